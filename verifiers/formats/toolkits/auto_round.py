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

    Args:
        quantization: the config's `quantization_config`.

    Raises:
        CheckpointError: another packing, or another kind of numbers.
    """

    def __init__(self, quantization: Settings) -> None:
        if any(quantization.get(key) for key in ("rotation_config", "spinquant_config")):
            raise CheckpointError(
                "AutoRound's layers rotate their inputs, which is not read; take a checkpoint"
                " without rotations"
            )
        packing = word(quantization, "packing_format", "backend", default="auto_round:auto_gptq")
        kind = word(quantization, "data_type", default="int")
        integral = kind == "int"
        self._form: Format | None = None
        self._block = None
        if integral:
            own = {"version": "gemm", **quantization} if "awq" in packing else quantization
            classic = "gptq" in packing and "gptqmodel" not in packing
            self._form = (
                Awq(own) if "awq" in packing else Gptq(own, "gptq" if classic else "gptq_v2")
            )
        elif kind == "nvfp4_v2" or not kind.startswith(("nv_fp", "mx_fp", "fp", "nvfp", "mxfp")):
            raise CheckpointError(
                f"AutoRound's {kind} is not read, but int, fp8, nv_fp and mx_fp are; take such a"
                f" checkpoint"
            )
        elif isinstance(quantization.get("group_size"), list | tuple):
            self._block = block_size(quantization, "group_size")
        plain = list[str]()
        for name, settings in section(quantization, "extra_config").items():
            if not isinstance(settings, dict):
                wrong(f"extra_config[{name!r}]", settings, "an object")
            if integer(settings, "bits", default=0) >= 16:
                plain.append(name)
        bits = (
            8.0
            if integer(quantization, "bits", default=4) == 8
            else NV_BITS
            if "nv" in kind
            else MX_BITS
        )
        form = self._form
        packed, widens = form is None or form.stays_packed, form is not None and form.widens
        group = (
            self._block[1]
            if self._block
            else NV_GROUP
            if "nv" in kind
            else MX_GROUP
            if "mx" in kind
            else None
        )
        bits, group = (form.bits, form.group) if form else (bits, group)
        super().__init__(bits, Listed(plain), group=group, stays_packed=packed, widens=widens)
        self.required = self._form.required if self._form else (("weight", "weight_packed"), SCALES)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        return (
            self._form.read(module, parts, dtype)
            if self._form
            else floats(module, parts, self._block, dtype)
        )
