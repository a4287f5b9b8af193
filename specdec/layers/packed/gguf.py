"""Weights as GGUF files store them: rows of ggml's blocks, kept byte by byte until a kernel wants
them in its own order.

ggml describes its blocks in `ggml-common.h`. A block has a scale in half precision, some have a
minimum, and all have codes. One of a "K" type has 256 inputs in groups of 16 or 32, whose scales
and minima are integers that the block's scale and minimum multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.layers.packed.weight import OUTER, Code, PackedWeight, planes, values_of

SLICE_OUTPUTS = 4096
"""Outputs that become numbers at a time."""


class _Numbers(NamedTuple):
    """What blocks say; fields are those of `PackedWeight`, with a byte for each code."""

    codes: Tensor
    scale: Tensor
    group: int
    code: Code
    middle: int = 0
    minimum: Tensor | None = None
    outer: Tensor | None = None


class BlockShape(NamedTuple):
    """What a block of a type is like."""

    inputs: int
    size: int  # bytes
    floats: tuple[int, ...]  # where its scale, and its minimum if it has one, are
    typical: float  # how large the products of codes and integer scales are that random bytes say
    read: Callable[[Tensor], _Numbers]  # of blocks [..., blocks, size]


def _float16(blocks: Tensor, *starts: int) -> Tensor:
    """Numbers [..., blocks, n] at these bytes of blocks."""
    numbers = [blocks[..., start : start + 2] for start in starts]
    return torch.cat(numbers, dim=-1).view(torch.float16)


def _fields(blocks: Tensor, size: int, bits: int) -> Tensor:
    """Codes of `bits` bits: `size` bytes have `size` codes in their lowest bits, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=blocks.device)[:, None]
    return (blocks.unflatten(-1, (-1, 1, size)) >> shifts & 2**bits - 1).flatten(-3)


def _simple(
    code: Code, middle: int, starts: tuple[int, ...], high: int | None, low: int
) -> Callable[[Tensor], _Numbers]:
    """Blocks of 32 inputs: a scale, maybe a minimum, fifth bits, and codes, at these bytes."""

    def read(blocks: Tensor) -> _Numbers:
        codes = blocks[..., low:].contiguous()
        codes = codes.view(torch.int8) if code == "int8" else _fields(codes, 16, 4)
        if high is not None:
            bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
            codes = codes | (blocks[..., high : high + 4, None] >> bits & 1).flatten(-2) << 4
        numbers = _float16(blocks, *starts)
        minimum = -numbers[..., 1] if len(starts) > 1 else None
        return _Numbers(codes.flatten(-2), numbers[..., 0], 32, code, middle, minimum)

    return read


def _read_q4_q5(blocks: Tensor) -> _Numbers:
    """Q4_K, and Q5_K with fifth bits: the scales and minima of eight groups have 6 bits each."""
    fifth = blocks.shape[-1] == 176
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minimum = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    codes = _fields(blocks[..., -128:], 32, 4)
    if fifth:
        codes = codes | _fields(blocks[..., 16:48], 32, 1) << 4
    code: Code = "int5" if fifth else "int4"
    scale, minimum = (numbers.flatten(-2).view(torch.int8) for numbers in (scale, minimum))
    outer = _float16(blocks, 0, 2).flatten(-2)
    return _Numbers(codes.flatten(-2), scale, 32, code, 0, minimum, outer)


def _read_q6(blocks: Tensor) -> _Numbers:
    codes = _fields(blocks[..., :128], 64, 4) | _fields(blocks[..., 128:192], 32, 2) << 4
    scale = blocks[..., 192:208].contiguous().view(torch.int8)
    outer = _float16(blocks, 208).flatten(-2)
    return _Numbers(codes.flatten(-2), scale.flatten(-2), 16, "int6", 32, None, outer)


BLOCK_SHAPES = {
    "Q4_0": BlockShape(32, 18, (0,), 4.6, _simple("int4", 8, (0,), None, 2)),
    "Q4_1": BlockShape(32, 20, (0, 2), 9.0, _simple("int4", 0, (0, 2), None, 4)),
    "Q5_0": BlockShape(32, 22, (0,), 9.0, _simple("int5", 16, (0,), 2, 6)),
    "Q5_1": BlockShape(32, 24, (0, 2), 18.0, _simple("int5", 0, (0, 2), 4, 8)),
    "Q8_0": BlockShape(32, 34, (0,), 74.0, _simple("int8", 0, (0,), None, 2)),
    "IQ4_NL": BlockShape(32, 18, (0,), 68.0, _simple("nl4", 0, (0,), None, 2)),
    "Q4_K": BlockShape(256, 144, (0, 2), 300.0, _read_q4_q5),
    "Q5_K": BlockShape(256, 176, (0, 2), 600.0, _read_q4_q5),
    "Q6_K": BlockShape(256, 210, (208,), 1400.0, _read_q6),
}
"""By ggml's name of the type."""

GGUF_TYPES = tuple(BLOCK_SHAPES)
"""Names of ggml's types that can be multiplied as they are stored."""

PLAIN_TYPES = ("Q4_0", "Q8_0")
"""Types that become codes and scales alone, see `PackedWeight.plain`."""


class Blocks(NamedTuple):
    """Outputs of one type.

    Attributes:
        raw: uint8 [..., out, bytes], as the file has them; leading dimensions are experts.
        kind: ggml's name of the type.
    """

    raw: Tensor
    kind: str


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A weight in ggml's blocks.

    Attributes:
        parts: its outputs, one after another; they may be stored in several types.
        dtype: of rows before and after a product with it.
    """

    parts: tuple[Blocks, ...]
    dtype: torch.dtype

    @classmethod
    def from_blocks(cls, raw: Tensor, kind: str, dtype: torch.dtype) -> GgufWeight:
        """Rows of one type, uint8 [..., out, bytes].

        Raises:
            ValueError: another type than those of `GGUF_TYPES`, or no whole blocks.
        """
        if kind not in BLOCK_SHAPES:
            known = ", ".join(GGUF_TYPES)
            multiplied = "is not multiplied as it is stored; the types that are"
            raise ValueError(f"{kind} {multiplied}: {known}")
        size = BLOCK_SHAPES[kind].size
        if raw.dtype != torch.uint8 or raw.shape[-1] % size:
            row = f"{raw.shape[-1]} {raw.dtype}"
            raise ValueError(f"rows of {row} are no blocks of {kind}, which have {size} bytes")
        return cls((Blocks(raw, kind),), dtype)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Types of its parts."""
        return tuple(kind for _, kind in self.parts)

    @property
    def group(self) -> int:
        """Inputs of the longest block."""
        return max(BLOCK_SHAPES[kind].inputs for kind in self.kinds)

    @property
    def in_features(self) -> int:
        """Inputs of an output."""
        raw, kind = self.parts[0]
        return raw.shape[-1] // BLOCK_SHAPES[kind].size * BLOCK_SHAPES[kind].inputs

    @property
    def out_features(self) -> int:
        """Outputs, of one expert."""
        return sum(raw.shape[-2] for raw, _ in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its numbers, [..., out, in]."""
        return *self.parts[0].raw.shape[:-2], self.out_features, self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(raw.nbytes for raw, _ in self.parts)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.parts[0].raw.device

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers [..., out, in]; see `PackedWeight.dequantized`."""
        dtype = dtype or self.dtype
        numbers = torch.empty(self.shape, dtype=dtype, device=self.device)
        start = 0
        for raw, kind in self.parts:
            for rows in raw.split(SLICE_OUTPUTS, dim=-2):
                end = start + rows.shape[-2]
                numbers[..., start:end, :] = _packed(_read(rows, kind), dtype).dequantized(dtype)
                start = end
        return numbers

    def packed(self) -> PackedWeight:
        """These numbers in the form that kernels read.

        Parts of several types get codes, and groups, that have room for those of each.
        """
        numbers = [_read(raw, kind) for raw, kind in self.parts]
        if len(set(self.kinds)) > 1:
            numbers = _widened(numbers)
        return PackedWeight.joined([_packed(part, self.dtype) for part in numbers])

    def select(self, order: Tensor) -> GgufWeight:
        """The outputs whose numbers are in `order`, int64 [n], in that order, of every expert."""
        assert len(self.parts) == 1, "before `joined`"
        return self._changed(lambda raw: raw.index_select(-2, order))

    def rows(self, start: int, end: int) -> GgufWeight:
        """The outputs from `start` to before `end`, as views."""
        parts, begin = list[Blocks](), 0
        for raw, kind in self.parts:
            part = raw[..., max(start - begin, 0) : max(end - begin, 0), :]
            parts += [Blocks(part, kind)] if part.shape[-2] else []
            begin += raw.shape[-2]
        nothing = Blocks(self.parts[0].raw[..., :0, :], self.parts[0].kind)
        return replace(self, parts=tuple(parts) or (nothing,))

    def inputs(self, start: int, end: int) -> GgufWeight:
        """The inputs from `start` to before `end`, copied; see `divides`."""
        assert self.divides(start) and self.divides(end), "whole blocks"
        parts = []
        for raw, kind in self.parts:
            inputs, size, *_ = BLOCK_SHAPES[kind]
            own = raw[..., start // inputs * size : end // inputs * size].clone()
            parts.append(Blocks(own, kind))
        return replace(self, parts=tuple(parts))

    def divides(self, start: int) -> bool:
        """Whether a part may begin or end at an input: between blocks."""
        return all(start % BLOCK_SHAPES[kind].inputs == 0 for kind in self.kinds)

    def expert(self, number: int) -> GgufWeight:
        """One of the weights along the first axis, as views."""
        return self._changed(lambda raw: raw[number])

    def to(self, target: torch.device | torch.dtype) -> GgufWeight:
        """The weight on that device, or for rows of that type; blocks stay as they are."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        return self._changed(lambda raw: raw.to(target))

    @staticmethod
    def joined(parts: Sequence[GgufWeight]) -> GgufWeight:
        """The outputs of all parts, one after another; neighbors of one type become one part."""
        joined = list[Blocks]()
        for raw, kind in (blocks for part in parts for blocks in part.parts):
            if joined and joined[-1].kind == kind:
                joined[-1] = Blocks(torch.cat([joined[-1].raw, raw], dim=-2), kind)
            else:
                joined.append(Blocks(raw, kind))
        return replace(parts[0], parts=tuple(joined))

    @staticmethod
    def stacked(parts: Sequence[GgufWeight]) -> GgufWeight:
        """Experts of one shape and of the same types, along a new first axis."""
        assert len({part.kinds for part in parts}) == 1, "experts of the same types"
        alike = zip(*(part.parts for part in parts), strict=True)
        stacked = [Blocks(torch.stack([raw for raw, _ in one]), one[0].kind) for one in alike]
        return replace(parts[0], parts=tuple(stacked))

    @staticmethod
    def alike(parts: Sequence[GgufWeight]) -> bool:
        """Whether parts can be joined: they have as many inputs and rows of one type."""
        return len({(part.in_features, part.dtype) for part in parts}) == 1

    def _changed(self, change: Callable[[Tensor], Tensor]) -> GgufWeight:
        return replace(self, parts=tuple(Blocks(change(raw), kind) for raw, kind in self.parts))


def eight_bits(weight: Tensor) -> GgufWeight:
    """The numbers [..., out, in] rounded to Q8_0: 8 bits, with a scale for every 32 inputs.

    >>> eight_bits(torch.tensor([[127.0, -63.4] + 30 * [0.0]])).dequantized()[:, :3]
    tensor([[127., -63.,   0.]])
    """
    groups = weight.detach().float().unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups / scale.float().clamp(min=1e-30)).round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=-1)
    return GgufWeight.from_blocks(blocks.flatten(-2), "Q8_0", weight.dtype)


def _read(raw: Tensor, kind: str) -> _Numbers:
    return BLOCK_SHAPES[kind].read(raw.unflatten(-1, (-1, BLOCK_SHAPES[kind].size)))


def _packed(numbers: _Numbers, dtype: torch.dtype) -> PackedWeight:
    codes, high = planes(numbers.codes, numbers.code)
    return PackedWeight(
        codes, numbers.scale, None, numbers.group, numbers.code, dtype,
        middle=numbers.middle, high=high, minimum=numbers.minimum, outer=numbers.outer,
    )  # fmt: skip


_RANGES: dict[Code, int] = {"int4": 15, "int5": 31, "int6": 63}


def _widened(parts: Sequence[_Numbers]) -> list[_Numbers]:
    """These numbers with one kind of code, middle, group and scale; none is rounded."""
    group, middle = min(part.group for part in parts), 0
    code: Code = "int8"
    if all(part.code in _RANGES for part in parts):
        middle = max(part.middle for part in parts)
        most = middle + max(_RANGES[part.code] - part.middle for part in parts)
        code = next((code for code, end in _RANGES.items() if most <= end), "int8")
    nested = all(part.outer is not None for part in parts)
    minima = any(part.minimum is not None for part in parts)
    widened = []
    for part in parts:
        scale, minimum, outer = part.scale, part.minimum, part.outer
        each = 1 if minimum is None else 2  # scales of 256 inputs
        minimum = torch.zeros_like(scale) if minimum is None else minimum
        if outer is not None and not nested:
            groups = OUTER // part.group
            factors = outer.float().unflatten(-1, (-1, each)).repeat_interleave(groups, dim=-2)
            scale, minimum = scale * factors[..., 0], minimum * factors[..., -1]
        if outer is not None and nested and minima and each == 1:  # scales of minima that are 0
            outer = torch.stack([outer, torch.zeros_like(outer)], dim=-1).flatten(-2)
        codes = values_of(part.codes, part.code, torch.int8) - part.middle + middle
        codes, times = codes if code == "int8" else codes.to(torch.uint8), part.group // group
        scale = scale.repeat_interleave(times, dim=-1)
        least = minimum.repeat_interleave(times, dim=-1) if minima else None
        outer = outer if nested else None
        widened.append(_Numbers(codes, scale, group, code, middle, least, outer))
    return widened


Quantized = PackedWeight | GgufWeight
"""A weight of few bits in any form."""


def alike(parts: Sequence[Quantized]) -> bool:
    """Whether parts can be joined as they are stored."""
    kind: Any = type(parts[0])
    return all(type(part) is kind for part in parts) and bool(kind.alike(parts))


def joined(parts: Sequence[Quantized]) -> Quantized:
    """The outputs of all parts, one after another; see `alike`."""
    kind: Any = type(parts[0])
    whole: Quantized = kind.joined(parts)
    return whole
