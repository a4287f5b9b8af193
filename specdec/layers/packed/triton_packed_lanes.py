"""Sums of few rows with weights of few bits, in Triton: a warp has a lane of the inputs, and its
codes come straight to registers.

Tiles are loaded as [thread, element], 16 bytes of a column or a row a thread, in the order in which
matrix instructions take their operands: thread `t` of a warp has column or row `t / 4` of eight and
every fourth run of elements. So nothing goes through shared memory, no warp waits for another
before the end, and codes are asked for a step ahead.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_overlap import await_previous, release_next
from specdec.layers.packed.triton_packed_codes import (
    beside,
    codes_of_word,
    high_bits,
    numbers_of,
    outer_of,
    signed_byte,
)


@triton.constexpr_function
def share_of(padded: int, span: int, lanes: int) -> int:
    """Inputs of a lane, in whole spans."""
    return -(-padded // (span * lanes)) * span


@triton.constexpr_function
def step_of(share: int, span: int, depth: int) -> int:
    """Inputs of a lane whose codes are asked for at once: as many as divide its share, at most
    `depth`.
    """
    return max(n for n in range(span, max(span, depth) + 1, span) if share % n == 0)


@triton.jit
def _spread(
    numbers: tl.tensor, RUN: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
) -> tl.tensor:
    """Numbers of columns or rows [COUNT] as those of a tile's threads [THREADS, 1]."""
    COUNT: tl.constexpr = numbers.shape[0]
    PARTS: tl.constexpr = RUN // (4 * EACH)
    spread = tl.reshape(numbers, [COUNT // 8, 1, 1, 8, 1])
    spread = tl.broadcast_to(spread, [COUNT // 8, PARTS, LANES, 8, 4])
    return tl.reshape(spread, [COUNT * PARTS * LANES * 4, 1])


@triton.jit
def _within(
    COUNT: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    SHARE: tl.constexpr,
) -> tl.tensor:
    """Numbers of a tile's elements in a column or row [THREADS, EACH], where a lane has SHARE of
    them.
    """
    PARTS: tl.constexpr = RUN // (4 * EACH)
    thread = tl.arange(0, COUNT * PARTS * LANES * 4)
    part = thread // (32 * LANES) % PARTS
    return (thread // 32 % LANES * SHARE + (part * 4 + thread % 4) * EACH)[:, None] + tl.arange(
        0, EACH
    )[None, :]


@triton.jit
def _columns(
    tile: tl.tensor, COUNT: tl.constexpr, RUN: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """A tile [THREADS, EACH] as [LANES, COUNT, RUN],
    in an order of inputs that is that of `_rows`.
    """
    EACH: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, [COUNT // 8, RUN // (4 * EACH), LANES, 8, 4, EACH // 2, 2])
    return tl.reshape(tl.permute(tile, [2, 0, 3, 1, 5, 4, 6]), [LANES, COUNT, RUN])


@triton.jit
def _rows(
    tile: tl.tensor, COUNT: tl.constexpr, RUN: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """A tile [THREADS, EACH] as [LANES, RUN, COUNT]."""
    EACH: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, [COUNT // 8, RUN // (4 * EACH), LANES, 8, 4, EACH // 2, 2])
    return tl.reshape(tl.permute(tile, [2, 1, 5, 4, 6, 0, 3]), [LANES, RUN, COUNT])


@triton.jit
def _factors(
    numbers: tl.tensor, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """A number for each column of each lane [THREADS, 1], the same in every fourth thread, as
    float32 [LANES, COLUMNS, ROWS].
    """
    numbers = tl.permute(tl.reshape(numbers, [COLUMNS // 8, LANES, 8, 4]), [1, 0, 2, 3])
    numbers = tl.reshape(numbers.to(tl.float32), [LANES, COLUMNS, 1, 4, 1])
    return tl.reshape(
        tl.broadcast_to(numbers, [LANES, COLUMNS, ROWS // 8, 4, 2]), [LANES, COLUMNS, ROWS]
    )


@triton.jit
def _ask(
    words: tl.tensor,  # addresses of uint16 [THREADS, EACH]
    high: tl.tensor,  # addresses of their high bits [THREADS, EACH / 4], or None
    scale: tl.tensor,  # addresses of the columns' first scales [THREADS, 1]
    zero: tl.tensor,  # the same of zeros or minima, or None
    outer: tl.tensor,  # the same of scales of scales, or None
    begin: tl.tensor,  # numbers of the words' first inputs, in whole pieces [THREADS, 1]
    start: tl.tensor,  # numbers of the lanes' first inputs [THREADS, 1]
    SIDE: tl.constexpr,  # columns from one side to the other
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    RUN: tl.constexpr,
    COUNT: tl.constexpr,
    ALIKE: tl.constexpr,  # runs of one group
    GATED: tl.constexpr,
    PIECES: tl.constexpr,
    UNEVEN: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple, tl.tuple, tl.tuple, tl.tuple]:
    """What a step needs of the weight, for one side or both: words, their high bits, scales, zeros,
    and scales of scales.

    Scales and zeros are one for a group, or with `outer` four in a word, for a piece.
    """
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    SPAN: tl.constexpr = COUNT * RUN
    held: tl.tuple = ()
    highs: tl.tuple = ()
    scales: tl.tuple = ()
    zeros: tl.tuple = ()
    outers: tl.tuple = ()
    for piece in tl.static_range(PIECES):
        for side in tl.static_range(1 + GATED):
            place = words + (piece * RUN + side * SIDE * ROW_WORDS)
            there = begin + piece * SPAN < ROW_WORDS * COUNT if UNEVEN else None
            other = 0 if UNEVEN else None
            held += (tl.load(place, mask=there, other=other, cache_modifier=".cg"),)
            if high is not None:
                place = high + (piece * RUN + side * SIDE * ROW_WORDS) // 4
                highs += (tl.load(place, mask=there, other=other, cache_modifier=".cg"),)
        if outer is not None:
            first = start + piece * SPAN
            if UNEVEN:
                first = tl.minimum(first, INPUTS - SPAN)
            for side in tl.static_range(1 + GATED):
                scales += (tl.load(scale + (first // SPAN + side * SIDE * (GROUPS // 4))),)
                if zero is not None:
                    zeros += (tl.load(zero + (first // SPAN + side * SIDE * (GROUPS // 4))),)
                outers += (tl.load(outer + (first // 256 + side * SIDE * (INPUTS // 256))),)
        elif not WHOLE:
            for i in tl.static_range(COUNT // ALIKE):
                group = (start + (piece * COUNT + i * ALIKE) * RUN) // GROUP
                if UNEVEN:
                    # what is behind the last is padding, of no weight
                    group = tl.minimum(group, GROUPS - 1)
                for side in tl.static_range(1 + GATED):
                    scales += (tl.load(scale + (group + side * SIDE * GROUPS)),)
                    if zero is not None:
                        zeros += (tl.load(zero + (group + side * SIDE * GROUPS)),)
    return held, highs, scales, zeros, outers


@triton.jit
def _scale(
    scales: tl.tuple, outers: tl.tuple, PIECE: tl.constexpr, PLACE: tl.constexpr,
    COUNT: tl.constexpr, ALIKE: tl.constexpr, SIDES: tl.constexpr, SIDE: tl.constexpr,
    SECOND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The scales, or with SECOND the minima, of a run of codes; tuples are those of `_ask`."""
    if len(outers) > 0:
        scale = signed_byte(scales[PIECE * SIDES + SIDE], PLACE)
        return scale * outer_of(outers[PIECE * SIDES + SIDE], SECOND)
    else:
        return scales[(PIECE * COUNT + PLACE) // ALIKE * SIDES + SIDE]


@triton.jit
def _scaled(
    total: tl.tensor, part: tl.tensor, sums: tl.tensor, scales: tl.tuple, zeros: tl.tuple,
    outers: tl.tuple, PIECE: tl.constexpr, PLACE: tl.constexpr, COUNT: tl.constexpr,
    ALIKE: tl.constexpr, SIDES: tl.constexpr, SIDE: tl.constexpr, MINIMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`total` and the sum `part` of a group's codes, scaled."""
    LANES: tl.constexpr = total.shape[0]
    COLUMNS: tl.constexpr = total.shape[1]
    ROWS: tl.constexpr = total.shape[2]
    if len(zeros) > 0:
        least = _scale(zeros, outers, PIECE, PLACE, COUNT, ALIKE, SIDES, SIDE, True)
        least = _factors(least, COLUMNS, ROWS, LANES) * sums
        if MINIMA:
            total -= least
        else:
            part -= least
    scale = _scale(scales, outers, PIECE, PLACE, COUNT, ALIKE, SIDES, SIDE, False)
    return total + part * _factors(scale, COLUMNS, ROWS, LANES)


@triton.jit
def _values(
    inputs: tl.tensor,
    there: tl.tensor,
    within: tl.tensor,
    INPUTS: tl.constexpr,
    RUN: tl.constexpr,
    COUNT: tl.constexpr,
    UNEVEN: tl.constexpr,
) -> tl.tuple:
    """The rows' elements of a piece, run by run; arguments are those of `_add_step`."""
    values: tl.tuple = ()
    for i in tl.static_range(COUNT):
        real = there
        if UNEVEN:
            real = there & (within + i * RUN < INPUTS)
        values += (tl.load(inputs + i * RUN, mask=real, other=0.0),)
    return values


@triton.jit
def _add_step(
    total: tl.tensor,  # float32 [LANES, COLUMNS, ROWS]
    up: tl.tensor,  # the same of the second side, if GATED
    asked: tl.tuple,
    inputs: tl.tensor,  # addresses of the rows' first elements [THREADS, EACH]
    there: tl.tensor,  # [THREADS, 1], rows that there are
    within: tl.tensor,  # numbers of the elements in a row [THREADS, EACH]
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMA: tl.constexpr,
    INPUTS: tl.constexpr,
    WHOLE: tl.constexpr,  # a scale has the whole row and is left to the caller
    RUN: tl.constexpr,
    ALIKE: tl.constexpr,
    UNEVEN: tl.constexpr,
    GATED: tl.constexpr,
    PIECES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both sums and the products of a step's inputs with their weights."""
    COUNT: tl.constexpr = codes_of_word(CODE)
    SPAN: tl.constexpr = COUNT * RUN
    LANES: tl.constexpr = total.shape[0]
    COLUMNS: tl.constexpr = total.shape[1]
    ROWS: tl.constexpr = total.shape[2]
    SIDES: tl.constexpr = 1 + GATED
    dtype: tl.constexpr = inputs.dtype.element_ty
    held, highs, scales, zeros, outers = asked
    ones = tl.full([LANES, COLUMNS, RUN], 1.0, dtype)
    values = _values(inputs, there, within, INPUTS, RUN, COUNT, UNEVEN)
    for piece in tl.static_range(PIECES):
        coming = values
        if piece + 1 < PIECES:  # rows are read a piece ahead
            following = (piece + 1) * SPAN
            coming = _values(
                inputs + following, there, within + following, INPUTS, RUN, COUNT, UNEVEN
            )
        above = None if len(highs) == 0 else beside(highs[piece * SIDES], high_bits(CODE))
        numbers = numbers_of(held[piece * SIDES], above, CODE, MIDDLE, dtype, ASSEMBLY)
        up_numbers = numbers
        if GATED:
            if len(highs) != 0:
                above = beside(highs[piece * SIDES + 1], high_bits(CODE))
            up_numbers = numbers_of(held[piece * SIDES + 1], above, CODE, MIDDLE, dtype, ASSEMBLY)
        part = tl.zeros_like(total)
        up_part = part
        sums = part
        for i in tl.static_range(COUNT):
            tile = _rows(values[i], ROWS, RUN, LANES)
            if WHOLE:
                total = tl.dot(_columns(numbers[i], COLUMNS, RUN, LANES), tile, total)
                if GATED:
                    up = tl.dot(_columns(up_numbers[i], COLUMNS, RUN, LANES), tile, up)
            else:
                if i % ALIKE == 0:
                    part = tl.zeros_like(total)
                    up_part = part
                    sums = part
                part = tl.dot(_columns(numbers[i], COLUMNS, RUN, LANES), tile, part)
                if GATED:
                    up_part = tl.dot(_columns(up_numbers[i], COLUMNS, RUN, LANES), tile, up_part)
                if len(zeros) > 0:
                    sums = tl.dot(ones, tile, sums)
                if i % ALIKE == ALIKE - 1:
                    total = _scaled(
                        total, part, sums, scales, zeros, outers,
                        piece, i, COUNT, ALIKE, SIDES, 0, MINIMA,
                    )  # fmt: skip
                    if GATED:
                        up = _scaled(
                            up, up_part, sums, scales, zeros, outers,
                            piece, i, COUNT, ALIKE, SIDES, 1, MINIMA,
                        )  # fmt: skip
        values = coming
    return total, up


@triton.jit
def sums_in_lanes(
    x: tl.tensor,
    row: tl.tensor,  # numbers of the rows [ROWS]
    there: tl.tensor,  # which of them there are [ROWS]
    x_stride: tl.tensor,
    words: tl.tensor,  # uint16 [columns, ROW_WORDS]
    high: tl.tensor,  # high bits of four words each [columns, ROW_WORDS / 4], or None
    scale: tl.tensor,  # [columns, groups], with `outer` four in a word
    zero: tl.tensor,  # the same, or None
    outer: tl.tensor,  # [columns, INPUTS / 256], or None
    column: tl.tensor,  # numbers of the columns [COLUMNS]
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
    OVERLAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of rows with columns, float32 [COLUMNS, ROWS], and with those as far behind as `up`
    is; the same without one.
    """
    COUNT: tl.constexpr = codes_of_word(CODE)
    SPAN: tl.constexpr = COUNT * RUN
    ROWS: tl.constexpr = row.shape[0]
    COLUMNS: tl.constexpr = column.shape[0]
    EACH: tl.constexpr = 8 if RUN >= 32 else RUN // 4
    ALIKE: tl.constexpr = COUNT if GROUP % SPAN == 0 else (GROUP // RUN if SPAN % GROUP == 0 else 1)
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    WHOLE: tl.constexpr = GROUP >= INPUTS and zero is None
    tl.static_assert(outer is None or (GROUP == RUN and COUNT == 4), "four scales for a piece")
    PADDED: tl.constexpr = ROW_WORDS * COUNT
    SHARE: tl.constexpr = share_of(PADDED, SPAN, LANES * SPLITS)
    STEP: tl.constexpr = step_of(SHARE, SPAN, DEPTH)
    PIECES: tl.constexpr = STEP // SPAN
    UNEVEN: tl.constexpr = SHARE * LANES * SPLITS != INPUTS
    first = split * (LANES * SHARE)
    within = first // COUNT + _within(COLUMNS, RUN, LANES, EACH, SHARE // COUNT)
    thread = tl.arange(0, COLUMNS * (RUN // (4 * EACH)) * LANES * 4)[:, None]
    begin = first + thread // 32 % LANES * SHARE
    places = words + _spread(column.to(tl.int64), RUN, LANES, EACH) * ROW_WORDS + within
    start = first + tl.arange(0, COLUMNS * LANES * 4)[:, None] // 32 % LANES * SHARE
    highs = high
    if high is not None:
        highs = high + _spread(column.to(tl.int64), RUN, LANES, EACH) * (ROW_WORDS // 4)
        highs += first // COUNT // 4
        highs += _within(COLUMNS, RUN // 4, LANES, EACH // 4, SHARE // COUNT // 4)
    columns = _spread(column.to(tl.int64), 16, LANES, 4)
    outers = None if outer is None else outer + columns * (INPUTS // 256)
    scales = columns * (GROUPS if outer is None else GROUPS // 4)
    zeros = None if zero is None else zero + scales
    scales = scale + scales
    within = first + _within(ROWS, RUN, LANES, EACH, SHARE)
    inputs = x + _spread(row.to(tl.int64), RUN, LANES, EACH) * x_stride + within
    real = _spread(there.to(tl.int32), RUN, LANES, EACH) != 0
    total = tl.zeros([LANES, COLUMNS, ROWS], tl.float32)
    up = total
    asked = _ask(
        places, highs, scales, zeros, outers, begin, start,
        SIDE, INPUTS, ROW_WORDS, GROUP, WHOLE, RUN, COUNT, ALIKE, GATED, PIECES, UNEVEN,
    )  # fmt: skip
    await_previous(OVERLAP)
    release_next(OVERLAP)
    total, up = _add_step(
        total, up, asked, inputs, real, within,
        CODE, MIDDLE, MINIMA, INPUTS, WHOLE, RUN, ALIKE, UNEVEN, GATED, PIECES, ASSEMBLY,
    )  # fmt: skip
    for step in range(STEP, SHARE, STEP):
        if high is not None:
            highs += STEP // COUNT // 4
        asked = _ask(
            places + step // COUNT, highs, scales, zeros, outers, begin + step, start + step,
            SIDE, INPUTS, ROW_WORDS, GROUP, WHOLE, RUN, COUNT, ALIKE, GATED, PIECES, UNEVEN,
        )  # fmt: skip
        total, up = _add_step(
            total, up, asked, inputs + step, real, within + step,
            CODE, MIDDLE, MINIMA, INPUTS, WHOLE, RUN, ALIKE, UNEVEN, GATED, PIECES, ASSEMBLY,
        )  # fmt: skip
    total = tl.sum(total, 0)
    up = tl.sum(up, 0)
    if WHOLE:
        total *= tl.load(scale + column.to(tl.int64) * GROUPS).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scale + (column + SIDE).to(tl.int64) * GROUPS).to(tl.float32)[:, None]
    return total, up
