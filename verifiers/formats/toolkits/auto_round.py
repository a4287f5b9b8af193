"""Checkpoints of Intel's AutoRound, whose tensors are those of GPTQ, of AWQ or of scaled floats."""

import torch

from specdec.base.errors import CheckpointError
from verifiers.formats.awq import Awq
from verifiers.formats.float4 import MX_BITS, MX_GROUP, NV_BITS, NV_GROUP
from verifiers.formats.float8 import SCALES, floats
from verifiers.formats.format import Format, Parts, Stored
from verifiers.formats.gptq import Gptq
from verifiers.formats.lists import Listed
from verifiers.formats.settings import Settings, block_size, integer, section, word, wrong


class AutoRound(Format):
    """`quant_method: auto-round`.

    Layers with bits and groups of their own, in `extra_config`, tell them by their tensors.

    Raises:
        CheckpointError: another packing, or another kind of numbers.
    """

    def __init__(self, quantization: Settings) -> None:
        if any(quantization.get(key) for key in ("rotation_config", "spinquant_config")):
            what = "AutoRound's layers rotate their inputs, which is not read"
            raise CheckpointError(f"{what}; take a checkpoint without rotations")
        kind = word(quantization, "data_type", default="int")
        plain = list[str]()
        for name, settings in section(quantization, "extra_config").items():
            if not isinstance(settings, dict):
                wrong(f"extra_config[{name!r}]", settings, "an object")
            if integer(settings, "bits", default=0) >= 16:
                plain.append(name)
        form = self._form = (
            _integers(quantization) if kind == "int" else _Floats(quantization, kind)
        )
        listed = Listed(plain)
        super().__init__(
            form.bits, listed, group=form.group, stays_packed=form.stays_packed, widens=form.widens
        )
        self.required = form.required

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        return self._form.read(module, parts, dtype)


def _integers(quantization: Settings) -> Format:
    packing = word(quantization, "packing_format", "backend", default="auto_round:auto_gptq")
    if "awq" in packing:
        return Awq({"version": "gemm", **quantization})
    classic = "gptq" in packing and "gptqmodel" not in packing
    return Gptq(quantization, "gptq" if classic else "gptq_v2")


class _Floats(Format):
    """Floats of 8 and 4 bits."""

    required = (("weight", "weight_packed"), SCALES)

    def __init__(self, quantization: Settings, kind: str) -> None:
        if kind == "nvfp4_v2" or not kind.startswith(("nv_fp", "mx_fp", "fp", "nvfp", "mxfp")):
            what = f"AutoRound's {kind} is not read, but int, fp8, nv_fp and mx_fp are"
            raise CheckpointError(f"{what}; take such a checkpoint")
        bits, group = (NV_BITS, NV_GROUP) if "nv" in kind else (MX_BITS, MX_GROUP)
        self._block = None
        if isinstance(quantization.get("group_size"), list | tuple):
            self._block = block_size(quantization, "group_size")
        if integer(quantization, "bits", default=4) == 8:
            bits = 8.0
        own = group if "nv" in kind or "mx" in kind else None
        super().__init__(bits, group=self._block[1] if self._block else own)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        return floats(module, parts, self._block, dtype)
