"""Multi-head attention on AMD GPUs with AITER's kernels, in one of two tiers.

*Full*, on CDNA, where AITER has HIP, assembly and Triton kernels:

    phase     asked for                                 kernel
    prefill   any                                       flash_attn_varlen_func on the rows themselves
    extend    sinks                                     unified_attention
              window                                    flash_attn_varlen_func on what the window shows, gathered
              else                                      flash_attn_varlen_func on the rows, then on gathered context, merged
    decode    several rows, causal                      unified_attention
              several rows, not causal                  flash_attn_with_kvcache; on gathered context when it cannot read the cache
              one row, sinks or a shape too narrow      unified_attention
              one row, plain layout                     paged_attention_v1, with a window on a trimmed block table
              one row, shuffled layout                  paged_attention_common or paged_attention_rocm; with a window or softcap,
                                                        unified_attention

*Triton-only*, on RDNA, where AITER has little else, and on CDNA when AITER_TRITON_ONLY is 1. NVIDIA is served by name alone, to
check these kernels without AMD hardware. Rows are stored in plain torch, and then:

    causal, or one row                                  unified_attention, all requests in one call
    several rows, not causal                            flash_attn_with_kvcache; on gathered context when it cannot read the cache

Layouts: plain, and in the full tier shuffled as a backend of its own. Cache: the model's type or 8-bit floats. Host: never waits
for the device. Architectures: gfx942, gfx950; Triton-only gfx110x, gfx115x, gfx120x. Known gaps: non-causal blocks with sinks or a
softcap; group sizes above 16 and head sizes other than 64, 128 and 256 decode on unified_attention, which is slower there than
the paged kernels.
"""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

import specdec.device
from specdec.attention.aiter.kernels import AiterKernels
from specdec.attention.aiter.layout import Layout
from specdec.attention.aiter.plan import AiterPlan, Group, plan_groups, plan_packed
from specdec.attention.aiter.triton import Layer, TritonKernels
from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from specdec.kernels import aiter, aiter_triton
from specdec.kv_cache import LayerCache

CDNA = ("gfx942", "gfx950")
RDNA = ("gfx110", "gfx115", "gfx120")
"""Beginnings of the names of RDNA 3, 3.5 and 4."""

FP8 = {
    "gfx942": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn,
    "gfx1200": torch.float8_e4m3fn,
    "gfx1201": torch.float8_e4m3fn,
}
"""The flavour of e4m3 that an architecture computes with."""

DTYPES = (torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 32)
PAGED_HEAD_DIMS = (64, 128, 256)
PAGED_MAX_GROUP = 16

Tier = Literal["full", "triton"]

Kernel = Literal[
    "varlen",
    "windowed_varlen",
    "chunked_varlen",
    "unified",
    "kvcache",
    "gathered_kvcache",
    "paged_v1",
    "paged_common",
    "paged_rocm",
]


class RocmAiterFaBackend(AttentionBackend):
    """AITER attention on the plain cache layout."""

    name = "rocm_aiter_fa"
    layout: ClassVar[Layout] = "plain"

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """All reasons why AITER cannot serve `spec` on this machine; empty when it can."""
        architecture = specdec.device.rocm_architecture(spec.device)
        tier = tier_of(spec.device)
        if architecture is None and tier is None:
            return [f"{spec.device} is not a ROCm device"]
        if architecture is None and aiter.installed_version() is None:
            return [f"{spec.device} is not a ROCm device; to check AITER's Triton kernels here, install amd-aiter (docs/rocm.md)"]
        reasons = []
        if tier is None:
            reasons.append(
                f"architecture {architecture} (AITER's kernels are for {' and '.join(CDNA)}, its Triton kernels for RDNA)"
            )
        if tier == "triton" and cls.layout == "shuffle":
            reasons.append(f"the shuffled layout needs AITER's compiled kernels, which are for {' and '.join(CDNA)}")
        reasons += aiter_triton.unavailable_reasons() if tier == "triton" else aiter.unavailable_reasons()
        version = aiter.version_numbers(aiter.installed_version() or "")
        if version and cls.layout == "shuffle" and version < aiter.SHUFFLE_VERSION:
            reasons.append(f"the shuffled layout needs amd-aiter {aiter.dotted(aiter.SHUFFLE_VERSION)}")
        if version and spec.non_causal and version < aiter.NON_CAUSAL_VERSION:
            reasons.append(f"non-causal blocks need amd-aiter {aiter.dotted(aiter.NON_CAUSAL_VERSION)}")
        return reasons + _shape_reasons(spec, architecture)

    @classmethod
    def reasons_against_auto(cls, spec: AttentionSpec) -> list[str]:
        """On NVIDIA these kernels run so that they can be checked, not because they are the ones to use there."""
        if tier_of(spec.device) == "triton" and specdec.device.rocm_architecture(spec.device) is None:
            return ["AITER's kernels are AMD's; on NVIDIA they run only when asked for by name"]
        return []

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.tier = tier_of(spec.device)
        self._kernels: TritonKernels
        if self.tier == "triton":
            self._kernels = TritonKernels(spec, self.layout, aiter_triton.load())
        else:
            self._kernels = self._compiled = AiterKernels(spec, self.layout)

    def plan(self, metadata: AttentionMetadata) -> AiterPlan:
        """Requests grouped by phase; the same whether or not a graph is being captured."""
        return (plan_packed if self.tier == "triton" else plan_groups)(metadata, self.spec.block_size)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        plan: AiterPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        self.write(cache, key, value, plan.slot_mapping)
        layer = Layer(cache, scale, window, softcap, sinks)
        if len(plan.groups) == 1:
            return self._attend(plan.groups[0], layer, query, key, value)
        output = torch.empty_like(query)
        for group in plan.groups:
            rows = group.rows
            assert isinstance(rows, Tensor), "a group that is not alone names its rows"
            output.index_copy_(0, rows, self._attend(group, layer, *(t.index_select(0, rows) for t in (query, key, value))))
        return output

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.write`."""
        self._kernels.write(cache, key, value, slot_mapping)

    def kernel(
        self, group: Group, *, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Kernel:
        """The kernel for a group of requests in one layer: the tables at the top of this file."""
        spec = self.spec
        if group.phase == "packed":
            return "unified"
        if group.phase == "prefill":
            return "varlen"
        if group.phase == "extend":
            return "unified" if sinks is not None else "windowed_varlen" if window is not None else "chunked_varlen"
        if group.max_query_len > 1:
            if group.causal:
                return "unified"
            return "kvcache" if self.layout == "plain" and spec.kv_dtype == spec.dtype else "gathered_kvcache"
        # A single row is the last position: causal or not, it sees the same keys.
        paged = spec.head_dim in PAGED_HEAD_DIMS and spec.num_heads // spec.num_kv_heads <= PAGED_MAX_GROUP
        if self.tier == "triton" or sinks is not None or not paged:
            return "unified"
        if self.layout == "plain":
            return "paged_v1"
        if window is not None or softcap is not None:
            return "unified"
        # For many rows `common` turns to an assembly kernel with heads of 128, blocks of 16 and a softmax scale of its own.
        fits_assembly = spec.head_dim == 128 and spec.block_size == 16 and math.isclose(scale, 128**-0.5)
        return "paged_common" if fits_assembly else "paged_rocm"

    def _attend(self, group: Group, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a group's rows."""
        match self.kernel(group, scale=layer.scale, window=layer.window, softcap=layer.softcap, sinks=layer.sinks):
            case "unified":
                return self._kernels.unified(group, layer, query)
            case "kvcache" | "gathered_kvcache" as kernel:
                return self._kernels.kvcache(group, layer, query, gathered=kernel == "gathered_kvcache")
            case "varlen":
                return self._compiled.varlen(group, layer, query, key, value)
            case "windowed_varlen":
                return self._compiled.windowed_varlen(group, layer, query)
            case "chunked_varlen":
                return self._compiled.chunked_varlen(group, layer, query, key, value)
            case "paged_v1":
                return self._compiled.paged_v1(group, layer, query)
            case "paged_common":
                return self._compiled.paged_common(group, layer, query)
            case "paged_rocm":
                return self._compiled.paged_rocm(group, layer, query)


class RocmAiterFaShuffleBackend(RocmAiterFaBackend):
    """The same on the shuffled layout, whose single-token kernels are AITER's fastest. Chosen by name only."""

    name = "rocm_aiter_fa_shuffle"
    layout = "shuffle"


def tier_of(device: torch.device) -> Tier | None:
    """How much of AITER runs on a device; None when nothing does."""
    architecture = specdec.device.rocm_architecture(device)
    if architecture in CDNA:
        return "triton" if aiter_triton.requested() else "full"
    if architecture is None:
        return "triton" if device.type == "cuda" else None
    return "triton" if architecture.startswith(RDNA) else None


def _shape_reasons(spec: AttentionSpec, architecture: str | None) -> list[str]:
    """What of the model's shape the kernels do not have."""
    reasons = []
    fp8 = FP8.get(architecture or "")
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype {spec.dtype} (the kernels take bfloat16 and float16)")
    if spec.kv_dtype not in (spec.dtype, fp8):
        has = f"computes with {fp8}" if fp8 else "has no 8-bit floats that AITER knows"
        reasons.append(f"a {spec.kv_dtype} cache ({architecture or spec.device} {has})")
    if spec.block_size not in BLOCK_SIZES:
        reasons.append(f"blocks of {spec.block_size} tokens (the kernels take 16 and 32)")
    if spec.head_dim % 16 or not 16 <= spec.head_dim <= 256:
        reasons.append(f"head size {spec.head_dim} (the kernels take multiples of 16 up to 256)")
    if spec.num_heads % spec.num_kv_heads:
        reasons.append(f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly")
    if spec.non_causal and spec.sinks:
        reasons.append("non-causal blocks with sinks (no kernel has both)")
    if spec.non_causal and spec.softcap is not None:
        reasons.append("non-causal blocks with a softcap (no kernel has both)")
    return reasons
