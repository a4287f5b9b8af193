"""Rotary position embeddings (RoFormer, arXiv 2104.09864): frequencies from a config, angles of
positions in few operations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.base.errors import CheckpointError, shown
from specdec.base.validation import is_number
from specdec.device.deviation import Deviation, deviation, worst
from specdec.kernels.kernel import Kernel

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")
"""RoPE types, as Transformers names them, whose frequencies stay what they are, however long a
sequence grows.
"""

ROPE_TYPES = (*STATIC_ROPE_TYPES, "dynamic", "longrope")
"""Types that targets may have; of the last two frequencies depend on a request's length."""


_POSITIVE = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
    "llama_4_scaling_beta", "low_freq_factor", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta",
}  # fmt: skip
_NUMBERS = {*_POSITIVE, "mscale", "mscale_all_dim"}


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuses RoPE parameters, as Transformers writes them to a config, that are no numbers where
    numbers belong.

    Raises:
        CheckpointError: one is so.
    """
    for name in sorted(_NUMBERS & parameters.keys()):
        value, positive = parameters[name], name in _POSITIVE
        if value is not None and not (is_number(value) and (value > 0 or not positive)):
            kind = "a positive number" if positive else "a number"
            what = f"RoPE's {name} is {shown(value)}"
            raise CheckpointError(f"{what}; it must be {kind}, so correct it in config.json")
    truncate = parameters.get("truncate")
    if not isinstance(truncate, bool | None):
        what = f"RoPE's truncate is {shown(truncate)}"
        raise CheckpointError(f"{what}; it must be true or false, so correct it in config.json")


class Temperature(NamedTuple):
    """A factor of queries that grows with their position, so that long contexts do not flatten
    attention (arXiv 2501.19399).

    It is `1 + strength * log(1 + floor((position + offset) / period))`.

    Attributes:
        strength, period, offset: as in the formula; the period is in tokens.
        rounds: the factor is rounded to the model's type.
    """

    strength: float
    period: float
    offset: int = 0
    rounds: bool = False

    def factors(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 or `dtype` [..., 1] for positions int64 [...]."""
        steps = torch.floor((position_ids + self.offset).float() / self.period)
        factors = (torch.log1p(steps) * self.strength + 1)[..., None]
        return factors.to(dtype) if self.rounds else factors


class Growth(NamedTuple):
    """How frequencies change with a length of more than `start` tokens: dynamic NTK scaling, as
    `generate` of Transformers has it.

    Rows of a prompt have those of the whole prompt, later rows those of the length that they make,
    whatever was cached before.
    """

    theta: float
    factor: float
    start: int
    rotated: int

    def frequencies(self, lengths: Tensor) -> Tensor:
        """float32 [..., rotated / 2] for lengths int64 [...] of at least `start`."""
        numbers = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=lengths.device)
        scale = self.factor * lengths.float() / self.start - (self.factor - 1)
        theta = self.theta * scale ** (self.rotated / (self.rotated - 2))
        return 1.0 / theta[..., None] ** (numbers / self.rotated)


@dataclass(frozen=True, eq=False)
class Rope:
    """How heads are rotated: number `i` of a head against number `i + head_dim / 2`.

    Attributes:
        frequencies: float32 [head_dim / 2]; 0 for numbers that are not rotated.
        amplitude: factor of the cosines and sines, a number or one per frequency.
        rotated: numbers of a head that are rotated; None means all.
        long_frequencies: those of long requests, like `frequencies`, in LongRoPE (arXiv
            2402.13753); None where all have the same.
        temperature: of the queries of layers that are rotated like this; None where there is none.
        growth: what frequencies become in sequences that are long enough; None where they stay.
    """

    frequencies: Tensor
    amplitude: float | Tensor = 1.0
    rotated: int | None = None
    long_frequencies: Tensor | None = None
    temperature: Temperature | None = None
    growth: Growth | None = None

    @classmethod
    def of(
        cls, parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int
    ) -> "Rope":
        """From RoPE parameters as Transformers writes them to a config; on the CPU.

        Args:
            parameters: `rope_type`, one of `ROPE_TYPES`, `rope_theta`, `partial_rotary_factor`, and
                what the type needs; of our own the type "none", which rotates nothing, and
                `temperature`, a `Temperature` or None.
            head_dim: numbers of a head, an even one.
            max_position_embeddings: longest sequence, which YaRN and LongRoPE look at.

        Raises:
            CheckpointError: the RoPE type needs a value that is not there, or angles are not
                finite.
        """
        with torch.device("cpu"):
            rope = cls._of(parameters, head_dim, max_position_embeddings)
            found = rope.frequencies, rope.long_frequencies, torch.as_tensor(rope.amplitude)
        if not all(one.isfinite().all() for one in found if one is not None):
            what = f"RoPE parameters {dict(parameters)} give no finite angles"
            raise CheckpointError(f"{what}; correct them in config.json")
        return rope

    @classmethod
    def _of(
        cls, parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int
    ) -> "Rope":
        temperature = parameters.get("temperature")
        rotated = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        if parameters["rope_type"] == "none":
            return cls(torch.zeros(head_dim // 2, dtype=torch.float32), temperature=temperature)
        if parameters["rope_type"] == "proportional":
            return cls(_proportional(parameters, head_dim), temperature=temperature)
        frequencies, factor = _frequencies(parameters, rotated, max_position_embeddings)
        still = (head_dim - rotated) // 2
        amplitude: float | Tensor = factor
        if still and factor != 1:
            amplitude = F.pad(torch.full_like(frequencies, factor), (0, still), value=1.0)
        frequencies = F.pad(frequencies, (0, still))
        long_frequencies, growth = None, None
        if parameters["rope_type"] == "dynamic":
            theta, stretch = parameters["rope_theta"], parameters["factor"]
            growth = Growth(theta, stretch, max_position_embeddings, rotated)
        if parameters["rope_type"] == "longrope":
            sizes = rotated, max_position_embeddings
            long_frequencies = F.pad(_frequencies(parameters, *sizes, is_long=True)[0], (0, still))
        return cls(frequencies, amplitude, rotated, long_frequencies, temperature, growth)

    def frequencies_of(self, position_ids: Tensor, rope_lens: Tensor) -> Tensor:
        """float32 [..., head_dim / 2] for rows with these positions and
        `specdec.model.batch.ForwardInput.rope_lens`, int64 [...].
        """
        if self.long_frequencies is not None:
            return torch.where(rope_lens[..., None] > 0, self.long_frequencies, self.frequencies)
        if self.growth is None:
            return self.frequencies
        lengths = torch.maximum(position_ids + 1, rope_lens)
        grown = self.growth.frequencies(lengths.clamp(min=self.growth.start))
        grown = F.pad(grown, (0, len(self.frequencies) - grown.shape[-1]))
        return torch.where(lengths[..., None] > self.growth.start, grown, self.frequencies)

    def to(self, device: torch.device) -> "Rope":
        """This rope on another device."""
        own = {
            name: getattr(self, name) for name in ("frequencies", "amplitude", "long_frequencies")
        }
        tensors: dict[str, Any] = {
            name: one.to(device) for name, one in own.items() if isinstance(one, Tensor)
        }
        return replace(self, **tensors)


class Angles:
    """Cosine and sine of the rotation of some rows.

    Attributes:
        cos, sin: [..., head_dim / 2], with equal strides.
        factors: [..., 1], of the queries of the rows; None for 1.
    """

    def __init__(self, cos: Tensor, sin: Tensor, factors: Tensor | None = None) -> None:
        self.cos, self.sin, self.factors = cos, sin, factors

    @classmethod
    def of(
        cls, position_ids: Tensor, rope: Rope, dtype: torch.dtype, rope_lens: Tensor | None = None
    ) -> "Angles":
        """Angles of positions int64 [...], computed in float32, in type `dtype`.

        Args:
            rope_lens: int64 like `position_ids`, see `specdec.model.batch.ForwardInput`; None for
                the usual frequencies.
        """
        frequencies, factors = rope.frequencies, None
        if rope_lens is not None:
            frequencies = rope.frequencies_of(position_ids, rope_lens)
        if rope.temperature is not None:
            factors = rope.temperature.factors(position_ids, dtype)
        angles = half_angles(position_ids, frequencies, dtype, amplitude=rope.amplitude)
        return cls(*angles, factors)

    @cached_property
    def doubled(self) -> tuple[Tensor, Tensor]:
        """For `rotate`: two tensors [..., 1, head_dim], the axis of 1 being that of the heads."""
        doubled = torch.cat([self.cos, self.cos], dim=-1), torch.cat([-self.sin, self.sin], dim=-1)
        return doubled[0].unsqueeze(-2), doubled[1].unsqueeze(-2)

    @cached_property
    def row_index(self) -> Tensor:
        """0, 1, ... int64 [T]: for a kernel that looks angles up in a table by position, where this
        is the table.
        """
        return torch.arange(len(self.cos), device=self.cos.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of the last axis of `x` [..., heads, head_dim] against each other, by
    `Angles.doubled`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotation_order(head_dim: int, rotated: int, *, interleaved: bool) -> Tensor | None:
    """Order of a head's numbers in which RoPE turns number `i` against number `i + head_dim / 2`,
    whatever the model pairs.

    Queries and keys are put into it alike, so their products stay what they are. The numbers that
    are not rotated come last in both halves. None where the order is that already.

    >>> [rotation_order(8, 4, interleaved=interleaved) for interleaved in (False, True)]
    [tensor([0, 1, 4, 5, 2, 3, 6, 7]), tensor([0, 2, 4, 5, 1, 3, 6, 7])]
    >>> rotation_order(8, 8, interleaved=False)
    """
    if rotated == head_dim and not interleaved:
        return None
    numbers = torch.arange(head_dim)
    pairs = numbers[:rotated].view(-1, 2) if interleaved else numbers[:rotated].view(2, -1).t()
    first, second = pairs.unbind(-1)
    rest = numbers[rotated:].view(2, -1)
    return torch.cat([first, rest[0], second, rest[1]])


def half_angles(
    position_ids: Tensor,
    frequencies: Tensor,
    dtype: torch.dtype,
    *,
    amplitude: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair of numbers, once each, computed in float32.

    Args:
        position_ids: int64 [...].
        frequencies: float32 [head_dim / 2], or [..., head_dim / 2] where they differ.
        amplitude: factor of the cosines and sines.

    Returns:
        Two tensors [..., head_dim / 2].
    """
    if (
        frequencies.ndim == 1
        and not isinstance(amplitude, Tensor)
        and KERNEL.runs_on(position_ids.device)
    ):
        from specdec.layers.rotary import triton_angles  # it imports Triton

        return triton_angles.angles(position_ids, frequencies, dtype, amplitude)
    return _half_angles(position_ids, frequencies, dtype, amplitude)


def _half_angles(
    position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype, amplitude: float | Tensor
) -> tuple[Tensor, Tensor]:
    """`half_angles` in plain torch."""
    angles = position_ids[..., None] * frequencies

    def rounded(turn: Callable[..., Tensor]) -> Tensor:
        # Written in the wanted type at once, since a conversion would be one more kernel.
        out = torch.empty_like(angles, dtype=dtype)
        if isinstance(amplitude, float) and amplitude == 1:
            return turn(angles, out=out)
        return torch.mul(turn(angles), amplitude, out=out)

    return rounded(torch.cos), rounded(torch.sin)


def check_angles(device: torch.device) -> Deviation:
    """Positions near and far, heads of two sizes, in every type."""
    from specdec.layers.rotary import triton_angles

    generator, found = torch.Generator().manual_seed(0), []
    for half, amplitude in ((32, 1.0), (48, 1.3)):
        position_ids = torch.randint(10**6, (3, 70), generator=generator)
        frequencies = 1.0 / 1e4 ** (torch.arange(half) / half)
        # What is rounded to float32 is the angle, which no kernel knows better.
        exact = (position_ids[..., None] * frequencies).double()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            there = position_ids.to(device), frequencies.to(device)
            ours = triton_angles.angles(*there, dtype, amplitude)
            plain = _half_angles(position_ids, frequencies, dtype, amplitude)
            right = exact.cos() * amplitude, exact.sin() * amplitude
            found += [deviation(*sides) for sides in zip(ours, plain, right, strict=True)]
    return worst(found)


KERNEL = Kernel("angles", check_angles)


_NOT_OF_THE_TYPE = (
    "partial_rotary_factor", "temperature", "llama_4_scaling_beta", "max_position_embeddings",
)  # fmt: skip
"""RoPE parameters that no type of RoPE looks at."""


def _proportional(parameters: Mapping[str, Any], head_dim: int) -> Tensor:
    """Frequencies as those of a whole head, of which the lowest are 0: its pairs lie as far apart
    as if all were rotated.
    """
    rotated = int((parameters.get("partial_rotary_factor") or 1.0) * head_dim // 2)
    exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** exponents / parameters.get("factor", 1.0)
    return F.pad(frequencies, (0, head_dim // 2 - rotated))


def _frequencies(
    parameters: Mapping[str, Any],
    rotated: int,
    max_position_embeddings: int,
    *,
    is_long: bool = False,
) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [rotated / 2], with `is_long` LongRoPE's second set, and the
    amplitude.
    """
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        own = {name: parameters[name] for name in parameters.keys() - {*_NOT_OF_THE_TYPE}}
        # A head of its own width, all of which is rotated.
        config = PreTrainedConfig(
            hidden_size=rotated,
            num_attention_heads=1,
            head_dim=rotated,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=own,
        )
        seq_len = parameters["original_max_position_embeddings"] + 1 if is_long else None
        initial = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, amplitude = initial(config, device="cpu", seq_len=seq_len)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"RoPE parameters {dict(parameters)} are not complete and valid ({error})"
        raise CheckpointError(f"{what}; correct them in config.json") from error
    return frequencies.float(), float(amplitude)
