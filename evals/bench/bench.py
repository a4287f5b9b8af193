"""`specdec bench`: acceptance and speed over prompt sets, every figure beside plain decoding measured in the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal, Protocol

from evals.bench.tree_step import tree_step
from evals.divergence import first_divergence
from evals.peers.peer import Peer, load_peer
from evals.prompt_sets import PromptSet
from evals.report.report import new_report
from evals.report.table import side_name
from evals.roofline import bound, measured_bandwidth
from evals.runner import Decoded, Generate, OnStep, OnTurn, Pass, most_tokens, run_set
from evals.speed import Speed, time_split
from specdec.config import CacheConfig, EngineConfig
from specdec.core import Drafter
from specdec.decoder import SpecDecoder, find_drafter
from specdec.engine.build import tree_reasons
from specdec.errors import InvalidInputError
from specdec.metrics import AcceptanceStats, mean_tau, pooled
from specdec.registry import drafter_name
from specdec.sampling_params import SamplingParams

SPLIT_ITEMS = 4
"""Conversations, or as many as there are at once, that the split of a step's time is taken from."""
SPLIT_TOKENS = 64
"""Output tokens of each, at most."""

PLAIN = "none"
DraftCount = int | Literal["auto"] | None
"""k of a side: a number, the drafter's own (None), or the one that is measured to be fastest, step by step."""

Progress = Callable[[str, int], OnStep]
"""Makes what follows one turn of a pass; called with what is running and the number of its conversations."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is measured.

    Attributes:
        sets: prompt sets.
        drafters: names or checkpoints, as `SpecDecoder.from_pretrained` takes them.
        num_draft_tokens: values of k, see `DraftCount`.
        trees: numbers of drafts that form a tree, further sides beside those of k.
        temperatures: 0 is greedy.
        top_k, top_p: of sampled decoding, see `SamplingParams`.
        concurrencies: conversations decoded at once.
        max_tokens: most output tokens per turn.
        repeats: timed passes of every side, taken in turn.
        warmup: untimed passes before them, and more while steps are still captured, up to `MOST_WARMUP`.
        seed: item `i` uses `seed + i`.
        raw: continue prompts as text, without the chat template.
        peers: other systems to measure beside, see `evals.peers.peer`.
        graphs: what to capture, see `EngineConfig`.
        memory_bytes: budget of each side's cache; None takes the device's default.
    """

    sets: tuple[PromptSet, ...]
    drafters: tuple[str, ...] = ("auto",)
    num_draft_tokens: tuple[DraftCount, ...] = (None,)
    trees: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    concurrencies: tuple[int, ...] = (1,)
    max_tokens: int = 256
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    raw: bool = False
    peers: tuple[str, ...] = ()
    graphs: bool | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, values in (
            ("prompt set", self.sets),
            ("drafter", self.drafters),
            ("temperature", self.temperatures),
            ("concurrency", self.concurrencies),
        ):
            if not values:
                raise InvalidInputError(f"no {name} is given; name at least one")
        if self.repeats < 1:
            raise InvalidInputError(f"repeats is {self.repeats}; it must be at least 1")
        if self.warmup < 0:
            raise InvalidInputError(f"warmup is {self.warmup}; it must be 0 or more passes")
        if self.peers and max(self.temperatures) > 0:
            raise InvalidInputError(
                f"peers are compared in greedy decoding and the temperature is {max(self.temperatures):g}; use temperature 0"
            )
        if PLAIN in self.drafters or 0 in self.num_draft_tokens or 0 in self.trees:
            raise InvalidInputError("plain decoding is always measured; leave out drafter none, k = 0 and trees of 0 drafts")
        for nodes in self.trees:
            EngineConfig(tree_nodes=nodes)
        for temperature in self.temperatures:
            self.sampling(temperature)
        for concurrency in self.concurrencies:
            EngineConfig(max_num_seqs=concurrency)

    def sampling(self, temperature: float) -> SamplingParams:
        """How to decode at a temperature."""
        return SamplingParams(self.max_tokens, temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    def engine(self, concurrency: int, max_model_len: int, k: DraftCount, tree: int | None) -> EngineConfig:
        """The engine of a side."""
        return EngineConfig(
            max_num_seqs=concurrency,
            max_model_len=max_model_len,
            num_draft_tokens=k,
            tree_nodes=tree,
            graphs=self.graphs,
            # Without it every pass does the same work, prefill included.
            cache=CacheConfig(memory_bytes=self.memory_bytes, prefix_caching=False),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What belongs in the report."""
        return {
            "max_tokens": self.max_tokens,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repeats": self.repeats,
            "warmup": self.warmup,
            "seed": self.seed,
            "raw": self.raw,
            "graphs": self.graphs,
            "prompt_sets": [
                {"name": one.name, "source": one.source, "num_items": len(one.items), "sha256": one.sha256} for one in self.sets
            ],
        }


@dataclass(slots=True)
class _Side:
    """One way of decoding within a cell, and what its passes gave. With a peer, the decoder only tokenizes."""

    drafter: str
    decoder: SpecDecoder
    peer: Peer | None = None
    generate: Generate | None = None
    passes: list[Pass] = field(default_factory=list)
    time_split: dict[str, float] | None = None

    @property
    def k(self) -> int | str:
        if self.peer:
            return 0
        return self.decoder.engine.k

    @property
    def title(self) -> str:
        if self.peer:
            return self.peer.name
        return side_name(self.drafter, self.k, len(self.drafter))

    @property
    def num_captured(self) -> int:
        """Steps that its engine has captured."""
        graphs = None if self.peer else self.decoder.engine.runner.graphs
        return graphs.num_captured if graphs else 0

    @property
    def speed(self) -> Speed:
        return Speed([one.num_tokens for one in self.passes], [one.seconds for one in self.passes])


class Measured(Protocol):
    """What the row of a side is made of."""

    drafter: str
    peer: Peer | None
    passes: list[Pass]
    time_split: dict[str, float] | None

    @property
    def k(self) -> int | str:
        """Drafts of its steps."""

    @property
    def speed(self) -> Speed:
        """Of its passes."""


MOST_WARMUP = 10
"""Untimed passes at most of a side that goes on capturing: where k is chosen step by step, one does not meet all that occurs."""


class Bench:
    """A sweep over prompt sets, temperatures, concurrencies, drafters and k.

    Args:
        base: gives target and tokenizer; its own drafter and engine are not used.
        config: what is measured.
        progress: follows every timed and warm-up pass.

    Attributes:
        drafters: those of the sweep by name; what "auto" stands for is under its own.

    Raises:
        InvalidInputError: an unknown drafter, a k or a tree that one of the drafters cannot give, or a peer that is unknown, not
            installed, or unable to serve so many conversations at once; said before anything is measured.
    """

    def __init__(self, base: SpecDecoder, config: BenchConfig, *, progress: Progress | None = None) -> None:
        self._base, self._config, self._progress = base, config, progress
        self.drafters: dict[str, Drafter] = {}
        for name in dict.fromkeys(drafter_name(name, base.verifier.name) for name in config.drafters):
            drafter = find_drafter(name)(base.verifier)
            assert drafter is not None, "BenchConfig refuses plain decoding"
            self.drafters[name] = drafter
            for k in config.num_draft_tokens:
                if isinstance(k, int) and not 1 <= k <= drafter.max_draft_tokens:
                    raise InvalidInputError(
                        f"k is {k} and drafter {name!r} gives 1 to {drafter.max_draft_tokens}; choose within that"
                    )
            if config.trees and (reasons := tree_reasons(base.verifier, drafter, EngineConfig())):
                raise InvalidInputError(f"trees are asked for, but {'; '.join(reasons)}; leave out --tree")
        self._peers = [load_peer(name, base.verifier) for name in config.peers]
        for peer in self._peers:
            if peer.max_concurrency is not None and max(config.concurrencies) > peer.max_concurrency:
                raise InvalidInputError(
                    f"concurrency is {max(config.concurrencies)} and peer {peer.name!r} decodes {peer.max_concurrency} at once;"
                    " measure it in a run of its own"
                )

    def run(self, provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Measures cell by cell; yields the report after each, which is complete when the iterator ends.

        A cell is a prompt set at one temperature and one concurrency. Its sides, plain decoding and every drafter with every k,
        take turns, so that a change of the machine's speed meets all of them.
        """
        config = self._config
        report = new_report("specdec-bench", provenance, config.settings)
        self._bandwidth = measured_bandwidth(self._base.verifier.device)
        report["bandwidth"] = self._bandwidth
        report["rows"] = []
        cells = list(product(config.sets, config.temperatures, config.concurrencies))
        for number, cell in enumerate(cells, start=1):
            report["rows"] += self._measure(*cell)
            report["complete"] = number == len(cells)
            yield report

    def _measure(self, prompts: PromptSet, temperature: float, concurrency: int) -> list[dict[str, Any]]:
        config, sides = self._config, self._sides(prompts, concurrency)
        sampling = config.sampling(temperature)
        where = f"{prompts.name} T={temperature:g} c={concurrency}"

        def run(side: _Side, title: str) -> Pass:
            on_turn = self._on_turn(f"{where} {side.title} {title}")
            if not side.peer:
                side.decoder.engine.reset()  # no pass may copy what one before it wrote
            return run_set(side.decoder, prompts, sampling, raw=config.raw, on_turn=on_turn, generate=side.generate)

        for side in sides if config.warmup else ():
            for number in range(max(config.warmup, MOST_WARMUP)):
                captured = side.num_captured
                run(side, "warm-up")
                if number + 1 >= config.warmup and side.num_captured == captured:
                    break
        for repeat in range(config.repeats):
            for side in sides:
                side.passes.append(run(side, f"{repeat + 1}/{config.repeats}"))
        for side in sides:
            if side.peer:
                continue
            # Apart from the timed passes, because on an accelerator timing the phases makes the host wait, many times over.
            timer = side.decoder.engine.timer
            timer.enabled = True
            sample = replace(prompts, items=prompts.items[: max(concurrency, SPLIT_ITEMS)])
            few = replace(sampling, max_tokens=min(sampling.max_tokens, SPLIT_TOKENS))
            on_turn = self._on_turn(f"{where} {side.title} phases")
            seconds = run_set(side.decoder, sample, few, raw=config.raw, on_turn=on_turn).seconds
            side.time_split = time_split(timer.totals, seconds)
        key = {"prompt_set": prompts.name, "temperature": temperature, "concurrency": concurrency}
        rows = [key | row_of(side, sides[0]) | {"roofline": self._roofline(side, concurrency), "tree_step": None} for side in sides]
        sizes = [Counter(size for one in side.passes[0].answers for size in one.stats.tree_sizes if size) for side in sides]
        drawn = next((index for index, counts in enumerate(sizes) if counts), None)
        if drawn is not None and concurrency == config.concurrencies[0]:  # one tree shows what they are like
            drafter, ((num_nodes, _),) = self.drafters[sides[drawn].drafter], sizes[drawn].most_common(1)
            rows[drawn]["tree_step"] = tree_step(self._base, drafter, prompts, sampling, num_nodes, raw=config.raw)
        return rows

    def _roofline(self, side: _Side, concurrency: int) -> dict[str, Any] | None:
        """What memory alone would allow; a peer's weights may lie otherwise, and k may change, so these have none."""
        if side.peer or side.k == "auto":
            return None
        answers = side.passes[0].answers
        context = sum(len(answer.prompt_token_ids) + len(answer.token_ids) / 2 for answer in answers) / len(answers)
        tau = pooled(answer.stats for answer in answers).tau
        return bound(
            side.decoder.engine,
            bandwidth=self._bandwidth,
            tau=tau,
            num_reqs=min(concurrency, len(answers)),
            context=context,
        )

    def _on_turn(self, title: str) -> OnTurn | None:
        progress = self._progress
        if progress is None:
            return None
        return lambda turn, count: progress(title + (f" turn {turn + 1}" if turn else ""), count)

    def _sides(self, prompts: PromptSet, concurrency: int) -> list[_Side]:
        config, verifier, tokenizer = self._config, self._base.verifier, self._base.tokenizer
        longest = most_tokens(self._base, prompts, config.max_tokens, raw=config.raw)

        def decoder(drafter: Drafter | None, k: DraftCount, tree: int | None = None) -> SpecDecoder:
            return SpecDecoder(
                verifier, tokenizer, drafter, config.engine(concurrency, min(longest, verifier.max_model_len), k, tree)
            )

        sides = [_Side(PLAIN, decoder(None, None))]
        for (name, drafter), k in product(self.drafters.items(), config.num_draft_tokens):
            sides.append(_Side(name, decoder(drafter, k)))
        for (name, drafter), tree in product(self.drafters.items(), config.trees):
            sides.append(_Side(name, decoder(drafter, None, tree)))
        for peer in self._peers:
            sides.append(_Side(peer.name, self._base, peer, partial(_ask, peer, concurrency)))
        return sides


def _ask(
    peer: Peer, concurrency: int, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], on_step: OnStep | None
) -> list[Decoded]:
    """A peer in the place of an engine; it shows no progress and tells nothing of its steps."""
    return [Decoded(tokens, AcceptanceStats()) for tokens in peer.generate(prompts, samplings, concurrency=concurrency)]


def row_of(side: Measured, plain: Measured) -> dict[str, Any]:
    """Figures of one side; those of acceptance come from its first timed pass."""
    first = side.passes[0].answers
    stats = [answer.stats for answer in first]
    differing = [
        index
        for index, (one, other) in enumerate(zip(plain.passes[0].answers, first, strict=True))
        if first_divergence(one.token_ids, other.token_ids) is not None
    ]
    return {
        "drafter": side.drafter,
        "k": side.k,
        "peer": side.peer.version if side.peer else None,
        "num_answers": len(first),
        "speed": side.speed.to_dict(),
        "ratio": side.speed.ratio(plain.speed),
        "acceptance": None if side.peer else pooled(stats).to_dict() | {"mean_tau": mean_tau(stats)},
        "tau_per_answer": [] if side.peer else [one.tau for one in stats],
        "differing_answers": differing,
        "time_split": side.time_split,
    }
