"""Putting the accepted path of a tree where a chain's rows would lie, in the paged caches of all
layers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.device.deviation import Deviation, mismatches, worst
from specdec.kernels.kernel import Kernel
from specdec.kv_cache.rows import move_rows, rows_of, side_by_side


class CacheRows:
    """The rows of an engine's caches. Made once, since all addresses are copied to the device.

    Args:
        caches: of the layers whose rows move, see `specdec.kv_cache.rows.rows_of`.
    """

    def __init__(self, caches: Iterable[object]) -> None:
        self._tensors = rows_of(caches)
        self._table, self._joined = None, side_by_side(self._tensors)
        if self._tensors and KERNEL.runs_on(self._tensors[0].device):
            from specdec.model import triton_cache_rows  # it imports Triton

            self._table = triton_cache_rows.row_table(self._tensors)

    def move(self, slots: Tensor, path: Tensor) -> None:
        """See `specdec.kv_cache.rows.move_rows`; the host never waits."""
        if self._table is None:
            move_rows(self._joined, slots, path)
            return
        from specdec.model import triton_cache_rows  # it imports Triton

        triton_cache_rows.move_rows(self._table, slots, path)


def check_cache_rows(device: torch.device) -> Deviation:
    """Rows of several lengths, whole words and odd bytes; one of two requests has none to move."""
    from specdec.model import triton_cache_rows

    generator = torch.Generator().manual_seed(0)
    path = torch.tensor([[0, 2, 3, 5, 4], [0, 1, 2, 3, 4]])
    slots = torch.randperm(40, generator=generator)[:14].view(2, 7)
    found = []
    for sizes in ([384, 4096 + 16], [24, 6], [7]):
        tensors = [
            torch.randint(256, (40, size), dtype=torch.uint8, generator=generator) for size in sizes
        ]
        moved = [tensor.to(device, copy=True) for tensor in tensors]
        table = triton_cache_rows.row_table(moved)
        triton_cache_rows.move_rows(table, slots.to(device), path.to(device))
        move_rows(side_by_side(tensors), slots, path)
        found += [mismatches(ours, expected) for ours, expected in zip(moved, tensors, strict=True)]
    return worst(found)


KERNEL = Kernel("cache_rows", check_cache_rows)
