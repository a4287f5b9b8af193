"""Gated activations in Triton, for kernels to call; `specdec.layers.activation` names and defines them."""

import triton
import triton.language as tl

# As in specdec.layers.activation, which lies above; the tests compare the two.
_LIMIT = tl.constexpr(7.0)
_SLOPE = tl.constexpr(1.702)


@triton.jit
def activate(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The activation called KIND of float32 tiles of one shape; NaN stays NaN."""
    tl.static_assert(
        (KIND == "silu") | (KIND == "gelu") | (KIND == "gelu_tanh") | (KIND == "relu") | (KIND == "swiglu_oai"),
        "no such activation",
    )
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(x)) / 2 is the sigmoid of 2x
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == "relu":
        gate = tl.where(gate < 0, 0.0, gate)
    elif KIND == "swiglu_oai":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        gate = gate * tl.sigmoid(gate * _SLOPE)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1
    return gate * up
