"""Where rows of blocks stand on kernels, against plain torch; where they run, see
`tests.helpers.triton_interpreter`.
"""

from dataclasses import fields

import pytest
import torch

from specdec.base.blocks import BlockShape
from specdec.model.batch import DecodeBatch
from specdec.model.block_rows import KERNEL, check_block_rows
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.trees import best_first
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.model import triton_block_rows  # noqa: E402 (only where Triton can run)


def batch_of(shape: BlockShape, max_model_len: int) -> DecodeBatch:
    """Three requests, one at the end of a block, whose tables are columns of a wider one."""
    table = (
        torch.randperm(30, generator=torch.Generator().manual_seed(1)).view(3, 10).int().to(DEVICE)
    )
    seq_lens = torch.tensor([16, 0, 33], device=DEVICE)
    return DecodeBatch(
        slots=torch.tensor([2, 0, 1], device=DEVICE),
        anchors=torch.tensor([7, 8, 9], device=DEVICE),
        seq_lens=seq_lens,
        block_table=table[:, :7],
        shape=shape,
        max_seq_len=100,
        block_size=16,
        max_model_len=max_model_len,
        sampling=SamplingTensors.neutral(3, DEVICE),
    )


@pytest.mark.parametrize(
    "shape",
    [BlockShape(0), BlockShape(15), BlockShape(6), BlockShape(20, 5), BlockShape(64, 5)],
    ids=str,
)
@pytest.mark.parametrize("max_model_len", [36, 200])
def test_forwards_are_given_the_same(
    shape: BlockShape, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions, position ids, slots, lengths, and what rows of a tree see."""
    assert KERNEL.runs_on(DEVICE)
    scores = -torch.rand(3, 5, 16, generator=torch.Generator().manual_seed(2))
    tree = best_first(scores.to(DEVICE), shape.drafts).tree if shape.is_tree else None
    token_ids = torch.zeros(3, shape.rows, dtype=torch.int64, device=DEVICE)
    found = []
    for ours in (True, False):
        monkeypatch.setattr(KERNEL, "runs_on", lambda device, ours=ours: ours)
        batch = batch_of(shape, max_model_len)
        positions, forward = (
            batch.row_positions(tree),
            batch.verification(token_ids, tree, max_pending=0),
        )
        metadata = forward.metadata
        tensors = [
            positions,
            batch.positions(3),
            forward.position_ids,
            metadata.slot_mapping,
            metadata.seq_lens,
        ]
        tensors += [
            metadata.query_start_loc,
            batch.metadata(4, visibility="full").slot_mapping,
            *(metadata.tree or ()),
        ]
        found.append((tensors, {f.name: getattr(metadata, f.name) for f in fields(metadata)}))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert all(
        found[0][1][name] == found[1][1][name]
        for name in ("num_tokens", "max_query_len", "max_seq_len", "visibility")
    )


def test_the_check_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and fails where a kernel is off."""
    assert check_block_rows(DEVICE).error == 0
    for name in ("block_rows", "tree_places"):
        right = getattr(triton_block_rows, name)
        with monkeypatch.context() as patch:
            patch.setattr(
                triton_block_rows,
                name,
                lambda *arguments, right=right: tuple(part + 1 for part in right(*arguments)),
            )
            assert check_block_rows(DEVICE).error > 0
