"""Results of a step on their way to the host."""

import gc

import pytest
import torch
from torch import Tensor

from specdec.blocks import BlockShape, DraftTree
from specdec.core import AcceptOutput, DraftOutput
from specdec.engine.request import Request
from specdec.engine.results import FinishedStep, ResultQueue, StepResult, TokenLogprobs, num_columns, result_table
from specdec.engine.timing import StepClock
from specdec.sampling.logprobs import Logprobs
from specdec.sampling.tensors import SamplingPlan
from specdec.sampling_params import SamplingParams


def requests(count: int) -> list[Request]:
    return [Request(i, [5], SamplingParams(), seed=0, max_total_len=9) for i in range(count)]


def sent_and_received(batch: list[Request], shape: BlockShape | None, table: Tensor) -> FinishedStep:
    queue = ResultQueue(StepClock(torch.device("cpu")))
    queue.send(batch, shape, table)
    (step,) = queue.receive()
    return step


def test_every_request_gets_its_own_row() -> None:
    """Catches rows and columns mixed up, log-probabilities that lose digits, and rows that pad the batch."""
    values = torch.tensor([[-0.1, -0.2, -0.3], [-1.1, -1.2, -1.3], [-9.0, -9.0, -9.0]])
    logprobs = Logprobs(values, torch.arange(18).view(3, 3, 2), torch.arange(18).view(3, 3, 2) / -7)
    accept = AcceptOutput(
        token_ids=torch.tensor([[11, 12, 13], [21, 22, 23], [91, 92, 93]]),
        num_accepted=torch.tensor([2, 0, 1]),
        next_anchors=torch.tensor([13, 21, 92]),
        finite=torch.tensor([True, False, True]),
        logprobs=logprobs,
    )
    table = result_table(
        BlockShape(2), accept, DraftOutput(torch.zeros(3, 2, dtype=torch.int64), num_drafts=torch.tensor([2, 1, 2]))
    )
    assert table.shape[1] == num_columns(BlockShape(2), SamplingPlan.of([SamplingParams(top_logprobs=2)]))
    batch = requests(2)
    step = sent_and_received(batch, BlockShape(2), table)

    def of(request: int) -> list[TokenLogprobs]:
        return list(zip(*(x[request].tolist() for x in logprobs), strict=True))

    assert list(step.results()) == [
        (batch[0], StepResult(BlockShape(2), 2, 2, True, [11, 12, 13], of(0))),
        (batch[1], StepResult(BlockShape(2), 0, 1, False, [21], of(1))),
    ]


def test_positions_that_a_tree_has_drafts_for() -> None:
    """As deep as those that count reach; all of the block's depth where nothing else is said."""
    shape, zeros = BlockShape(4, 3), torch.zeros(3, 4, dtype=torch.int64)
    tree = DraftTree(torch.tensor([[0, 1, 2, 0]] * 3), torch.tensor([[1, 2, 3, 1]] * 3), zeros, zeros)
    rows = torch.arange(4).repeat(3, 1)
    accept = AcceptOutput(rows, torch.zeros(3, dtype=torch.int64), rows[:, 0], torch.ones(3, dtype=torch.bool), path=rows)
    for num_drafts, offered in ((torch.tensor([0, 2, 4]), [0, 2, 3]), (None, [3, 3, 3])):
        table = result_table(shape, accept, DraftOutput(zeros, num_drafts=num_drafts, tree=tree))
        results = sent_and_received(requests(3), shape, table).results()
        assert [result.num_drafts for _, result in results] == offered


@pytest.mark.parametrize("shape", [None, BlockShape(0)])
def test_a_single_token(shape: BlockShape | None) -> None:
    """First tokens and plain decoding: one token each, no log-probabilities unless asked for."""
    accept = AcceptOutput(torch.tensor([[7]]), torch.tensor([0]), torch.tensor([7]), torch.tensor([True]))
    batch = requests(1)
    step = sent_and_received(batch, shape, result_table(BlockShape(0), accept))
    assert list(step.results()) == [(batch[0], StepResult(shape, 0, 0, True, [7], []))]


def test_a_large_batch_does_not_set_off_the_garbage_collector() -> None:
    """Objects of a whole batch alive at once would: each pass over all of Python's objects takes longer than a step."""
    count = 20_000
    zeros = torch.zeros(count, dtype=torch.int64)
    accept = AcceptOutput(zeros[:, None] + 7, zeros, zeros, torch.ones(count, dtype=torch.bool))
    step = sent_and_received(requests(count), BlockShape(0), result_table(BlockShape(0), accept))
    passes: list[str] = []
    note = lambda phase, info: passes.append(phase)  # noqa: E731
    gc.collect()
    gc.callbacks.append(note)
    try:
        total = sum(len(result.token_ids) for _, result in step.results())
    finally:
        gc.callbacks.remove(note)
    assert total == count
    assert passes == []
