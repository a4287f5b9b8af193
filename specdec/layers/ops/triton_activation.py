"""Activations in Triton: a function for kernels to call, and one of a joined product in a kernel of
its own.

`specdec.layers.ops.activation` names and defines them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.layers.experts.routing import PLAIN

# As in specdec.layers.ops.activation, which lies above; the tests compare the two.
_LIMIT = tl.constexpr(7.0)
_SLOPE = tl.constexpr(1.702)


@triton.jit
def activate(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The activation called KIND of float32 tiles of one shape; NaN stays NaN. One without a gate
    takes its tile for both.
    """
    tl.static_assert(
        (KIND == "silu")
        | (KIND == "gelu")
        | (KIND == "gelu_tanh")
        | (KIND == "relu")
        | (KIND == "swiglu_oai")
        | (KIND == "relu2"),
        "no such activation",
    )
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(x)) / 2 is the sigmoid of 2x
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif (KIND == "relu") | (KIND == "relu2"):
        gate = tl.where(gate < 0, 0.0, gate)
    elif KIND == "swiglu_oai":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        gate = gate * tl.sigmoid(gate * _SLOPE)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1
    return gate * up


@triton.jit
def _activation_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    await_previous(OVERLAP)
    gate = tl.load(gate_up + row * row_stride + column, mask=exists, other=0.0).to(tl.float32)
    up = gate
    if KIND != "relu2":
        up = tl.load(gate_up + row * row_stride + width + column, mask=exists, other=0.0).to(
            tl.float32
        )
    tl.store(
        output + row * width + column,
        activate(gate, up, KIND).to(output.dtype.element_ty),
        mask=exists,
    )


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """The activation [rows, I] of a joined product [rows, 2 * I], or [rows, I] ungated.

    See `specdec.layers.ops.activation`.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 if activation in PLAIN else 2)
    output = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(width), 1024)
    with on_device(gate_up):
        _activation_kernel[(rows, triton.cdiv(width, block))](
            gate_up,
            output,
            gate_up.stride(0),
            width,
            KIND=activation,
            BLOCK=block,
            num_warps=4,
            **overlap_options(gate_up.device),
        )
    return output
