"""GPTQ (arXiv 2210.17323): integers with zeros, whose inputs may be sorted by size."""

import torch

from specdec.base.errors import CheckpointError
from verifiers.formats.bits import bytes_of, unpacked
from verifiers.formats.format import Format, Parts, Stored, as_number
from verifiers.formats.integers import ALIGNED, check_width, integers, memory_bits, stream
from verifiers.formats.settings import Settings, group_size, integer, word

LAYOUTS = ("gptq", "gptq_v2")
"""In the first one a zero is stored less by one, so that 0 becomes the highest code."""


class Gptq(Format):
    """`quant_method: gptq`.

    `qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32], `scales`
    [groups, out], perhaps `g_idx` [in]. Bits and groups of a module are told by its tensors, as
    some have settings of their own.

    `layout` is that of the zeros; None takes what the config says.

    Raises:
        CheckpointError: other bits, or another layout.
    """

    required = (("qweight",), ("qzeros",), ("scales",))

    def __init__(self, quantization: Settings, layout: str | None = None) -> None:
        bits = integer(quantization, "bits", default=4)
        layout = layout or word(quantization, "checkpoint_format", "format", default="gptq")
        check_width(bits, "GPTQ")
        if layout not in LAYOUTS:
            what = f"GPTQ in layout {layout!r} is not read, but gptq and gptq_v2 are"
            raise CheckpointError(f"{what}; take such a checkpoint")
        self._bits = bits
        self._stored_less_one = layout == LAYOUTS[0]
        group = group_size(quantization, default=128)
        acts = quantization.get("desc_act") is True
        sorts = acts and quantization.get("static_groups") is not True
        packed, widens = group is None or not sorts, bits not in ALIGNED
        super().__init__(memory_bits(bits, group), group=group, stays_packed=packed, widens=widens)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        words, zero_words = parts["qweight"], parts["qzeros"]
        scale = as_number(parts["scales"]).t().float()
        out_features, groups = scale.shape
        bits, rest = self._bits, 0
        if zero_words.shape[-1] != -(-out_features * bits // 32):
            bits, rest = divmod(zero_words.shape[-1] * 32, out_features)
        in_features = words.shape[0] * 32 // max(bits, 1)
        if rest or zero_words.shape[0] != groups or words.shape[1] != out_features:
            raise CheckpointError(
                f"{module!r} has words {list(words.shape)} and zeros {list(zero_words.shape)} for"
                f" {out_features} outputs with {groups} scales each, which do not go together;"
                f" fetch the checkpoint again"
            )
        check_width(bits, repr(module))
        codes = stream(bytes_of(words).transpose(0, 1).flatten(1), bits, in_features, module)
        zeros = unpacked(bytes_of(zero_words).flatten(1), bits, out_features)
        if self._stored_less_one:
            zeros = (zeros + 1) & (2**bits - 1)
        group = self.group or in_features
        if -(-in_features // group) != groups and in_features % groups == 0:
            group = in_features // groups
        return integers(module, codes, scale, zeros.t(), parts.get("g_idx"), bits, group, dtype)
