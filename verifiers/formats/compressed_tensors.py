"""Checkpoints of compressed-tensors, which llm-compressor writes: several kinds of weights, told by groups in the config."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from specdec.errors import CheckpointError
from verifiers.formats.float4 import MX_GROUP, NV_GROUP, float4, nvfp4
from verifiers.formats.float8 import float8
from verifiers.formats.format import Format, Parts, Stored
from verifiers.formats.integers import byte_integers, packed_integers
from verifiers.formats.lists import aliases, matches, name_or_expression

STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
"""What shares a scale."""


class Scheme(NamedTuple):
    """How some modules are quantized."""

    targets: Sequence[str]  # names, expressions after "re:", or classes such as "Linear"
    bits: int
    kind: str  # "int" or "float"
    strategy: str
    group: int | None
    block: tuple[int, int] | None


class CompressedTensors(Format):
    """`quant_method: compressed-tensors`.

    Args:
        quantization: the config's `quantization_config`.

    Raises:
        CheckpointError: rotated or sparse weights, or settings that no weight can have.
    """

    required = (("weight", "weight_packed"), ("weight_scale",))

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        if any(map(_active, (quantization.get("sparsity_config"), quantization.get("transform_config")))):
            raise CheckpointError("its weights are sparse or rotated, which is not read; take a checkpoint without")
        self._plain: Sequence[str] = quantization.get("ignore") or ()
        groups = (quantization.get("config_groups") or {}).values()
        self._schemes = [_scheme(group["targets"], group["weights"]) for group in groups if group.get("weights")]

    def lists_as_plain(self, module: str) -> bool:
        return matches(module, self._plain, name_or_expression)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        scheme = self._scheme(module)
        packed, scale = parts.get("weight_packed"), parts["weight_scale"]
        if packed is not None and scheme.kind == "float":
            if scheme.group == MX_GROUP:
                return float4(module, packed, scale, MX_GROUP, dtype)
            if scheme.group != NV_GROUP or "weight_global_scale" not in parts:
                raise CheckpointError(f"4-bit floats of {module!r} have groups of {scheme.group}; MXFP4 and NVFP4 are read")
            return nvfp4(module, packed, scale, 1 / parts["weight_global_scale"].float(), dtype)
        if packed is not None:
            return packed_integers(module, parts, scheme.bits, scheme.group, dtype)
        weight = parts["weight"]
        if weight.dtype == torch.int8:
            return byte_integers(module, parts, scheme.group, dtype)
        out_features, in_features = weight.shape[-2:]
        rows, columns = {
            "tensor": (out_features, in_features),
            "channel": (1, in_features),
            "block": scheme.block or (0, 0),
        }.get(scheme.strategy, (1, scheme.group or in_features))
        return float8(module, weight, scale, (rows, columns), dtype)

    def _scheme(self, module: str) -> Scheme:
        """The scheme of a module: one that names it, before one whose expression fits, before one for a class."""
        names = aliases(module)
        for fits in (
            lambda target: target in names,
            lambda target: target.startswith("re:") and any(name_or_expression(name, target) for name in names),
            lambda target: target[:1].isupper(),
        ):
            for scheme in self._schemes:
                if any(map(fits, scheme.targets)):
                    return scheme
        raise CheckpointError(f"{module!r} is quantized but no group of quantization_config has it; fetch config.json again")


def _scheme(targets: Sequence[str], weights: Mapping[str, Any]) -> Scheme:
    group, block = weights.get("group_size"), weights.get("block_structure")
    group = group if group and group > 0 else None
    strategy = weights.get("strategy") or ("group" if group else "tensor")
    if strategy not in STRATEGIES or (strategy == "block" and (not block or len(block) != 2)):
        raise CheckpointError(f"weights share scales by {strategy!r} with blocks {block}; {', '.join(STRATEGIES)} are read")
    kind = str(weights.get("type", "int"))
    return Scheme(targets, int(weights.get("num_bits", 8)), kind, strategy, group, (block[0], block[1]) if block else None)


def _active(part: Any) -> bool:
    """Whether a config for sparse or rotated weights says anything."""
    return bool(part) and bool(part.get("config_groups") or part.get("format", "dense") != "dense")
