"""How long steps take, by batch and shape of their blocks: measured, and estimated where they are
not.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge
from typing import NamedTuple

from specdec.base.blocks import BlockShape

ENOUGH = 3
"""Times that tell how long a step takes, even where two of them are disturbed."""

_SAMPLES = 15  # times kept per shape
_KNOWN = 2500  # steps after which a time is as unknown as before
_FIRST_ROWS = 8  # of a request, in what is tried before anything is measured


class Batch(NamedTuple):
    """What the time of a step depends on, beside its shape.

    Attributes:
        sampled: a request has a temperature: steps take longer and accept less.
        num_reqs: requests, as `batch_bucket` counts them.
    """

    sampled: bool
    num_reqs: int


@dataclass(slots=True)
class Samples:
    """Times of one shape in one kind of batch.

    Attributes:
        late: the last ones.
        last: of the last step, also of the first, which pays for memory and for choosing kernels
            and is left out of `late`; 0 before any.
        step: when one was measured, of all steps of such batches.
        seconds: their lower quartile, as disturbances only lengthen; None before there are enough.
    """

    late: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    last: float = 0.0
    step: int = 0
    seconds: float | None = None

    def observe(self, seconds: float, step: int) -> None:
        """Takes over the time of a step."""
        if self.last:
            self.late.append(seconds)
            self.step = step
        if len(self.late) >= ENOUGH:
            self.seconds = sorted(self.late)[len(self.late) // 4]
        self.last = seconds


class StepTimes:
    """Seconds of a step, by its batch and the shape of its blocks.

    Args:
        arms: shapes that steps may have.
        forward_for_each: see `specdec.model.core.Drafter.forward_for_each`.

    Attributes:
        num_steps: that were measured, by batch.
    """

    def __init__(self, arms: Sequence[BlockShape], *, forward_for_each: bool = False) -> None:
        self.num_steps = Counter[Batch]()
        self._arms, self._forward_for_each = sorted(arms), forward_for_each
        self._samples: dict[Batch, dict[BlockShape, Samples]] = {}
        # until another shape is measured
        self._estimates: dict[Batch, dict[BlockShape, float]] = {}

    def of(self, batch: Batch) -> dict[BlockShape, Samples]:
        """What was measured."""
        if batch not in self._samples:
            self._samples[batch] = {shape: Samples() for shape in self._arms}
        return self._samples[batch]

    def observe(self, batch: Batch, shape: BlockShape, seconds: float) -> None:
        """Takes over the time of a step."""
        self.num_steps[batch] += 1
        samples = self.of(batch)[shape]
        known = samples.seconds
        samples.observe(max(seconds, 1e-9), self.num_steps[batch])
        if known is None and samples.seconds:
            self._estimates.clear()

    def most(self, batch: Batch, shape: BlockShape) -> float:
        """Seconds that a step takes at most: what the last took, or no less than its rows one by
        one; 0 where nothing tells.
        """
        samples = self.of(batch)
        if took := samples[shape].seconds or samples[shape].last:
            return took
        each = [(one.mean_rows, known.seconds) for one, known in samples.items() if known.seconds]
        rows, took = max((one for one in each if one[0] <= shape.mean_rows), default=(1.0, 0.0))
        return took * shape.mean_rows / rows

    def seconds(self, batch: Batch) -> dict[BlockShape, float]:
        """Time of a step by shape, as far as there is anything to tell it from: no shorter than
        with fewer drafts of the same kind.
        """
        for one in self.of(batch).values():
            if one.seconds and one.step < self.num_steps[batch] - _KNOWN:
                one.seconds = None
                one.late.clear()
                self._estimates.clear()
        if batch not in self._estimates:
            self._estimates[batch] = self._estimate(batch)
        measured, estimates = self._measured(batch), self._estimates[batch]
        found: dict[BlockShape, float] = {}
        longest: dict[tuple[bool, bool], float] = {}
        for shape in self._arms:
            kind = shape.is_tree, shape.budget > 0
            if shape in measured:
                longest[kind] = found[shape] = measured[shape]
            elif shape in estimates:
                longest[kind] = found[shape] = max(estimates[shape], longest.get(kind, 0.0))
        return found

    def _measured(self, batch: Batch) -> dict[BlockShape, float]:
        """Seconds of what was measured: no longer than with more drafts of the same kind, and
        without drafts than with any, as disturbances only lengthen.
        """
        times: dict[BlockShape, float] = {}
        least: dict[tuple[bool, bool], float] = {}
        for shape, one in reversed(self.of(batch).items()):
            if one.seconds:
                kind = shape.is_tree, shape.budget > 0
                least[kind] = times[shape] = min(one.seconds, least.get(kind, one.seconds))
                if not shape.drafts:
                    times[shape] = min(least.values())
        return times

    def _estimate(self, batch: Batch) -> dict[BlockShape, float]:
        """Seconds of shapes of at most twice the rows of all that have been tried: the time of a
        much larger one would be a guess.
        """
        known = {
            self._size(there, shape): took
            for there in self._samples
            if there.sampled == batch.sampled
            for shape, took in self._measured(there).items()
        }
        most = max([_FIRST_ROWS, *(2 * size.rows / size.num_reqs for size in known)])
        sizes = {s: self._size(batch, s) for s in self._arms if s.mean_rows <= most}
        times = {shape: size.estimate(known) for shape, size in sizes.items()}
        return {shape: took for shape, took in times.items() if took}

    def _size(self, batch: Batch, shape: BlockShape) -> "StepSize":
        forwards = shape.depth if self._forward_for_each else min(shape.depth, 1)
        rows = batch.num_reqs * shape.mean_rows
        return StepSize(batch.num_reqs, rows, forwards, shape.is_tree)


class StepSize(NamedTuple):
    """What the time of a step grows with.

    Attributes:
        num_reqs: of the batch.
        rows: to verify.
        forwards: of the drafter.
        is_tree: blocks are trees.
    """

    num_reqs: int
    rows: float
    forwards: int
    is_tree: bool

    def exceeds(self, other: "StepSize") -> bool:
        """Whether it takes no less time."""
        return all(map(ge, self, other))

    def estimate(self, known: Mapping["StepSize", float]) -> float | None:
        """Seconds by rows between the longest known step below and the shortest above; without one
        of them what the other took. So what no step bounds is tried, and plain decoding is not
        given up unmeasured.
        """
        below = max(
            ((took, one.rows) for one, took in known.items() if self.exceeds(one)), default=None
        )
        above = min(
            ((took, one.rows) for one, took in known.items() if one.exceeds(self)), default=None
        )
        if not below or not above or below[1] == above[1] or not self.forwards:
            return (below or above or (None,))[0]
        return below[0] + (above[0] - below[0]) * (self.rows - below[1]) / (above[1] - below[1])
