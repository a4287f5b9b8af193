"""Checkpoints of bitsandbytes: blocks of codes that a table turns into numbers (arXiv 2305.14314),
and rows of 8-bit integers.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from verifiers.formats.format import Format, Parts, Stored, as_number
from verifiers.formats.integers import byte_integers, memory_bits
from verifiers.formats.lists import Listed
from verifiers.formats.settings import Settings, names

LARGEST = 127
"""Code of a row's largest number in 8 bits."""

TABLES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
"""Parts that hold the settings of a 4-bit weight, as JSON in bytes."""


class BitsAndBytes(Format):
    """`quant_method: bitsandbytes`, 4 bits (`nf4`, `fp4`) or 8 bits.

    In 4 bits `weight` has two codes to a byte, the first in the high half, row by row, and
    `weight.absmax` has a scale for each block of them. Scales may be codes themselves, with a table
    and scales of their own. In 8 bits `SCB` has the largest number of each row of `weight`. Only
    the 8 bits stay packed: our kernels have no such tables.
    """

    required = (("weight",), ("SCB", "weight.absmax"))

    def __init__(self, quantization: Settings) -> None:
        eight = quantization.get("load_in_8bit") is True
        plain = Listed(names(quantization, "llm_int8_skip_modules"))
        super().__init__(memory_bits(8, None) if eight else 4.5, plain, stays_packed=eight)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        if "SCB" in parts:
            if parts["weight"].dtype != torch.int8:
                what = f"{module!r} has rows of {parts['weight'].dtype}, not int8"
                raise CheckpointError(f"{what}; fetch the checkpoint again")
            scale = as_number(parts["SCB"]).float() / LARGEST
            return byte_integers(module, {**parts, "weight_scale": scale}, None, dtype)
        state = _State.of(module, parts)
        scales = parts["weight.absmax"]
        if "weight.nested_absmax" in parts:
            nested = as_number(parts["weight.nested_quant_map"]).float()[scales.flatten().long()]
            factors = as_number(parts["weight.nested_absmax"]).float()
            scales = _scaled(module, nested, factors, state.nested_block) + state.nested_offset
        pairs = parts["weight"].view(torch.uint8).flatten()
        codes, count = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(), state.shape.numel()
        if codes.numel() != count + count % 2:
            what = f"{module!r} holds {codes.numel()} codes for {list(state.shape)}"
            raise CheckpointError(f"{what}; fetch the checkpoint again")
        values = as_number(parts["weight.quant_map"]).float()[codes[:count].long()]
        return _scaled(module, values, scales.float().flatten(), state.block).view(state.shape)


class _State(NamedTuple):
    """Settings of a 4-bit weight."""

    shape: torch.Size
    block: int
    nested_block: int
    nested_offset: float

    @staticmethod
    def of(module: str, parts: Parts) -> "_State":
        """The state among the parts of a module."""
        stored = next((parts[name] for name in TABLES if name in parts), None)
        scales, table = parts["weight.absmax"], parts.get("weight.quant_map")
        names = ("weight.nested_absmax", "weight.nested_quant_map")
        nested = [parts[name] for name in names if name in parts]
        fits = not nested and scales.is_floating_point()
        if scales.dtype == torch.uint8:
            fits = len(nested) == 2 and nested[1].numel() == 256
        if stored is None or table is None or table.numel() != 16 or not fits:
            what = f"{module!r} has {', '.join(sorted(parts))} but no whole state"
            raise CheckpointError(f"{what}; fetch the whole checkpoint again")
        try:
            entries: dict[str, Any] = json.loads(bytes(stored.flatten().tolist()))
            shape = torch.Size(entries["shape"])
            block = int(entries["blocksize"])
            nested_block = int(entries.get("nested_blocksize", 256))
            if len(shape) != 2 or min(*shape, block, nested_block) <= 0:
                raise ValueError(f"{entries} has no sizes of a matrix")
            return _State(shape, block, nested_block, float(entries.get("nested_offset", 0)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"the state of {module!r} is none of bitsandbytes"
            raise CheckpointError(f"{what}; fetch the checkpoint again") from error


def _scaled(module: str, values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Numbers in blocks, each times the scale of its block."""
    if scales.numel() != -(-values.numel() // block):
        raise CheckpointError(
            f"{module!r} has {scales.numel()} scales for {values.numel()} numbers in blocks of"
            f" {block}; fetch the checkpoint again"
        )
    return values * scales.repeat_interleave(block)[: values.numel()]
