"""Weights of few bits as data: codes, scales that groups of inputs share, and the order in which kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Code = Literal["e4m3", "int8", "int4", "e2m1"]
"""How a code is read: an 8-bit float, a signed byte, an unsigned half of a byte, or a 4-bit float (0, .5, 1, 1.5, 2, 3, 4, 6)."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `scale * (value of code - middle - zero)`, in groups of inputs of one output.

    Formats with wider blocks, such as 128 x 128, repeat a scale for each output: a few per cent of the codes, and every format is
    then read by one kernel and joined with others output by output.

    Attributes:
        codes: of whole bytes [..., out, in], as float8_e4m3fn or int8; of halves uint8 [..., out, in / 2], where byte `j` holds
            the code of input `2j` in its low half and of input `2j + 1` in its high half. Leading dimensions are experts.
        scale: [..., out, groups], a float; group `g` has the inputs from `g * group` on, the last one maybe fewer.
        zero: like `scale`, or None.
        group: inputs of a group.
        code: how a code is read.
        dtype: of rows before and after a product with it.
        run: in which order codes lie. Two bytes are a word of two or four codes, the lowest bits first. The words of every `run`
            times as many inputs hold the first `run` of them as their first codes, the next as their second ones, and so on.
        padding: inputs that `codes` has at the end of a row beyond those that there are.
        middle: a zero that all groups share.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    code: Code
    dtype: torch.dtype
    run: int = 1
    padding: int = 0
    middle: int = 0

    def __post_init__(self) -> None:
        groups = -(-self.in_features // self.group)
        if self.scale.shape != (*self.codes.shape[:-1], groups):
            raise ValueError(f"scales are {list(self.scale.shape)} for {groups} groups of outputs {list(self.codes.shape[:-1])}")
        if self.zero is not None and self.zero.shape != self.scale.shape:
            raise ValueError(f"zeros are {list(self.zero.shape)} for scales {list(self.scale.shape)}")

    @property
    def halves(self) -> bool:
        """Whether a byte holds two codes."""
        return self.code in ("int4", "e2m1")

    @property
    def in_features(self) -> int:
        """Inputs of an output."""
        return self.codes.shape[-1] * (1 + self.halves) - self.padding

    @property
    def out_features(self) -> int:
        """Outputs, of one expert."""
        return self.codes.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its numbers, [..., out, in]."""
        return *self.codes.shape[:-1], self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers [..., out, in], computed in float32 or wider and rounded once to `dtype`, by default the weight's."""
        dtype = dtype or self.dtype
        wide = torch.promote_types(dtype, torch.float32)
        values = _values(self.codes, self.code, self.run, wide)[..., : self.in_features]

        def spread(numbers: Tensor) -> Tensor:
            return numbers.to(wide).repeat_interleave(self.group, dim=-1)[..., : self.in_features]

        values = values - self.middle if self.middle else values
        values = values if self.zero is None else values - spread(self.zero)
        return (values * spread(self.scale)).to(dtype)

    def select(self, order: Tensor) -> PackedWeight:
        """The outputs whose numbers are in `order`, int64 [n], in that order, of every expert."""
        zero = None if self.zero is None else self.zero.index_select(-2, order)
        codes = _bytes(self.codes).index_select(-2, order).view(self.codes.dtype)
        return replace(self, codes=codes, scale=self.scale.index_select(-2, order), zero=zero)

    def rows(self, start: int, end: int) -> PackedWeight:
        """The outputs from `start` to before `end`, as views."""
        zero = None if self.zero is None else self.zero[..., start:end, :]
        return replace(self, codes=self.codes[..., start:end, :], scale=self.scale[..., start:end, :], zero=zero)

    def inputs(self, start: int, end: int) -> PackedWeight:
        """The inputs from `start` to before `end`, copied, so that the others need not be kept; see `divides`."""
        assert self.run == 1 and self.divides(start) and self.divides(end), "whole groups, before `arranged`"
        last = end == self.in_features
        codes = slice(start // (1 + self.halves), None if last else end // (1 + self.halves))
        groups = slice(None) if self.group >= self.in_features else slice(start // self.group, -(-end // self.group))
        zero = None if self.zero is None else self.zero[..., groups].clone()
        own = _bytes(self.codes)[..., codes].clone(memory_format=torch.contiguous_format).view(self.codes.dtype)
        padding = self.padding if last else 0
        return replace(self, codes=own, scale=self.scale[..., groups].clone(), zero=zero, padding=padding)

    def divides(self, start: int) -> bool:
        """Whether a part may begin or end at an input: between bytes, and between groups unless one has all inputs."""
        whole = self.group >= self.in_features
        return start in (0, self.in_features) or (start % (1 + self.halves) == 0 and (whole or start % self.group == 0))

    def expert(self, number: int) -> PackedWeight:
        """One of the weights along the first axis, as views."""
        zero = None if self.zero is None else self.zero[number]
        return replace(self, codes=self.codes[number], scale=self.scale[number], zero=zero)

    def to(self, target: torch.device | torch.dtype) -> PackedWeight:
        """The same on that device, or for rows of that type; codes stay as they are."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        zero = None if self.zero is None else self.zero.to(target)
        return replace(self, codes=self.codes.to(target), scale=self.scale.to(target), zero=zero)

    @staticmethod
    def joined(parts: Sequence[PackedWeight]) -> PackedWeight:
        """The outputs of all parts, one after another; see `alike`."""
        return _combined(parts, lambda tensors: torch.cat(tensors, dim=-2))

    @staticmethod
    def stacked(parts: Sequence[PackedWeight]) -> PackedWeight:
        """Experts of one shape, along a new first axis; see `alike`."""
        return _combined(parts, torch.stack)

    @staticmethod
    def alike(parts: Sequence[PackedWeight]) -> bool:
        """Whether parts are stored in one way, so that they can be joined."""
        return len({(x.in_features, x.group, x.code, x.dtype, x.run, x.padding, x.middle) for x in parts}) == 1

    def arranged(self) -> PackedWeight:
        """The same as kernels read it, once for good; it has to look at numbers, so the host waits.

        Neighboring words hold neighboring inputs of one group, and rows are padded. Scales are in half precision if none is
        rounded by it. A zero that all groups share is a number.
        """
        run = run_of(self.group, self.in_features, self.halves)
        zero, middle = self.zero, self.middle
        if zero is not None and self.code == "int4":
            first = float(zero.flatten()[0])
            if first in range(16) and bool((zero == first).all()):
                zero, middle = None, middle + int(first)
        numbers = replace(self, scale=_narrow(self.scale), zero=None if zero is None else _narrow(zero), middle=middle)
        if run is None or self.run > 1:
            return replace(numbers, codes=self.codes.contiguous())
        padding = -self.in_features % (run * (4 if self.halves else 2))
        codes = _rearranged(_bytes(self.codes), self.halves, run, padding).view(self.codes.dtype)
        return replace(numbers, codes=codes, run=run, padding=padding)


def run_of(group: int, inputs: int, halves: bool) -> int | None:
    """Neighboring words with neighboring inputs, of which kernels want 16 at least; None for groups that 16 does not divide.

    >>> [run_of(group, 4096, True) for group in (16, 32, 64, 128, 256, 48, 20, 4096, 5000)]
    [16, 32, 32, 32, 32, 16, None, 32, 32]
    >>> [run_of(group, 4096, False) for group in (16, 32, 64, 128, 4096)]
    [16, 32, 64, 64, 64]
    >>> [run_of(32, inputs, True) for inputs in (2880, 160, 64)]
    [32, 16, 16]
    """
    count = 4 if halves else 2
    whole = group >= inputs
    runs = [run for run in (64, 32, 16) if run * count <= 128 and (whole or group % run == 0)]
    # Long ones make larger products, short ones less padding.
    return next((run for run in runs if -inputs % (run * count) <= inputs // 8), runs[-1] if runs else None)


def _bytes(codes: Tensor) -> Tensor:
    """What operations on the codes go through: few are written for 8-bit floats."""
    return codes.view(torch.uint8)


def _values(codes: Tensor, code: Code, run: int, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for, in the order of their inputs."""
    if code in ("e4m3", "int8"):
        return (codes if run == 1 else codes.unflatten(-1, (-1, run, 2)).mT.flatten(-3)).to(dtype)
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    numbers = numbers if run == 1 else numbers.unflatten(-1, (-1, run, 4)).mT.flatten(-3)
    if code == "int4":
        return numbers.to(dtype)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device=codes.device)
    return table[numbers.int()]


def _rearranged(codes: Tensor, halves: bool, run: int, padding: int) -> Tensor:
    """Bytes in the order of inputs, put into runs with padding at the end of each row; some rows at a time, as they are many."""
    count = 4 if halves else 2
    output = codes.new_empty(*codes.shape[:-1], codes.shape[-1] + padding * 2 // count)
    for source, target in zip(codes.flatten(0, -2).split(4096), output.flatten(0, -2).split(4096), strict=True):
        apart = torch.stack([source & 15, source >> 4], dim=-1).flatten(1) if halves else source
        words = F.pad(apart, (0, padding)).unflatten(1, (-1, count, run)).mT.flatten(1)
        target.copy_(words[:, ::2] | words[:, 1::2] << 4 if halves else words)
    return output


def _narrow(numbers: Tensor) -> Tensor:
    """Contiguous, in the narrowest type that holds every number."""
    for dtype in (torch.bfloat16, torch.float16):
        if numbers.dtype.itemsize > dtype.itemsize and numbers.to(dtype).to(numbers.dtype).equal(numbers):
            return numbers.to(dtype).contiguous()
    return numbers.contiguous()


def _combined(parts: Sequence[PackedWeight], combine: Callable[[list[Tensor]], Tensor]) -> PackedWeight:
    assert PackedWeight.alike(parts), "parts that are stored in one way"
    first, zero = parts[0], None
    if any(part.zero is not None for part in parts):
        zero = combine(_promoted([torch.zeros_like(part.scale) if part.zero is None else part.zero for part in parts]))
    codes = combine([_bytes(part.codes) for part in parts]).view(first.codes.dtype)
    return replace(first, codes=codes, scale=combine(_promoted([part.scale for part in parts])), zero=zero)


def _promoted(tensors: list[Tensor]) -> list[Tensor]:
    """All in the narrowest type that holds the numbers of each."""
    kind = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(kind) for tensor in tensors]
