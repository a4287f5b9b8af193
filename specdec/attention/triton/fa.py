"""Multi-head attention on CUDA devices, and on CDNA devices without AITER, with our own Triton
kernels.

Kernels: `specdec.attention.triton.triton_prefill` for prompts,
`specdec.attention.triton.triton_attention` for few rows and for blocks whose rows see
each other; both read the cache, so a chunk needs no second path. A library takes part in long
contexts, if there is a faster one (`specdec.attention.triton.libraries`).
Layout: plain. Cache: the model's type or 8-bit floats. Host: never waits for the device, and
launches depend on nothing but the host's counts and bounds, so a captured graph serves any lengths
below its bound. Float32 is computed as such, not in the matrix units' short form.
Known gaps: query heads in groups above 128; head sizes above 512.
"""

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, Scoring
from specdec.attention.check import reasons_against_kernels
from specdec.attention.triton import context
from specdec.attention.triton.context import PrefillPlan, plan_rectangles
from specdec.attention.triton.libraries import library
from specdec.base.blocks import MAX_NODES
from specdec.kernels.triton_launch import num_processors, shared_memory, unavailable_reasons
from specdec.kv_cache import LayerCache

if TYPE_CHECKING:
    from specdec.attention.triton.triton_attention import Tile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 512
MAX_GROUP = 128
PREFILL_ROWS = 128
"""Rows of a request from which on they are a prompt's; no block of drafts has as many."""
MIN_SPLIT_KEYS = 128
"""Fewest keys that pay for a program of their own."""
MAX_SPLITS = 64
SHORT_CONTEXT = 2**21
"""Bytes of keys and values that several programs can read for as many rows each."""
SMALL_TILE = 16
"""Rows times heads of a program that leaves so much of a processor free that four of them run
faster than two.
"""


class TritonFaBackend(AttentionBackend):
    """Attention in Triton."""

    name = "triton_fa"
    captures_prefill = True
    fits_fused_layers = True
    mixes_cache_types = True

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """All reasons why the kernels cannot serve `spec` on this machine; empty when they can."""
        reasons = unavailable_reasons(spec.device)
        if spec.dtype not in DTYPES:
            reasons.append(f"dtype {spec.dtype} (the kernels take bfloat16, float16 and float32)")
        if spec.kv_dtype != spec.dtype and not reasons:
            reasons += _cache_reasons(spec)
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 2:
            what = f"head size {spec.head_dim} (the kernels take even ones up to {MAX_HEAD_DIM})"
            reasons.append(what)
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly"
            )
        elif spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            reasons.append(
                f"{spec.num_heads // spec.num_kv_heads} query heads per key head (the kernels take"
                f" {MAX_GROUP})"
            )
        return reasons

    @classmethod
    def tree_reasons(cls, spec: AttentionSpec) -> list[str]:
        """None: a row's ancestors are a word of its own."""
        return []

    @classmethod
    def ragged_reasons(cls, spec: AttentionSpec) -> list[str]:
        """None but windows that end within a block: programs look up where a request's rows end."""
        least = min((window for window in spec.windows if window is not None), default=None)
        if least is None or least > MAX_NODES:
            return []
        return [f"a window of {least} tokens, which ends within a block of {MAX_NODES} drafts"]

    @classmethod
    def reasons_against_auto(cls, spec: AttentionSpec) -> list[str]:
        """See `AttentionBackend.reasons_against_auto`."""
        if unavailable_reasons(spec.device):
            return []
        if (
            spec.device.type == "cpu"
            and specdec.device.device.rocm_architecture(spec.device) is None
        ):
            return ["kernels are interpreted on a CPU, for tests only"]
        return reasons_against_kernels(cls, spec)

    def __init__(self, spec: AttentionSpec) -> None:
        # Triton itself is imported only where it is used.
        from specdec.attention.triton import triton_attention, triton_prefill
        from specdec.kernels import triton_rope

        super().__init__(spec)
        if any(one.chunk for one in spec.each):  # whose rows would be requests of their own
            self.captures_prefill = False
        self._kernels, self._prefill, self._rope_store = (
            triton_attention,
            triton_prefill,
            triton_rope.rope_store,
        )
        self._group = spec.num_heads // spec.num_kv_heads
        self.num_processors = num_processors(spec.device)
        self.rectangle = library(spec)

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The metadata itself, in which programs find their own work, and what of long contexts a
        library takes.
        """
        return plan_rectangles(metadata, self.spec.block_size) if self.rectangle else metadata

    def read(
        self, query: Tensor, cache: LayerCache, plan: AttentionMetadata, **how: Unpack[Scoring]
    ) -> Tensor:
        """See `AttentionBackend.read`."""
        query = query if query.stride(-1) == 1 else query.contiguous()
        simple = how.get("window") is None and how.get("softcap") is None
        if not (self.rectangle and simple and isinstance(plan, PrefillPlan)):
            return self._attend(query, cache, plan, **how)
        return context.attend(
            query,
            cache,
            plan,
            self.rectangle,
            scale=how["scale"],
            sinks=how.get("sinks"),
            go_on=lambda rows, rest, **more: self._prefill.prefill_attention(
                rows, cache, **_places(rest), **how, **more
            ),
            plain=lambda rows, rest: self._attend(rows, cache, rest, **how),
        )

    def _attend(
        self,
        query: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        *,
        window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention through our own kernels alone."""
        if self.is_prefill(metadata, window):
            return self._prefill.prefill_attention(
                query, cache, **_places(metadata), window=window, **options
            )
        tile = self.tile(metadata)
        splits = self.num_splits(metadata, window, tile)
        return self._kernels.paged_attention(
            query,
            cache,
            **_places(metadata),
            causal=metadata.visibility != "full",
            tree=metadata.tree and metadata.tree.within(metadata.max_query_len, window),
            window=window,
            splits=splits,
            tile=tile,
            **options,
        )

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.write`."""
        key, value = (
            rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
            for rows in (key, value)
        )
        self._rope_store(None, key, value, cache, slot_mapping)

    def is_prefill(self, metadata: AttentionMetadata, window: int | None) -> bool:
        """Whether the kernel for prompts is taken, which does not divide keys: so many rows fill
        the device, or see few keys.
        """
        if metadata.visibility != "causal" or metadata.max_query_len < PREFILL_ROWS:
            return False
        spec = self.spec
        memory = shared_memory(spec.device)
        tile = self._prefill.prefill_tile(self._group, spec.head_dim, spec.dtype, memory)
        return self.num_splits(metadata, window, tile) == 1

    def tile(self, metadata: AttentionMetadata) -> "Tile":
        """Shape of a program: the smallest for few rows over a short context, else what reads keys
        the fewest times.

        Where the smallest pays, a row among drafts is computed as it is alone, to the last bit.
        """
        spec, memory = self.spec, shared_memory(self.spec.device)
        small = self._kernels.tile_for(self._group, 1, spec.head_dim, spec.dtype, memory)
        programs = metadata.num_reqs * spec.num_kv_heads * self._num_tiles(metadata, small)
        num_values = (
            metadata.num_reqs * metadata.max_seq_len * spec.num_kv_heads * spec.head_dim * 2
        )
        context_bytes = num_values * spec.kv_dtype.itemsize
        if programs <= self.num_processors and context_bytes <= SHORT_CONTEXT:
            return small
        return self._kernels.tile_for(
            self._group, metadata.usual_query_len, spec.head_dim, spec.dtype, memory
        )

    def num_splits(self, metadata: AttentionMetadata, window: int | None, tile: "Tile") -> int:
        """Programs that share the keys of a row: a power of two that fills the device, as far as
        there are keys.

        It follows from host counts alone, so it is the same whenever the same graph is captured.
        """
        # two warps' keys fill the memory
        resident = 4 if tile.block_m <= SMALL_TILE and tile.num_warps > 2 else 2
        programs = metadata.num_reqs * self._num_tiles(metadata, tile) * self.spec.num_kv_heads
        wanted = resident * self.num_processors // programs
        keys = metadata.max_seq_len
        if window is not None:
            seen = 2 if metadata.visibility == "full" else 1
            keys = min(keys, metadata.max_query_len + seen * window)
        most = max(1, min(wanted, keys // MIN_SPLIT_KEYS, MAX_SPLITS))
        return 1 << (most.bit_length() - 1)

    def _num_tiles(self, metadata: AttentionMetadata, tile: "Tile") -> int:
        """Programs for the rows of one request and one key head."""
        return -(-metadata.usual_query_len // (tile.block_m // self._group))


def _places(metadata: AttentionMetadata) -> dict[str, Any]:
    """What kernels are told of the rows."""
    return {
        "block_table": metadata.block_table,
        "seq_lens": metadata.seq_lens,
        "query_start_loc": metadata.query_start_loc,
        "max_query_len": metadata.max_query_len,
    }


def _cache_reasons(spec: AttentionSpec) -> list[str]:
    """Why this device cannot read an 8-bit cache of this type."""
    expected = specdec.device.device.float8_dtype(spec.device)
    if spec.kv_dtype != expected:
        return [f"a {spec.kv_dtype} cache (the kernels take the model's type and {expected})"]
    nvidia = (
        spec.device.type == "cuda" and specdec.device.device.rocm_architecture(spec.device) is None
    )
    if nvidia and torch.cuda.get_device_capability(spec.device) < (8, 9):
        return [f"a {spec.kv_dtype} cache (it needs compute capability 8.9)"]
    return []
