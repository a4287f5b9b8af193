"""Products of rows with weights of few bits, in Triton: tiles of codes become numbers in registers,
sums are float32.

The scale of a group multiplies its partial sum, so no weight is rounded. A zero, or a minimum,
takes as many times the sum of the group's inputs, which is one more product, with ones. In which
order inputs are added up depends on the weight alone, so a row has the same bits whatever rows are
beside it.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_overlap import await_previous
from specdec.kernels.triton_prefetch import hint_program, send_hints
from specdec.layers.ops.triton_activation import activate
from specdec.layers.packed.triton_packed_codes import codes_of_word, high_bits, numbers_of, scale_at
from specdec.layers.packed.triton_packed_lanes import sums_in_lanes


@triton.jit
def _words(place: tl.tensor, within: tl.tensor, UNEVEN: tl.constexpr) -> tl.tensor:
    """A tile of words, with no mask where none is needed."""
    if UNEVEN:
        return tl.load(place, mask=within, other=0)
    else:
        return tl.load(place)


@triton.jit
def _high(
    place: tl.tensor,
    within: tl.tensor,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    UNEVEN: tl.constexpr,
) -> tl.tensor:
    """The high bits of a tile of words."""
    return _words(place, within, UNEVEN).to(tl.uint32) >> (tl.arange(0, RUN) % 4 * (4 * BITS))


@triton.jit
def _scaled(
    total: tl.tensor,
    part: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    outer: tl.tensor,
    group: tl.tensor,
    GROUP: tl.constexpr,
    MINIMA: tl.constexpr,
) -> tl.tensor:
    """`total` and the sum `part` of a group's codes, scaled; see `_add_piece`."""
    if zero is not None:
        least = scale_at(zero, outer, group, GROUP, True).expand_dims(-1) * sums
        if MINIMA:
            total -= least
        else:
            part -= least
    return total + part * scale_at(scale, outer, group, GROUP, False).expand_dims(-1)


@triton.jit
def _add_piece(
    total: tl.tensor,  # float32 [COLUMNS, ROWS]
    up: tl.tensor,  # the same of the second side, if GATED
    words: tl.tensor,  # addresses of uint16 [COLUMNS, RUN]
    high: tl.tensor,  # addresses of their high bits, or None
    inputs: tl.tensor,  # addresses of the inputs of the words' first codes [RUN, ROWS]
    mask: tl.tensor,  # [1, ROWS], rows that there are
    scale: tl.tensor,  # addresses of the columns' first scales [COLUMNS]
    zero: tl.tensor,  # the same of zeros, or of minima, or None
    outer: tl.tensor,  # the same of scales of scales, or None
    begin: tl.tensor,  # number of the first input
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMA: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,  # a scale has the whole row and is left to the caller
    RUN: tl.constexpr,
    SIDE: tl.constexpr,  # columns from one side to the other
    ROW_WORDS: tl.constexpr,
    UNEVEN: tl.constexpr,  # there may be fewer inputs
    GATED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both sums and the products of a span of inputs with their weights."""
    COUNT: tl.constexpr = codes_of_word(CODE)
    SPAN: tl.constexpr = COUNT * RUN
    # Runs of one group.
    ALIKE: tl.constexpr = COUNT if GROUP % SPAN == 0 else (GROUP // RUN if SPAN % GROUP == 0 else 1)
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    dtype: tl.constexpr = inputs.dtype.element_ty
    # a whole piece is, or none of it
    within = tl.expand_dims(begin + tl.zeros([1], tl.int32) < ROW_WORDS * COUNT, -1)
    above = None if high is None else _high(high, within, high_bits(CODE), RUN, UNEVEN)
    numbers = numbers_of(_words(words, within, UNEVEN), above, CODE, MIDDLE, dtype, ASSEMBLY)
    up_numbers = numbers
    if GATED:
        if high is not None:
            above = _high(high + SIDE * (ROW_WORDS // 4), within, high_bits(CODE), RUN, UNEVEN)
        tile = _words(words + SIDE * ROW_WORDS, within, UNEVEN)
        up_numbers = numbers_of(tile, above, CODE, MIDDLE, dtype, ASSEMBLY)
    ones = tl.full(numbers[0].shape, 1.0, dtype)
    part = tl.zeros_like(total)
    up_part = part
    sums = part
    for i in tl.static_range(COUNT):
        there = mask
        if UNEVEN:
            there = mask & tl.expand_dims(tl.arange(0, RUN) < INPUTS - begin - i * RUN, -1)
        values = tl.load(inputs + i * RUN, mask=there, other=0.0)
        if WHOLE:
            total = tl.dot(numbers[i], values, total)
            if GATED:
                up = tl.dot(up_numbers[i], values, up)
        else:
            if i % ALIKE == 0:
                part = tl.zeros_like(total)
                up_part = part
                sums = part
            part = tl.dot(numbers[i], values, part)
            if GATED:
                up_part = tl.dot(up_numbers[i], values, up_part)
            if zero is not None:
                sums = tl.dot(ones, values, sums)
            if i % ALIKE == ALIKE - 1:
                # what is behind the last is padding, of no weight
                place = tl.minimum((begin + i * RUN) // GROUP, GROUPS - 1)
                total = _scaled(total, part, sums, scale, zero, outer, place, GROUP, MINIMA)
                if GATED:
                    side = place + SIDE * GROUPS
                    up = _scaled(up, up_part, sums, scale, zero, outer, side, GROUP, MINIMA)
    return total, up


@triton.jit
def packed_sums(
    rows: tl.tensor,  # addresses of the rows [ROWS]
    there: tl.tensor,  # which of them there are [1, ROWS]
    words: tl.tensor,  # addresses of the columns' words, uint16 [COLUMNS]
    highs: tl.tensor,  # addresses of their high bits, or None
    scales: tl.tensor,  # addresses of their scales
    zeros: tl.tensor,  # the same of zeros, or of minima, or None
    outers: tl.tensor,  # the same of scales of scales, or None
    split: tl.tensor,  # which share of the inputs
    SIDE: tl.constexpr,  # columns from gate to up
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,  # see `specdec.layers.packed.weight.PackedWeight`
    GATED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of rows with columns, float32 [COLUMNS, ROWS], and with those as far behind as `up`
    is; the same without one.
    """
    COUNT: tl.constexpr = codes_of_word(CODE)
    SPAN: tl.constexpr = COUNT * RUN
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    WHOLE: tl.constexpr = GROUP >= INPUTS and zeros is None
    PADDED: tl.constexpr = ROW_WORDS * COUNT
    # Inputs of each lane.
    STEPS: tl.constexpr = (PADDED + DEPTH * LANES * SPLITS - 1) // (DEPTH * LANES * SPLITS)
    SHARE: tl.constexpr = STEPS * DEPTH
    UNEVEN: tl.constexpr = INPUTS % DEPTH != 0 or SHARE * LANES * SPLITS != PADDED
    run = tl.arange(0, RUN)
    if LANES == 1:
        first = split * SHARE
        tiles = words[:, None] + (first // COUNT + run)[None, :]
        highs = None if highs is None else highs[:, None] + (first // COUNT + run)[None, :] // 4
        inputs = rows[None, :] + (first + run)[:, None]
        real = there
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        first = (split * LANES + tl.arange(0, LANES)[:, None]) * SHARE
        tiles = words[None, :, None] + (first // COUNT + run[None, :])[:, None, :]
        if highs is not None:
            highs = highs[None, :, None] + (first // COUNT + run[None, :])[:, None, :] // 4
        inputs = rows[None, None, :] + (first + run[None, :])[:, :, None]
        real = there[None, :, :]
        total = tl.zeros([LANES, COLUMNS, ROWS], tl.float32)
    up = total
    for step in range(0, SHARE, DEPTH):
        for piece in tl.static_range(DEPTH // SPAN):
            above = None if highs is None else highs + piece * RUN // 4
            total, up = _add_piece(
                total, up, tiles + piece * RUN, above, inputs + piece * SPAN, real,
                scales, zeros, outers, first + step + piece * SPAN, CODE, MIDDLE, MINIMA, INPUTS,
                GROUP, WHOLE, RUN, SIDE, ROW_WORDS, UNEVEN, GATED, ASSEMBLY,
            )  # fmt: skip
        tiles += DEPTH // COUNT
        if highs is not None:
            highs += DEPTH // (4 * COUNT)
        inputs += DEPTH
    if LANES > 1:
        total = tl.sum(total, 0)
        up = tl.sum(up, 0)
    if WHOLE:
        total *= tl.load(scales).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scales + SIDE * GROUPS).to(tl.float32)[:, None]
    return total, up


@triton.jit(do_not_specialize=["num_rows"])
def packed_kernel(
    x: tl.tensor,  # [num_rows, INPUTS]
    words: tl.tensor,  # uint16 [WIDTH, ROW_WORDS], or twice that with an activation: gate, then up
    high: tl.tensor,  # high bits of four words each [WIDTH, ROW_WORDS / 4], or None
    scale: tl.tensor,  # [WIDTH, groups], or twice that width; with `outer` four in a word, int32
    zero: tl.tensor,  # the same, or with MINIMA minima, or None
    outer: tl.tensor,  # float16 [WIDTH, INPUTS / 256], or with zeros two in int32; or None
    bias: tl.tensor,  # as many numbers as the weight has rows, or None
    output: tl.tensor,  # [num_rows, WIDTH], or float32 [SPLITS, num_rows, WIDTH]
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    prefetch: tl.tensor,  # weight to send hints about, or None
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a name, or None
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,  # see `specdec.layers.packed.triton_packed.Tile`
    PREFETCH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (c, s, r): tile c of the columns, share s of the inputs, tile r of the rows."""
    if prefetch is not None:
        program = hint_program(PREFETCH)
        if program >= 0:
            send_hints(prefetch, program, PREFETCH)
            return
    GATED: tl.constexpr = ACTIVATION is not None
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if WIDTH % COLUMNS:
        column = tl.minimum(column, WIDTH - 1)  # whose result is stored again
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    there = (row < num_rows)[None, :]
    rows = x + row.to(tl.int64) * x_stride
    places = words + column.to(tl.int64) * ROW_WORDS
    if DIRECT:
        total, up = sums_in_lanes(
            x, row, row < num_rows, x_stride, words, high, scale, zero, outer, column, split,
            WIDTH, INPUTS, ROW_WORDS, CODE, MIDDLE, MINIMA, GROUP, RUN,
            GATED, DEPTH, LANES, SPLITS, ASSEMBLY, OVERLAP,
        )  # fmt: skip
    else:
        await_previous(OVERLAP)
        first = column * (GROUPS if outer is None else GROUPS // 4)
        highs = None if high is None else high + column.to(tl.int64) * (ROW_WORDS // 4)
        total, up = packed_sums(
            rows, there, places, highs, scale + first, None if zero is None else zero + first,
            None if outer is None else outer + column * (INPUTS // 256), split,
            WIDTH, INPUTS, ROW_WORDS, CODE, MIDDLE, MINIMA, GROUP, RUN,
            GATED, DEPTH, LANES, SPLITS, ASSEMBLY,
        )  # fmt: skip
    dtype = output.dtype.element_ty
    if bias is not None:  # of the sum of all splits, so one of them adds it
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[:, None]
        if GATED:
            up += tl.load(bias + WIDTH + column).to(tl.float32)[:, None]
    if GATED:  # rounded where the product and the activation would be two kernels
        total = activate(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    place = (split * num_rows + row[None, :]).to(tl.int64) * WIDTH + column[:, None]
    tl.store(output + place, total.to(dtype), mask=there)
