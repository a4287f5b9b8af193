"""What single ranks are made to do in tests; called on every rank through `collective_rpc`, so a
module that all can import.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

import specdec.engine.memory
from specdec.base.blocks import BlockShape
from specdec.base.errors import BackendError
from specdec.engine import guided
from specdec.engine.agreement import agreed
from specdec.engine.capture.capture import LaunchAlone
from specdec.engine.capture.graphs import ShapeGraphs
from specdec.model.core import AcceptOutput
from specdec.parallel.collectives import least
from specdec.parallel.executor import current
from specdec.parallel.plain import on_ranks
from specdec.parallel.sockets import listening
from specdec.sampling.masks import TokenMasks


def rank() -> int:
    """Of this process."""
    executor = current()
    assert executor is not None
    return executor.group.rank


@on_ranks
def wait(seconds: float) -> None:
    """Nothing wakes it."""
    threading.Event().wait(seconds)


@on_ranks
def have_memory(*budgets: int) -> None:
    """From now on each rank finds so many bytes for its cache."""
    specdec.engine.memory.default_cache_bytes = lambda device: budgets[rank()]


@on_ranks
def be_killed_in_forward(verifier: Any, calls: int) -> None:
    """Rank 1 is killed in the midst of a forward, after so many more."""
    if rank() != 1:
        return
    forward, left = verifier.forward, [calls]

    def forward_or_end(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args)

    verifier.forward = forward_or_end


@on_ranks
def run_out_of_memory(verifier: Any, calls: int) -> None:
    """Rank 1's device refuses memory between two exchanges of a forward, after so many more."""
    if rank() != 1:
        return
    head, left = verifier.head, [calls]

    def head_or_nothing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory 0 bytes"
                " are free."
            )
        return head(*args)

    verifier.head = head_or_nothing


_masks: list[bytes] = []
"""Of every row with a grammar, by this rank."""


@on_ranks
def note_masks() -> None:
    """From now on each rank keeps the masks that it puts on its device."""
    put = guided.put

    def put_and_note(masks: TokenMasks, filled: TokenMasks) -> None:
        _masks.append(filled.words.numpy().tobytes() + filled.places.numpy().tobytes())
        put(masks, filled)

    guided.put = put_and_note


@on_ranks
def same_masks() -> tuple[bool, int]:
    """Whether all ranks have put the same masks on their devices, and how many steps had some."""
    executor = current()
    assert executor is not None
    digest = int.from_bytes(sha256(b"".join(_masks)).digest()[:7])
    return least(digest, executor.group) == -least(-digest, executor.group), len(_masks)


_reads: list[int] = []
"""Tokens of each prefill of this rank's drafter."""


@on_ranks
def note_reads(engine: Any) -> None:
    """From now on each rank counts what its drafter is given to read."""
    _reads.clear()
    prefill = engine.runner.drafter.prefill

    def noted(batch: Any, verify: Any) -> None:
        _reads.append(len(batch.forward.token_ids))
        prefill(batch, verify)

    engine.runner.drafter.prefill = noted


@on_ranks
def all_read_alike() -> tuple[bool, int]:
    """Whether all ranks' drafters were given as much, and how many tokens that was."""
    executor, total = current(), sum(_reads)
    assert executor is not None
    return least(total, executor.group) == -least(-total, executor.group), total


@on_ranks
def process_of_rank_1() -> int:
    """Its id, on all ranks."""
    executor = current()
    assert executor is not None
    return least(os.getpid() if rank() == 1 else sys.maxsize, executor.group)


@on_ranks
def listens_on_loopback() -> bool:
    """Whether the ranks listen, and nowhere else."""
    executor = current()
    assert executor is not None
    hosts = {host for host, _ in listening()}
    return bool(least(int(bool(hosts) and hosts <= {"127.0.0.1", "::1"}), executor.group))


@on_ranks
def lose_a_block(engine: Any) -> None:
    """Rank 1's schedule becomes another."""
    if rank() == 1:
        engine.pool.allocate(1)


@on_ranks
def judge_apart(engine: Any) -> None:
    """Rank 0 takes the models among its drafters to be worth their time and rank 1 does not; nobody
    asks what drafters expect.
    """

    def refuse(*_: Any) -> None:
        raise AssertionError("a rank looks for itself")

    drafter = engine.runner.drafter
    assert drafter.has_expected_accepted and drafter._optional
    drafter.gate.pays, drafter.expected_accepted = lambda *_: rank() == 0, refuse


@on_ranks
def share_out_apart(engine: Any) -> None:
    """Rank 1 would verify drafts of other requests."""
    if rank() == 1:
        allot = engine.runner.budget.allot
        engine.runner.budget.allot = lambda *given: allot(*given).flip(0)


@on_ranks
def spoil_drafts(verifier: Any, engine: Any, token: int) -> None:
    """Every block has a token at its second place, whose row makes all rows of its request NaN, as
    a backend may have it.
    """
    forward, propose = verifier.forward, engine.runner.drafter.propose

    def spoiled(rows: Any, *rest: Any) -> Any:
        output = forward(rows, *rest)
        if rows.metadata.max_query_len > 1 and rows.logit_rows is None:
            bad = (rows.token_ids.view(rows.metadata.num_reqs, -1) == token).any(dim=1)
            output.logits[bad.repeat_interleave(rows.metadata.max_query_len)] = torch.nan
        return output

    def drafted(batch: Any) -> Any:
        draft = propose(batch)
        draft.token_ids[:, min(1, batch.k - 1)] = token
        return draft

    verifier.forward, engine.runner.drafter.propose = spoiled, drafted


@on_ranks
def mend(verifier: Any) -> None:
    """Its forward is its own again."""
    del verifier.forward


@on_ranks
def num_blocks(engine: Any) -> tuple[int, int]:
    """The least and the most of all ranks' caches."""
    executor = current()
    assert executor is not None
    return least(engine.pool.num_blocks, executor.group), -least(
        -engine.pool.num_blocks, executor.group
    )


@on_ranks
def captured(refusing: int) -> tuple[bool, bool]:
    """Whether rank 0 and whether any rank has a graph, when one rank cannot capture."""
    executor = current()
    assert executor is not None

    def capture(shape: BlockShape) -> str:
        if rank() == refusing:
            raise BackendError("no graphs here")
        return "a graph"

    about: Any = {"required": False, "group": executor.group}
    graphs: ShapeGraphs[BlockShape, str] = ShapeGraphs(LaunchAlone(), **about)
    has = graphs.obtain(BlockShape(0), capture) is not None
    return has, not least(int(not has), executor.group)


@on_ranks
def outcomes_agree(path: bool) -> bool:
    """Whether all ranks go on from the same outcome, though each has found another."""
    executor = current()
    assert executor is not None
    number = 5 * rank()

    def tensor(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).view(shape) + number

    found = AcceptOutput(
        tensor(2, 4),
        tensor(2),
        tensor(2) + 1,
        torch.tensor([True, rank() == 0]),
        None,
        tensor(2, 4) if path else None,
    )
    got, number = agreed(found, executor.group), 0
    dense = got.num_accepted, got.next_anchors, got.finite, got.token_ids, got.path
    same: list[Callable[[], bool]] = [
        lambda: torch.equal(got.token_ids, tensor(2, 4)),
        lambda: torch.equal(got.num_accepted, tensor(2)),
        lambda: torch.equal(got.next_anchors, tensor(2) + 1),
        lambda: got.finite.tolist() == [True, True],
        lambda: (
            torch.equal(got.path, tensor(2, 4))
            if path and got.path is not None
            else got.path is None and not path
        ),
        # Kernels read them so.
        lambda: all(one.is_contiguous() for one in dense if one is not None),
    ]
    return bool(least(int(all(one() for one in same)), executor.group))
