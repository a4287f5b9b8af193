"""The product of a tile of rows that share an expert with a tile of its columns, in Triton; see
`triton_expert_products`.

Inputs are added up in the order of their columns, or in lanes for weights of few bits. So a row has
the same bits whatever rows are beside it.
"""

import triton
import triton.language as tl

from specdec.layers.ops.triton_activation import activate
from specdec.layers.packed.triton_packed_products import packed_sums


@triton.jit
def _load(
    place: tl.tensor,
    mask: tl.tensor,
    depth_mask: tl.tensor,
    MASKED: tl.constexpr,
    UNEVEN: tl.constexpr,
) -> tl.tensor:
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
def _dot(
    side: tl.tensor,
    values: tl.tensor,
    total: tl.tensor,
    PRECISION: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
) -> tl.tensor:
    """`total` and the product of columns [COLUMNS, DEPTH] and rows [DEPTH, ROWS],
    in either order.
    """
    if ROWS_FIRST:
        return tl.dot(values.T, side.T, total, input_precision=PRECISION)
    else:
        return tl.dot(side, values, total, input_precision=PRECISION)


@triton.jit
def _finish(
    total: tl.tensor,  # [COLUMNS, ROWS]
    up: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    expert: tl.tensor,
    pair: tl.tensor,
    real: tl.tensor,
    column: tl.tensor,  # [COLUMNS]
    num_pairs: tl.tensor,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_RANK: tl.constexpr,
) -> None:
    """What is done to sums before they are stored; arguments are those of `multiply`."""
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "relu2"
    if bias is not None:
        shift = bias + expert.to(tl.int64) * (2 if GATED else 1) * WIDTH + column
        total += tl.load(shift, mask=column < WIDTH, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(shift + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        total = activate(total, up if GATED else total, ACTIVATION)
    if factors is not None:
        total *= tl.load(factors + pair, mask=real, other=0.0)[None, :]
    target = pair.to(tl.int64)
    if BY_RANK:
        target = (target % TOP_K) * (num_pairs // TOP_K) + target // TOP_K
    place = output + target[None, :] * WIDTH + column[:, None]
    tl.store(
        place, total.to(output.dtype.element_ty), mask=real[None, :] & (column < WIDTH)[:, None]
    )


@triton.jit
def multiply(
    x: tl.tensor,  # [rows, INPUTS], or with ACTIVATION None [pairs, INPUTS]
    # [EXPERTS, WIDTH, INPUTS], or twice that width with gates: gate, then up; or a descriptor of it
    weight: tl.tensor,
    # see `specdec.layers.experts.routing.SharedExperts`, whose first has the number EXPERTS; or
    # None
    shared: tl.tensor,
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
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BY_RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """The product of pairs that share an expert with a tile of its columns.

    With DESCRIBED tiles of the weight come by descriptor (TMA), without registers for addresses.
    """
    FIRST: tl.constexpr = ACTIVATION is not None  # of the two products
    GATED: tl.constexpr = FIRST and ACTIVATION != "relu2"
    # in the matrix instructions; which is faster was measured
    ROWS_FIRST: tl.constexpr = DESCRIBED and not GATED
    SIDES: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = pair.shape[0]
    CUT: tl.constexpr = WIDTH % COLUMNS != 0
    UNEVEN: tl.constexpr = INPUTS % DEPTH != 0
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside = (column < WIDTH)[:, None]
    present = real[None, :]
    row = (pair // TOP_K if FIRST else pair).to(tl.int64)
    first = expert.to(tl.int64) * SIDES * WIDTH
    corner = (first + tile * COLUMNS).to(tl.int32)
    up_rows = WIDTH  # from gate to up
    row_inputs = INPUTS  # from a column of the output to the next
    if shared is not None:
        beyond = expert - EXPERTS
        if FIRST:
            up_rows = tl.where(beyond >= 0, SHARED * WIDTH, WIDTH)
            part = shared + beyond.to(tl.int64) * (WIDTH * INPUTS)
        else:
            row_inputs = tl.where(beyond >= 0, SHARED * INPUTS, INPUTS)
            part = shared + beyond.to(tl.int64) * INPUTS
        weight = tl.where(beyond >= 0, part, weight + first * INPUTS)
    elif not DESCRIBED:
        weight += first * INPUTS
    weights = weight if DESCRIBED else weight + column[:, None] * row_inputs + depth[None, :]
    inputs = x + row[None, :] * x_stride + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS] if ROWS_FIRST else [COLUMNS, ROWS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS] if ROWS_FIRST else [COLUMNS, ROWS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        remaining = depth < INPUTS - start
        values = _load(inputs, present, remaining[:, None], True, UNEVEN)
        # A descriptor's tile may hold rows of the next expert, whose columns are not stored.
        side = (
            weights.load([corner, start])
            if DESCRIBED
            else _load(weights, inside, remaining[None, :], CUT, UNEVEN)
        )
        total = _dot(side, values, total, PRECISION, ROWS_FIRST)
        if GATED:
            if DESCRIBED:
                side = weights.load([corner + WIDTH, start])
            else:
                side = _load(weights + up_rows * INPUTS, inside, remaining[None, :], CUT, UNEVEN)
            up = _dot(side, values, up, PRECISION, ROWS_FIRST)
        if not DESCRIBED:
            weights += DEPTH
        inputs += DEPTH
    if ROWS_FIRST:
        total = total.T
        up = up.T
    _finish(
        total, up, bias, factors, output, expert, pair, real, column, num_pairs,
        WIDTH, TOP_K, ACTIVATION, BY_RANK,
    )  # fmt: skip


@triton.jit
def multiply_packed(
    x: tl.tensor,
    words: tl.tensor,  # uint16 [experts, WIDTH, ROW_WORDS], or twice that width
    scale: tl.tensor,  # [experts, WIDTH, groups], or twice that width
    zero: tl.tensor,  # the same, or None
    bias: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    expert: tl.tensor,
    pair: tl.tensor,
    real: tl.tensor,
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
    PACKED: tl.constexpr,  # see `specdec.layers.packed.triton_packed.expert_codes`
) -> None:
    """`multiply` with weights of few bits."""
    CODE: tl.constexpr = PACKED[0]
    MIDDLE: tl.constexpr = PACKED[1]
    GROUP: tl.constexpr = PACKED[2]
    RUN: tl.constexpr = PACKED[3]
    ROW_WORDS: tl.constexpr = PACKED[4]
    LANES: tl.constexpr = PACKED[5]
    ASSEMBLY: tl.constexpr = PACKED[6]
    FIRST: tl.constexpr = ACTIVATION is not None
    GATED: tl.constexpr = FIRST and ACTIVATION != "relu2"
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = (pair // TOP_K if FIRST else pair).to(tl.int64)
    number = expert.to(tl.int64) * (2 if GATED else 1) * WIDTH + tl.minimum(column, WIDTH - 1)
    zeros = None if zero is None else zero + number * GROUPS
    total, up = packed_sums(
        x + row * x_stride, real[None, :], words + number * ROW_WORDS, None,
        scale + number * GROUPS, zeros, None, 0,
        WIDTH, INPUTS, ROW_WORDS, CODE, MIDDLE, False, GROUP, RUN, GATED, DEPTH, LANES, 1, ASSEMBLY,
    )  # fmt: skip
    _finish(
        total, up, bias, factors, output, expert, pair, real, column, num_pairs,
        WIDTH, TOP_K, ACTIVATION, BY_RANK,
    )  # fmt: skip
