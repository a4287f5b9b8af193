"""Drawing tokens in Triton: one program per row finds the least logit that the filters keep, then slices of rows draw.

The noise is that of `specdec.sampling.noise`, made where it is used. The least logit is built up bit by bit from the leading one,
with one look for each at the logits that can be it, mostly few, so nothing is sorted. How a row is divided and added up does not
depend on its neighbors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_argmax import DTYPES, SLICE, choose_slice, ordered, token_key
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

TILE = 4096
"""Most logits of a row that a program looks at together."""

LIKELY = 2048
"""Logits that are set apart when nothing but they can be the least one kept."""

SIGNIFICANT_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}
"""Leading bits of a float32 in which numbers of a type can differ."""

# As in specdec.sampling, which lies above; the tests compare the two.
_COLDEST = tl.constexpr(1e-20)
_NUM_PURPOSES = tl.constexpr(3)
_LEAST = tl.constexpr(-(2**31))


@triton.jit
def _mix(bits: tl.tensor) -> tl.tensor:
    """SplitMix64's finalizer on an int64; shifts of it copy the sign, which the masks take off."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(bits: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Noise of int32 tokens from the int64 of their position; see `specdec.sampling.noise.gumbel`."""
    x = token * -0x61C8864F + bits.to(tl.int32)
    x = ((x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D) ^ (bits >> 32).to(tl.int32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    x = ((x ^ ((x >> 16) & 0xFFFF)) >> 1) & 0x7FFFFFFF
    v = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    # The logarithm of 1 - v, by its series where the difference would lose what distinguishes small v.
    exponential = tl.where(v < 0.0078125, v * (1 + v * (0.5 + v * (0.3333333333 + v * 0.25))), -tl.log(1 - v))
    return -tl.log(exponential)


@triton.jit
def _kept(
    place: tl.tensor,
    least: tl.tensor,  # int32, in order
    best: tl.tensor,
    temperature: tl.tensor,
    size: tl.tensor,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """How many logits are in order at least `least`, or with WEIGHTED the sum of their exp((x - best) / temperature)."""
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, size, TILE):
        column = start + tl.arange(0, TILE)
        x = tl.load(place + column, mask=column < size, other=-float("inf")).to(tl.float32)
        stays = (ordered(x) >= least) & (column < size)
        total += tl.where(stays, tl.exp((x - best) / temperature) if WEIGHTED else 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _highest(
    place: tl.tensor,
    wanted: tl.tensor,
    floor: tl.tensor,  # int32, in order
    best: tl.tensor,
    temperature: tl.tensor,
    size: tl.tensor,
    WEIGHTED: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The highest place in order, int32, from which on `wanted` is kept of what is above `floor`; the lowest if there is none."""
    found = tl.full([], -(2**31), tl.int64)
    step = tl.full([], 2**31, tl.int64)
    for _ in range(BITS):
        candidate = tl.maximum((found + step).to(tl.int32), floor)
        enough = _kept(place, candidate, best, temperature, size, WEIGHTED, TILE) >= wanted
        found = tl.where(enough, found + step, found)
        step = step >> 1
    return found.to(tl.int32)


@triton.jit
def _highest_of(x: tl.tensor, weights: tl.tensor, wanted: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The same for the weights of numbers that a program holds."""
    order = ordered(x)
    found = tl.full([], -(2**31), tl.int64)
    step = tl.full([], 2**31, tl.int64)
    for _ in range(BITS):
        enough = tl.sum(tl.where(order >= (found + step).to(tl.int32), weights, 0.0), 0) >= wanted
        found = tl.where(enough, found + step, found)
        step = step >> 1
    return found.to(tl.int32)


@triton.jit
def _floor(
    place: tl.tensor,
    size: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    mass: tl.tensor,  # of the whole row, where top-k is off
    best: tl.tensor,
    temperature: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The least of the logits at `place`, in order, that top-k and top-p keep."""
    floor = tl.full([], _LEAST, tl.int32)
    if top_k > 0:
        floor = _highest(place, top_k.to(tl.float32), _LEAST, best, temperature, size, False, BITS, TILE)
        mass = _kept(place, floor, best, temperature, size, True, TILE)
    if top_p < 1:
        edge = _highest(place, top_p * mass, floor, best, temperature, size, True, BITS, TILE)
        floor = tl.maximum(floor, tl.minimum(edge, ordered(best)))
    return floor


@triton.jit
def _least_kept_kernel(
    logits: tl.tensor,  # [groups, width, vocab_size]
    floats: tl.tensor,  # float32 [4, groups]: temperature, top-p, min-p, penalty
    ints: tl.tensor,  # int64 [2, groups]: top-k, seed
    likely: tl.tensor,  # [groups * width, LIKELY], of the logits' type
    least: tl.tensor,  # float32 [groups * width]
    groups: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    LIKELY: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = row // width
    place = logits + group * group_stride + (row % width) * row_stride
    likely += row * LIKELY
    await_previous(OVERLAP)
    temperature = tl.load(floats + group)
    top_p, min_p = tl.load(floats + groups + group), tl.load(floats + 2 * groups + group)
    top_k = tl.load(ints + group)
    kept = -float("inf")
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        temperature = tl.maximum(temperature, _COLDEST)
        # The highest of every lane, some of which are all that is looked for.
        highest = tl.full([TILE], -float("inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            column = start + tl.arange(0, TILE)
            x = tl.load(place + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
            highest = tl.maximum(highest, x)
        best = tl.max(highest, 0)
        if (top_k > 0) | (top_p < 1):
            # As the lanes' highest are a part of the row, what is looked for is not below where they alone would have enough.
            mass = tl.full([], 0.0, tl.float32)
            if top_k > 0:
                bound = _highest_of(highest, tl.full([TILE], 1.0, tl.float32), top_k.to(tl.float32), BITS)
            else:
                mass = _kept(place, _LEAST, best, temperature, vocab_size, True, TILE)
                bound = _highest_of(highest, tl.exp((highest - best) / temperature), top_p * mass, BITS)
            if _kept(place, bound, best, temperature, vocab_size, False, TILE) <= LIKELY:
                count = _collect(place, bound, likely, vocab_size, TILE)
                tl.debug_barrier()  # threads read what others have written
                floor = _floor(likely, count, top_k, top_p, mass, best, temperature, BITS, LIKELY)
            else:
                floor = _floor(place, vocab_size, top_k, top_p, mass, best, temperature, BITS, TILE)
            floor = tl.maximum(floor, bound)
            # Back from the order to the number that has it.
            kept = tl.where(floor < 0, -((-floor).to(tl.float32, bitcast=True)), floor.to(tl.float32, bitcast=True))
            kept = tl.where(floor == _LEAST, -float("inf"), kept)
        if min_p > 0:
            kept = tl.maximum(kept, best + temperature * tl.log(min_p))
    tl.store(least + row, kept)


@triton.jit
def _collect(place: tl.tensor, bound: tl.tensor, likely: tl.tensor, vocab_size: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Writes the logits that are in order at least `bound` to `likely`, and tells how many they are."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        column = start + tl.arange(0, TILE)
        x = tl.load(place + column, mask=column < vocab_size, other=-float("inf"))
        stays = (ordered(x.to(tl.float32)) >= bound) & (column < vocab_size)
        until = tl.cumsum(stays.to(tl.int32), 0)
        tl.store(likely + count + until - 1, x, mask=stays)
        count += tl.max(until, 0)
    return count


@triton.jit
def _draw_kernel(
    logits: tl.tensor,  # [groups, width, vocab_size]
    floats: tl.tensor,  # float32 [4, groups]
    ints: tl.tensor,  # int64 [2, groups]
    positions: tl.tensor,  # int64 [groups * width]
    least: tl.tensor,  # float32 [groups * width]
    keys: tl.tensor,  # int64 [groups * width, slices]
    groups: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    FILTERED: tl.constexpr,
    SLICE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = row // width
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    exists = column < vocab_size
    place = logits + group * group_stride + (row % width) * row_stride
    await_previous(OVERLAP)
    x = tl.load(place + column, mask=exists, other=0.0).to(tl.float32)
    temperature = tl.load(floats + group)
    if temperature > 0:
        counter = tl.load(positions + row) * _NUM_PURPOSES + 1  # Purpose.SAMPLE
        bits = _mix(_mix(tl.load(ints + groups + group)) + counter * -0x61C8864680B583EB)
        if FILTERED:
            x = tl.where(x < tl.load(least + row), -float("inf"), x)
        x = x / tl.maximum(temperature, _COLDEST) + _gumbel(bits, column)
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.where(exists, token_key(x, column), -(2**63)), 0))


def sample(logits: Tensor, floats: Tensor, ints: Tensor, positions: Tensor, *, filtered: bool) -> tuple[Tensor, Tensor]:
    """See `specdec.sampling.sampler.sample`.

    Args:
        logits: [num_reqs, n, V], bfloat16, float16 or float32; the last axis is contiguous.
        floats, ints: as in `SamplingTensors`, contiguous.
        positions: int64 [num_reqs, n].
        filtered: a request may have top-k, top-p or min-p.
    """
    assert logits.stride(-1) == 1 and logits.dtype in DTYPES and positions.shape == logits.shape[:2]
    assert floats.is_contiguous() and ints.is_contiguous()
    least = least_kept(logits, floats, ints) if filtered else floats  # which is not read then
    vocab_size, positions = logits.shape[-1], positions.contiguous()
    slices = triton.cdiv(vocab_size, SLICE)
    keys = torch.empty(positions.numel(), slices, dtype=torch.int64, device=logits.device)
    with on_device(logits):
        _draw_kernel[(len(keys), slices)](
            logits,
            floats,
            ints,
            positions,
            least,
            keys,
            *logits.shape,
            *logits.stride()[:2],
            FILTERED=filtered,
            SLICE=SLICE,
            num_warps=4,
            **overlap_options(logits.device),
        )
        return choose_slice(keys, positions.shape)


def least_kept(logits: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """The least logit of each row that the filters keep, float32 [num_reqs, n], -inf where all stay; arguments as in `sample`."""
    least = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    with on_device(logits):
        _least_kept_kernel[(least.numel(),)](
            logits,
            floats,
            ints,
            torch.empty(least.numel(), LIKELY, dtype=logits.dtype, device=logits.device),
            least,
            *logits.shape,
            *logits.stride()[:2],
            LIKELY=LIKELY,
            BITS=SIGNIFICANT_BITS[logits.dtype],
            TILE=min(TILE, triton.next_power_of_2(logits.shape[-1])),
            num_warps=16,
            **overlap_options(logits.device),
        )
    return least
