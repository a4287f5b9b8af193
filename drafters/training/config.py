"""Everything `specdec train` can be told: the fields are flags and keys of the config file."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from drafters.keys import MAX_LAYERS
from drafters.training.data.openings import KINDS
from specdec.base.chat.messages import template_text, variables_text
from specdec.base.errors import InvalidInputError, shown
from specdec.base.files import read_json, read_toml, user_path
from specdec.base.validation import is_number
from specdec.cli.fields import add_options, kinds_of


def _option(default: Any, text: str, **more: str) -> Any:
    return field(default=default, metadata={"help": text, **more})


_RULES: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda value: value >= 1,
    "positive": lambda value: value > 0,
    "0 or more": lambda value: value >= 0,
    "between 0 and 1": lambda value: 0 <= value <= 1,
}
"""What numbers have to be; None is always allowed."""

_count, _positive, _amount, _share = (partial(_option, rule=rule) for rule in _RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run.

    `out` holds all of it: `answers/`, `training/` and at last `drafter/` and
    `drafter-speculators/`. A field's description is the help text of its flag.
    """

    out: str = _option(
        "",
        "folder of the run; running again with the same folder goes on where the last run stopped",
        metavar="FOLDER",
    )
    model: str = _option("embedded", "target: embedded, a folder, a GGUF file, or a hub name")
    revision: str | None = _option(
        None, "branch, tag or commit of the target on the hub, as in owner/name@NAME"
    )
    device: str = _option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = _option(
        "auto", "type of the target and of the drafter's forward: auto, float32 or bfloat16"
    )
    seed: int = _option(0, "fixes prompts, answers, order and anchors")
    stop_after: float | None = _positive(
        None, "minutes after which a stage saves what it has and the command ends"
    )

    prompts: tuple[str, ...] = _option(
        (),
        "text, JSON or parquet files with prompts, or hub:NAME; never a test split",
        metavar="FILE",
    )
    answers_from: tuple[str, ...] = _option(
        (),
        "answers that the target gave elsewhere, trained on as they are: files as of --prompts",
        metavar="FILE",
    )
    chat_template: str | None = _option(
        None, "file with a Jinja template in place of the tokenizer's own", metavar="FILE"
    )
    chat_template_kwargs: str | None = _option(
        None, 'variables of the chat template, such as {"enable_thinking": false}', metavar="JSON"
    )
    max_prompts: int | None = _positive(None, "most prompts taken from the files")
    variations: int = _amount(0, "versions of every question with other numbers and names")
    self_prompts: int = _amount(
        0, "prompts that the target writes itself (Magpie), beside the files"
    )
    opening_share: float = _share(
        0.0, "share of --self-prompts whose beginning is given, by --openings"
    )
    openings: tuple[str, ...] = _option(
        (),
        f"kinds of these beginnings, in the shares named: {', '.join(KINDS)} (default: each once)",
        metavar="KIND",
    )
    documents: int = _amount(
        0, "further prompts, about texts of the target's answers to all others"
    )
    few_shot_share: float = _share(
        0.0, "share of the questions asked as few-shot text instead of in the chat template"
    )
    few_shot: int = _count(5, "worked examples in a few-shot prompt")
    temperatures: tuple[float, ...] = _option(
        (0.0,), "one answer per prompt and temperature; 0 is greedy"
    )
    top_p: float = _share(
        1.0, "when sampling, keep the likeliest tokens that reach this probability"
    )
    max_tokens: int = _count(256, "most tokens of an answer")
    heldout: int = _count(64, "prompts kept out of training, answered greedily, for tau")
    answer_server: str | None = _option(
        None,
        "OpenAI-compatible server that answers in place of our engine, such as http://host:8000",
        metavar="URL",
    )
    heldout_temperature: float = _amount(
        1.0, "temperature of a second answer to each held-out prompt; 0 is none"
    )
    max_num_seqs: int = _count(256, "answers decoded at once")
    attention: str = _option("auto", "attention backend of the engine")
    kv_memory: int | None = _option(None, "memory for the KV cache")
    shard_size: int = _count(2048, "answers per file; a file appears whole or not at all")
    skip_long: bool = _option(
        False, "leave out prompts that do not fit the target's context instead of refusing them"
    )

    init: str | None = _option(
        None,
        "checkpoint to start from, a DFlash or EAGLE-3 drafter, or mtp, the target's own layers for"
        " multi-token prediction; it brings its own shape",
    )
    unroll: int | None = _positive(
        None, "steps that a drafter which goes token by token is unrolled for (default: its drafts)"
    )
    layers: int = _count(5, "draft layers")
    block_size: int = _option(16, "positions of a block, the anchor included")
    taps: tuple[int, ...] = _option((), "tapped target layers, 0-based (default: evenly spaced)")
    mask_token: int | None = _option(
        None, "token id of the mask (default: a reserved token that never occurs)"
    )
    heads: int | None = _option(None, "query heads (default: the target's)")
    kv_heads: int | None = _option(None, "key heads (default: the target's)")
    head_dim: int | None = _option(None, "size of a head (default: the target's)")
    intermediate: int | None = _option(None, "width of the MLP (default: the target's)")
    draft_vocab: int | None = _positive(
        None, "tokens that can be drafted, the answers' most frequent (default: all)"
    )
    head: str = _option(
        "none",
        "head that corrects drafts by the tokens before: none, markov, gated, selector, domino,"
        " lilicorr or xpress",
    )
    head_rank: int = _count(128, "rank of the head's corrections")
    head_state: int = _count(256, "numbers of a head's own state (domino, lilicorr)")
    head_candidates: int = _option(
        16, "likeliest tokens of a position that the head corrects; 0 is the whole vocabulary"
    )
    tied_tables: bool = _option(False, "the head's tables are projections of the target's own")
    convolutions: bool = _option(False, "convolutions around sublayers, as in DFlash 2")
    window: int | None = _positive(
        None, "sliding window of all layers but the last (default: full attention)"
    )

    batch_size: int = _count(96, "sequences per optimizer step, on all devices together")
    accumulation: int = _count(1, "forwards that a step is split into, to save memory")
    shard: bool = _option(
        False,
        "divide the drafter's weights over the processes too (FSDP2), not its optimizer alone",
    )
    anchors: int = _count(24, "blocks per sequence and step")
    replay: float = _share(
        0.0, "share of the blocks that begin where drafts of other blocks were refused"
    )
    optimizer: str = _option("adamw", "adamw, or muon: by orthogonalized momentum, for matrices")
    lr: float = _positive(6e-4, "peak learning rate")
    min_lr: float = _share(0.02, "learning rate at the end, as a share of the peak")
    warmup: float = _share(0.04, "share of the run with a rising learning rate")
    schedule: str = _option(
        "cosine", "how the learning rate falls behind the warm-up: cosine or linear"
    )
    ema: float = _share(
        0.0, "decay of the running mean of the weights, which is measured and exported; 0 is none"
    )
    weight_decay: float = _amount(0.01, "decay of the weights of matrices")
    clip: float = _positive(1.0, "largest norm of the gradient")
    epochs: float = _positive(6.0, "passes over the answers")
    max_steps: int | None = _positive(None, "optimizer steps, instead of epochs")
    max_minutes: float | None = _positive(
        None, "minutes of steps over all runs, instead of epochs or a number of steps"
    )
    max_length: int = _positive(
        2048, "longest sequence of prompt and answer; longer ones are left out"
    )
    loss: str = _option("decay", "weights of the positions: decay (exponential) or dpace")
    gamma: float | None = _positive(
        None, "positions over which decaying weights fall to 1/e (default: by block size)"
    )
    dpace_alpha: float = _share(0.5, "smoothing of D-PACE's acceptance probabilities")
    dpace_candidates: int = _count(
        1, "tokens of a position that a tree may hold, in D-PACE's weights; 1 is for chains"
    )
    first_error: float = _amount(
        0.0, "what is added to the weight 1 of a block's first wrong position"
    )
    ce: float = _amount(1.0, "factor of the cross-entropy with the answer's token")
    kl: float = _amount(0.0, "factor of the divergence from the target's distribution")
    tv: float = _amount(0.0, "factor of the total variation to the target's distribution")
    nla: float = _amount(
        0.0, "factor of the negative log of the probability that a draft is accepted"
    )
    selector: float = _amount(
        1.0, "factor of the cross-entropy among the candidates, for a head that chooses there"
    )
    confidence: float = _amount(0.0, "factor of the loss of a head's confidences")
    head_loss: str = _option(
        "candidates", "what a head with candidates learns to correct: candidates or vocabulary"
    )
    base_until: float = _share(
        0.0, "share of the run over which the loss moves from the backbone to its head"
    )
    base_share: float = _share(
        0.0, "share of the loss that stays with the backbone beside its head"
    )
    mask_path: str = _option(
        "auto", "attention of the blocks: flex (FlexAttention), dense, or auto (flex on CUDA)"
    )
    compile: bool = _option(False, "compile the layers and the loss; worth it for long runs")
    loss_rows: int = _count(4096, "rows whose logits exist at once")
    bucket: int = _count(128, "sequences are padded to multiples of this many tokens")
    pack_length: int = _amount(
        0, "tokens of a row that sequences of any length share; 0 pads sequences of like length"
    )
    log_every: int = _count(20, "steps between lines of the log")
    eval_every: float = _amount(5.0, "minutes between evaluations of tau on the held-out answers")
    save_every: float = _amount(2.0, "minutes between checkpoints")

    tolerance: float = _amount(
        0.02, "largest relative difference of tau between training and the engine"
    )
    finish_prompts: int = _count(
        64, "held-out prompts that the engine answers; no more than were held out"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value, rule = getattr(self, one.name), one.metadata.get("rule")
            for number in value if isinstance(value, tuple) else (value,):
                other = isinstance(number, bool) or not isinstance(number, int | float)
                right = other or is_number(number)
                self._check(one.name, right, "a number that float32 or int64 holds")
            if rule is not None and value is not None:
                self._check(one.name, _RULES[rule](value), rule)
        alone = not (self.prompts or self.self_prompts or self.documents or self.variations)
        rule = "empty, or prompts, self-prompts, documents and variations must be: it has its own"
        self._check("answers_from", alone or not self.answers_from, rule)
        rule = "0 with answer-server: the noise of a server's samples is not known"
        known = self.answer_server is None or self.heldout_temperature == 0
        self._check("heldout_temperature", known, rule)
        object.__setattr__(self, "chat_template", template_text(self.chat_template))
        object.__setattr__(self, "chat_template_kwargs", variables_text(self.chat_template_kwargs))
        self._check("layers", self.layers <= MAX_LAYERS, f"at most {MAX_LAYERS:,}")
        self._check("block_size", self.block_size >= 2, "at least 2, the anchor and one draft")
        some = self.ce + self.kl + self.tv + self.nla > 0
        self._check("ce", some, "positive, or kl, tv or nla must be")
        self._check("ema", self.ema < 1, "below 1")
        self._check("replay", self.replay < 1, "below 1: a block has to go before")
        self._check("schedule", self.schedule in ("cosine", "linear"), "cosine or linear")
        self._check("loss", self.loss in ("decay", "dpace"), "decay or dpace")
        self._check("optimizer", self.optimizer in ("adamw", "muon"), "adamw or muon")
        whole = not self.shard or self.optimizer != "muon"
        self._check("optimizer", whole, "adamw with shard: muon moves whole matrices")
        tied = self.tied_tables and self.draft_vocab is not None
        self._check("tied_tables", not tied, "left out with draft-vocab: they are of all tokens")
        self._check("openings", set(self.openings) <= set(KINDS), f"some of {', '.join(KINDS)}")
        heads = ("none", "markov", "gated", "selector", "domino", "lilicorr", "xpress")
        self._check("head", self.head in heads, f"one of {', '.join(heads)}")
        of_dspark = self.head in ("markov", "gated")
        rule = "0 unless the head is markov or gated"
        self._check("confidence", self.confidence == 0 or of_dspark, rule)
        known = self.head_loss in ("candidates", "vocabulary")
        self._check("head_loss", known, "candidates or vocabulary")
        whole = self.head in ("domino", "xpress") or (of_dspark and self.head_candidates == 0)
        some = self.head not in ("none", "lilicorr")
        learned = whole or (some and self.head_loss == "vocabulary")
        rule = "0 unless the head learns over the whole vocabulary"
        for name in ("base_until", "base_share"):
            self._check(name, getattr(self, name) == 0 or learned, rule)
        self._check("head_candidates", 0 <= self.head_candidates <= 64, "0 to 64")
        among = self.head != "lilicorr" or self.head_candidates > 0
        self._check("head_candidates", among, "1 or more for lilicorr, which compares them")
        divides = self.head != "lilicorr" or self.head_state % max(self.head_state // 64, 1) == 0
        self._check("head_state", divides, "a multiple of 64, or less than 128, for lilicorr")
        long_enough = not self.pack_length or self.pack_length >= self.max_length
        rule = f"0, or at least max-length ({self.max_length}): no sequence is cut"
        self._check("pack_length", long_enough, rule)
        self._check("mask_path", self.mask_path in ("auto", "flex", "dense"), "auto, flex or dense")
        known = self.dtype in ("auto", "float32", "bfloat16")
        self._check("dtype", known, "auto, float32 or bfloat16")
        right = bool(self.temperatures) and min(self.temperatures) >= 0
        self._check("temperatures", right, "a list of numbers from 0 up")
        rule = f"a multiple of accumulation ({self.accumulation})"
        self._check("batch_size", self.batch_size % self.accumulation == 0, rule)

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            what = f"{name.replace('_', '-')} is {shown(getattr(self, name))}"
            raise InvalidInputError(f"{what}; it must be {rule}")

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return user_path(self.out)

    @property
    def uses_teacher(self) -> bool:
        """Whether the loss needs the target's own distribution."""
        return self.kl + self.tv + self.nla + self.confidence > 0


_GROUPS = {
    "run": "out", "answers": "prompts", "drafter": "init", "training": "batch_size",
    "finish": "tolerance",
}  # fmt: skip
"""The first option of each group of flags."""

SEVERAL = ("batch_size", "anchors")
"""Options that take several values in `specdec train bench`, and one elsewhere."""


BENCH_ALONE = ("shortest", "cards")
"""Options that only `specdec train bench` has."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field, in the groups of the dataclass; the namespace has given ones alone."""
    names = [info.name for info in fields(TrainConfig)]
    starts = [names.index(first) for first in _GROUPS.values()]
    for title, start, end in zip(_GROUPS, starts, [*starts[1:], None], strict=True):
        group = parser.add_argument_group(title)
        defaults = dict.fromkeys(names, argparse.SUPPRESS)
        own = names[start:end]
        add_options(group, TrainConfig, own, defaults=defaults, several=SEVERAL, nargs="+")


def build_config(
    flags: Mapping[str, Any], file: str | None, recipe: Path | None = None
) -> TrainConfig:
    """The run that a config file and flags describe; flags win, and the file over a recipe.

    Raises:
        InvalidInputError: an unreadable file, an unknown key, or a value that is wrong.
    """
    kinds = kinds_of(TrainConfig)
    values = {**(_read_file(recipe) if recipe else {}), **(_read_file(Path(file)) if file else {})}
    for name, value in values.items():
        if name not in kinds:
            what = f"{file}: unknown key {name!r}"
            way_out = "the keys are the flags of `specdec train`, with _ for -"
            raise InvalidInputError(f"{what}; {way_out}")
        values[name] = kinds[name].check(value, f"{file}: {name}")
    for name, value in flags.items():
        if name in SEVERAL and len(value) > 1:
            given = f"--{name.replace('_', '-')} {' '.join(map(str, value))}"
            what = f"{given}: a run takes one"
            raise InvalidInputError(f"{what}; several are for specdec train bench")
        if name in kinds:
            single = name in SEVERAL
            values[name] = value[0] if single else tuple(value) if kinds[name].many else value
    if not values.get("out"):
        raise InvalidInputError("the run has no folder; name one with --out")
    if (revision := values.pop("revision", None)) is not None:
        from specdec.base.checkpoint.hub import pinned

        values["model"] = pinned(values.get("model", "embedded"), revision)
    return TrainConfig(**values)


def _read_file(path: Path) -> dict[str, Any]:
    read = read_json if path.suffix == ".json" else read_toml
    values = read(path, way_out="give --config a table of options")
    return {name.replace("-", "_"): value for name, value in values.items()}
