"""Weights of few bits as data: codes, scales that groups of inputs share, and the order in which
kernels read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Code = Literal["e4m3", "int8", "int4", "int5", "int6", "e2m1", "nl4"]
"""How a code is read: an 8-bit float, a signed byte, an unsigned number of 4, 5 or 6 bits, a 4-bit
float (0, .5, 1, 1.5, 2, 3, 4, 6), or the place of a number in `NL4`."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NL4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What GGUF's IQ4_NL calls by 4 bits."""
OUTER = 256
"""Inputs that share scales of scales."""
_HIGH_BITS: dict[Code, int] = {"int5": 1, "int6": 2}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `scale * (value of code - middle - zero) - minimum`, in groups of inputs of an
    output.

    Formats with wider blocks, such as 128 x 128, repeat a scale for each output: a few per cent of
    the codes, and every format is then read by one kernel and joined with others output by output.

    Attributes:
        codes: of whole bytes [..., out, in], as float8_e4m3fn or int8; of halves uint8 [..., out,
            in / 2], where byte `j` holds the code of input `2j` in its low half and of input
            `2j + 1` in its high half. Leading dimensions are experts.
        scale: [..., out, groups], a float; group `g` has the inputs from `g * group` on, the last
            one maybe fewer.
        zero: like `scale`, or None.
        group: inputs of a group.
        code: how a code is read.
        dtype: of rows before and after a product with it.
        run: in which order codes lie. Two bytes are a word of two or four codes, the lowest bits
            first. The words of every `run` times as many inputs hold the first `run` of them as
            their first codes, the next as their second ones, and so on.
        padding: inputs that `codes` has at the end of a row beyond those that there are.
        middle: a zero that all groups share.
        high: what `codes` leave of codes of 5 and 6 bits, uint8 [..., out, in / 8 or in / 4]: a
            byte holds one or two bits of as many codes as fit, in their order, the lowest bits
            first.
        minimum: like `scale`, or None; there is no `zero` then.
        outer: float16 [..., out, in / 256], or twice that with minima: for every 256 inputs what
            multiplies their scales, then their minima, both of which are int8 then; or None.
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
    high: Tensor | None = None
    minimum: Tensor | None = None
    outer: Tensor | None = None

    def __post_init__(self) -> None:
        groups = -(-self.in_features // self.group)
        if self.scale.shape != (*self.codes.shape[:-1], groups):
            raise ValueError(
                f"scales are {list(self.scale.shape)} for {groups} groups of outputs"
                f" {list(self.codes.shape[:-1])}"
            )
        if self.zero is not None and self.zero.shape != self.scale.shape:
            shapes = list(self.zero.shape), list(self.scale.shape)
            raise ValueError(f"zeros are {shapes[0]} for scales {shapes[1]}")

    @property
    def halves(self) -> bool:
        """Whether a byte holds two codes."""
        return self.code not in ("e4m3", "int8")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What its codes are called where it is said which weights a model has."""
        return (self.code,)

    @property
    def high_bits(self) -> int:
        """Bits of a code that are in `high`."""
        return _HIGH_BITS.get(self.code, 0)

    @property
    def plain(self) -> bool:
        """Whether there are codes, scales and zeros alone, which every kernel takes."""
        return self.code != "nl4" and self.high is self.minimum is self.outer is None

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
        """Shape of its numbers, [..., out, in]."""
        return *self.codes.shape[:-1], self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers [..., out, in], computed in float32 or wider and rounded once to `dtype`, by
        default the weight's.
        """
        dtype = dtype or self.dtype
        wide = torch.promote_types(dtype, torch.float32)
        codes = _in_order(self.codes, self.high, self.code, self.run)[..., : self.in_features]
        values = values_of(codes, self.code, wide)

        def spread(numbers: Tensor, which: int = 0) -> Tensor:
            numbers = numbers.to(wide)
            if self.outer is not None:
                each = 1 if self.minimum is None else 2
                outer = self.outer[..., which::each].to(wide)
                numbers = numbers * outer.repeat_interleave(OUTER // self.group, dim=-1)
            return numbers.repeat_interleave(self.group, dim=-1)[..., : self.in_features]

        values = values - self.middle if self.middle else values
        values = values if self.zero is None else values - spread(self.zero)
        values = values * spread(self.scale)
        return (values if self.minimum is None else values - spread(self.minimum, 1)).to(dtype)

    def select(self, order: Tensor) -> PackedWeight:
        """The outputs whose numbers are in `order`, int64 [n], in that order, of every expert."""
        return self._changed(lambda tensor: tensor.index_select(-2, order))

    def rows(self, start: int, end: int) -> PackedWeight:
        """The outputs from `start` to before `end`, as views."""
        return self._changed(lambda tensor: tensor[..., start:end, :])

    def inputs(self, start: int, end: int) -> PackedWeight:
        """The inputs from `start` to before `end`, copied, so that the others need not be kept; see
        `divides`.
        """
        assert self.plain and self.run == 1, "before `arranged`"
        assert self.divides(start) and self.divides(end), "whole groups"
        last = end == self.in_features
        codes = slice(start // (1 + self.halves), None if last else end // (1 + self.halves))
        groups = slice(start // self.group, -(-end // self.group))
        if self.group >= self.in_features:
            groups = slice(None)
        own = _bytes(self.codes)[..., codes].clone(memory_format=torch.contiguous_format)
        return replace(
            self,
            codes=own.view(self.codes.dtype),
            scale=self.scale[..., groups].clone(),
            zero=None if self.zero is None else self.zero[..., groups].clone(),
            padding=self.padding if last else 0,
        )

    def divides(self, start: int) -> bool:
        """Whether a part may begin or end at an input: between bytes, and between groups unless one
        has all inputs.
        """
        whole = self.group >= self.in_features
        return start in (0, self.in_features) or (
            start % (1 + self.halves) == 0 and (whole or start % self.group == 0)
        )

    def expert(self, number: int) -> PackedWeight:
        """One of the weights along the first axis, as views."""
        return self._changed(lambda tensor: tensor[number])

    def to(self, target: torch.device | torch.dtype) -> PackedWeight:
        """The weight on that device, or for rows of that type; codes stay as they are."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        return self._changed(lambda tensor: tensor.to(target))

    def _tensors(self) -> dict[str, Tensor]:
        """Tensors that there are, by the names of fields."""
        names = ("scale", "zero", "high", "minimum", "outer")
        found = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return found | {"codes": _bytes(self.codes)}

    def _changed(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The weight with other tensors; codes go through as bytes, for few operations know 8-bit
        floats.
        """
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **tensors | {"codes": tensors["codes"].view(self.codes.dtype)})

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
        return len({x._manner() for x in parts}) == 1

    def _manner(self) -> tuple[object, ...]:
        extra = self.outer is not None, self.minimum is not None
        order = self.in_features, self.run, self.padding
        return self.group, self.code, self.dtype, self.middle, order, extra

    def arranged(self) -> PackedWeight:
        """The weight as kernels read it, once for good; it has to look at numbers, so the host
        waits.

        Neighboring words hold neighboring inputs of one group, and rows are padded. Scales are in
        half precision if none is rounded by it. A zero that all groups share is a number.
        """
        run = run_of(self.group, self.in_features, self.halves)
        zero, middle = self.zero, self.middle
        if zero is not None and self.code == "int4":
            first = float(zero.flatten()[0])
            if first in range(16) and bool((zero == first).all()):
                zero, middle = None, middle + int(first)
        numbers: dict[str, Any] = {
            name: _narrow(tensor)
            for name, tensor in self._tensors().items()
            if name not in ("codes", "high", "zero")
        }
        numbers["zero"] = None if zero is None else _narrow(zero)
        weight = replace(self, middle=middle, **numbers)
        if run is None or self.run > 1:
            high = None if self.high is None else self.high.contiguous()
            return replace(weight, codes=self.codes.contiguous(), high=high)
        padding = -self.in_features % (run * (4 if self.halves else 2))
        codes = _rearranged(_bytes(self.codes), 4 if self.halves else 8, run, padding)
        high = None if self.high is None else _rearranged(self.high, self.high_bits, run, padding)
        codes = codes.view(self.codes.dtype)
        return replace(weight, codes=codes, high=high, run=run, padding=padding)


def run_of(group: int, inputs: int, halves: bool) -> int | None:
    """Neighboring words with neighboring inputs, of which kernels want 16 at least; None for groups
    that 16 does not divide.

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
    fitting = [run for run in runs if -inputs % (run * count) <= inputs // 8]
    return next(iter(fitting or runs[-1:]), None)


def _bytes(codes: Tensor) -> Tensor:
    """What operations on the codes go through: few are written for 8-bit floats."""
    return codes.view(torch.uint8)


def fields(numbers: Tensor, bits: int) -> Tensor:
    """The numbers of `bits` bits in bytes, the lowest bits first: [..., 8 / bits times as many]."""
    if bits == 8:
        return numbers
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)
    return (numbers[..., None] >> shifts & 2**bits - 1).flatten(-2)


def _in_bytes(numbers: Tensor, bits: int) -> Tensor:
    """The other way."""
    count = 8 // bits
    shifted = [numbers[..., place::count] << place * bits for place in range(count)]
    return reduce(torch.bitwise_or, shifted)


def planes(codes: Tensor, code: Code) -> tuple[Tensor, Tensor | None]:
    """`codes` and `high` of a weight, of codes [..., out, in] with a byte each."""
    if code in ("e4m3", "int8"):
        return codes, None
    bits = _HIGH_BITS.get(code, 0)
    return _in_bytes(codes & 15, 4), _in_bytes(codes >> 4, bits) if bits else None


def _in_order(codes: Tensor, high: Tensor | None, code: Code, run: int) -> Tensor:
    """Codes with a byte each, in the order of their inputs."""
    halves = code not in ("e4m3", "int8")
    numbers = fields(codes, 4) if halves else codes
    numbers = numbers if high is None else numbers | fields(high, _HIGH_BITS[code]) << 4
    if run == 1:
        return numbers
    return numbers.unflatten(-1, (-1, run, 4 if halves else 2)).mT.flatten(-3)


def values_of(codes: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for."""
    if code not in ("e2m1", "nl4"):
        return codes.to(dtype)
    table = (*_E2M1, *(-value for value in _E2M1)) if code == "e2m1" else NL4
    return torch.tensor(table, dtype=dtype, device=codes.device)[codes.int()]


def _rearranged(codes: Tensor, bits: int, run: int, padding: int) -> Tensor:
    """Bytes in the order of inputs, put into runs with padding; some rows at a time, as they are
    many.

    Args:
        codes: uint8 [..., out, in * bits / 8].
        bits: of an input; 8 in weights with two codes a word, fewer in those with four.
        run: see `PackedWeight`.
    """
    count = 2 if bits == 8 else 4
    output = codes.new_empty(*codes.shape[:-1], codes.shape[-1] + padding * bits // 8)
    sides = (side.flatten(0, -2).split(4096) for side in (codes, output))
    for source, target in zip(*sides, strict=True):
        padded = F.pad(fields(source, bits), (0, padding))
        target.copy_(_in_bytes(padded.unflatten(1, (-1, count, run)).mT.flatten(1), bits))
    return output


def _narrow(numbers: Tensor) -> Tensor:
    """Contiguous, in the narrowest type that holds every number; integers stay what they are."""
    if numbers.is_floating_point() and numbers.dtype.itemsize > 2:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = numbers.to(dtype)
            if narrow.to(numbers.dtype).equal(numbers):
                return narrow.contiguous()
    return numbers.contiguous()


def _combined(
    parts: Sequence[PackedWeight], combine: Callable[[list[Tensor]], Tensor]
) -> PackedWeight:
    assert PackedWeight.alike(parts), "parts that are stored in one way"
    first, tensors = parts[0], [part._tensors() for part in parts]
    joined: dict[str, Any] = {}
    for name in set().union(*tensors):
        found = [one[name] if name in one else torch.zeros_like(one["scale"]) for one in tensors]
        # the narrowest type that holds the numbers of each
        kind = reduce(torch.promote_types, (tensor.dtype for tensor in found))
        joined[name] = combine([tensor.to(kind) for tensor in found])
    return replace(first, **joined | {"codes": joined["codes"].view(first.codes.dtype)})
