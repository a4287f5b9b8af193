"""Multi-head attention on AMD GPUs with AITER's kernels, in one of two tiers.

*Full* is for CDNA, where AITER has HIP, assembly and Triton kernels and a cache writer.
*Triton-only* is for RDNA, where AITER has two Triton kernels and rows are stored in plain torch,
and for CDNA when AITER_TRITON_ONLY is 1. NVIDIA is served by name alone, to check these kernels
without AMD hardware. `fa_routes` holds the table of each tier.

Layouts: plain, and in the full tier shuffled as a backend of its own. Cache: the model's type or
8-bit floats. Host: never waits for the device. Architectures: gfx942, gfx950; Triton-only gfx110x,
gfx115x, gfx120x. An 8-bit cache is read by our own Triton kernel for blocks and trees; where that
does not run, their contexts are gathered for each layer. Known gaps: non-causal blocks with sinks
or a softcap; draft trees with windows, a softcap or the shuffled layout; in the shuffled layout
head sizes that are no power of two; group sizes above 16 and head sizes other than 64, 128 and 256
decode on unified_attention, which is slower there than the paged kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.aiter import fa_compiled, fa_routes, fa_triton
from specdec.attention.aiter.fa_triton import Layer, Rows, Setup
from specdec.attention.aiter.groups import AiterPlan, Group, plan_groups, plan_packed
from specdec.attention.aiter.layout import Layout
from specdec.attention.aiter.routes import Kernel, Route, choose
from specdec.attention.aiter.scratch import Scratch
from specdec.attention.backend import (
    BY_NAME,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Scoring,
)
from specdec.attention.check import reasons_against_kernels
from specdec.attention.triton.fa import TritonFaBackend
from specdec.base.sizes import power_of_two
from specdec.kernels import aiter, aiter_triton_only, triton_launch
from specdec.kernels.aiter import AiterFa
from specdec.kv_cache import LayerCache

CDNA = ("gfx942", "gfx950")
RDNA = ("gfx110", "gfx115", "gfx120")
"""Beginnings of the names of RDNA 3, 3.5 and 4."""

FP8_ARCHITECTURES = (*CDNA, "gfx1200", "gfx1201")
"""Architectures that compute with 8-bit floats."""

LARGE_TILES = (0, 1, 21)
"""From it, AITER's tiles may exceed RDNA's shared memory, in some releases."""

DTYPES = (torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 32)

Tier = Literal["full", "triton"]


class RocmAiterFaBackend(AttentionBackend):
    """AITER attention on the plain cache layout."""

    name = "rocm_aiter_fa"
    layout: ClassVar[Layout] = "plain"

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """All reasons why AITER cannot serve `spec` on this machine; empty when it can."""
        architecture = specdec.device.device.rocm_architecture(spec.device)
        tier = tier_of(spec.device)
        if architecture is None and tier is None:
            return [f"{spec.device} is not a ROCm device"]
        if architecture is None and aiter.installed_version() is None:
            return [
                f"{spec.device} is not a ROCm device; to check AITER's Triton kernels here, install"
                f" amd-aiter (docs/rocm.md)"
            ]
        reasons = []
        if tier is None:
            reasons.append(
                f"architecture {architecture} (AITER's kernels are for {' and '.join(CDNA)}, its"
                f" Triton kernels for RDNA)"
            )
        if tier == "triton" and cls.layout == "shuffle":
            reasons.append(
                f"the shuffled layout needs AITER's compiled kernels, which are for"
                f" {' and '.join(CDNA)}"
            )
        reasons += (
            aiter_triton_only.unavailable_reasons()
            if tier == "triton"
            else aiter.unavailable_reasons()
        )
        version = aiter.known_numbers(aiter.installed_version() or "")
        if version and cls.layout == "shuffle" and version < aiter.SHUFFLE_VERSION:
            since = aiter.dotted(aiter.SHUFFLE_VERSION)
            reasons.append(f"the shuffled layout needs amd-aiter {since}")
        if version and spec.non_causal and version < aiter.NON_CAUSAL_VERSION:
            since = aiter.dotted(aiter.NON_CAUSAL_VERSION)
            reasons.append(f"non-causal blocks need amd-aiter {since}")
        if version and spec.kv_dtype == torch.float16 and version < aiter.FLOAT16_VERSION:
            reasons.append(
                f"a float16 cache needs amd-aiter {aiter.dotted(aiter.FLOAT16_VERSION)}; bfloat16"
                f" does not"
            )
        return reasons + _shape_reasons(spec, architecture, cls.layout)

    @classmethod
    def tree_reasons(cls, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend.tree_reasons`."""
        reasons = []
        version = aiter.known_numbers(aiter.installed_version() or "")
        if version < aiter.NON_CAUSAL_VERSION:
            reasons.append(f"they need amd-aiter {aiter.dotted(aiter.NON_CAUSAL_VERSION)}")
        if spec.windows != {None}:
            reasons.append("windows (AITER's kernels count rows, not depth)")
        if spec.softcap is not None:
            reasons.append("a softcap (of AITER's kernels the one for contexts has none)")
        if cls.layout == "shuffle":
            reasons.append(
                f"the shuffled layout (an accepted path cannot move in it; take"
                f" {RocmAiterFaBackend.name})"
            )
        return reasons

    @classmethod
    def ragged_reasons(cls, spec: AttentionSpec) -> list[str]:
        """None: the causal kernel looks up where a request's rows end, and trees are padded."""
        return []

    @classmethod
    def reasons_against_auto(cls, spec: AttentionSpec) -> list[str]:
        """On NVIDIA these kernels run so that they can be checked, not because they are the ones to
        use there.

        On AMD they are left out when their self-check fails.
        """
        architecture = specdec.device.device.rocm_architecture(spec.device)
        if tier_of(spec.device) == "triton" and architecture is None:
            return ["AITER's kernels are AMD's; on NVIDIA they run only when asked for by name"]
        return reasons_against_kernels(cls, spec)

    @classmethod
    def describe(cls, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend.describe`."""
        if cls.layout != "plain" or tier_of(spec.device) != "triton":
            return []
        said = ["with AITER's Triton kernels alone"]
        architecture = specdec.device.device.rocm_architecture(spec.device) or ""
        version = aiter.known_numbers(aiter.installed_version() or "")
        widest = 64 if architecture == "gfx1201" else 128
        if architecture.startswith(RDNA) and version >= LARGE_TILES and spec.head_dim > widest:
            said.append(
                "behind 512 tokens it may ask for more shared memory than there is; auto takes it"
                " only where its check says that it does not"
            )
        return said

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.fits_fused_layers = not triton_launch.unavailable_reasons(spec.device)
        self.tier, scratch = tier_of(spec.device), Scratch(spec.device)
        own = _own_kernels(spec) if self.layout == "plain" else None
        self._setup: Setup[Any]
        self._routes: Sequence[Route]
        self._write: Callable[..., None]
        if self.tier == "triton":
            self._setup = Setup(spec, self.layout, aiter_triton_only.load(), scratch, own)
            self._routes, self._plan = fa_routes.TRITON_ONLY, plan_packed
            self._write = fa_triton.write
        else:
            self._setup = Setup(spec, self.layout, aiter.load(AiterFa), scratch, own)
            self._routes, self._plan, self._write = fa_routes.FULL, plan_groups, fa_compiled.write
        # of layers whose cache keeps the model's type
        self._plain = replace(self._setup, spec=replace(spec, cache_dtype=None), own=None)

    @cached_property
    def mixes_cache_types(self) -> bool:
        """See `Backend.mixes_cache_types`."""
        return self._has_plain_kernels()

    def plan(self, metadata: AttentionMetadata) -> AiterPlan:
        """Requests grouped by phase; the same whether or not a graph is being captured."""
        return self._plan(metadata, self.spec.block_size)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        plan: AiterPlan,
        **how: Unpack[Scoring],
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        key, value = key.contiguous(), value.contiguous()
        self.write(cache, key, value, plan.slot_mapping)
        return self.attend(query, key, value, cache, plan, **how)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        plan: AiterPlan,
        **how: Unpack[Scoring],
    ) -> Tensor:
        """Attends to keys and values that are in the cache already."""
        rows, layer = Rows(query.contiguous(), key, value), Layer(cache, **how)
        # which read rows, where decoding reads the cache alone
        if any(group.phase != "decode" for group in plan.groups):
            rows = Rows(rows.query, key.contiguous(), value.contiguous())

        def attend(group: Group, rows: Rows) -> Tensor:
            return self.kernel(group, layer)(self._setup_of(cache), group, layer, rows)

        return plan.attend(rows, self.spec.head_dim, attend)

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.write`."""
        self._write(self._setup_of(cache), cache, key, value, slot_mapping)

    def kernel(self, group: Group, layer: Layer) -> Kernel:
        """The kernel for a group of requests in one layer, from the tables in `fa_routes`."""
        return choose(self._routes, group, self._setup_of(layer.cache), layer)

    def _setup_of(self, cache: LayerCache) -> Setup[Any]:
        return self._setup if cache.key.dtype == self.spec.kv_dtype else self._plain


class RocmAiterFaShuffleBackend(RocmAiterFaBackend):
    """The backend on the shuffled layout, whose single-token kernels are AITER's fastest. Chosen by
    name only.
    """

    name = "rocm_aiter_fa_shuffle"
    layout = "shuffle"

    @classmethod
    def reasons_against_auto(cls, spec: AttentionSpec) -> list[str]:
        """Always: which layout is faster depends on the model."""
        return BY_NAME


def tier_of(device: torch.device) -> Tier | None:
    """How much of AITER runs on a device; None when nothing does."""
    architecture = specdec.device.device.rocm_architecture(device)
    if architecture in CDNA:
        return "triton" if aiter_triton_only.requested() else "full"
    if architecture is None:
        return "triton" if device.type == "cuda" else None
    return "triton" if architecture.startswith(RDNA) else None


def _own_kernels(spec: AttentionSpec) -> AttentionBackend | None:
    """Our Triton kernels for an 8-bit cache, where they run and have passed their own check."""
    if spec.kv_dtype.itemsize > 1 or TritonFaBackend.unsupported_reasons(spec):
        return None
    return None if TritonFaBackend.reasons_against_auto(spec) else TritonFaBackend(spec)


def _shape_reasons(spec: AttentionSpec, architecture: str | None, layout: Layout) -> list[str]:
    """What of the model's shape the kernels do not have."""
    reasons = []
    has_fp8 = architecture in FP8_ARCHITECTURES
    fp8 = specdec.device.device.float8_dtype(spec.device) if has_fp8 else None
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype {spec.dtype} (the kernels take bfloat16 and float16)")
    if spec.kv_dtype not in (spec.dtype, fp8):
        has = f"computes with {fp8}" if fp8 else "has no 8-bit floats that AITER knows"
        reasons.append(f"a {spec.kv_dtype} cache ({architecture or spec.device} {has})")
    if spec.block_size not in BLOCK_SIZES:
        reasons.append(f"blocks of {spec.block_size} tokens (the kernels take 16 and 32)")
    if spec.head_dim % 16 or not 16 <= spec.head_dim <= 256:
        reasons.append(f"head size {spec.head_dim} (the kernels take multiples of 16 up to 256)")
    elif layout == "shuffle" and spec.head_dim != power_of_two(spec.head_dim):
        reasons.append(
            f"head size {spec.head_dim} (of the shuffled layout AITER reads powers of two alone:"
            f" take {RocmAiterFaBackend.name})"
        )
    if spec.num_heads % spec.num_kv_heads:
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        reasons.append(f"{heads} query heads do not share {kv_heads} key heads evenly")
    if spec.reads_others:
        reasons.append("layers that read the cache of other layers")
    if spec.non_causal and spec.sinks:
        reasons.append("non-causal blocks with sinks (no kernel has both)")
    if spec.non_causal and spec.softcap is not None:
        reasons.append("non-causal blocks with a softcap (no kernel has both)")
    return reasons
