"""Results of a step on their way to the host, and what they do to requests."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.blocks import BlockShape, DraftTree
from specdec.engine.launch import Launch, ResultQueue
from specdec.engine.policy.timing import StepClock
from specdec.engine.requests.outcome import take_over
from specdec.engine.requests.request import Request, Status
from specdec.engine.selection import Selection
from specdec.engine.step_table import num_columns, result_table
from specdec.model.core import AcceptOutput, DraftOutput
from specdec.sampling.logprobs import Logprobs
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingPlan


def requests(count: int, most: int = 9, **sampling: Any) -> list[Request]:
    """In the midst of a step of at most two drafts."""
    params = SamplingParams(**sampling)
    numbers: dict[str, Any] = {
        "seed": 0,
        "max_total_len": 1 + most,
        "num_unread": 1,
        "num_in_flight": 3,
    }
    return [Request(i, [5], params, status=Status.RUNNING, **numbers) for i in range(count)]


def sent_and_received(batch: list[Request], shape: BlockShape | None, table: Tensor) -> Launch:
    queue = ResultQueue(StepClock(torch.device("cpu")))
    queue.send(Launch(Selection(batch), shape, table=table))
    (step,) = queue.receive()
    return step


def test_every_request_gets_its_own_row() -> None:
    """Catches rows and columns mixed up, log-probabilities that lose digits, and rows that pad the
    batch.
    """
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
        BlockShape(2),
        accept,
        DraftOutput(torch.zeros(3, 2, dtype=torch.int64), num_drafts=torch.tensor([2, 1, 2])),
    )
    assert table.shape[1] == num_columns(
        BlockShape(2), SamplingPlan.of([SamplingParams(top_logprobs=2)])
    )
    batch = requests(2, top_logprobs=2)
    outcome = take_over(sent_and_received(batch, BlockShape(2), table))
    assert outcome.requests == batch[:1] and outcome.num_accepted == [2] and not outcome.paths
    assert outcome.spoiled == batch[1:] and "NaN or infinite after 0 output tokens" in (
        batch[1].error or ""
    )
    assert [request.output_token_ids for request in batch] == [[11, 12, 13], []]
    assert batch[0].logprobs == values[0].tolist() and batch[1].logprobs == []
    tops = zip(*(x[0].tolist() for x in logprobs[1:]), strict=True)
    own = zip([11, 12, 13], batch[0].logprobs, strict=True)
    assert batch[0].top_logprobs == [
        {**dict(zip(*top, strict=True)), token: value}
        for top, (token, value) in zip(tops, own, strict=True)
    ]
    assert [request.steps for request in batch] == [[2, 2, 3, 0, 0], []]
    assert [(one.num_kv_tokens, one.num_in_flight, one.num_unread) for one in batch[:1]] == [
        (3, 0, 0)
    ]


def test_positions_that_a_tree_has_drafts_for() -> None:
    """As deep as those that count reach; all of the block's depth where nothing else is said."""
    shape, zeros = BlockShape(4, 3), torch.zeros(3, 4, dtype=torch.int64)
    tree = DraftTree(
        torch.tensor([[0, 1, 2, 0]] * 3), torch.tensor([[1, 2, 3, 1]] * 3), zeros, zeros
    )
    rows = torch.arange(4).repeat(3, 1)
    accept = AcceptOutput(
        rows,
        torch.zeros(3, dtype=torch.int64),
        rows[:, 0],
        torch.ones(3, dtype=torch.bool),
        path=rows,
    )
    for num_drafts, offered in ((torch.tensor([0, 2, 4]), [0, 2, 3]), (None, [3, 3, 3])):
        table = result_table(shape, accept, DraftOutput(zeros, num_drafts=num_drafts, tree=tree))
        assert sent_and_received(requests(3), shape, table).columns().num_drafts == offered


@pytest.mark.parametrize("shape", [None, BlockShape(0)])
def test_a_single_token(shape: BlockShape | None) -> None:
    """First tokens and plain decoding: one token each, no log-probabilities unless asked for."""
    accept = AcceptOutput(
        torch.tensor([[7]]), torch.tensor([0]), torch.tensor([7]), torch.tensor([True])
    )
    batch = requests(1)
    outcome = take_over(sent_and_received(batch, shape, result_table(BlockShape(0), accept)))
    assert outcome.num_accepted == [0] and not outcome.ended and not batch[0].logprobs
    assert batch[0].output_token_ids == [7] and batch[0].num_unread == 0
    assert (batch[0].num_kv_tokens, batch[0].steps) == (
        (0, []) if shape is None else (1, [0, 0, 1, 0, 0])
    )


CHAIN = AcceptOutput(
    torch.tensor([[11, 12, 13]]), torch.tensor([2]), torch.tensor([13]), torch.tensor([True])
)


@pytest.mark.parametrize(
    ("most", "stop", "output", "reason"),
    [
        (9, (), [11, 12, 13], None),
        (9, (13,), [11, 12, 13], "stop"),
        (9, (12, 11), [11], "stop"),
        (3, (), [11, 12, 13], "length"),
        (2, (), [11, 12], "length"),
        (2, (13,), [11, 12], "length"),
        (2, (12,), [11, 12], "stop"),
        (0, (), [], "length"),
    ],
)
def test_where_an_output_ends(
    most: int, stop: tuple[int, ...], output: list[int], reason: str | None
) -> None:
    """At the first stop token or at the token limit, whichever comes first; a stop token at the
    limit is a stop.
    """
    (request,) = batch = requests(1, most)
    request.stop_ids = frozenset(stop)
    outcome = take_over(sent_and_received(batch, BlockShape(2), result_table(BlockShape(2), CHAIN)))
    assert request.output_token_ids == output
    assert outcome.ended == ([(request, reason)] if reason else [])
    assert request.steps == [2, min(2, len(output)), len(output), 0, 0]


def test_what_a_caller_keeps_of_the_tokens() -> None:
    """A stop string ends the output; who ended while the step was in flight gets nothing."""
    asked, ended = requests(2)
    asked.on_tokens, ended.status = lambda request, tokens: tokens.index(12) + 1, Status.FINISHED
    table = result_table(BlockShape(2), CHAIN).repeat(2, 1)
    outcome = take_over(sent_and_received([asked, ended], BlockShape(2), table))
    assert (asked.output_token_ids, ended.output_token_ids) == ([11, 12], [])
    assert (
        outcome.ended == [(asked, "stop")]
        and outcome.requests == [asked]
        and outcome.num_accepted == [2]
    )


def test_a_large_batch_does_not_set_off_the_garbage_collector() -> None:
    """Objects of a whole batch alive at once would: each pass over all of Python's objects takes
    longer than a step.
    """
    count = 20_000
    zeros = torch.zeros(count, dtype=torch.int64)
    accept = AcceptOutput(zeros[:, None] + 7, zeros, zeros, torch.ones(count, dtype=torch.bool))
    batch = requests(count)
    step = sent_and_received(batch, BlockShape(0), result_table(BlockShape(0), accept))
    passes: list[str] = []
    note = lambda phase, info: passes.append(phase)  # noqa: E731
    gc.collect()
    gc.callbacks.append(note)
    try:
        take_over(step)
    finally:
        gc.callbacks.remove(note)
    assert all(request.output_token_ids == [7] for request in batch)
    assert passes == []
