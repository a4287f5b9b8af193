"""Drawing tokens in Triton: slices of rows draw among the logits that filters keep.

The noise is of `specdec.sampling.noise`, made in place. Each row is divided on its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_argmax import DTYPES, SLICE, choose_slice, token_key
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.sampling.triton_filters import COLDEST, min_kept

# As in specdec.sampling, which lies above; the tests compare the two.
_NUM_PURPOSES = tl.constexpr(3)


@triton.jit
def _mix(bits: tl.tensor) -> tl.tensor:
    """SplitMix64's finalizer on an int64; shifts of it copy the sign, which the masks take off."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def noise_bits(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The bits of the target's own token at a position, int64, by where seed and position lie."""
    counter = tl.load(position) * _NUM_PURPOSES + 1  # Purpose.SAMPLE
    return _mix(_mix(tl.load(seed)) + counter * -0x61C8864680B583EB)


@triton.jit
def gumbel(bits: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Noise of int32 tokens from the int64 of their position; see `noise.gumbel`."""
    x = token * -0x61C8864F + bits.to(tl.int32)
    x = ((x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D) ^ (bits >> 32).to(tl.int32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    x = ((x ^ ((x >> 16) & 0xFFFF)) >> 1) & 0x7FFFFFFF
    v = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    # The logarithm of 1 - v, by its series where small v would lose their digits.
    exponential = tl.where(
        v < 0.0078125, v * (1 + v * (0.5 + v * (0.3333333333 + v * 0.25))), -tl.log(1 - v)
    )
    return -tl.log(exponential)


@triton.jit
def _draw_kernel(
    logits: tl.tensor,  # [groups, width, vocab_size]
    floats: tl.tensor,  # float32 [6, groups]
    ints: tl.tensor,  # int64 [3, groups]
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
        bits = noise_bits(ints + groups + group, positions + row)
        if FILTERED:
            x = tl.where(x < tl.load(least + row), -float("inf"), x)
        x = x / tl.maximum(temperature, COLDEST) + gumbel(bits, column)
    tl.store(
        keys + row * tl.num_programs(1) + tl.program_id(1),
        tl.max(tl.where(exists, token_key(x, column), -(2**63)), 0),
    )


def sample(
    logits: Tensor, floats: Tensor, ints: Tensor, positions: Tensor, *, filtered: bool
) -> tuple[Tensor, Tensor]:
    """See `specdec.sampling.sampler.sample`.

    Args:
        logits: [num_reqs, n, V], bfloat16, float16 or float32; the last axis is contiguous.
        floats, ints: as in `SamplingTensors`, contiguous.
        positions: int64 [num_reqs, n].
        filtered: a request may have top-k, top-p or min-p.
    """
    assert logits.stride(-1) == 1 and logits.dtype in DTYPES and positions.shape == logits.shape[:2]
    assert floats.is_contiguous() and ints.is_contiguous()
    least = min_kept(logits, floats, ints) if filtered else floats  # which is not read then
    vocab_size, positions = logits.shape[-1], positions.contiguous()
    slices = triton.cdiv(vocab_size, SLICE)
    keys = torch.empty(positions.numel(), slices, dtype=torch.int64, device=logits.device)
    tensors, sizes = (logits, floats, ints, positions, least, keys), logits.shape
    options = {"FILTERED": filtered, "SLICE": SLICE, "num_warps": 4}
    options |= overlap_options(logits.device)
    with on_device(logits):
        _draw_kernel[(len(keys), slices)](*tensors, *sizes, *logits.stride()[:2], **options)
        return choose_slice(keys, positions.shape)
