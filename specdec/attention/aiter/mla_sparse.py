"""Sparse latent attention (DeepSeek-V3.2, GLM-MoE-DSA) on AMD GPUs with AITER's kernels.

Kernel: `mla_decode_fwd` in prefill, decode and verification alike. Every token is a batch entry of its own with a list of the cache
slots that the indexer chose for it, min(position + 1, topk) of them, so causality is in the lists and a sequence no longer than
`topk` is attended to whole. Queries are absorbed: the maps to keys and values are applied to query and output. Layout: plain.
Cache: the model's type or 8-bit floats, which saturate. Host: never waits for the device.
Architectures: gfx942, gfx950. Known gaps: no non-causal blocks; a prefill builds no keys and values, which would be faster below
`topk` tokens. The indexer rounds to 8 bits (see `rocm_aiter_indexer`); decoding with drafts still equals plain decoding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import specdec.device
from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.aiter.indexer import SCALE_BYTES, AiterIndexerKernels
from specdec.attention.aiter.sparse_plan import SparsePlan, SparsePlanner
from specdec.attention.backend import AttentionBackend, AttentionMetadata
from specdec.attention.mla import IndexerRows, IndexerSpec, MlaBackend, MlaRows, MlaSpec, UpProjection
from specdec.errors import CapacityError
from specdec.kernels import aiter
from specdec.kv_cache import LatentCache, LatentLayerSpec

DTYPES = (torch.bfloat16,)
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""Architectures the kernels are built for, and the flavour of e4m3 each computes with."""
LATENT_SHAPES = ((512, 64),)
"""Compressed and rotated numbers of a latent."""
INDEX_HEAD_DIMS = (128,)
MIN_INDEX_HEADS = 32
BLOCK_SIZES = (16, 32, 64, 128)
HEAD_GROUP = 16
"""Query heads per tile of the kernel; others are filled up."""
MAX_HEADS = 128
MAX_ADDRESS = 2**31
"""Numbers of a layer's cache that the kernel can address with 32 bits."""


class RocmAiterMlaSparseBackend(MlaBackend):
    """AITER's latent attention on the positions that an indexer selects (DeepSeek-V3.2, arXiv 2512.02556)."""

    name = "rocm_aiter_mla_sparse"

    @classmethod
    def unsupported_reasons(cls, spec: MlaSpec) -> list[str]:
        """All reasons why AITER cannot serve `spec` on this machine; empty when it can."""
        if spec.indexer is None:
            return ["the model has no indexer (rocm_aiter_mla serves those)"]
        architecture = specdec.device.rocm_architecture(spec.device)
        if architecture is None:
            return [f"{spec.device} is not a ROCm device"]
        reasons = []
        if architecture not in FP8:
            reasons.append(f"architecture {architecture} (AITER's kernels are for {' and '.join(FP8)})")
        reasons += dict.fromkeys([*aiter.unavailable_reasons("mla"), *aiter.unavailable_reasons("indexer")])
        return reasons + _shape_reasons(spec, FP8.get(architecture)) + _index_reasons(spec.indexer)

    def __init__(self, spec: MlaSpec) -> None:
        super().__init__(spec)
        assert spec.indexer is not None
        architecture = specdec.device.rocm_architecture(spec.device)
        assert architecture is not None
        self._is_fp8 = spec.kv_dtype.itemsize == 1
        self._num_heads = -(-spec.num_heads // HEAD_GROUP) * HEAD_GROUP
        self._ops = aiter.load_mla()
        self._indexer = AiterIndexerKernels(spec.indexer, spec.block_size, FP8[architecture])
        self._planner = SparsePlanner(
            self._ops,
            num_heads=self._num_heads,
            topk=spec.indexer.topk,
            query_dtype=spec.dtype,
            kv_dtype=spec.kv_dtype,
            device=spec.device,
        )
        self._one = torch.ones(1, dtype=torch.float32, device=spec.device)
        self._kv_scale = torch.full((1,), spec.cache_scale, dtype=torch.float32, device=spec.device)

    @property
    def multi_head(self) -> type[AttentionBackend]:
        """See `MlaBackend.multi_head`."""
        return RocmAiterFaBackend

    @property
    def cache_spec(self) -> LatentLayerSpec:
        """A latent and, in 8 bits with a scale, the indexer's key."""
        assert self.spec.indexer is not None
        return LatentLayerSpec(self.spec.latent_dim, self.spec.indexer.head_dim + SCALE_BYTES)

    def plan(self, metadata: AttentionMetadata) -> SparsePlan:
        """Index lists and AITER's work plan; only the newest plan of a backend may run."""
        return self._planner.plan(metadata)

    def select(self, rows: IndexerRows, cache: LatentCache, plan: SparsePlan) -> Tensor:
        """See `MlaBackend.select`."""
        return self._indexer.select(rows, cache.index_key, plan)

    def run(
        self, rows: MlaRows, up: UpProjection, cache: LatentCache, plan: SparsePlan, *, scale: float, selected: Tensor | None = None
    ) -> Tensor:
        """See `MlaBackend.run`; `selected` may come from an earlier layer.

        Raises:
            CapacityError: the cache is larger than the kernel can address.
        """
        assert selected is not None, "every layer of a model with an indexer brings a selection"
        buffers = plan.buffers
        assert plan.serial == buffers.serial, "a newer plan has taken this plan's buffers"
        num_slots, most_slots = cache.latent.shape[:2].numel(), MAX_ADDRESS // self.spec.latent_dim
        if num_slots > most_slots:
            raise CapacityError(
                f"the KV cache has {num_slots:,} tokens and AITER's latent kernels address {most_slots:,}: give it less memory"
            )
        self._write(rows, cache, plan)
        if plan.selected is not selected:  # layers that share a selection share its list
            buffers.list_slots(selected, plan.metadata.block_table, self.spec.block_size)
            plan.selected = selected
        query = self._absorbed(rows, up)
        count = len(query)
        output = query.new_empty(count, self._num_heads, self.spec.kv_lora_rank)
        self._ops.mla_decode_fwd(
            q=query,
            kv_buffer=cache.latent.view(-1, 1, 1, self.spec.latent_dim),
            o=output,
            qo_indptr=buffers.qo_indptr[: count + 1],
            kv_indptr=buffers.kv_indptr[: count + 1],
            kv_indices=buffers.kv_indices[: count * buffers.topk],
            kv_last_page_lens=buffers.last_page_lens[:count],
            max_seqlen_q=1,
            page_size=1,
            nhead_kv=1,
            sm_scale=scale,
            # What AITER would fill in itself; left out, some versions drop the plan for one of their own.
            num_kv_splits=buffers.work["work_indptr"].numel() - 1,
            q_scale=self._one if self._is_fp8 else None,
            kv_scale=self._kv_scale if self._is_fp8 else None,
            **buffers.work,
        )
        return torch.bmm(output[:, : self.spec.num_heads].transpose(0, 1), up.value).transpose(0, 1)

    def _write(self, rows: MlaRows, cache: LatentCache, plan: SparsePlan) -> None:
        """Stores latents."""
        compressed, key_rope = rows.compressed, rows.key_rope
        if self._is_fp8:  # the writer converts without saturating
            most = torch.finfo(self.spec.kv_dtype).max * self.spec.cache_scale
            compressed, key_rope = compressed.clamp(-most, most), key_rope.clamp(-most, most)
        self._ops.concat_and_cache_mla(
            kv_c=compressed.contiguous(),
            k_pe=key_rope.contiguous(),
            kv_cache=cache.latent,
            slot_mapping=plan.metadata.slot_mapping,
            kv_cache_dtype="fp8" if self._is_fp8 else "auto",
            scale=self._kv_scale,
        )

    def _absorbed(self, rows: MlaRows, up: UpProjection) -> Tensor:
        """Queries that score latents: [num_tokens, heads filled up with zeros, latent_dim]."""
        nope = torch.bmm(rows.query_nope.transpose(0, 1), up.key).transpose(0, 1)
        query = torch.cat([nope, rows.query_rope], dim=-1)
        if self._num_heads > self.spec.num_heads:
            query = F.pad(query, (0, 0, 0, self._num_heads - self.spec.num_heads))
        return query


def _shape_reasons(spec: MlaSpec, fp8: torch.dtype | None) -> list[str]:
    """What of the model's shape the attention kernel does not have."""
    reasons = []
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype {spec.dtype} (the kernel takes bfloat16)")
    if spec.kv_dtype not in (spec.dtype, fp8):
        reasons.append(f"a {spec.kv_dtype} cache (this device computes with {fp8})")
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) not in LATENT_SHAPES:
        reasons.append(f"latents of {spec.kv_lora_rank} + {spec.qk_rope_head_dim} numbers (the kernel takes 512 + 64)")
    if spec.num_heads > MAX_HEADS:
        reasons.append(f"{spec.num_heads} heads (the kernel takes up to {MAX_HEADS})")
    if spec.block_size not in BLOCK_SIZES:
        reasons.append(f"blocks of {spec.block_size} tokens (the kernels take {', '.join(map(str, BLOCK_SIZES))})")
    if spec.non_causal:
        reasons.append("non-causal blocks (the indexer's kernels are causal)")
    return reasons


def _index_reasons(indexer: IndexerSpec) -> list[str]:
    """What of the indexer's shape its kernels do not have."""
    reasons = []
    if indexer.head_dim not in INDEX_HEAD_DIMS:
        reasons.append(f"index keys of {indexer.head_dim} numbers (the kernels take 128)")
    if indexer.num_heads < MIN_INDEX_HEADS or indexer.num_heads & (indexer.num_heads - 1):
        reasons.append(f"{indexer.num_heads} index heads (the kernels take powers of two from {MIN_INDEX_HEADS} on)")
    return reasons
