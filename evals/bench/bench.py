"""`specdec bench`: acceptance and speed over prompt sets, beside plain decoding in the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from evals.bench.config import MAX_WARMUP, BenchConfig, SideKind
from evals.bench.side import Side
from evals.bench.tree_step import tree_step
from evals.peers.peer import Peer, load_peer
from evals.prompt_sets import PromptSet
from evals.report.report import new_report
from evals.report.sides import PLAIN, side_name
from evals.roofline import bound, measured_bandwidth
from evals.runner import (
    Answer,
    Generate,
    OnStep,
    OnTurn,
    Pass,
    behind_hits,
    max_total_tokens,
    num_captured,
    run_set,
)
from evals.speed import time_split
from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats, pooled
from specdec.base.registry import drafter_name
from specdec.engine.build import budget_reasons, tree_reasons
from specdec.engine.capture.warmup import set_serving
from specdec.model.core import Drafter
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.drafter_choice import find_drafter

SPLIT_ITEMS = 4
"""Conversations, or as many as there are at once, that the split of a step's time is taken from."""
SPLIT_TOKENS = 64
"""Output tokens of each, at most."""

Progress = Callable[[str, int], OnStep]
"""Makes what follows a turn of a pass, from what is running and how many conversations it has."""


@dataclass(slots=True, kw_only=True)
class _Side(Side):
    """One that an engine decodes, or a peer, beside which the decoder only tokenizes."""

    decoder: SpecDecoder
    generate: Generate | None = None

    @property
    def title(self) -> str:
        """For who waits."""
        return self.peer.name if self.peer else side_name(self.drafter, self.k, len(self.drafter))

    @property
    def num_captured(self) -> int:
        """Steps and prefills that its engine has captured."""
        return 0 if self.peer else num_captured(self.decoder.engine)


class Bench:
    """A sweep over prompt sets, temperatures, concurrencies, drafters and k.

    Args:
        base: gives target and tokenizer; its own drafter and engine are not used.
        progress: follows every timed and warm-up pass.

    Attributes:
        drafters: those of the sweep by name; what "auto" stands for is under its own.

    Raises:
        InvalidInputError: an unknown drafter, a k or a tree that one cannot give, or a peer that is
            unknown, not installed, or unable to serve so many at once; before anything is measured.
    """

    def __init__(
        self, base: SpecDecoder, config: BenchConfig, *, progress: Progress | None = None
    ) -> None:
        self._base, self._config, self._progress = base, config, progress
        self.drafters: dict[str, Drafter] = {}
        for name in dict.fromkeys(drafter_name(one, base.verifier.name) for one in config.drafters):
            drafter = find_drafter(name)(base.verifier)
            assert drafter is not None, "BenchConfig refuses plain decoding"
            self.drafters[name] = drafter
            for k in config.num_draft_tokens:
                if isinstance(k, int) and not 1 <= k <= drafter.max_draft_tokens:
                    message = f"k is {k} and drafter {name!r} gives 1 to {drafter.max_draft_tokens}"
                    raise InvalidInputError(f"{message}; choose within that")
            if config.budgets and (reasons := budget_reasons(base.verifier, EngineConfig())):
                what = f"budgets are asked for, but {'; '.join(reasons)}"
                raise InvalidInputError(f"{what}; leave out --budget")
            if config.trees and (reasons := tree_reasons(base.verifier, drafter, EngineConfig())):
                what = f"trees are asked for, but {'; '.join(reasons)}"
                raise InvalidInputError(f"{what}; leave out --tree")
        self._peers = [load_peer(name, base.verifier) for name in config.peers]
        most = max(config.concurrencies)
        for peer in self._peers:
            if peer.max_concurrency is not None and most > peer.max_concurrency:
                what = f"concurrency is {most} and peer {peer.name!r} decodes"
                way_out = "measure it in a run of its own"
                raise InvalidInputError(f"{what} {peer.max_concurrency} at once; {way_out}")

    def run(self, provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Measures cell by cell; yields the report after each, complete when the iterator ends.

        A cell is a prompt set at one temperature and one concurrency. Its sides, plain decoding and
        every drafter with every k, take turns, so that changes of the machine's speed meet all.
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

    def _measure(
        self, prompts: PromptSet, temperature: float, concurrency: int
    ) -> list[dict[str, Any]]:
        config, sides = self._config, self._sides(prompts, concurrency)
        sampling = config.sampling(temperature)
        where = f"{prompts.name} T={temperature:g} c={concurrency}"

        def run(side: _Side, title: str, *, hits: bool = False) -> Pass:
            on_turn = self._on_turn(f"{where} {side.title} {title}")
            if not side.peer:
                side.decoder.engine.reset()  # no pass may copy what one before it wrote
                # without it every pass does the same work, prefill included
                side.decoder.engine.scheduler.prefix.enabled = hits
            how = behind_hits(side.decoder, concurrency) if hits else side.generate
            return run_set(
                side.decoder, prompts, sampling, raw=config.raw, on_turn=on_turn, generate=how
            )

        for side in sides if config.warmup else ():
            set_serving(side.decoder.engine, False)
            for number in range(max(config.warmup, MAX_WARMUP)):
                captured = side.num_captured
                run(side, "warm-up")
                if number + 1 >= config.warmup and side.num_captured == captured:
                    break
            set_serving(side.decoder.engine, True)  # no timed pass pays for what the next one has
        for repeat in range(config.repeats):
            for side in sides:
                side.passes.append(run(side, f"{repeat + 1}/{config.repeats}"))
        for side in sides:
            if side.peer:
                continue
            if choice := side.decoder.engine.planner.choice:
                side.choice = [one._asdict() for one in choice.estimates()]
            if config.behind_hits:
                side.hits = run(side, "behind hits", hits=True)
                side.decoder.engine.scheduler.prefix.enabled = False
            # Apart from the timed passes: timing phases makes an accelerator's host wait.
            side.decoder.engine.reset()
            timer = side.decoder.engine.timer
            timer.enabled = True
            sample = replace(prompts, items=prompts.items[: max(concurrency, SPLIT_ITEMS)])
            few = sampling.at_most(SPLIT_TOKENS)
            on_turn = self._on_turn(f"{where} {side.title} phases")
            seconds = run_set(side.decoder, sample, few, raw=config.raw, on_turn=on_turn).seconds
            side.time_split = time_split(timer.totals, seconds)
        key = {"prompt_set": prompts.name, "temperature": temperature, "concurrency": concurrency}
        rows = [side.row(sides[0], prompts, key, raw=config.raw) for side in sides]
        for row, side in zip(rows, sides, strict=True):
            row["roofline"] = self._roofline(side, concurrency)
        answers = [[one.stats.tree_sizes for one in side.passes[0].answers] for side in sides]
        sizes = [Counter(size for some in own for size in some if size) for own in answers]
        drawn = next((index for index, counts in enumerate(sizes) if counts), None)
        # one tree shows what they are like
        if drawn is not None and concurrency == config.concurrencies[0]:
            drafter = self.drafters[sides[drawn].drafter]
            ((num_nodes, _),) = sizes[drawn].most_common(1)
            rows[drawn]["tree_step"] = tree_step(
                self._base, drafter, prompts, sampling, num_nodes, raw=config.raw
            )
        return rows

    def _roofline(self, side: _Side, concurrency: int) -> dict[str, Any] | None:
        """What memory alone would allow; None of peers, and where there are no steps or their rows
        change.
        """
        if side.peer or str(side.k).startswith("auto") or side.decoder.engine.runner.budget:
            return None
        answers = side.passes[0].answers
        lengths = (len(one.prompt_token_ids) + len(one.token_ids) / 2 for one in answers)
        tau, num_reqs = pooled(one.stats for one in answers).tau, min(concurrency, len(answers))
        engine, context = side.decoder.engine, sum(lengths) / len(answers)
        if not tau:  # all answers ended with the prefill's own token
            return None
        return bound(engine, bandwidth=self._bandwidth, tau=tau, num_reqs=num_reqs, context=context)

    def _on_turn(self, title: str) -> OnTurn | None:
        progress = self._progress
        if progress is None:
            return None
        return lambda turn, count: progress(title + (f" turn {turn + 1}" if turn else ""), count)

    def _sides(self, prompts: PromptSet, concurrency: int) -> list[_Side]:
        config, verifier = self._config, self._base.verifier
        longest = longest_of(self._base, prompts, config)

        def side(name: str, drafter: Drafter | None, kind: SideKind) -> _Side:
            engine = config.engine(concurrency, longest, kind)
            decoder = self._base.variant(drafter, engine)
            return _Side(drafter=name, k=decoder.engine.k, decoder=decoder)

        sides = [side(PLAIN, None, SideKind())]
        sides += [side(*one, kind) for one, kind in product(self.drafters.items(), config.kinds)]
        for peer in self._peers:
            ask = partial(_ask, peer, verifier.defaults, concurrency)
            sides.append(_Side(drafter=peer.name, peer=peer, decoder=self._base, generate=ask))
        return sides


def _ask(
    peer: Peer,
    defaults: SamplingDefaults,
    concurrency: int,
    prompts: Sequence[list[int]],
    samplings: Sequence[SamplingParams],
    on_step: OnStep | None,
) -> list[Answer]:
    """A peer in an engine's place, told the checkpoint's defaults; it tells of no steps."""
    pairs = zip(prompts, samplings, strict=True)
    samplings = [defaults.fill(sampling, len(prompt)) for prompt, sampling in pairs]
    outputs = peer.generate(prompts, samplings, concurrency=concurrency)
    return [Answer(*pair, AcceptanceStats()) for pair in zip(prompts, outputs, strict=True)]


def longest_of(decoder: SpecDecoder, prompts: PromptSet, config: BenchConfig) -> int:
    """Most tokens of a conversation of a set, as far as the target or the options allow."""
    limit = config.max_model_len or decoder.verifier.max_model_len
    return min(max_total_tokens(decoder, prompts, config.max_tokens, raw=config.raw), limit)
