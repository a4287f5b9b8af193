"""How long steps take, by requests and the shape of their blocks: measured, and estimated where
they are not.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from specdec.base.blocks import BlockShape

ENOUGH = 3
"""Times that tell how long a step takes, even where two of them are disturbed."""

_SAMPLES = 15  # times kept per shape
# steps after which times may be of shorter contexts or of a busier machine, and give way to new
# ones
_FRESH = 64
_CHANGE = 1.5  # how many times as long or short a step must take for all old times to be forgotten


class StepTimes:
    """Seconds of a step by the shape of its blocks, at one batch size.

    Args:
        arms: shapes, those of a kind in the order of their drafts.
    """

    def __init__(self, arms: Sequence[BlockShape]) -> None:
        self._samples: dict[BlockShape, deque[float]] = {
            shape: deque(maxlen=_SAMPLES) for shape in arms
        }
        self._quartiles: dict[BlockShape, float] = {}  # of these, where there are enough
        self._measured_at = dict.fromkeys(arms, 0)
        # what was forgotten, until there is something new to compare it with
        self._before: dict[BlockShape, float] = {}
        self._cold = set(arms)
        self._num_steps = 0

    def observe(self, shape: BlockShape, seconds: float) -> None:
        """Takes over the time of a step. The first of its kind is left out: it pays for memory and
        for choosing kernels.
        """
        self._num_steps += 1
        if shape in self._cold:
            self._cold.discard(shape)
            return
        samples = self._samples[shape]
        if self.age(shape) > _FRESH and samples:
            self._before[shape] = _lower_quartile(samples)
            self._forget(shape)
        samples.append(seconds)
        self._measured_at[shape] = self._num_steps
        if len(samples) < ENOUGH:
            return
        now = self._quartiles[shape] = _lower_quartile(samples)
        if len(samples) == ENOUGH and shape in self._before:
            before = self._before.pop(shape)
            if max(before, now) > _CHANGE * min(before, now):
                self._forget_old()

    def _forget_old(self) -> None:
        for shape in self._samples:
            if self.age(shape) > _FRESH:
                self._forget(shape)

    def _forget(self, shape: BlockShape) -> None:
        self._samples[shape].clear()
        self._quartiles.pop(shape, None)

    @property
    def num_measured(self) -> int:
        """Shapes in `measured`."""
        return len(self._quartiles)

    def measured(self) -> dict[BlockShape, float]:
        """Seconds by shape, where there are enough: their lower quartile, as disturbances only
        lengthen.

        Not above those of more drafts of the same kind.
        """
        times: dict[BlockShape, float] = {}
        bounds: dict[tuple[bool, int], float] = {}
        for shape in reversed(self._samples):
            if shape in self._quartiles:
                kind = shape.is_tree, shape.drafts if shape.budget else 0
                bounds[kind] = times[shape] = min(
                    bounds.get(kind, float("inf")), self._quartiles[shape]
                )
        return times

    def is_cold(self, shape: BlockShape) -> bool:
        """Whether there has been no step of that shape."""
        return shape in self._cold

    def age(self, shape: BlockShape) -> int:
        """Steps since one of that shape was measured."""
        return self._num_steps - self._measured_at[shape]


class StepSize(NamedTuple):
    """What the time of a step depends on."""

    num_reqs: int
    shape: BlockShape
    forward_for_each: bool = False
    """See `specdec.model.core.Drafter.forward_for_each`."""

    @property
    def forwards(self) -> int:
        """Forwards of the drafter."""
        return self.shape.depth if self.forward_for_each else min(self.shape.depth, 1)

    @property
    def rows(self) -> float:
        """Rows to verify."""
        return self.num_reqs * self.shape.mean_rows

    def exceeds(self, other: "StepSize") -> bool:
        """Whether it takes no less time: it has no fewer requests, rows or forwards, and no chains
        in place of trees.
        """
        if other.shape.is_tree and not self.shape.is_tree:
            return False
        larger = self.num_reqs >= other.num_reqs and self.rows >= other.rows
        return larger and self.forwards >= other.forwards

    def estimate(self, known: Mapping["StepSize", float]) -> float | None:
        """Seconds by rows between the longest known step below and the shortest above; without one
        of them what the other took.

        Without one above it grows on, a quarter as fast as between fewer drafts. Plain decoding is
        taken to be no slower than the shapes below it. Else it could be given up unmeasured when it
        would be the fastest.
        """
        below = max(
            ((took, step.rows) for step, took in known.items() if self.exceeds(step)), default=None
        )
        above = min(
            ((took, step.rows) for step, took in known.items() if step.exceeds(self)), default=None
        )
        if below is not None and above is None:
            return max(below[0], self._grown(known))
        if below is None or above is None or below[1] == above[1] or not self.shape.drafts:
            return (below or above or (None,))[0]
        return below[0] + (above[0] - below[0]) * (self.rows - below[1]) / (above[1] - below[1])

    def _grown(self, known: Mapping["StepSize", float]) -> float:
        """Seconds if each draft more costs a quarter of those before, by the two largest numbers of
        them, and each forward more as much as those before; 0 when nothing tells.
        """
        alike = (
            step
            for step in known
            if step.num_reqs == self.num_reqs
            and step.shape.is_tree == self.shape.is_tree
            and not (step.shape.budget or self.shape.budget)
        )
        fewer = sorted(step for step in alike if step.shape.drafts < self.shape.drafts)[-2:]
        if len(fewer) < 2:
            return 0.0
        less, more = fewer
        if self.forward_for_each:
            share = (self.forwards - more.forwards) / max(more.forwards - less.forwards, 1)
        else:
            drafts = more.shape.drafts - less.shape.drafts
            share = (self.shape.drafts - more.shape.drafts) / drafts / 4
        return known[more] + share * (known[more] - known[less])


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
