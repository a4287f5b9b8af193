"""Products of rows with the weights of the experts they chose, in Triton.

A program multiplies some rows that share an expert with some of its columns, and weights and biases
are read where they lie. Few rows find those that share their expert themselves: a program looks at
all ids, and the first pair of an expert works for all of them, so every weight is read once. For
many rows `specdec.layers.experts.triton_expert_groups` has sorted them before.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_overlap import await_previous
from specdec.layers.experts.triton_expert_tiles import multiply, multiply_packed


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    shared: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    ids: tl.tensor,  # int32 [num_rows, TOP_K], different ones in each row
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_RANK: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (s, t): tile t of the columns of expert s, with BY_EXPERT, or of the expert of pair s
    if it is the first that has it.

    Arguments are those of `multiply`, and with PACKED of `multiply_packed`.
    """
    slot = tl.program_id(0)
    row = tl.arange(0, ROWS)
    rank = tl.arange(0, triton.next_power_of_2(TOP_K))
    # The second product's ids were written before the kernel in front of it, whose programs have
    # all waited for them and ended; they are read past the L1 cache, which may hold what was there
    # before.
    if ACTIVATION is not None:
        await_previous(OVERLAP)
    expert = slot if BY_EXPERT else tl.load(ids + slot, cache_modifier=".cg")
    pair = slot + row  # of an only row
    count = 1
    if not ALONE:
        pairs = row[:, None] * TOP_K + rank[None, :]
        own = (row < num_rows)[:, None] & (rank < TOP_K)[None, :]
        own = own & (tl.load(ids + pairs, mask=own, other=-1, cache_modifier=".cg") == expert)
        # the pair of each row that has the expert; -1 without one
        chosen = tl.max(tl.where(own, pairs, -1), 1)
        has = chosen >= 0
        count = tl.sum(has.to(tl.int32), 0)
        first = slot if BY_EXPERT else tl.min(tl.where(has, chosen, ROWS * TOP_K), 0)
        if (count == 0) | (first != slot):
            return
        # Row i of the product is the i-th that has the expert.
        until = tl.cumsum(has.to(tl.int32), 0)
        pair = tl.sum(
            tl.where(has[None, :] & (until[None, :] == row[:, None] + 1), chosen[None, :], 0), 1
        )
    if ACTIVATION is None:
        await_previous(OVERLAP)
    if PACKED is None:
        multiply(
            x, weight, shared, bias, factors, output, expert, pair, row < count, tl.program_id(1),
            num_rows * TOP_K, x_stride, WIDTH, INPUTS, TOP_K, EXPERTS, SHARED, ACTIVATION, BY_RANK,
            COLUMNS, DEPTH, PRECISION, False,
        )  # fmt: skip
    else:
        multiply_packed(
            x, weight, scale, zero, bias, factors, output, expert, pair, row < count,
            tl.program_id(1), num_rows * TOP_K, x_stride, WIDTH, INPUTS, TOP_K, ACTIVATION, BY_RANK,
            COLUMNS, DEPTH, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def grouped_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    pairs: tl.tensor,  # see `specdec.layers.experts.triton_expert_groups.Groups`
    experts: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BESIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program per block and tile of columns; BESIDE blocks take all tiles before the next ones
    do, for the L2 cache.

    Arguments are those of `multiply`, and with PACKED of `multiply_packed`.
    """
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    first = program // (BESIDE * TILES) * BESIDE
    beside = tl.minimum(num_blocks - first, BESIDE)
    within = program % (BESIDE * TILES)
    block = first + within % beside
    await_previous(OVERLAP)
    expert = tl.load(experts + block)
    if expert < 0:
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    if PACKED is None:
        multiply(
            x, weight, None, bias, factors, output, expert, pair, pair < num_pairs,
            within // beside, num_pairs, x_stride, WIDTH, INPUTS, TOP_K, 0, 0, ACTIVATION, False,
            COLUMNS, DEPTH, PRECISION, DESCRIBED,
        )  # fmt: skip
    else:
        multiply_packed(
            x, weight, scale, zero, bias, factors, output, expert, pair, pair < num_pairs,
            within // beside, num_pairs, x_stride, WIDTH, INPUTS, TOP_K, ACTIVATION, False, COLUMNS,
            DEPTH, PACKED,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    parts: tl.tensor,  # [rows, TOP_K, WIDTH]
    output: tl.tensor,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds up the experts of a row in its own order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    await_previous(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(parts + (row * TOP_K + k) * WIDTH + column, mask=exists, other=0.0).to(
            tl.float32
        )
    tl.store(output + row * WIDTH + column, total.to(output.dtype.element_ty), mask=exists)
