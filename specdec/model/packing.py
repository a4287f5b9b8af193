"""Rows of blocks of which each request verifies as many as it is given, one request behind the
other, so that a forward has no row that is not wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Packing(NamedTuple):
    """Which rows of blocks [num_reqs, width] are verified: the first ones of each request.

    Attributes:
        drafts: int64 [num_reqs], drafts of each that are verified.
        requests: int64 [T], whose a packed row is.
        rows: int64 [T], its place in the blocks, `request * width + row`.
        places: int64 [num_reqs, width], where a row of a block is packed; of one that is not, the
            request's last one.
        starts: int32 [num_reqs + 1], first packed rows of the requests; the last entry is T.
    """

    drafts: Tensor
    requests: Tensor
    rows: Tensor
    places: Tensor
    starts: Tensor

    @classmethod
    def of(cls, drafts: Tensor, width: int, total: int) -> Packing:
        """Packs the anchors and int64 [num_reqs] drafts, each below `width`; together they have
        `total` rows, which the host knows. Nobody waits.

        >>> packing = Packing.of(torch.tensor([2, 0, 1]), width=4, total=6)
        >>> packing.rows.tolist(), packing.starts.tolist()
        ([0, 1, 2, 4, 8, 9], [0, 3, 4, 6])
        >>> packing.places.tolist()
        [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5]]
        """
        ends = (drafts + 1).cumsum(0)
        packed = torch.arange(total, device=drafts.device)
        requests = torch.searchsorted(ends, packed, right=True)
        first = ends - drafts - 1
        within = packed - first.index_select(0, requests)
        block = torch.arange(width, device=drafts.device)
        places = first[:, None] + torch.minimum(block, drafts[:, None])
        starts = F.pad(ends, (1, 0)).int()
        return cls(drafts, requests, requests * width + within, places, starts)

    def pack(self, of_blocks: Tensor) -> Tensor:
        """The rows [T, ...] of `of_blocks` [num_reqs, width, ...] that are verified."""
        return of_blocks.flatten(0, 1).index_select(0, self.rows)

    def unpack(self, packed: Tensor) -> Tensor:
        """Blocks [num_reqs, width, ...] of packed rows [T, ...]; rows that are not verified repeat
        the request's last one.
        """
        rows = packed.index_select(0, self.places.flatten())
        return rows.view(*self.places.shape, *packed.shape[1:])
