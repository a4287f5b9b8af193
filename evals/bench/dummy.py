"""`specdec bench --dummy-weights`: times of a shape with random weights, beside vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from evals.bench.dummy_engine import PLAIN, TREE_DEPTH, WARM_STEPS, OwnSteps, Room
from evals.peers.vllm_steps import VllmSteps
from evals.report.report import new_report
from evals.roofline import measured_bandwidth, step_bytes
from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.kv_cache import bytes_per_slot
from specdec.model.core import Verifier
from specdec.parallel.collectives import all_agree
from specdec.parallel.group import group_of

Work = Callable[[Sequence[list[int]]], float]
"""Seconds that a side takes for one pass over some prompts."""

Progress = Callable[[str], None]
"""Called with what is about to be measured."""


@dataclass(frozen=True, slots=True)
class DummyConfig:
    """What is measured.

    Attributes:
        prompt_tokens: lengths of prompts. All but the first are measured with one request.
        concurrencies: requests at once.
        verify_rows: rows per request of steps that verify a chain of drafts; 1 for none.
        trees: drafts per request of steps that verify a tree.
        steps: timed steps of a pass.
        repeats: timed passes of every side, taken in turn.
        warmup: untimed passes before them.
        seed: of weights and prompts.
        peers: only "vllm" knows dummy weights.
        graphs: what to capture, see `EngineConfig`.
        quantize: how weights are, see `verifiers.weights.quantize`; None: not at all.
    """

    prompt_tokens: tuple[int, ...] = (1024,)
    concurrencies: tuple[int, ...] = (1,)
    verify_rows: tuple[int, ...] = (8,)
    trees: tuple[int, ...] = ()
    steps: int = 64
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    peers: tuple[str, ...] = ()
    graphs: bool | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "concurrencies", "verify_rows"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                what = f"{name} is {getattr(self, name)}"
                raise InvalidInputError(f"{what}; give one or more numbers of at least 1")
        for nodes in self.trees:
            EngineConfig(tree_nodes=nodes)
        for name, least in (("steps", 1), ("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise InvalidInputError(f"{name} is {value}; it must be at least {least}")
        if others := [name for name in self.peers if name != VllmSteps.name]:
            what = f"peer {others[0]!r} has no dummy weights"
            raise InvalidInputError(f"{what}; with --dummy-weights only vllm can be a peer")
        if self.quantize and self.peers:
            what = f"a peer's dummy weights are plain numbers, not {self.quantize}"
            raise InvalidInputError(f"{what}; leave out --weights or --peer")

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Length of the prompts and number of requests of every part of the sweep."""
        first, *longer = self.prompt_tokens
        return [*((first, n) for n in self.concurrencies), *((length, 1) for length in longer)]

    @property
    def shapes(self) -> list[BlockShape]:
        """Shapes of the blocks that steps with drafts verify."""
        chains = [BlockShape(rows - 1) for rows in self.verify_rows if rows > 1]
        return [*chains, *(BlockShape(n, min(n, TREE_DEPTH)) for n in self.trees if n)]

    @property
    def step_rows(self) -> list[int]:
        """Rows of all steps of the sweep."""
        shapes = (BlockShape(0), *self.shapes)
        return sorted({count * shape.rows for _, count in self.cells for shape in shapes})


class DummyBench:
    """A sweep over lengths of prompts and numbers of requests.

    Args:
        met: different experts met, by number of rows; see `verifiers.dummy.experts_met`.
        weights: folder with weights for the peer, see `verifiers.dummy.write_weights`; or None.
        per_step: see `Room.of`.

    Raises:
        CapacityError: the prompts do not fit the model.
    """

    def __init__(
        self,
        verifier: Verifier,
        entries: dict[str, Any],
        config: DummyConfig,
        *,
        met: Mapping[int, float | None] | None = None,
        weights: Path | None = None,
        progress: Progress | None = None,
        per_step: int = 2,
    ) -> None:
        self._verifier, self._entries, self._config = verifier, entries, config
        self._met = met or {}
        self._weights = weights
        self._progress = progress or (lambda title: None)
        self._rooms: dict[tuple[int, int], Room] = {}
        for length, count in config.cells:
            room = Room.of(verifier, count, length, config.steps, per_step)
            self._rooms[length, count] = room
        self._vocab_size, self._group = verifier.vocab_size, group_of(verifier)

    def run(self, provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Measures part by part; yields the report after each, complete when the iterator ends.

        Raises:
            InvalidInputError: the peer is not installed, or the target is on a CPU.
        """
        config, group = self._config, self._group
        report = self._new_report(provenance)
        self._progress("vLLM starts" if config.peers else "measuring")
        # A peer starts ranks of its own; of ours the first one alone asks it.
        peer = None
        if config.peers and (group is None or group.rank == 0):
            peer = self._start_peer(1 if group is None else group.size)
        report["peer"] = peer.version if peer else None
        try:
            for number, cell in enumerate(config.cells, start=1):
                report["rows"] += self._measure(*cell, peer)
                report["complete"] = number == len(config.cells)
                yield report
        finally:
            if peer:
                peer.close()

    def _new_report(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """The report without rows."""
        config = self._config
        self._bandwidth = measured_bandwidth(self._verifier.device)
        settings = {"steps": config.steps, "warm_steps": WARM_STEPS}
        names = ("repeats", "warmup", "seed", "graphs", "quantize")
        settings |= {name: getattr(config, name) for name in names} | {"config": self._entries}
        report = new_report("specdec-dummy-bench", provenance, settings)
        return report | {
            "weight_bytes": self._verifier.weight_bytes,
            "bandwidth": self._bandwidth,
            "peer": None,
            "experts": self._experts(),
            "rows": [],
        }

    def _measure(self, length: int, count: int, peer: VllmSteps | None) -> list[dict[str, Any]]:
        """Rows of one part: prefill, a plain step, and steps that verify drafts."""
        config, room = self._config, self._rooms[length, count]
        own, steps = OwnSteps(self._verifier, room, graphs=config.graphs), config.steps
        key = {"prompt_tokens": length, "num_reqs": count}
        title = f"{count} x {length:,}"
        prefill = self._sides(f"{title} prefill", key, own.prefill, peer.prefill if peer else None)
        ours = partial(own.steps, count=steps)
        theirs = partial(peer.steps, count=steps, warm=WARM_STEPS) if peer else None
        plain = self._sides(f"{title} plain step", key, ours, theirs)
        speed = _row(prefill, "tokens/s", lambda seconds: length * count / seconds)
        found = [key | {"work": "prefill"} | speed]
        found.append(key | {"work": "plain step"} | self._step(plain, own, length, count))
        own.close()
        for shape in config.shapes:
            own = OwnSteps(self._verifier, room, shape=shape, graphs=config.graphs)
            work = f"verify {shape if shape.is_tree else shape.rows}"
            verify = self._sides(f"{title} {work}", key, partial(own.steps, count=steps), None)
            found.append(key | {"work": work} | self._step(verify, own, length, count))
            own.close()
        return found

    def _sides(
        self, title: str, key: dict[str, int], own: Work, peer: Work | None
    ) -> tuple[list[float], list[float]]:
        """Seconds of our passes and the peer's, in turn; each turn has prompts of its own."""
        ours: list[float] = []
        theirs: list[float] = []
        for repeat in range(-self._config.warmup, self._config.repeats):
            number = "warm-up" if repeat < 0 else f"{repeat + 1}/{self._config.repeats}"
            self._progress(f"{title} {number}")
            prompts = self._prompts(**key, repeat=repeat)
            for work, seconds in ((own, ours), (peer, theirs)):
                if work:
                    spent = work(prompts)
                    if repeat >= 0:
                        seconds.append(spent)
            # A rank in its next pass would keep its GPU busy while the first one asks the peer.
            all_agree(True, self._group)
        return ours, theirs

    def _prompts(self, prompt_tokens: int, num_reqs: int, repeat: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._config.seed + repeat + self._config.warmup)
        shape, most = (num_reqs, prompt_tokens), self._vocab_size
        prompts: list[list[int]] = torch.randint(most, shape, generator=generator).tolist()
        return prompts

    def _step(
        self, seconds: tuple[list[float], list[float]], own: OwnSteps, length: int, count: int
    ) -> dict[str, Any]:
        """A row about steps, with what reading memory alone would take."""
        config, engine = self._config, own.engine
        row = _row(seconds, "ms", lambda spent: spent / config.steps * 1e3)
        k, context = engine.planner.shapes[-1].drafts, length + WARM_STEPS + config.steps / 2
        moved = step_bytes(engine, k=k, num_reqs=count, context=context)
        milliseconds = moved / self._bandwidth * 1e3
        share = milliseconds / row["ours"]["median"]
        return row | {
            "roofline": {"bytes": moved, "ms": milliseconds, "share": share},
            "distinct_tokens": own.distinct,
        }

    def _start_peer(self, ranks: int) -> VllmSteps:
        verifier, rooms = self._verifier, self._rooms.values()
        dtype = verifier.attention.spec.kv_dtype
        per_token = sum(spec.bytes_per_token(dtype) for spec in verifier.kv_specs)
        max_rows = max(shape.rows for shape in (PLAIN, *self._config.shapes))
        per_request = bytes_per_slot(verifier.kv_specs, max_rows)
        cache = max(one.num_reqs * (one.max_model_len * per_token + per_request) for one in rooms)
        num_rows = max_rows * max(self._config.concurrencies)
        logits = num_rows * verifier.vocab_size * verifier.dtype.itemsize
        spare = 2 * cache + LOGITS * logits + SPARE
        return self._peer(verifier.device, verifier.dtype, spare=spare, ranks=ranks)

    def _peer(self, device: torch.device, dtype: torch.dtype, **options: Any) -> VllmSteps:
        """The peer, with room for all of the sweep."""
        rooms = self._rooms.values()
        options["max_num_seqs"] = max(room.num_reqs for room in rooms)
        options["max_model_len"] = max(room.max_model_len for room in rooms)
        return VllmSteps(self._entries, device, dtype, weights=self._weights, **options)

    def _experts(self) -> dict[str, Any] | None:
        """How many experts rows meet; None in a model without."""
        experts = self._verifier.routed_experts
        if experts is None:
            return None
        met = [
            {"rows": rows, "expected": experts.expected(rows), "measured": self._met.get(rows)}
            for rows in self._config.step_rows
        ]
        return {"num_experts": experts.num_experts, "top_k": experts.top_k, "met": met}


LOGITS = 4
"""Tensors as large as a step's logits that a captured step may have at once."""

SPARE = 6 * 2**30
"""Bytes for what our engine takes beside weights, cache and logits: prefill and graphs."""


def _row(
    seconds: tuple[list[float], list[float]], unit: str, figure: Callable[[float], float]
) -> dict[str, Any]:
    """Figures of both sides, made of their seconds."""
    ours, theirs = ([figure(one) for one in side] for side in seconds)
    return figures_of(ours, theirs, unit)


def figures_of(ours: list[float], theirs: list[float], unit: str) -> dict[str, Any]:
    """What a row has of both sides' passes; the ratio is ours to theirs."""
    assert ours, "there is at least one timed pass"
    own, peer = _spread(ours), _spread(theirs) if theirs else None
    ratio = own["median"] / peer["median"] if peer else None
    figures = {"unit": unit, "ours": own, "theirs": peer, "ratio": ratio}
    return figures | {"roofline": None, "distinct_tokens": None}


def _spread(values: list[float]) -> dict[str, Any]:
    return {"values": values, "median": median(values), "min": min(values), "max": max(values)}
