"""Sums of a row over the ranks of a group, within a kernel that has the row in registers: no launch
and no memory between them.

A program writes its row to memory that all ranks can read, tells every other rank so, waits until
all have told it the same, and reads their rows (the one-shot sum of NCCL's and torch's own kernels;
that it is part of the next kernel is common, too). There are two places for a row, used by turns: a
rank that writes to one again has passed the sum in between, for which all others have ended the one
before. All ranks launch the same sums in the same order.
"""

import triton
import triton.language as tl


@triton.jit
def sum_over_ranks(
    rows: tl.tensor,  # [BLOCK], this rank's numbers of one row
    row: tl.tensor,  # which program's
    column: tl.tensor,
    exists: tl.tensor,
    places: tl.tensor,  # see `specdec.parallel.shared_rows.SharedRows`
    epochs: tl.tensor,
    max_tries: tl.tensor,  # looks at a flag before it is given up; less than 0 for no end
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Float32 numbers, added up in the order of ranks and rounded to `dtype` at every step, as
    `sum_in_order` does.
    """
    epoch = tl.load(epochs + row) + 1
    place = ((epoch % 2) * MOST + row) * WIDTH + column
    flags = 2 * MOST * WIDTH * (dtype.primitive_bitwidth // 8) // 4 + row * SIZE
    own = tl.load(places + RANK)
    tl.store(
        tl.multiple_of(own.to(tl.pointer_type(dtype)), 16) + place, rows.to(dtype), mask=exists
    )
    tl.debug_barrier()  # all threads have written before one of them says so
    for other in tl.static_range(SIZE):
        if other != RANK:
            theirs = tl.load(places + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + flags + RANK, epoch, sem="release", scope="sys")
    for other in tl.static_range(SIZE):
        if other != RANK:
            flag = own.to(tl.pointer_type(tl.int32)) + flags + other
            tries = 0
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch) & (
                tries != max_tries
            ):
                tries += 1
    tl.debug_barrier()
    tl.store(epochs + row, epoch)  # no thread has still to read the old one
    total = rows.to(dtype).to(tl.float32)
    for other in tl.static_range(SIZE):
        term = rows.to(dtype)
        if other != RANK:
            theirs = tl.multiple_of(tl.load(places + other).to(tl.pointer_type(dtype)), 16)
            term = tl.load(theirs + place, mask=exists, other=0.0, cache_modifier=".cg")
        total = (
            term.to(tl.float32)
            if other == 0
            else (total + term.to(tl.float32)).to(dtype).to(tl.float32)
        )
    return total
