"""Checkpoints of AMD's Quark: floats of 8 and 4 bits and integers."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from specdec.base.errors import CheckpointError
from verifiers.formats.awq import in_order
from verifiers.formats.bits import bytes_of, halves, paired
from verifiers.formats.float4 import MX_BITS, MX_GROUP, NV_BITS, NV_GROUP
from verifiers.formats.float8 import BLOCK, floats
from verifiers.formats.format import Format, Parts, Stored, as_number
from verifiers.formats.integers import byte_integers, integers, memory_bits
from verifiers.formats.lists import Listed, aliases
from verifiers.formats.settings import Settings, block_size, group_size, names, section, word, wrong

SCALED = {"per_tensor", "per_channel", "per_group", "per_block"}
"""What shares a scale."""


class Scheme(NamedTuple):
    """How the weights of some modules are quantized."""

    kind: str  # "fp8_e4m3", "fp4", "int4", "uint4" or "int8"
    shared: str  # one of `SCALED`
    group: int | None
    block: tuple[int, int] | None

    @property
    def bits(self) -> float:
        """Bits of a number, with its part of a scale."""
        if self.kind == "fp4":
            return MX_BITS if self.group == MX_GROUP else NV_BITS
        if self.kind == "fp8_e4m3":
            return 8.0
        return memory_bits(4 if self.kind.endswith("int4") else 8, self.group)


class Quark(Format):
    """`quant_method: quark`: `weight` and `weight_scale`, perhaps `weight_zero_point` or, of NVFP4,
    `weight_scale_2`.

    Raises:
        CheckpointError: weights of another kind, such as were exported in plain numbers, or inputs
            that layers have to rotate.
    """

    required = (("weight",), ("weight_scale",))

    def __init__(self, quantization: Settings) -> None:
        export = section(quantization, "export")
        if word(export, "weight_format", default="real_quantized") != "real_quantized":
            what = "Quark's weights are not real_quantized, which alone is read"
            raise CheckpointError(f"{what}; take such a checkpoint")
        _check_rotation(quantization.get("algo_config"))
        self._reordered = word(export, "pack_method", default="reorder") == "reorder"
        everywhere = _scheme("global_quant_config", quantization.get("global_quant_config"))
        types = dict(_schemes(quantization, "layer_type_quant_config"))
        of_linear = (scheme for name, scheme in types.items() if name.endswith("Linear"))
        self._common = next(of_linear, everywhere)
        self._layers = list(_schemes(quantization, "layer_quant_config"))
        schemes = [one for one in (self._common, *dict(self._layers).values()) if one is not None]
        groups = [scheme.block[1] for scheme in schemes if scheme.block]
        plain = Listed(names(quantization, "exclude"))
        bits = schemes[0].bits if schemes else 8.0
        super().__init__(bits, plain, group=max(groups, default=None))

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        weight, scheme = parts["weight"], self._scheme(module)
        if weight.dtype == torch.int8:
            return byte_integers(module, parts, None, dtype)
        if weight.dtype == torch.int32 and scheme is not None:
            return self._four_bits(module, parts, scheme, dtype)
        return floats(module, parts, None if scheme is None else scheme.block, dtype)

    def _four_bits(self, module: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> Stored:
        """Integers packed along the outputs and lying [in, out] if groups share scales, else along
        the inputs.
        """
        grouped, sign = scheme.shared == "per_group", 8 if scheme.kind == "int4" else 0

        def unpacked(words: torch.Tensor) -> torch.Tensor:
            inner = in_order(words) if self._reordered else halves(bytes_of(words)).flatten(-2)
            return (inner ^ sign).t() if grouped else inner ^ sign

        codes, zeros = unpacked(parts["weight"]), parts.get("weight_zero_point")
        scale = as_number(parts["weight_scale"]).float()
        scale = scale.t() if grouped and scale.ndim == 2 else scale
        if zeros is not None:
            lone = not zeros.ndim
            zeros = zeros[None] ^ sign if lone else unpacked(zeros.reshape(-1, zeros.shape[-1]))
            if not grouped and scale.numel() > 1:
                zeros = zeros.flatten()[: codes.shape[0], None]
        group = scheme.group if grouped and scheme.group else codes.shape[1]
        return integers(module, paired(codes.contiguous()), scale, zeros, None, 4, group, dtype)

    def _scheme(self, module: str) -> Scheme | None:
        """The scheme of a module: of its name or pattern, else of its class, else of all."""
        own = aliases(module)
        return next(
            (one for name, one in self._layers if any(fnmatchcase(alias, name) for alias in own)),
            self._common,
        )


def _check_rotation(algorithms: object) -> None:
    """Rotations that were multiplied into weights on both sides are none; Hadamard's of
    `down_proj`, R4, leaves no tensor.
    """
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if algorithm is None:
            continue
        if not isinstance(algorithm, Mapping):
            wrong("algo_config", algorithm, "a list of objects")
        named = algorithm.get("name") in ("rotation", "quarot")
        rotates = named and algorithm.get("r4") is not False
        if rotates or any(
            algorithm.get(key) for key in ("r4", "online_r1_rotation", "online_config")
        ):
            what = "Quark's layers rotate their inputs, which is not read"
            raise CheckpointError(f"{what}; take a checkpoint without rotations")


def _schemes(quantization: Settings, key: str) -> Iterator[tuple[str, Scheme | None]]:
    for name, settings in section(quantization, key).items():
        yield name, _scheme(f"{key}[{name!r}]", settings)


def _scheme(where: str, settings: object) -> Scheme | None:
    """What a part of the config says of weights; None where it leaves them alone."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        wrong(where, settings, "an object")
    stated = settings.get("weight")
    steps = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(isinstance(step, Mapping) for step in steps):
        wrong(f"{where}.weight", stated, "an object or a list of them")
    if not steps:
        return None
    kinds = [word(step, "dtype") for step in steps]
    shared = word(steps[0], "qscheme", default="per_tensor")
    block = block_size(steps[0], "block_size") or (BLOCK if shared == "per_block" else None)
    group = group_size(steps[0]) if shared == "per_group" else None
    block = (1, group) if group else block
    nvfp4 = kinds == ["fp4", "fp8_e4m3"] and group == NV_GROUP
    mxfp4 = kinds == ["fp4"] and group == MX_GROUP
    other = len(kinds) == 1 and kinds[0] in ("fp8_e4m3", "int4", "uint4", "int8")
    if not (nvfp4 or mxfp4 or other) or shared not in SCALED:
        raise CheckpointError(
            f"Quark's {' of '.join(reversed(kinds))} weights with scales {shared}, groups of"
            f" {group}, are not read, but fp8_e4m3,"
            " MXFP4, NVFP4, int4, uint4 and int8 are; take such a checkpoint"
        )
    return Scheme(kinds[0], shared, group, block)
