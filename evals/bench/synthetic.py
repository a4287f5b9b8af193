"""`specdec bench --synthetic-acceptance L`: tokens per second with drafts at a given acceptance.

Target and drafter do all their work; how many drafts are accepted is drawn (`StepRunner.force`).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.layout import Layout
from drafters.dflash.dummy import dummy_drafter
from drafters.dflash.model import DFlashModel
from evals.bench.config import MAX_WARMUP, DraftCount
from evals.bench.dummy import DummyBench, DummyConfig, Work, figures_of
from evals.bench.dummy_engine import PLAIN, WARM_STEPS, OwnSteps
from evals.peers.vllm import check_drafter
from evals.peers.vllm_steps import VllmSteps, library_for
from evals.runner import num_captured
from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.base.writing import write_text
from specdec.engine.policy.shapes import tree_shape
from specdec.model.core import Drafter, Verifier

Survival = tuple[tuple[float, ...], ...]
"""Rates at which the first 1, 2, ... drafts of a step are accepted together, by kind of request."""


def survival_of(values: Sequence[float], spread: float, most: int, kinds: int = 1) -> Survival:
    """What an option says.

    Args:
        values: one mean accepted length, the target's own token included; or rates by position.
        spread: accepted lengths of requests lie evenly within so much of the mean.
        most: drafts of a step.
        kinds: of requests, where they differ.

    Raises:
        InvalidInputError: a length or a rate that no step can have.

    >>> survival_of([2.5], 0, 3)
    ((1.0, 0.5, 0.0),)
    >>> survival_of([0.75, 0.5], 0, 3)
    ((0.75, 0.5),)
    """
    if len(values) > 1 or values[0] < 1:
        rates = tuple(values)
        falls = sorted(rates, reverse=True) == list(rates)
        if len(rates) > most or not falls or not 0 <= rates[-1] <= rates[0] <= 1:
            raise InvalidInputError(
                f"acceptance by position is {list(rates)}; give at most {most} rates from 1 to 0"
                " that do not rise, or one mean accepted length of at least 1"
            )
        if spread:
            raise InvalidInputError("rates are those of all requests; leave out --synthetic-spread")
        return (rates,)
    (mean,) = values
    if spread < 0 or not 1 <= mean - spread <= mean + spread <= most + 1:
        what = f"accepted lengths of {mean - spread:g} to {mean + spread:g} are asked for"
        raise InvalidInputError(f"{what}; a step of {most} drafts puts out 1 to {most + 1} tokens")
    rows = kinds if spread else 1
    found = []
    for row in range(rows):
        drafts = mean - 1 + spread * ((2 * row + 1) / rows - 1)
        found.append(tuple(min(max(drafts - place, 0.0), 1.0) for place in range(most)))
    return tuple(found)


class SyntheticBench(DummyBench):
    """A sweep over numbers of requests; the device is ours first, then the peer's alone.

    Args:
        verifier: the target; the caller keeps no reference to it where there is a peer.
        entries, config, options: see `DummyBench`.
        survival: rates at which drafts are accepted, for so many requests.
        drafts: by step; None are all that the drafter has.
        divides: see `DFlashDrafter`.

    Raises:
        InvalidInputError: more drafts than the drafter has, a drafter that the peer cannot run, or
            several ranks with a peer or with shapes that are chosen.
    """

    def __init__(
        self,
        verifier: Verifier,
        entries: dict[str, Any],
        config: DummyConfig,
        *,
        drafter: DFlashConfig,
        survival: Callable[[int], Survival],
        drafts: Sequence[DraftCount],
        divides: bool | None = None,
        **options: Any,
    ) -> None:
        # At most so many tokens come of a step.
        every = [row for count in config.concurrencies for row in survival(count)]
        per_step = 1 + max(sum(rate > 0 for rate in row) for row in every)
        super().__init__(verifier, entries, config, per_step=max(2, per_step), **options)
        self._drafter, self._survival, self._divides = drafter, survival, divides
        most = drafter.max_draft_tokens
        self._shapes: list[BlockShape | None] = []  # None is one chosen step by step
        for k in drafts:
            if isinstance(k, int) and not 1 <= k <= most:
                raise InvalidInputError(f"k is {k}; choose 1 to {most}, which the drafter gives")
            self._shapes.append(None if k == "auto" else BlockShape(k or most))
        self._shapes += [tree_shape(nodes, most) for nodes in config.trees]
        if self._group is None and divides:
            raise InvalidInputError("one process has the whole drafter; leave out --divide-drafter")
        if self._group is not None and config.peers:
            what = "--synthetic-acceptance with --peer takes one process"
            raise InvalidInputError(f"{what}; leave out torchrun")
        if self._group is not None and None in self._shapes:
            what = "each rank would choose shapes by its own clock"
            raise InvalidInputError(f"{what}; give -k a number")
        if config.peers:
            check_drafter("vllm", drafter, verifier, library_for(verifier.device).__version__)

    def run(self, provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """See `DummyBench.run`."""
        config, device, dtype = self._config, self._verifier.device, self._verifier.dtype
        report = self._new_report(provenance)
        rows = self._survival(max(config.concurrencies))
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        drafter = dummy_drafter(self._drafter, self._verifier, divides=self._divides)
        divided = drafter.group is not None
        report["settings"] |= {"survival": mean, "kinds": len(rows), "drafter_divided": divided}
        report["drafter_bytes"] = drafter.weight_bytes
        if self._group is not None:
            what = "each rank has a part" if divided else "whole on each rank"
            self._progress(f"the drafter: {what}, {drafter.weight_bytes / 1e9:.2f} GB of a step")
        for cell in config.cells:
            for shape in (PLAIN, *self._shapes):
                report["rows"].append(self._own(*cell, shape, drafter))
                last = cell == config.cells[-1] and shape == self._shapes[-1]
                report["complete"] = last and not config.peers
                yield report
        if not config.peers:
            return
        del drafter, self._verifier
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._progress("vLLM starts")
        with TemporaryDirectory(prefix="specdec-drafter-") as folder:
            peer = self._start(Path(folder), mean, device, dtype)
            report["peer"] = peer.version
            try:
                for cell in config.cells:
                    self._beside(peer, *cell, report["rows"])
                    report["complete"] = cell == config.cells[-1]
                    yield report
            finally:
                peer.close()

    def _own(
        self, length: int, count: int, shape: BlockShape | None, drafter: Drafter
    ) -> dict[str, Any]:
        """Our row of a part; no shape is one that is chosen step by step."""
        options: dict[str, Any] = {"shape": shape, "graphs": self._config.graphs}
        if shape != PLAIN:
            options |= {"drafter": drafter, "survival": self._survival(count)}
        own = OwnSteps(self._verifier, self._rooms[length, count], **options)
        key = {"prompt_tokens": length, "num_reqs": count}
        work = "plain" if shape == PLAIN else "drafts auto" if shape is None else f"drafts {shape}"
        steps = partial(own.steps, count=self._config.steps)
        for repeat in range(MAX_WARMUP if shape is None else 0):
            captured = num_captured(own.engine)
            steps(self._prompts(**key, repeat=repeat))
            if num_captured(own.engine) == captured:  # one pass does not meet all shapes
                break
        found, tau = self._rates(f"{count} x {length:,} {work}", key, steps, own)
        own.close()
        row = figures_of(found, [], "tokens/s") | {"tau": tau, "peer_tau": None}
        return key | {"work": work} | row

    def _beside(self, peer: VllmSteps, length: int, count: int, rows: list[dict[str, Any]]) -> None:
        """Puts the peer's figures beside ours of a part."""
        key = {"prompt_tokens": length, "num_reqs": count}
        decode = partial(peer.decode, count=self._config.steps, warm=WARM_STEPS)
        found, tau = self._rates(f"{count} x {length:,} vLLM", key, decode, peer)
        for row in rows:
            if row["work"] != "plain" and key.items() <= row.items():
                row |= figures_of(row["ours"]["values"], found, "tokens/s") | {"peer_tau": tau}

    def _start(
        self, folder: Path, mean: Sequence[float], device: torch.device, dtype: torch.dtype
    ) -> VllmSteps:
        """The peer with as many drafts as ours has at most, at our mean rates."""
        layout: Layout = "z-lab" if self._drafter.head is None else "speculators"
        name = str(dtype).removeprefix("torch.")
        if self._weights is None:
            config = json.dumps(config_json(self._drafter, layout, dtype=name))
            write_text(folder / "config.json", config)
        else:  # it reads files, of the drafter as well
            tensors = DFlashModel(self._drafter).state_dict()
            write_checkpoint(folder, self._drafter, tensors, layout=layout, dtype=dtype)
        chains = [one.drafts for one in self._shapes if one is not None and not one.is_tree]
        most = max(chains, default=self._drafter.max_draft_tokens)
        speculation = {
            "method": "dflash" if self._drafter.head is None else "dspark",
            "model": str(folder),
            "num_speculative_tokens": most,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [*mean, *[0.0] * most][:most],
        }
        return self._peer(device, dtype, spare=0, speculation=speculation)

    def _rates(
        self, title: str, key: dict[str, int], work: Work, side: OwnSteps | VllmSteps
    ) -> tuple[list[float], float]:
        """Tokens per second of every timed pass, and tokens that a step puts out for a request."""
        tokens: list[int] = []

        def noted(prompts: Sequence[list[int]]) -> float:
            seconds = work(prompts)
            tokens.append(side.tokens)
            return seconds

        seconds, _ = self._sides(title, key, noted, None)
        timed = tokens[-len(seconds) :]
        steps = len(timed) * self._config.steps * key["num_reqs"]
        rates = [count / spent for count, spent in zip(timed, seconds, strict=True)]
        return rates, sum(timed) / steps
