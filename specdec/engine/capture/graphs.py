"""Decode steps as graphs: captured once per shape, then replayed with one launch.

A captured step reads its requests' state through `slots`, a tensor that keeps its place, so a
replay serves whichever requests stand there. Everything the host would otherwise decide anew in
each step is part of the shape: the padded size of the batch, the shape of its blocks, a bound on
the sequence lengths, and what the requests' sampling needs. A shape is captured on the padding slot
alone: when it first occurs, or before anybody waits (`specdec.engine.capture.warmup`). From then on
larger shapes serve others.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.base.errors import BackendError
from specdec.engine.capture.buckets import BATCH_SIZES, batch_bucket, length_bucket
from specdec.engine.capture.capture import Capture, LaunchAlone
from specdec.engine.selection import Selection
from specdec.engine.slots import SlotState
from specdec.engine.step_table import num_columns
from specdec.model.batch import Context, DecodeBatch
from specdec.parallel.collectives import all_agree
from specdec.parallel.group import Group
from specdec.sampling.tensors import SamplingPlan

logger = logging.getLogger(__name__)

Shape = TypeVar("Shape")
Graph = TypeVar("Graph")

MAX_GRAPHS = 512
"""Shapes of steps captured at most, and of prefills; each keeps the nodes of its graph in device
memory, and others run without.
"""

EAGER = 8
"""Times that a step which no graph can serve runs without one while requests are served. One more
takes about three times as long, for it is captured; its kernels are compiled by then.
"""


class ShapeGraphs(Generic[Shape, Graph]):
    """Graphs by the shape of what they repeat.

    Args:
        capture: captures device work.
        required: raise when something cannot be captured; otherwise warn, and go on without further
            graphs.
        group: ranks that capture together, all or none; None for a process alone.

    Attributes:
        graphs: what is captured.
        serving: requests are served, which no capture may hold up: see `obtain`.
    """

    def __init__(self, capture: Capture, *, required: bool, group: Group | None = None) -> None:
        self._capture = capture
        self.graphs: dict[Shape, Graph] = {}
        self.serving = False
        self._nearest: dict[Shape, Shape | None] = {}
        self._met: Counter[Shape] = Counter()  # while nothing could serve it
        self._group = group
        self._required = required
        self._closed = False

    @contextmanager
    def only_launched(self) -> Iterator[None]:
        """What would be captured is launched once, without other ranks, and no graph is kept."""
        before = self._capture, self.graphs, self._group
        self._capture, self.graphs, self._group = LaunchAlone(), {}, None
        try:
            yield
        finally:
            self._capture, self.graphs, self._group = before
            self._nearest.clear()

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return len(self.graphs)

    def obtain(self, shape: Shape, capture: Callable[[Shape], Graph]) -> Graph | None:
        """The graph of a shape, captured when there is none; while requests are served, that of the
        nearest shape that serves it.

        Returns:
            None when there are too many graphs, the device refuses, or requests are served and this
            has been rare.

        Raises:
            BackendError: graphs are required and the device refuses.
        """
        if shape in self.graphs:
            return self.graphs[shape]
        if self.serving:
            nearest = self.nearest(shape)
            if nearest is not None:
                return self.graphs[nearest]
            self._met[shape] += 1
            if self._met[shape] <= EAGER:
                return None
        if self._closed:
            return None
        if len(self.graphs) >= MAX_GRAPHS:
            logger.warning(
                "%d graphs are captured, the most there may be; other shapes run without one",
                MAX_GRAPHS,
            )
            self._closed = True
            return None
        graph, refusal = (
            None,
            BackendError("another rank cannot capture this model's step; turn graphs off"),
        )
        try:
            graph = capture(shape)
        except BackendError as error:
            refusal = error
        if not all_agree(graph is not None, self._group) or graph is None:
            if self._required:
                raise refusal
            logger.warning("%s. Decoding goes on without further graphs", refusal)
            self._closed = True
            return None
        self.graphs[shape] = graph
        self._nearest.clear()
        logger.debug("captured: %s", shape)
        return self.graphs[shape]

    def nearest(self, shape: Shape) -> Shape | None:
        """The captured shape that serves `shape` for the least; None where there is none."""
        if shape not in self._nearest:
            costs = {one: self._cost(one, shape) for one in self.graphs}
            fits = {one: cost for one, cost in costs.items() if cost is not None}
            self._nearest[shape] = min(fits, key=fits.__getitem__, default=None)
        return self._nearest[shape]

    def _cost(self, one: Shape, shape: Shape) -> tuple[Any, ...] | None:
        """What tells the best of the captured shapes that serve `shape`, the least; None where
        `one` does not.
        """
        return () if one == shape else None


class StepShape(NamedTuple):
    """What a captured step depends on beside the tensors it reads."""

    num_reqs: int  # padding included
    block: BlockShape
    max_seq_len: int
    plan: SamplingPlan
    # of the requests, not of those that pad; see `AttentionBackend.steady_len`
    min_seq_len: int = 0
    context: Context = "now"


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step.

    Attributes:
        replay: launches it for the requests in the static slots.
        table: int64 [num_reqs, columns], its results, the same tensor every time; see
            `specdec.engine.step_table.result_table`.
    """

    replay: Callable[[], None]
    table: Tensor


class CapturedSteps(ShapeGraphs[StepShape, Graph]):
    """The captured steps of one engine. A subclass gives `_capture_step`.

    Args:
        state: of the requests.
        steady_len: see `AttentionBackend.steady_len`.
        capture, required, group: see `ShapeGraphs`.
    """

    def __init__(
        self,
        capture: Capture,
        state: SlotState,
        *,
        steady_len: int = 0,
        required: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__(capture, required=required, group=group)
        self._state, self._steady_len = state, steady_len
        self._slots = torch.full(
            (BATCH_SIZES[-1],), state.padding_slot, dtype=torch.int64, device=state.device
        )
        self._selection: Selection | None = None  # whose slots the static ones are
        self._some: dict[tuple[StepShape, int], bool] = {}  # by how many graphs there were

    def prepare(
        self, selection: Selection, block: BlockShape, context: Context = "now"
    ) -> Graph | None:
        """The captured step for a batch, ready to be replayed; captures it when its shape is new.

        Returns:
            None when there is no graph for such a batch: it is too large, there are too many
            graphs, or the device refuses.

        Raises:
            BackendError: graphs are required and the device refuses to capture the step.
        """
        if len(selection.requests) > BATCH_SIZES[-1]:
            return None
        graph = self.obtain(self._shapes(selection)(block, context), self._captured)
        if graph is not None and selection is not self._selection:
            self._slots.copy_(
                self._state.slot_indices(selection.requests, len(self._slots)), non_blocking=True
            )
            self._selection = selection
        return graph

    def ready(self, selection: Selection, context: Context) -> Callable[[BlockShape], bool]:
        """Tells of any block whether a step of a batch may have it: not where another has a graph
        and it has none. One without drafts always may.

        Args:
            selection: the batch.
            context: of a step without drafts.
        """
        shapes = self._shapes(selection)
        if not self.serving or not self._has_some(shapes, shapes(BlockShape(0), context)):
            return lambda block: True
        return lambda block: not block.drafts or self.nearest(shapes(block, "now")) is not None

    def _has_some(
        self, shapes: Callable[[BlockShape, Context], StepShape], plain: StepShape
    ) -> bool:
        """Whether a step of a batch, whose plain one is `plain`, has a graph with any block."""
        key = plain, len(self.graphs)
        if key not in self._some:
            self._some[key] = any(
                self._cost(one, shapes(one.block, one.context)) is not None for one in self.graphs
            )
        return self._some[key]

    def _cost(self, one: StepShape, shape: StepShape) -> tuple[Any, ...] | None:
        """See `ShapeGraphs`."""
        same = (one.block, one.context) == (shape.block, shape.context)
        same &= one.min_seq_len in (0, shape.min_seq_len)
        larger = one.num_reqs >= shape.num_reqs and one.max_seq_len >= shape.max_seq_len
        if not (same and larger and one.plan.covers(shape.plan)):
            return None
        return one.num_reqs, one.plan != shape.plan, one.max_seq_len, -one.min_seq_len

    def _shapes(self, selection: Selection) -> Callable[[BlockShape, Context], StepShape]:
        """The shape of any step of a batch."""
        state, size, most = self._state, batch_bucket(len(selection.requests)), selection.longest
        steady = (
            self._steady_len if self._steady_len and selection.shortest >= self._steady_len else 0
        )

        def shape(block: BlockShape, context: Context) -> StepShape:
            bound = length_bucket(most + state.step_rows(block.drafts), state.longest)
            return StepShape(size, block, bound, selection.plan, steady, context)

        return shape

    def _captured(self, shape: StepShape) -> Graph:
        """Captures a step of padding, so that no request's state moves."""
        state, plan = self._state, shape.plan
        self._selection = None
        self._slots.fill_(state.padding_slot)
        slots = self._slots[: shape.num_reqs]
        columns = num_columns(shape.block, plan)
        table = torch.zeros(shape.num_reqs, columns, dtype=torch.int64, device=state.device)

        def gather() -> DecodeBatch:
            bounds = {"max_seq_len": shape.max_seq_len, "min_seq_len": shape.min_seq_len}
            sampling = state.sampling.select(slots, plan)
            return state.gather(slots, sampling, shape=shape.block, context=shape.context, **bounds)

        # What a steady step finds planned was planned outside any capture, once for its number of
        # rows.
        block = shape.block
        kind = (
            block.drafts > 0,
            block.is_tree,
            shape.context,
            plan,
            (shape.num_reqs, block) if shape.min_seq_len else None,
        )
        return self._capture_step(shape, gather, table, kind)

    def _capture_step(
        self, shape: StepShape, gather: Callable[[], DecodeBatch], table: Tensor, kind: Hashable
    ) -> Graph:
        """Captures a step of the batch that `gather` gives, and leaves the padding slot as it was.

        Args:
            shape: of the step.
            gather: to be called within what is captured.
            table: where the results go.
            kind: see `Capture.capture`.
        """
        raise NotImplementedError


class StepGraphs(CapturedSteps[StepGraph]):
    """The captured steps that are one graph each.

    Args:
        capture, state, steady_len, required, group: see `CapturedSteps`.
        step: launches the step of a batch and writes its result table.
    """

    def __init__(
        self,
        capture: Capture,
        state: SlotState,
        step: Callable[[DecodeBatch, Tensor], object],
        *,
        steady_len: int = 0,
        required: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__(capture, state, steady_len=steady_len, required=required, group=group)
        self._step = step

    def _capture_step(
        self, shape: StepShape, gather: Callable[[], DecodeBatch], table: Tensor, kind: Hashable
    ) -> StepGraph:
        """See `CapturedSteps`."""

        def launch() -> None:
            self._step(gather(), table)
            self._state.rest_padding()

        return StepGraph(self._capture.capture(launch, kind), table)
