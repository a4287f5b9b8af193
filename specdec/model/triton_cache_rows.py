"""Moving rows of paged caches in Triton, one launch for all layers; see `specdec.kv_cache.rows`.

A program moves its piece of a request's rows one after the other. As no row moves down past one
that is yet to be read, each thread may write before it reads the next.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

PIECE = 2048
"""Bytes of a row that a program moves at most: 16 of each thread."""


class RowTable(NamedTuple):
    """Where rows lie.

    Attributes:
        entries: int64 [num_tensors, 2], address and words of a row.
        word: bytes that are moved at once.
        max_words: of the longest row.
        aligned: whether rows begin at multiples of 16 bytes.
    """

    entries: Tensor
    word: int
    max_words: int
    aligned: bool


def row_table(tensors: Sequence[Tensor]) -> RowTable:
    """The table of tensors uint8 [num_slots, bytes], which have to outlive it. It is copied to
    their device, so the host waits.
    """
    assert all(tensor.is_contiguous() for tensor in tensors)
    sizes = [tensor.shape[1] for tensor in tensors]
    word = next(word for word in (8, 4, 2, 1) if all(size % word == 0 for size in sizes))
    sized = zip(tensors, sizes, strict=True)
    entries = [[tensor.data_ptr(), size // word] for tensor, size in sized]
    aligned = all(
        size % 16 == 0 and tensor.data_ptr() % 16 == 0
        for tensor, size in zip(tensors, sizes, strict=True)
    )
    table = torch.tensor(entries, device=tensors[0].device)
    return RowTable(table, word, max(sizes) // word, aligned)


@triton.jit
def _move_rows_kernel(
    entries: tl.tensor,  # int64 [tensors, 2]
    slots: tl.tensor,  # int64 [requests, rows]
    path: tl.tensor,  # int64 [requests, depth + 1]
    rows: tl.tensor,
    depth: tl.tensor,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    entry = entries + tl.program_id(1) * 2
    address, width = tl.load(entry), tl.load(entry + 1)
    kind: tl.constexpr = (
        tl.int64 if WORD == 8 else tl.int32 if WORD == 4 else tl.int16 if WORD == 2 else tl.int8
    )
    base = address.to(tl.pointer_type(kind))
    if ALIGNED:
        base, width = tl.multiple_of(base, 16), tl.multiple_of(width, 16 // WORD)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    slots += request * rows
    path += request * (depth + 1)
    await_previous(OVERLAP)
    for step in range(1, depth + 1):
        row = tl.load(path + step)
        if row != step:
            words = tl.load(base + tl.load(slots + row) * width + column, mask=within)
            tl.store(base + tl.load(slots + step) * width + column, words, mask=within)


def move_rows(table: RowTable, slots: Tensor, path: Tensor) -> None:
    """See `specdec.kv_cache.rows.move_rows`; all are contiguous."""
    assert slots.is_contiguous() and path.is_contiguous() and path.shape[1] <= slots.shape[1]
    block = min(PIECE // table.word, triton.next_power_of_2(table.max_words))
    grid = (len(slots), len(table.entries), triton.cdiv(table.max_words, block))
    with on_device(slots):
        _move_rows_kernel[grid](
            table.entries,
            slots,
            path,
            slots.shape[1],
            path.shape[1] - 1,
            WORD=table.word,
            ALIGNED=table.aligned,
            BLOCK=block,
            num_warps=max(1, block * table.word // 512),
            **overlap_options(slots.device),
        )
