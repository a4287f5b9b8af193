"""Steps of batches in which outputs follow a grammar.

Which tokens may follow a row depends on the drafts before it, and these exist only on the device.
So such a step is launched in three parts, each a graph of its own where steps are captured, and the
host works while the target does:

    draft    -> drafts, which start on their way to the host
                drafts that a grammar refuses give way to the likeliest token of the drafter's that
                it allows, if there are some
    verify      the host meanwhile follows the drafts in each request's grammar, and masks start on
                their way back
    accept   -> the masks are applied to the target's logits before anything else

The state of a grammar is that of the tokens read, so the results of one step are read before the
next is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.device.host import host_tensor
from specdec.engine.capture.capture import Capture
from specdec.engine.capture.graphs import CapturedSteps, StepShape
from specdec.engine.policy.block import Block
from specdec.engine.policy.timing import StepTimer
from specdec.engine.requests.request import Request
from specdec.engine.slots import SlotState
from specdec.engine.step_table import result_table
from specdec.model.batch import DecodeBatch
from specdec.model.core import AcceptOutput, VerifyOutput
from specdec.parallel.group import Group
from specdec.sampling.masks import TokenMasks


class Parts(Protocol):
    """What launches the parts of a step: a `StepRunner`."""

    def draft(self, batch: DecodeBatch) -> Block:
        """The block of each request."""

    def verify(self, batch: DecodeBatch, block: Block) -> VerifyOutput:
        """The target's forward over the block."""

    def accept(
        self,
        batch: DecodeBatch,
        block: Block,
        verify: VerifyOutput,
        masks: TokenMasks | None = None,
    ) -> AcceptOutput:
        """Acceptance, and the commit."""


class GuidedStep:
    """One step in parts, which hand on their results through it. Each may be launched several
    times, as a capture does.

    Args:
        parts: launches them.
        gather: gives the batch.
        masks: applied by `accept`, which reads what they hold then.
        table: where the results go; None makes a new one.

    Attributes:
        packed: int64 [num_reqs, N], the drafts; [num_reqs, 2 N] with the parents of a tree behind
            them, [num_reqs, N (C + 1)] with the alternatives of every slot. It is what the host has
            to know.
        has_alternatives: whether there are alternatives.
        table: see `specdec.engine.step_table.result_table`.
    """

    packed: Tensor
    table: Tensor
    has_alternatives = False

    def __init__(
        self,
        parts: Parts,
        gather: Callable[[], DecodeBatch],
        masks: TokenMasks,
        table: Tensor | None = None,
    ) -> None:
        self.masks = masks
        self._parts, self._gather, self._out = parts, gather, table

    def draft(self) -> None:
        """The first part."""
        self._batch = self._gather()
        self._block = block = self._parts.draft(self._batch)
        self.packed = block.token_ids[:, 1:]
        if block.draft and block.draft.tree:
            self.packed = torch.cat([self.packed, block.draft.tree.parents], dim=1)
        elif block.draft and block.draft.alternatives is not None:
            self.packed, self.has_alternatives = (
                torch.cat([self.packed, block.draft.alternatives.flatten(1)], dim=1),
                True,
            )

    def replace(self, drafts: Tensor) -> None:
        """Puts other drafts int64 [n, N], on the host, in the place of those of the first n
        requests, before `verify`.
        """
        self._block.token_ids[: len(drafts), 1:].copy_(drafts, non_blocking=True)

    def verify(self) -> None:
        """The second part."""
        # what is derived is derived anew in each part
        self._verified = self._parts.verify(replace(self._batch), self._block)

    def accept(self) -> None:
        """The last part."""
        batch = replace(self._batch)
        accepted = self._parts.accept(batch, self._block, self._verified, self.masks)
        self.table = result_table(batch.shape, accepted, self._block.draft, self._out)


@dataclass(frozen=True, slots=True)
class GuidedGraph:
    """A captured step in parts.

    Attributes:
        step: what is replayed.
        draft, verify, accept: replay its parts.
    """

    step: GuidedStep
    draft: Callable[[], None]
    verify: Callable[[], None]
    accept: Callable[[], None]


class GuidedGraphs(CapturedSteps[GuidedGraph]):
    """The captured steps in parts of one engine.

    Args:
        capture, state, steady_len, required, group: see `CapturedSteps`.
        parts: launches the parts of a step.
    """

    def __init__(
        self,
        capture: Capture,
        state: SlotState,
        parts: Parts,
        *,
        steady_len: int = 0,
        required: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__(capture, state, steady_len=steady_len, required=required, group=group)
        self._parts = parts
        self._words = torch.empty(0, dtype=torch.int32, device=state.device)

    def _capture_step(
        self, shape: StepShape, gather: Callable[[], DecodeBatch], table: Tensor, kind: Hashable
    ) -> GuidedGraph:
        """See `CapturedSteps`. Masks of all steps share memory, since only one runs at a time."""
        masks = TokenMasks.empty(
            shape.num_reqs, shape.block.rows, self._state.vocab_size, self._words
        )
        self._words = max(self._words, masks.words.flatten(), key=len)
        step = GuidedStep(self._parts, gather, masks, table)

        def accept() -> None:
            step.accept()
            self._state.rest_padding()

        parts = enumerate((step.draft, step.verify, accept))
        replays = [self._capture.capture(launch, (place, kind)) for place, launch in parts]
        return GuidedGraph(step, *replays)


def run_guided(
    launches: GuidedStep | GuidedGraph,
    requests: Sequence[Request],
    shape: BlockShape,
    timer: StepTimer,
) -> Tensor:
    """Launches a step of `requests`, all of whose results have been read, and makes its masks
    meanwhile; gives its table.
    """
    step = launches if isinstance(launches, GuidedStep) else launches.step
    launches.draft()
    coming = OnItsWay(step.packed[: len(requests)]) if shape.drafts else None
    packed: list[list[int]] = [[] for _ in requests]
    if coming and step.has_alternatives:
        with timer.phase("grammar"):
            pairs = zip(requests, coming.read(), strict=True)
            packed = [_constrained(request, row, shape.drafts) for request, row in pairs]
            step.replace(host_tensor(packed, torch.int64, step.packed.device))
    launches.verify()
    with timer.phase("grammar"):
        if coming and not step.has_alternatives:
            packed = coming.read()
        put(step.masks, fill(requests, shape.rows, packed, step.masks))
    launches.accept()
    return step.table


def _constrained(request: Request, packed: list[int], count: int) -> list[int]:
    """The drafts of a request out of `GuidedStep.packed`, those its grammar refuses replaced."""
    drafts, most = packed[:count], len(packed) // count - 1
    if request.grammar is not None and not request.error:
        try:
            rows = [packed[start : start + most] for start in range(count, len(packed), most)]
            return request.grammar.constrained(drafts, rows)
        except Exception as error:  # it ends when the step's results are read
            request.fail(error)
    return drafts


class OnItsWay:
    """A tensor whose copy to the host has begun."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host = host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list[list[int]]:
        """The rows that were copied; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows


def fill(
    requests: Sequence[Request], rows: int, drafts: Sequence[Sequence[int]], like: TokenMasks
) -> TokenMasks:
    """Masks on the host of the requests that have a grammar, in their order, as wide as `like`.

    Args:
        requests: of the batch.
        rows: of a block.
        drafts: of each request, with the parents of a tree behind them.
        like: where they will go.
    """
    guided = [
        (index, request.grammar)
        for index, request in enumerate(requests)
        if request.grammar is not None
    ]
    device = like.words.device
    sizes, pinned = (len(guided), rows, like.words.shape[2]), device.type == "cuda"
    words = torch.empty(sizes, dtype=torch.int32, device="cpu", pin_memory=pinned)
    places = [-1] * len(like.places)
    for place, (index, grammar) in enumerate(guided):
        tokens, parents = drafts[index][: rows - 1], drafts[index][rows - 1 :]
        try:
            grammar.fill(words[place], tokens, parents or None)
            places[index] = place
        except (
            Exception
        ) as error:  # it goes without a mask, and ends when the step's results are read
            requests[index].fail(error)
    return TokenMasks(words, host_tensor(places, torch.int64, device))


def put(masks: TokenMasks, filled: TokenMasks) -> None:
    """Copies masks from the host to where a step reads them; nobody waits."""
    masks.words[: len(filled.words)].copy_(filled.words, non_blocking=True)
    masks.places.copy_(filled.places, non_blocking=True)
