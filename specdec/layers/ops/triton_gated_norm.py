"""What gates the output of attention and of recurrent layers, in Triton: a norm per head with a
gate, and a sigmoid.

Gates may be columns of a wider product. Arithmetic is float32; numbers are rounded to the model's
type where transformers does it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

BLOCK = 1024
"""Numbers of a program, unless a group of a norm has more."""


@triton.jit
def _gated_norm_kernel(
    x: tl.tensor,  # [T, GROUPS * WIDTH]
    gate: tl.tensor,  # the same
    weight: tl.tensor,  # [WIDTH], or [GROUPS * WIDTH]
    output: tl.tensor,  # like x, contiguous
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    epsilon: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,  # whether groups share the weight
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    TOGETHER: tl.constexpr,  # groups of a program
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    inner = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    exists = (group < GROUPS) & (inner < WIDTH)
    column = group * WIDTH + inner
    dtype = output.dtype.element_ty
    gain = tl.load(
        weight + (inner if SHARED else column), mask=inner < WIDTH if SHARED else exists, other=0.0
    )
    await_previous(OVERLAP)
    wide = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + column, mask=exists, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened) if SIGMOID else opened * tl.sigmoid(opened)
    if GATE_FIRST:
        wide *= opened
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / WIDTH + epsilon)
    scaled = gain.to(tl.float32) * (scaled if SIGMOID else scaled.to(dtype).to(tl.float32))
    if not GATE_FIRST:
        if gain.dtype != tl.float32 and not SIGMOID:  # else the product stays as it is
            scaled = scaled.to(dtype).to(tl.float32)
        scaled *= opened
    tl.store(output + row * (GROUPS * WIDTH) + column, scaled.to(dtype), mask=exists)


@triton.jit
def _sigmoid_gate_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    output: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    dtype = output.dtype.element_ty
    await_previous(OVERLAP)
    opened = tl.load(gate + row * gate_stride + column, mask=exists, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened).to(dtype).to(tl.float32)
    wide = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(output + row * width + column, (wide * opened).to(dtype), mask=exists)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    width: int = 0,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> Tensor:
    """Root mean square norm (arXiv 1910.07467) of every group of columns, such as a head, with
    `silu(gate)` as a factor.

    Args:
        x: [T, groups * V]; rows may be apart.
        gate: the same shape and type; rows may be apart.
        weight: [V] for all groups alike, or [groups * V].
        width: V, if groups do not share the weight; 0 is the weight's size.
        gate_first: the norm sees the gated numbers (Mamba-2), or is gated itself (Gated DeltaNet).
        sigmoid: the factor is `sigmoid(gate)`, rounded only at the end (Kimi Delta Attention).

    Returns:
        [T, groups * V] in the type of `x`, contiguous.
    """
    rows, columns = x.shape
    width = width or len(weight)
    groups = columns // width
    assert groups * width == columns and len(weight) in (width, columns) and weight.is_contiguous()
    assert gate.shape == x.shape and x.stride(1) == gate.stride(1) == 1
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    together = min(max(1, BLOCK // block), triton.next_power_of_2(groups))
    with on_device(x):
        _gated_norm_kernel[(rows, triton.cdiv(groups, together))](
            x,
            gate,
            weight,
            output,
            x.stride(0),
            gate.stride(0),
            epsilon,
            GROUPS=groups,
            WIDTH=width,
            SHARED=len(weight) == width,
            GATE_FIRST=gate_first,
            SIGMOID=sigmoid,
            TOGETHER=together,
            num_warps=max(4, min(16, block // 1024)),
            **overlap_options(x.device),
        )
    return output


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` [T, n], contiguous; rows of both may be apart."""
    rows, width = x.shape
    assert gate.shape == x.shape and gate.dtype == x.dtype and x.stride(1) == gate.stride(1) == 1
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(width), BLOCK)
    with on_device(x):
        _sigmoid_gate_kernel[(rows, triton.cdiv(width, block))](
            x,
            gate,
            output,
            x.stride(0),
            gate.stride(0),
            width,
            BLOCK=block,
            num_warps=4,
            **overlap_options(x.device),
        )
    return output
