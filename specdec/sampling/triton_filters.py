"""Filters of a row in Triton: the least logit that top-k, top-p and min-p keep.

Programs first find the highest logit of each small group of neighbors, so that even one row keeps
many processors busy. As these are a part of the row, what is looked for is not below where they
alone would have enough, so only groups that reach up to there can hold it: mostly few, which one
program per row then keeps in its registers and searches. Nothing is sorted. How a row is divided
and added up does not depend on its neighbors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_argmax import SLICE, ordered
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

MAX_GROUPS = 4096
"""Groups of a row, unless they would be smaller than `SMALLEST_GROUP`."""

SMALLEST_GROUP = 16
"""Logits of a group at least: 32 bytes, the least that is fetched from memory at once."""

HELD = 2048
"""Most logits that a program searches without reading them again each time."""

TILE = 4096
"""Logits of a row that a program looks at together, where there are more."""

WARPS = 8

SIGNIFICANT_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}
"""Leading bits of a float32 in which numbers of a type can differ."""

COLDEST = tl.constexpr(1e-20)  # as in specdec.sampling, which lies above; the tests compare the two
_LEAST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def number_of(order: tl.tensor) -> tl.tensor:
    """The float32 that has this int32 in `specdec.kernels.triton_argmax.ordered`."""
    return tl.where(
        order < 0, -((-order).to(tl.float32, bitcast=True)), order.to(tl.float32, bitcast=True)
    )


@triton.jit
def _settings(
    floats: tl.tensor, ints: tl.tensor, groups: tl.tensor, group: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Temperature, top-p, min-p and top-k of a request, and whether it drops tokens."""
    temperature, top_p = tl.load(floats + group), tl.load(floats + groups + group)
    min_p, top_k = tl.load(floats + 2 * groups + group), tl.load(ints + group)
    filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return tl.maximum(temperature, COLDEST), top_p, min_p, top_k, filtered


@triton.jit
def _group_max_kernel(
    logits: tl.tensor,  # [groups, width, vocab_size]
    floats: tl.tensor,  # float32 [6, groups]: temperature, top-p, min-p, then penalties
    ints: tl.tensor,  # int64 [3, groups]: top-k, seed, first position
    highest: tl.tensor,  # [groups * width, num_groups], of the logits' type
    # float32 [groups * width, slices, 2]: the best, and the sum of exp((x - best) / temperature)
    parts: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    SLICE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = logits + (row // width) * group_stride + (row % width) * row_stride
    number = tl.program_id(1) * (SLICE // GROUP) + tl.arange(0, SLICE // GROUP)
    column = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    await_previous(OVERLAP)
    temperature, top_p, _, top_k, filtered = _settings(floats, ints, groups, row // width)
    if filtered:
        x = tl.load(place + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
        of_groups = tl.max(x, 1)
        tl.store(highest + row * num_groups + number, of_groups, mask=number < num_groups)
        if (top_k == 0) & (top_p < 1):
            best = tl.max(of_groups, 0)
            # A slice of -inf alone is nothing, not NaN.
            shifted = (x - tl.maximum(best, _LOWEST_FINITE)) / temperature
            total = tl.sum(tl.sum(tl.exp(shifted), 1), 0)
            parts += (row * tl.num_programs(1) + tl.program_id(1)) * 2
            tl.store(parts, best)
            tl.store(parts + 1, total)


@triton.jit
def _highest(
    order: tl.tensor,
    weights: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """The highest place, int64 from `low` to `high`, from which on the weights are `wanted`."""
    while low < high:
        step = ((high - low) // UNIT // 2 + 1) * UNIT
        enough = tl.sum(tl.where(order >= (low + step).to(tl.int32), weights, 0.0), 0) >= wanted
        high = tl.where(enough, high, low + step - UNIT)
        low = tl.where(enough, low + step, low)
    return low


@triton.jit
def _listed(
    place: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    vocab_size: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The logits of `count` listed groups from the one at `start` on; -inf after the last."""
    index = start + tl.arange(0, TILE)
    exists = index < count * GROUP
    column = tl.load(listed + index // GROUP, mask=exists, other=0) * GROUP + index % GROUP
    there = exists & (column < vocab_size)
    return tl.load(place + column, mask=there, other=-float("inf")).to(tl.float32)


@triton.jit
def _highest_listed(
    place: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    WEIGHTED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """The highest logits read each time, weighing 1 or exp((x - best) / temperature)."""
    while low < high:
        # Reading takes longest, so a look compares with three. Lanes are added up once.
        step = ((high - low) // UNIT // 4 + 1) * UNIT
        first = tl.minimum(low + step, _HIGHEST).to(tl.int32)
        second = tl.minimum(low + 2 * step, _HIGHEST).to(tl.int32)
        third = tl.minimum(low + 3 * step, _HIGHEST).to(tl.int32)
        from_first = tl.zeros([TILE], tl.float32)
        from_second, from_third = from_first, from_first
        for start in range(0, count * GROUP, TILE):
            x = _listed(place, listed, count, start, vocab_size, GROUP, TILE)
            order, weights = ordered(x), tl.full([TILE], 1.0, tl.float32)
            if WEIGHTED:
                weights = tl.exp((x - best) / temperature)
            from_first += tl.where(order >= first, weights, 0.0)
            from_second += tl.where(order >= second, weights, 0.0)
            from_third += tl.where(order >= third, weights, 0.0)
        enough = (tl.sum(from_first, 0) >= wanted).to(tl.int64)
        enough += (tl.sum(from_second, 0) >= wanted).to(tl.int64)
        low += step * (enough + (tl.sum(from_third, 0) >= wanted).to(tl.int64))
        high = tl.minimum(high, low + step - UNIT)
    return low


@triton.jit
def _mass_listed(
    place: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    floor: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    vocab_size: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The weights of the logits that are in order at least `floor`."""
    mass = tl.full([], 0.0, tl.float32)
    for start in range(0, count * GROUP, TILE):
        x = _listed(place, listed, count, start, vocab_size, GROUP, TILE)
        mass += tl.sum(tl.where(ordered(x) >= floor, tl.exp((x - best) / temperature), 0.0), 0)
    return mass


@triton.jit
def _min_kept_kernel(
    logits: tl.tensor,  # [groups, width, vocab_size]
    floats: tl.tensor,  # float32 [6, groups]
    ints: tl.tensor,  # int64 [3, groups]
    highest: tl.tensor,  # [groups * width, num_groups]
    parts: tl.tensor,  # float32 [groups * width, slices, 2]
    listed: tl.tensor,  # int32 [groups * width, num_groups]
    least: tl.tensor,  # float32 [groups * width]
    groups: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    num_groups: tl.tensor,
    slices: tl.tensor,
    GROUPS: tl.constexpr,  # powers of two, no less than the numbers of groups and slices
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = logits + (row // width) * group_stride + (row % width) * row_stride
    listed += row * num_groups
    number = tl.arange(0, GROUPS)
    await_previous(OVERLAP)
    temperature, top_p, min_p, top_k, filtered = _settings(floats, ints, groups, row // width)
    kept = -float("inf")
    if filtered:
        x = tl.load(
            highest + row * num_groups + number, mask=number < num_groups, other=-float("inf")
        ).to(tl.float32)
        best = tl.max(x, 0)
        if (top_k > 0) | (top_p < 1):
            order, high = ordered(x), ordered(best).to(tl.int64)
            low = tl.full([], _LEAST, tl.int64)
            mass = tl.full([], 0.0, tl.float32)
            if top_k > 0:
                there = (number < num_groups).to(tl.float32)
                low = _highest(order, there, top_k.to(tl.float32), low, high, UNIT)
            else:
                part = tl.arange(0, SLICES)
                its_parts = parts + (row * slices + part) * 2
                of_slices = tl.load(its_parts, mask=part < slices, other=-float("inf"))
                totals = tl.load(its_parts + 1, mask=part < slices, other=0.0)
                mass = tl.sum(tl.exp((of_slices - best) / temperature) * totals, 0)
                weights = tl.exp((x - best) / temperature)
                low = _highest(order, weights, top_p * mass, low, high, UNIT)
            reaches = (order >= low) & (number < num_groups)
            until = tl.cumsum(reaches.to(tl.int32), 0)
            tl.store(listed + until - 1, number, mask=reaches)
            count = tl.max(until, 0)
            tl.debug_barrier()  # threads read what others have written
            if count * GROUP <= HELD:
                held = _listed(place, listed, count, 0, vocab_size, GROUP, HELD)
                among, weights = ordered(held), tl.exp((held - best) / temperature)
                if top_k > 0:
                    ones = tl.full([HELD], 1.0, tl.float32)
                    low = _highest(among, ones, top_k.to(tl.float32), low, high, UNIT)
                    mass = tl.sum(tl.where(among >= low, weights, 0.0), 0)
                if top_p < 1:
                    low = _highest(among, weights, top_p * mass, low, high, UNIT)
            else:
                if top_k > 0:
                    wanted = top_k.to(tl.float32)
                    low = _highest_listed(
                        place, listed, count, wanted, low, high, best, temperature, vocab_size,
                        False, GROUP, TILE, UNIT,
                    )  # fmt: skip
                    mass = _mass_listed(
                        place, listed, count, low, best, temperature, vocab_size, GROUP, TILE
                    )
                if top_p < 1:
                    wanted = top_p * mass
                    low = _highest_listed(
                        place, listed, count, wanted, low, high, best, temperature, vocab_size,
                        True, GROUP, TILE, UNIT,
                    )  # fmt: skip
            floor = low.to(tl.int32)
            kept = tl.where(floor == _LEAST, -float("inf"), number_of(floor))
        if min_p > 0:
            kept = tl.maximum(kept, best + temperature * tl.log(min_p))
    tl.store(least + row, kept)


def min_kept(logits: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """The least logit of each row that the filters keep, float32 [num_reqs, n], -inf for all.

    Args:
        logits: [num_reqs, n, V], bfloat16, float16 or float32; the last axis is contiguous.
        floats, ints: as in `SamplingTensors`, contiguous.
    """
    vocab_size, device = logits.shape[-1], logits.device
    least = torch.empty(logits.shape[:2], dtype=torch.float32, device=device)
    group = max(SMALLEST_GROUP, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_GROUPS)))
    num_groups, slices = triton.cdiv(vocab_size, group), triton.cdiv(vocab_size, SLICE)
    highest = torch.empty(least.numel(), num_groups, dtype=logits.dtype, device=device)
    parts = torch.empty(least.numel(), slices, 2, dtype=torch.float32, device=device)
    listed = torch.empty(highest.shape, dtype=torch.int32, device=device)
    tensors, sizes = (logits, floats, ints, highest, parts), (*logits.shape, *logits.stride()[:2])
    options = {"GROUP": group, **overlap_options(device)}
    power = triton.next_power_of_2
    powers = {"GROUPS": power(num_groups), "SLICES": power(slices)}
    searched = {"HELD": max(HELD, group), "TILE": max(TILE, group)}
    searched["UNIT"] = 2 ** (32 - SIGNIFICANT_BITS[logits.dtype])
    with on_device(logits):
        _group_max_kernel[(least.numel(), slices)](
            *tensors, *sizes, num_groups, SLICE=SLICE, num_warps=4, **options
        )
        numbers = *tensors, listed, least, *sizes, num_groups, slices
        options |= {**powers, **searched, "num_warps": WARPS}
        _min_kept_kernel[(least.numel(),)](*numbers, **options)
    return least
