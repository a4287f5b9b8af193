"""Where the rows of blocks stand, and which cache slots they have: on our kernels where they run,
in plain torch elsewhere.

On a GPU plain torch takes eight small kernels for each width of a block, and seven more for a tree.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.base.blocks import DraftTree
from specdec.device.deviation import Deviation, mismatches, worst
from specdec.kernels.kernel import Kernel


class BlockRows(NamedTuple):
    """Rows of consecutive positions, equally many of each request.

    Attributes:
        positions: int64 [num_reqs, width], L, L + 1, ...
        slots: int64 [num_reqs * width], cache slots of these positions.
        seq_lens: int32 [num_reqs], L + width.
        starts: int32 [num_reqs + 1], first rows of the requests among all.
    """

    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    starts: Tensor


class TreePlaces(NamedTuple):
    """Rows of draft trees, the anchor's first.

    Attributes:
        positions: int64 [num_reqs, N + 1], by depth.
        position_ids: int64 [num_reqs * (N + 1)], the same, clamped.
        ancestors, depths: int64 [num_reqs * (N + 1)], see `specdec.attention.backend.TreeRows`.
    """

    positions: Tensor
    position_ids: Tensor
    ancestors: Tensor
    depths: Tensor


def block_rows(seq_lens: Tensor, block_table: Tensor, width: int, block_size: int) -> BlockRows:
    """Rows behind int64 [num_reqs] tokens of each request, by our kernel.

    Their blocks are int32 [num_reqs, max_blocks]; without, slots are of the null block.
    """
    from specdec.model import triton_block_rows  # it imports Triton

    return BlockRows(*triton_block_rows.block_rows(seq_lens, block_table, width, block_size))


def tree_places(seq_lens: Tensor, tree: DraftTree, most: int) -> TreePlaces:
    """The rows of trees behind int64 [num_reqs] tokens each; position ids are below `most`."""
    if KERNEL.runs_on(seq_lens.device):
        from specdec.model import triton_block_rows  # it imports Triton

        places = triton_block_rows.tree_places(seq_lens, tree.depths, tree.ancestors, most)
        return TreePlaces(*places)
    return _tree_places(seq_lens, tree, most)


def _tree_places(seq_lens: Tensor, tree: DraftTree, most: int) -> TreePlaces:
    """`tree_places` in plain torch."""
    depths, ancestors = F.pad(tree.depths, (1, 0)), F.pad(tree.ancestors, (1, 0))
    positions = seq_lens[:, None] + depths
    position_ids = positions.clamp(max=most - 1).flatten()
    return TreePlaces(positions, position_ids, ancestors.flatten(), depths.flatten())


def check_block_rows(device: torch.device) -> Deviation:
    """Rows of a few requests, some of which reach into a next block, and those of trees near the
    model's length.
    """
    generator = torch.Generator().manual_seed(0)
    seq_lens, width = torch.tensor([0, 15, 16, 40]), 5
    table = torch.randperm(16, generator=generator).view(4, 4).int()
    positions = seq_lens[:, None] + torch.arange(width)
    slots = table.gather(1, positions // 16) * 16 + positions % 16
    starts = torch.arange(0, 4 * width + 1, width, dtype=torch.int32)
    expected: list[Tensor] = [positions, slots.flatten(), (seq_lens + width).int(), starts]
    tree = DraftTree(*torch.randint(1, 9, (4, 4, width - 1), generator=generator))
    expected += _tree_places(seq_lens, tree, 44)
    # Replays of drafts have positions alone, and a table without blocks.
    expected += [positions, (positions % 16).flatten(), *expected[2:4]]
    ours = [*block_rows(seq_lens.to(device), table.to(device), width, 16)]
    from specdec.model import triton_block_rows  # it imports Triton

    ours += triton_block_rows.tree_places(
        seq_lens.to(device), tree.depths.to(device), tree.ancestors.to(device), 44
    )
    ours += block_rows(seq_lens.to(device), table[:, :0].to(device), width, 16)
    return worst(mismatches(one, other) for one, other in zip(ours, expected, strict=True))


KERNEL = Kernel("block_rows", check_block_rows)
