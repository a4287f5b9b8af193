"""Activations of feed-forward layers, by name, in plain torch;
`specdec.layers.ops.triton_activation` is the same in a kernel.

    silu         `silu(gate) * up`: Llama, Qwen and most others
    gelu         `gelu(gate) * up`, exact
    gelu_tanh    the same in its tanh approximation: Gemma
    relu         `relu(gate) * up`
    swiglu_oai   gpt-oss: both sides bounded by 7, a steeper sigmoid, and one added to `up`
    relu2        `relu(up) ** 2`, without a gate (arXiv 2109.08668): Nemotron-H

All but the last two are among the GLU variants of arXiv 2002.05202.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from specdec.layers.experts.routing import PLAIN

LIMIT = 7.0
"""Bound of swiglu_oai: of gate from above, of up from both sides."""
SLOPE = 1.702
"""Factor in the sigmoid of swiglu_oai."""


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=LIMIT)
    return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * (gate * SLOPE).sigmoid())


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate).mul_(up),
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: F.relu(gate) * up,
    "swiglu_oai": _swiglu_oai,
}

ACTIVATIONS = tuple(_FUNCTIONS)
"""Activations with a gate; `PLAIN` has the others."""


def activate(product: Tensor, kind: str) -> Tensor:
    """The activation of a product, in its type.

    Args:
        product: [..., 2 * I], gate and then up, or [..., I] where `kind` has no gate.
        kind: one of `ACTIVATIONS` or `PLAIN`.

    Returns:
        [..., I].

    >>> import torch
    >>> activate(torch.tensor([-1.0, 3.0]), "relu2")
    tensor([0., 9.])
    """
    if kind in PLAIN:
        return F.relu(product).square_()
    gate, up = product.chunk(2, dim=-1)
    return gated(gate, up, kind)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """The activation of two tensors of one shape, in their type.

    Args:
        gate, up: equal shapes.
        kind: one of `ACTIVATIONS`.

    >>> import torch
    >>> gated(torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 3.0]), "relu")
    tensor([0., 6.])
    """
    return _FUNCTIONS[kind](gate, up)
