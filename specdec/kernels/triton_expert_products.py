"""Products of rows with the weights of the experts they chose, in Triton.

A program multiplies some rows that share an expert with some of its columns, and weights and biases are read where they lie. Few
rows find those that share their expert themselves: a program looks at all ids, and the first pair of an expert works for all of
them, so every weight is read once. For many rows `specdec.kernels.triton_expert_groups` has sorted them before.

Inputs are added up in the order of their columns. So a row has the same bits whatever rows are beside it.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_activation import activate
from specdec.kernels.triton_overlap import await_previous


@triton.jit
def _load(place: tl.tensor, mask: tl.tensor, depth_mask: tl.tensor, MASKED: tl.constexpr, UNEVEN: tl.constexpr) -> tl.tensor:
    """A tile, with no mask where none is needed."""
    if MASKED and UNEVEN:
        return tl.load(place, mask=mask & depth_mask, other=0.0)
    elif MASKED:
        return tl.load(place, mask=mask, other=0.0)
    elif UNEVEN:
        return tl.load(place, mask=depth_mask, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _dot(side: tl.tensor, values: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr, ROWS_FIRST: tl.constexpr) -> tl.tensor:
    """`total` and the product of columns [COLUMNS, DEPTH] and rows [DEPTH, ROWS], in either order."""
    if ROWS_FIRST:
        return tl.dot(values.T, side.T, total, input_precision=PRECISION)
    else:
        return tl.dot(side, values, total, input_precision=PRECISION)


@triton.jit
def _multiply(
    x: tl.tensor,  # [rows, INPUTS], or with ACTIVATION None [pairs, INPUTS]
    weight: tl.tensor,  # [experts, WIDTH, INPUTS], or twice that width with an activation: gate, then up; or a descriptor of it
    bias: tl.tensor,  # [experts, WIDTH] or as wide as the weight, or None
    factors: tl.tensor,  # float32 [pairs], of the outputs, or None
    output: tl.tensor,  # [pairs, WIDTH], or with BY_RANK [TOP_K, pairs / TOP_K, WIDTH]
    expert: tl.tensor,
    pair: tl.tensor,  # [ROWS]
    real: tl.tensor,  # [ROWS]
    tile: tl.tensor,
    num_pairs: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """The product of pairs that share an expert with a tile of its columns.

    With DESCRIBED tiles of the weight come by descriptor (TMA), which takes no registers for addresses.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    ROWS_FIRST: tl.constexpr = DESCRIBED and not GATED  # in the matrix instructions; which is faster was measured
    SIDES: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = pair.shape[0]
    CUT: tl.constexpr = WIDTH % COLUMNS != 0
    UNEVEN: tl.constexpr = INPUTS % DEPTH != 0
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside = (column < WIDTH)[:, None]
    present = real[None, :]
    row = (pair // TOP_K if GATED else pair).to(tl.int64)
    first = expert.to(tl.int64) * SIDES * WIDTH
    corner = (first + tile * COLUMNS).to(tl.int32)
    weights = weight if DESCRIBED else weight + (first + column)[:, None] * INPUTS + depth[None, :]
    inputs = x + row[None, :] * x_stride + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS] if ROWS_FIRST else [COLUMNS, ROWS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS] if ROWS_FIRST else [COLUMNS, ROWS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        remaining = depth < INPUTS - start
        values = _load(inputs, present, remaining[:, None], True, UNEVEN)
        # A descriptor's tile may hold rows of the next expert, whose columns are not stored.
        side = weights.load([corner, start]) if DESCRIBED else _load(weights, inside, remaining[None, :], CUT, UNEVEN)
        total = _dot(side, values, total, PRECISION, ROWS_FIRST)
        if GATED:
            if DESCRIBED:
                side = weights.load([corner + WIDTH, start])
            else:
                side = _load(weights + WIDTH * INPUTS, inside, remaining[None, :], CUT, UNEVEN)
            up = _dot(side, values, up, PRECISION, ROWS_FIRST)
        if not DESCRIBED:
            weights += DEPTH
        inputs += DEPTH
    if ROWS_FIRST:
        total = total.T
        up = up.T
    if bias is not None:
        shift = bias + first + column
        total += tl.load(shift, mask=column < WIDTH, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(shift + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = activate(total, up, ACTIVATION)
    if factors is not None:
        total *= tl.load(factors + pair, mask=real, other=0.0)[None, :]
    target = pair.to(tl.int64)
    if BY_RANK:
        target = (target % TOP_K) * (num_pairs // TOP_K) + target // TOP_K
    place = output + target[None, :] * WIDTH + column[:, None]
    tl.store(place, total.to(output.dtype.element_ty), mask=present & inside)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    ids: tl.tensor,  # int32 [num_rows, TOP_K], different ones in each row
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_RANK: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (s, t): tile t of the columns of expert s, with BY_EXPERT, or of the expert of pair s if it is the first that has it.

    Arguments are those of `_multiply`.
    """
    slot = tl.program_id(0)
    row = tl.arange(0, ROWS)
    rank = tl.arange(0, triton.next_power_of_2(TOP_K))
    # The second product's ids were written before the kernel in front of it, whose programs have all waited for them and ended;
    # they are read past the L1 cache, which may hold what was there before.
    if ACTIVATION is not None:
        await_previous(OVERLAP)
    expert = slot if BY_EXPERT else tl.load(ids + slot, cache_modifier=".cg")
    pair = slot + row  # of an only row
    count = 1
    if not ALONE:
        pairs = row[:, None] * TOP_K + rank[None, :]
        own = (row < num_rows)[:, None] & (rank < TOP_K)[None, :]
        own = own & (tl.load(ids + pairs, mask=own, other=-1, cache_modifier=".cg") == expert)
        chosen = tl.max(tl.where(own, pairs, -1), 1)  # the pair of each row that has the expert; -1 without one
        has = chosen >= 0
        count = tl.sum(has.to(tl.int32), 0)
        first = slot if BY_EXPERT else tl.min(tl.where(has, chosen, ROWS * TOP_K), 0)
        if (count == 0) | (first != slot):
            return
        # Row i of the product is the i-th that has the expert.
        until = tl.cumsum(has.to(tl.int32), 0)
        pair = tl.sum(tl.where(has[None, :] & (until[None, :] == row[:, None] + 1), chosen[None, :], 0), 1)
    if ACTIVATION is None:
        await_previous(OVERLAP)
    _multiply(
        x,
        weight,
        bias,
        factors,
        output,
        expert,
        pair,
        row < count,
        tl.program_id(1),
        num_rows * TOP_K,
        x_stride,
        WIDTH,
        INPUTS,
        TOP_K,
        ACTIVATION,
        BY_RANK,
        COLUMNS,
        DEPTH,
        PRECISION,
        False,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def grouped_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    pairs: tl.tensor,  # see `specdec.kernels.triton_expert_groups.Groups`
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
    DESCRIBED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program per block and tile of columns; BESIDE blocks take all tiles before the next ones do, for the L2 cache.

    Arguments are those of `_multiply`.
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
    _multiply(
        x,
        weight,
        bias,
        factors,
        output,
        expert,
        pair,
        pair < num_pairs,
        within // beside,
        num_pairs,
        x_stride,
        WIDTH,
        INPUTS,
        TOP_K,
        ACTIVATION,
        False,
        COLUMNS,
        DEPTH,
        PRECISION,
        DESCRIBED,
    )


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
        total += tl.load(parts + (row * TOP_K + k) * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(output + row * WIDTH + column, total.to(output.dtype.element_ty), mask=exists)
