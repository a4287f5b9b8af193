"""Checkpoints of compressed-tensors, which llm-compressor writes: several kinds of weights, told by
groups in the config.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from specdec.base.errors import CheckpointError
from verifiers.formats.float4 import MX_GROUP, NV_GROUP
from verifiers.formats.float8 import float8, floats
from verifiers.formats.format import Format, Parts, Stored
from verifiers.formats.integers import (
    ALIGNED,
    byte_integers,
    check_width,
    memory_bits,
    packed_integers,
)
from verifiers.formats.lists import Listed, aliases, expression
from verifiers.formats.settings import (
    Settings,
    block_size,
    group_size,
    integer,
    names,
    section,
    word,
    wrong,
)

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

    Raises:
        CheckpointError: rotated or sparse weights, or settings that no weight can have.
    """

    required = (("weight", "weight_packed"), ("weight_scale",))

    def __init__(self, quantization: Settings) -> None:
        keys = ("sparsity_config", "transform_config")
        parts = [section(quantization, key) for key in keys]
        if any(map(_active, parts)) or quantization.get("format") == "marlin-24":
            what = "its weights are sparse or rotated, which is not read"
            raise CheckpointError(f"{what}; take a checkpoint without")
        schemes = list[Scheme]()
        for name, group in section(quantization, "config_groups").items():
            if not isinstance(group, Mapping):
                wrong(f"config_groups[{name!r}]", group, "an object")
            if weights := section(group, "weights"):
                schemes.append(_scheme(names(group, "targets"), weights))
        first = schemes[0] if schemes else Scheme((), 8, "int", "channel", None, None)
        plain = Listed(names(quantization, "ignore"))
        widens = any(one.bits not in ALIGNED for one in schemes)
        groups = [n for one in schemes for n in (one.group, one.block and one.block[1]) if n]
        bits, group = memory_bits(first.bits, first.group), max(groups, default=None)
        super().__init__(bits, plain, group=group, widens=widens)
        targets = [(target, scheme) for scheme in schemes for target in scheme.targets]
        self._named = dict(reversed(targets))
        self._expressions = [
            (expression(name[3:]), scheme) for name, scheme in targets if name.startswith("re:")
        ]
        self._of_a_class = next((scheme for name, scheme in targets if name[:1].isupper()), None)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        scheme = self._scheme(module)
        if "weight_packed" in parts and scheme.kind == "int":
            return packed_integers(module, parts, scheme.bits, scheme.group, dtype)
        if "weight_packed" in parts:
            if scheme.group != MX_GROUP and "weight_global_scale" not in parts:
                what = f"{module!r} has no weight_global_scale, as NVFP4 has"
                raise CheckpointError(f"{what}; fetch the whole checkpoint again")
            return floats(module, parts, None, dtype)
        weight, scale = parts["weight"], parts["weight_scale"]
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
        """The scheme of a module: one that names it, before one whose expression fits, before one
        for a class.
        """
        own = aliases(module)
        named = next((self._named[name] for name in own if name in self._named), None)
        scheme = named or next(
            (one for fits, one in self._expressions if any(map(fits.match, own))), self._of_a_class
        )
        if scheme is None:
            what = f"{module!r} is quantized but no group of quantization_config has it"
            raise CheckpointError(f"{what}; fetch config.json again")
        return scheme


def _scheme(targets: Sequence[str], weights: Settings) -> Scheme:
    group, block = group_size(weights), block_size(weights, "block_structure")
    strategy = word(weights, "strategy", default="group" if group else "tensor")
    if strategy not in STRATEGIES or (strategy == "block" and block is None):
        what = f"weights share scales by {strategy!r} with blocks {block}"
        raise CheckpointError(f"{what}; {', '.join(STRATEGIES)} are read")
    kind, bits = word(weights, "type", default="int"), integer(weights, "num_bits", default=8)
    if kind == "int":
        check_width(bits, "quantization_config")
    elif bits != 8 and (bits != 4 or group not in (MX_GROUP, NV_GROUP)):
        raise CheckpointError(
            f"it has {kind}s of {bits} bits in groups of {group}, and 8 bits, MXFP4 and NVFP4 are"
            f" read; take such a checkpoint"
        )
    return Scheme(targets, bits, kind, strategy, group, block)


def _active(part: Mapping[str, Any]) -> bool:
    """Whether a config for sparse or rotated weights says anything."""
    return bool(part) and bool(part.get("config_groups") or part.get("format", "dense") != "dense")
