"""Checkpoints of NVIDIA's ModelOpt: floats of 8 and 4 bits and integers, told apart by tensors."""

import torch

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from verifiers.formats.bits import halves, paired
from verifiers.formats.float4 import MX_BITS, MX_GROUP, NV_BITS, NV_GROUP
from verifiers.formats.float8 import BLOCK, floats
from verifiers.formats.format import Format, Parts, Stored, as_number
from verifiers.formats.integers import byte_integers, integers, memory_bits
from verifiers.formats.lists import Listed
from verifiers.formats.settings import Settings, group_size, names, section, word

ALGORITHMS = {
    **dict.fromkeys(
        ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_block_scales", "mxfp8"), 8.0
    ),
    **dict.fromkeys(
        ("nvfp4", "w4a16_nvfp4", "nvfp4_awq", "w4a8_nvfp4_fp8", "mixed_precision"), NV_BITS
    ),
    **dict.fromkeys(("w4a16_mxfp4", "w4a8_mxfp4_fp8"), MX_BITS),
    **dict.fromkeys(("w4a16_awq", "w4a8_awq"), memory_bits(4, 128)),
    **dict.fromkeys(("w8a16", "w8a8_sq_per_channel"), memory_bits(8, None)),
}
"""What is read, with its bits of a number."""

SCALED_INPUTS = ("nvfp4_awq", "w4a16_awq", "w4a8_awq", "w8a8_sq_per_channel")
"""Algorithms whose layers may have factors of their inputs, which belong to the weight here: no
packed form of ours has them.
"""


class ModelOpt(Format):
    """`quant_method: modelopt` and its variants, or the `quantization` of `hf_quant_config.json`.

    Raises:
        CheckpointError: another algorithm.
    """

    required = (("weight",), ("weight_scale",))

    def __init__(self, quantization: Settings) -> None:
        quantization = section(quantization, "quantization") or quantization
        algorithm = word(quantization, "quant_algo", default="nvfp4")
        if algorithm not in ALGORITHMS:
            known = ", ".join(name.upper() for name in ALGORITHMS)
            what = f"ModelOpt's {algorithm.upper()} is not read, but {known} are"
            raise CheckpointError(f"{what}; take such a checkpoint")
        plain, size = Listed(names(quantization, "exclude_modules", "ignore")), None
        if "_pb_" in algorithm or "block" in algorithm:
            size = group_size(quantization, default=BLOCK[0])
        self._block = (size, size) if size else None
        bits = ALGORITHMS[algorithm]
        own = MX_GROUP if algorithm == "mxfp8" else size
        group = {NV_BITS: NV_GROUP, MX_BITS: MX_GROUP}.get(bits, own)
        super().__init__(bits, plain, group=group, stays_packed=algorithm not in SCALED_INPUTS)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        weight, scale = parts["weight"], parts["weight_scale"]
        if scale.ndim == 4:  # [rows of blocks, 1, columns of blocks, 1]
            parts = {**parts, "weight_scale": scale.squeeze(3).squeeze(1)}
        if weight.dtype == torch.int8:
            stored: Stored = byte_integers(module, parts, None, dtype)
        elif (
            weight.dtype == torch.uint8
            and scale.ndim == 2
            and scale.shape[0] == 2 * weight.shape[0]
        ):
            codes = paired(halves(weight.t()).t() ^ 8)  # a byte has two outputs, as signed halves
            group = 2 * codes.shape[1] // max(scale.shape[1], 1)
            stored = integers(module, codes, as_number(scale), None, None, 4, group, dtype)
        else:
            stored = floats(module, parts, self._block, dtype)
        if "pre_quant_scale" not in parts:
            return stored
        numbers = stored.dequantized(torch.float32) if isinstance(stored, Quantized) else stored
        factors = as_number(parts["pre_quant_scale"]).float().reshape(-1)
        if len(factors) != numbers.shape[-1]:
            what = f"{module!r} has {len(factors)} factors for {numbers.shape[-1]} inputs"
            raise CheckpointError(f"{what}; fetch the checkpoint again")
        return numbers * factors
