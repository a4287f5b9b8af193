"""The machine the emulation pretends to run on, and the checks that every function shares."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

# kept before any test guards them: kernels may look at values, the host may not
_TOLIST = torch.Tensor.tolist
_TENSOR = torch.tensor


class MisuseError(AssertionError):
    """The real kernel would read garbage, skip rows, fault, or make the host wait."""


def refuse_unless(ok: bool, message: str) -> None:
    """Raises `MisuseError` with `message` unless `ok`."""
    if not ok:
        raise MisuseError(message)


def host(tensor: Tensor) -> list[Any]:
    """Values of a tensor, as the kernel sees them."""
    return _TOLIST(tensor.detach())


def from_host(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The reverse of `host`."""
    return _TENSOR(values, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function: its name and how it was routed."""

    name: str
    details: dict[str, Any]


@dataclass
class Machine:
    """AITER version and hardware.

    Attributes:
        version: any from 0.1.15 on; `signatures.VERSIONS` are those that differ from the one
            before.
        architecture: "gfx942" or "gfx950" have every kernel; others only the Triton ones.
        num_compute_units: decides between the HIP and the assembly kernel of
            `paged_attention_common`.
        allow_float32: also take float32, which no real kernel does, so that whole generations can
            be compared token for token.
        no_keys: what `flash_attn_varlen_func` writes for a row that sees no key, output and
            logarithm of the denominator. AITER's host code writes 0 and infinity where no request
            has a key; what its kernels write for one of them is not known.
        signatures: what tells the arguments of functions that AITER compiles, whose wrapper hides
            them: "schemas", those of torch's operators, as with AITER; "hidden", nothing; "shown",
            the function itself, for tests that ask the emulation.
        any_shape: also take latents and heads of other sizes than the assembly kernels are written
            for (576/512 and 192/128), so that tiny models can be compared.
        capturing: a graph is being captured: nothing may wait or compile.
        calls: every call so far.
        plans: what each decode plan was made from, by the address of its work list.
        on_device: tensors that a test declares to live on the device; on a CPU nothing else tells
            them from the host's.
        watch: told of every call and its result, for what records calls as a graph does.
    """

    version: str = "0.1.20"
    architecture: str = "gfx942"
    num_compute_units: int = 304
    allow_float32: bool = False
    any_shape: bool = False
    no_keys: tuple[float, float] = (0.0, -math.inf)
    signatures: Literal["schemas", "hidden", "shown"] = "schemas"
    capturing: bool = False
    calls: list[Call] = field(default_factory=list)
    compiled: set[tuple[Any, ...]] = field(default_factory=set)
    plans: dict[int, Any] = field(default_factory=dict)
    on_device: list[Tensor] = field(default_factory=list)
    watch: Callable[[Callable[..., Any], dict[str, Any], Any], None] | None = None

    @property
    def fp8(self) -> torch.dtype:
        """The flavour of e4m3 that the architecture computes with."""
        return torch.float8_e4m3fnuz if self.architecture == "gfx942" else torch.float8_e4m3fn

    @property
    def is_cdna(self) -> bool:
        """Whether the C++ and assembly kernels exist here."""
        return self.architecture in ("gfx942", "gfx950")

    def record(self, name: str, **details: Any) -> None:
        """Remembers a call."""
        self.calls.append(Call(name, details))

    def names(self) -> set[str]:
        """Names of all functions called so far."""
        return {call.name for call in self.calls}

    def refuse_on_device(self, name: str, **tensors: Tensor) -> None:
        """The function is host code: it takes none of `on_device`, nor views of them."""
        device = {tensor.untyped_storage().data_ptr() for tensor in self.on_device}
        for argument, tensor in tensors.items():
            held = tensor.untyped_storage().data_ptr() not in device
            refuse_unless(
                held,
                f"{name} is host code: {argument} on the device makes the host wait, and races with"
                f" the stream",
            )

    def size(self, name: str, *pairs: tuple[int, int]) -> None:
        """Sizes, as (got, wanted) pairs, that assembly has built in."""
        fits = self.any_shape or all(got == wanted for got, wanted in pairs)
        refuse_unless(
            fits,
            f"{name}: sizes {[got for got, _ in pairs]}, not {[wanted for _, wanted in pairs]}",
        )

    def needs_cdna(self, name: str) -> None:
        """The function is C++ or assembly."""
        refuse_unless(self.is_cdna, f"{name} is not built for {self.architecture}")

    def compile(self, *key: Any) -> None:
        """The first call with a template key compiles, which a capture does not survive."""
        refuse_unless(
            not self.capturing or key in self.compiled,
            f"{key} compiles during capture; warm it up before",
        )
        self.compiled.add(key)

    def activation(self, name: str, *tensors: Tensor) -> torch.dtype:
        """The common type of query-like tensors."""
        allowed = (torch.bfloat16, torch.float16, *((torch.float32,) if self.allow_float32 else ()))
        dtypes = {tensor.dtype for tensor in tensors}
        refuse_unless(
            len(dtypes) == 1 and dtypes <= set(allowed), f"{name} takes bf16 or fp16, not {dtypes}"
        )
        refuse_unless(
            all(tensor.stride(-1) == 1 for tensor in tensors),
            f"{name} needs a contiguous last dimension",
        )
        return tensors[0].dtype

    def kv_is_fp8(self, name: str, activation: torch.dtype, *tensors: Tensor) -> bool:
        """Whether a cache holds fp8; it may hold that or the activation's type."""
        dtypes = {tensor.dtype for tensor in tensors}
        refuse_unless(
            len(dtypes) == 1 and dtypes <= {activation, self.fp8},
            f"{name}: cache of {dtypes} on {self.architecture}",
        )
        return dtypes == {self.fp8}


def gather(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, also of 8-bit floats, which torch cannot index."""
    chosen = from_host(rows, torch.int64)
    return (
        tensor.view(torch.uint8)[chosen].view(tensor.dtype)
        if tensor.element_size() == 1
        else tensor[chosen]
    )


def int32(name: str, tensor: Tensor, *shape: int | None) -> Tensor:
    """An index tensor: int32 of the given shape, last dimension contiguous."""
    refuse_unless(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}; the kernel reads int32")
    fits = tensor.dim() == len(shape) and all(
        want in (None, got) for got, want in zip(tensor.shape, shape, strict=True)
    )
    refuse_unless(fits, f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    refuse_unless(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, f"{name} has strided columns")
    return tensor


def increasing(name: str, values: list[int]) -> list[int]:
    """Starts of ranges: from 0, never decreasing, so that padding rows repeat the last value."""
    refuse_unless(len(values) > 0 and values[0] == 0, f"{name} does not start at 0: {values}")
    grows = all(a <= b for a, b in pairwise(values))
    refuse_unless(grows, f"{name} decreases: {values}; a padded tail has to repeat the last value")
    return values


def tensor_scale(name: str, scale: Tensor | None) -> float:
    """A per-tensor dequantization factor."""
    refuse_unless(
        scale is not None and scale.dtype == torch.float32 and scale.numel() == 1,
        f"{name} must be one float32",
    )
    assert scale is not None
    return float(host(scale.reshape(1))[0])


def blocks_of(
    name: str, row: Sequence[int], length: int, block_size: int, num_blocks: int
) -> list[int]:
    """The blocks of a request that a kernel reads, checked."""
    count = -(-length // block_size)
    refuse_unless(
        count <= len(row),
        f"{name}: {length} tokens need {count} blocks and the table has {len(row)} columns",
    )
    used = list(row[:count])
    refuse_unless(
        all(0 <= block < num_blocks for block in used),
        f"{name}: block table names blocks outside the cache: {used}",
    )
    return used
