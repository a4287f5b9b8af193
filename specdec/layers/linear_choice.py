"""Which layer multiplies with a weight, by how it is stored and where."""

from torch import Tensor

from specdec.layers.linear import BlockedLinear, DenseLinear, Linear, can_block
from specdec.layers.packed.cpu import GgufLinear, multiplies, multiplies_in
from specdec.layers.packed.gguf import GgufWeight, Quantized, eight_bits
from specdec.layers.packed.linear import PackedLinear
from specdec.layers.packed.weight import PackedWeight


def linear(weight: Tensor | Quantized, bias: Tensor | None = None) -> Linear:
    """The layer that this machine runs fastest.

    Args:
        weight: [out, in]; packed, or on a CPU in bfloat16, it may be released once the layer
            exists. It gets no gradient. A packed one stays so on accelerators, and in ggml's blocks
            where a CPU multiplies these; otherwise it becomes numbers here.
        bias: [out], or None.
    """
    if isinstance(weight, PackedWeight | GgufWeight):
        if isinstance(weight, GgufWeight) and multiplies(weight):
            return GgufLinear(weight, bias)
        if weight.device.type != "cpu":
            packed = weight.packed() if isinstance(weight, GgufWeight) else weight
            return PackedLinear(packed, bias)
        weight = weight.dequantized()
    if not can_block(weight):
        return DenseLinear(weight, bias)
    return BlockedLinear(weight, bias)


def drafting_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The layer of a drafter, whose numbers decide how many drafts are accepted and nothing else:
    `linear`, with 8 bits for a number on a CPU in bfloat16, which reads them in half the time.
    """
    rounds = weight.device.type == "cpu" and weight.shape[-1] % 32 == 0
    return linear(eight_bits(weight) if rounds and multiplies_in(weight.dtype) else weight, bias)
