"""Everything `specdec train` can be told: one frozen dataclass whose fields are the flags and the keys of the config file."""

import argparse
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec.cli.fields import add_options, kinds_of
from specdec.errors import InvalidInputError
from specdec.files import reason_of


def _option(default: Any, group: str, text: str, **more: str) -> Any:
    return field(default=default, metadata={"group": group, "help": text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run.

    `out` holds all of it: `answers/`, `training/` and at last `drafter/` and `drafter-speculators/`. A field's description is the
    help text of its flag.
    """

    out: str = _option(
        "", "run", "folder of the run; running again with the same folder goes on where the last run stopped", metavar="FOLDER"
    )
    model: str = _option("embedded", "run", "target: embedded, a folder, or a hub name")
    device: str = _option("auto", "run", "auto, cpu, cuda or cuda:N")
    dtype: str = _option("auto", "run", "type of the target and of the drafter's forward: auto, float32 or bfloat16")
    seed: int = _option(0, "run", "fixes prompts, answers, order and anchors")
    stop_after: float | None = _option(None, "run", "minutes after which a stage saves what it has and the command ends")

    prompts: tuple[str, ...] = _option((), "answers", "text or JSON lines files with prompts; never a test split", metavar="FILE")
    max_prompts: int | None = _option(None, "answers", "most prompts taken from the files")
    variations: int = _option(0, "answers", "versions of every question with other numbers and names")
    self_prompts: int = _option(0, "answers", "prompts that the target writes itself (Magpie), beside the files")
    opening_share: float = _option(0.0, "answers", "share of these that are begun for it: code, lists, summaries, translation, ...")
    few_shot_share: float = _option(0.0, "answers", "share of the questions asked as few-shot text instead of in the chat template")
    few_shot: int = _option(5, "answers", "worked examples in a few-shot prompt")
    temperatures: tuple[float, ...] = _option((0.0,), "answers", "one answer per prompt and temperature; 0 is greedy")
    top_p: float = _option(1.0, "answers", "keep the likeliest tokens that reach P when sampling")
    max_tokens: int = _option(256, "answers", "most tokens of an answer")
    heldout: int = _option(64, "answers", "prompts kept out of training, answered greedily, for tau")
    heldout_temperature: float = _option(1.0, "answers", "of a second answer to each of these; 0 is none")
    max_num_seqs: int = _option(256, "answers", "answers decoded at once")
    attention: str = _option("auto", "answers", "attention backend of the engine")
    kv_memory: int | None = _option(None, "answers", "memory for the KV cache")
    shard_size: int = _option(2048, "answers", "answers per file; a file appears whole or not at all")
    skip_long: bool = _option(False, "answers", "leave out prompts that do not fit the target's context instead of refusing them")

    init: str | None = _option(None, "drafter", "checkpoint to start from; it brings its own shape")
    layers: int = _option(5, "drafter", "draft layers")
    block_size: int = _option(16, "drafter", "positions of a block, the anchor included")
    taps: tuple[int, ...] = _option((), "drafter", "tapped target layers, 0-based (default: evenly spaced)")
    mask_token: int | None = _option(None, "drafter", "token id of the mask (default: a reserved token that never occurs)")
    heads: int | None = _option(None, "drafter", "query heads (default: the target's)")
    kv_heads: int | None = _option(None, "drafter", "key heads (default: the target's)")
    head_dim: int | None = _option(None, "drafter", "size of a head (default: the target's)")
    intermediate: int | None = _option(None, "drafter", "width of the MLP (default: the target's)")
    head: str = _option("none", "drafter", "what the token before a draft has a say through: none, markov, gated, selector, domino")
    head_rank: int = _option(128, "drafter", "rank of the head's corrections")
    head_state: int = _option(256, "drafter", "numbers of a recurrent head's state (domino)")
    head_candidates: int = _option(16, "drafter", "tokens of a position that the head corrects, the likeliest; 0 is the vocabulary")
    tied_tables: bool = _option(False, "drafter", "the head's tables are projections of the target's own")
    convolutions: bool = _option(False, "drafter", "convolutions around sublayers, as in DFlash 2")
    window: int | None = _option(None, "drafter", "sliding window of all layers but the last (default: full attention)")

    batch_size: int = _option(96, "training", "sequences per optimizer step, on all devices together")
    accumulation: int = _option(1, "training", "forwards that a step is split into, to save memory")
    anchors: int = _option(24, "training", "blocks per sequence and step")
    optimizer: str = _option("adamw", "training", "adamw, or muon: by orthogonalized momentum, for matrices")
    lr: float = _option(6e-4, "training", "peak learning rate")
    min_lr: float = _option(0.02, "training", "learning rate at the end, as a share of the peak")
    warmup: float = _option(0.04, "training", "share of the run with a rising learning rate")
    weight_decay: float = _option(0.01, "training", "of the optimizer, on matrices")
    clip: float = _option(1.0, "training", "largest norm of the gradient")
    epochs: float = _option(6.0, "training", "passes over the answers")
    max_steps: int | None = _option(None, "training", "optimizer steps, instead of epochs")
    max_minutes: float | None = _option(None, "training", "minutes of training over all runs, instead of epochs or steps")
    max_length: int = _option(2048, "training", "longest sequence of prompt and answer; longer ones are left out")
    loss: str = _option("decay", "training", "weights of the positions: decay (exponential) or dpace")
    gamma: float | None = _option(None, "training", "positions over which decaying weights fall to 1/e (default: by block size)")
    dpace_alpha: float = _option(0.5, "training", "smoothing of D-PACE's acceptance probabilities")
    dpace_candidates: int = _option(
        1, "training", "tokens of a position that a tree may hold, in D-PACE's weights; 1 is for chains"
    )
    ce: float = _option(1.0, "training", "factor of the cross-entropy with the answer's token")
    kl: float = _option(0.0, "training", "factor of the divergence from the target's distribution")
    tv: float = _option(0.0, "training", "factor of the total variation to the target's distribution")
    selector: float = _option(1.0, "training", "factor of the cross-entropy among the candidates, for a head that chooses there")
    confidence: float = _option(0.0, "training", "factor of the loss of a head's confidences")
    head_loss: str = _option("candidates", "training", "what a head with candidates learns to correct: candidates or vocabulary")
    base_until: float = _option(0.0, "training", "share of the run over which the loss moves from the backbone to its head")
    base_share: float = _option(0.0, "training", "share of the loss that stays with the backbone beside its head")
    mask_path: str = _option("auto", "training", "attention of the blocks: flex (FlexAttention), dense, or auto (flex on CUDA)")
    compile: bool = _option(False, "training", "compile the target's layers and the loss; worth it for long runs")
    loss_rows: int = _option(4096, "training", "rows whose logits exist at once")
    bucket: int = _option(128, "training", "sequences are padded to multiples of this many tokens")
    log_every: int = _option(20, "training", "steps between lines of the log")
    eval_every: float = _option(5.0, "training", "minutes between evaluations of tau on the held-out answers")
    save_every: float = _option(2.0, "training", "minutes between checkpoints")

    tolerance: float = _option(0.02, "finish", "largest relative difference of tau between training and the engine")
    finish_prompts: int = _option(64, "finish", "held-out prompts that the engine answers; no more than were held out")

    def __post_init__(self) -> None:
        positive = ("max_tokens", "max_num_seqs", "shard_size", "layers", "batch_size", "accumulation", "anchors", "loss_rows")
        for name in (
            *positive,
            "dpace_candidates",
            "head_rank",
            "head_state",
            "bucket",
            "log_every",
            "finish_prompts",
            "heldout",
            "few_shot",
        ):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "lr",
            "clip",
            "epochs",
            "max_length",
            "max_steps",
            "max_minutes",
            "max_prompts",
            "stop_after",
            "gamma",
            "window",
        ):
            self._check(name, getattr(self, name) is None or getattr(self, name) > 0, "positive")
        for name in ("base_until", "base_share", "min_lr", "warmup", "opening_share", "few_shot_share", "dpace_alpha", "top_p"):
            self._check(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        zero_or_more = ("variations", "self_prompts", "weight_decay", "ce", "kl", "tv", "selector", "confidence")
        for name in (*zero_or_more, "eval_every", "save_every", "tolerance", "heldout_temperature"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("block_size", self.block_size >= 2, "at least 2, the anchor and one draft")
        self._check("ce", self.ce + self.kl + self.tv > 0, "positive, or kl or tv must be")
        self._check("loss", self.loss in ("decay", "dpace"), "decay or dpace")
        self._check("optimizer", self.optimizer in ("adamw", "muon"), "adamw or muon")
        heads = ("none", "markov", "gated", "selector", "domino")
        self._check("head", self.head in heads, f"one of {', '.join(heads)}")
        self._check("confidence", self.confidence == 0 or self.head in ("markov", "gated"), "0 unless the head is markov or gated")
        self._check("head_loss", self.head_loss in ("candidates", "vocabulary"), "candidates or vocabulary")
        whole = self.head == "domino" or (self.head in ("markov", "gated") and self.head_candidates == 0)
        for name in ("base_until", "base_share"):
            learned = whole or (self.head != "none" and self.head_loss == "vocabulary")
            self._check(name, getattr(self, name) == 0 or learned, "0 unless the head learns over the whole vocabulary")
        self._check("head_candidates", 0 <= self.head_candidates <= 64, "0 to 64")
        self._check("mask_path", self.mask_path in ("auto", "flex", "dense"), "auto, flex or dense")
        self._check("dtype", self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16")
        self._check("temperatures", bool(self.temperatures) and min(self.temperatures) >= 0, "a list of numbers from 0 up")
        self._check("batch_size", self.batch_size % self.accumulation == 0, f"a multiple of accumulation ({self.accumulation})")

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise InvalidInputError(f"{name.replace('_', '-')} is {getattr(self, name)}; it must be {rule}")

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.out).expanduser()

    @property
    def uses_teacher(self) -> bool:
        """Whether the loss needs the target's own distribution."""
        return self.kl > 0 or self.tv > 0 or self.confidence > 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field, in the groups of the dataclass; a flag that is not given leaves no trace in the namespace."""
    names = [info.name for info in fields(TrainConfig)]
    groups = {info.metadata["group"]: None for info in fields(TrainConfig)}
    for title in groups:
        add_options(
            parser.add_argument_group(title),
            TrainConfig,
            [info.name for info in fields(TrainConfig) if info.metadata["group"] == title],
            defaults=dict.fromkeys(names, argparse.SUPPRESS),
            nargs="+",
        )


def build_config(flags: Mapping[str, Any], file: str | None) -> TrainConfig:
    """The run that a config file and flags describe; flags win.

    Raises:
        InvalidInputError: an unreadable file, an unknown key, or a value of the wrong type or out of range.
    """
    kinds = kinds_of(TrainConfig)
    values = _read_file(Path(file)) if file else {}
    for name, value in values.items():
        if name not in kinds:
            raise InvalidInputError(f"{file}: unknown key {name!r}; the keys are the flags of `specdec train`, with _ for -")
        values[name] = kinds[name].check(value, f"{file}: {name}")
    values |= {name: tuple(value) if kinds[name].many else value for name, value in flags.items() if name in kinds}
    if not values.get("out"):
        raise InvalidInputError("the run has no folder; name one with --out")
    return TrainConfig(**values)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        values = json.loads(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except OSError as error:
        raise InvalidInputError(f"cannot read {str(path)!r}: {reason_of(error)}; check --config") from error
    except ValueError as error:
        raise InvalidInputError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path} has no keys at its top level; write a table of options")
    return {name.replace("-", "_"): value for name, value in values.items()}
