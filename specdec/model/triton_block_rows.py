"""Where the rows of blocks stand, in Triton, one program per request; see
`specdec.model.block_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous


@triton.jit
def _block_rows_kernel(
    seq_lens: tl.tensor,  # int64 [requests]
    block_table: tl.tensor,  # int32 [requests, max_blocks]
    positions: tl.tensor,  # int64 [requests, WIDTH]
    slots: tl.tensor,  # the same
    lengths: tl.tensor,  # int32 [requests]
    starts: tl.tensor,  # int32 [requests + 1]
    table_stride: tl.tensor,
    max_blocks: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, triton.next_power_of_2(WIDTH))
    within = row < WIDTH
    await_previous(OVERLAP)
    length = tl.load(seq_lens + request)
    position = length + row
    place = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)  # -1 in a table without blocks
    known = within & (place >= 0)
    block = tl.load(block_table + request * table_stride + place, mask=known, other=0).to(tl.int64)
    tl.store(positions + request * WIDTH + row, position, mask=within)
    tl.store(slots + request * WIDTH + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=within)
    tl.store(lengths + request, (length + WIDTH).to(tl.int32))
    tl.store(starts + request + 1, ((request + 1) * WIDTH).to(tl.int32))
    tl.store(starts, 0, mask=request == 0)


@triton.jit
def _tree_places_kernel(
    seq_lens: tl.tensor,  # int64 [requests]
    depths: tl.tensor,  # int64 [requests, NODES]
    ancestors: tl.tensor,  # the same
    places: tl.tensor,  # int64 [4, requests, NODES + 1]
    most: tl.tensor,
    NODES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, triton.next_power_of_2(NODES + 1))
    within, is_draft = row <= NODES, (row > 0) & (row <= NODES)
    await_previous(OVERLAP)
    depth = tl.load(depths + request * NODES + row - 1, mask=is_draft, other=0)
    word = tl.load(ancestors + request * NODES + row - 1, mask=is_draft, other=0)
    position = tl.load(seq_lens + request) + depth
    stride = tl.num_programs(0).to(tl.int64) * (NODES + 1)
    places += request * (NODES + 1) + row
    tl.store(places, position, mask=within)
    tl.store(places + stride, tl.minimum(position, most - 1), mask=within)
    tl.store(places + 2 * stride, word, mask=within)
    tl.store(places + 3 * stride, depth, mask=within)


def block_rows(
    seq_lens: Tensor, block_table: Tensor, width: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `specdec.model.block_rows.BlockRows`, and what it is made of: see there."""
    num_reqs, device = len(seq_lens), seq_lens.device
    positions, slots = torch.empty(2, num_reqs, width, dtype=torch.int64, device=device)
    lengths = torch.empty(num_reqs, dtype=torch.int32, device=device)
    starts = torch.empty(num_reqs + 1, dtype=torch.int32, device=device)
    assert seq_lens.is_contiguous() and block_table.stride(1) == 1
    with on_device(seq_lens):
        _block_rows_kernel[(num_reqs,)](
            seq_lens,
            block_table,
            positions,
            slots,
            lengths,
            starts,
            *block_table.stride()[:1],
            block_table.shape[1],
            WIDTH=width,
            BLOCK_SIZE=block_size,
            num_warps=1,
            **overlap_options(device),
        )
    return positions, slots.flatten(), lengths, starts


def tree_places(
    seq_lens: Tensor, depths: Tensor, ancestors: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `specdec.model.block_rows.TreePlaces`.

    Args:
        seq_lens: int64 [num_reqs].
        depths, ancestors: int64 [num_reqs, N].
        most: position ids are below it.
    """
    num_reqs, nodes = depths.shape
    places = torch.empty(4, num_reqs, nodes + 1, dtype=torch.int64, device=depths.device)
    with on_device(depths):
        _tree_places_kernel[(num_reqs,)](
            seq_lens.contiguous(),
            depths.contiguous(),
            ancestors.contiguous(),
            places,
            most,
            NODES=nodes,
            num_warps=1,
            **overlap_options(depths.device),
        )
    positions, *flat = places
    return positions, *(part.flatten() for part in flat)
