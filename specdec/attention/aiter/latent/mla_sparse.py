"""Sparse latent attention (DeepSeek-V3.2, GLM-MoE-DSA) on AMD GPUs with AITER's kernels.

One route: `mla_decode_fwd` in prefill, decode and verification alike. Every token is an entry of
its own with a list of the cache slots that the indexer chose for it, min(position + 1, topk) of
them, so causality is in the lists and a sequence no longer than `topk` is attended to whole.
Layout: plain. Cache: the model's type or 8-bit floats, which saturate. Host: never waits for the
device. Architectures: gfx942, gfx950. Known gaps: no non-causal blocks; a prefill builds no keys
and values, which would be faster below `topk` tokens. The indexer rounds to 8 bits (see
`mla_indexer`); decoding with drafts still equals plain decoding.
"""

from torch import Tensor

import specdec.device.device
from specdec.attention.aiter.latent import latents
from specdec.attention.aiter.latent.latents import AiterLatentBackend
from specdec.attention.aiter.latent.mla_indexer import SCALE_BYTES, AiterIndexerKernels
from specdec.attention.aiter.latent.mla_sparse_plan import SparsePlan, SparsePlanner
from specdec.attention.backend import AttentionMetadata
from specdec.attention.mla import (
    INDEXED,
    IndexerRows,
    IndexerSpec,
    MlaRows,
    MlaSpec,
    SparseMlaBackend,
    UpProjection,
)
from specdec.kernels.aiter import AiterIndexer, AiterMla
from specdec.kv_cache import LatentCache, LatentLayerSpec

INDEX_HEAD_DIMS = (128,)
MIN_INDEX_HEADS = 32
BLOCK_SIZES = (16, 32, 64, 128)


class RocmAiterMlaSparseBackend(AiterLatentBackend, SparseMlaBackend):
    """AITER's latent attention on the positions that an indexer selects (DeepSeek-V3.2, arXiv
    2512.02556).
    """

    name = "rocm_aiter_mla_sparse"

    @classmethod
    def unsupported_reasons(cls, spec: MlaSpec) -> list[str]:
        """All reasons why AITER cannot serve `spec` on this machine; empty when it can."""
        if spec.indexer is None:
            return ["the model has no indexer (rocm_aiter_mla serves those)"]
        reasons = []
        if spec.block_size not in BLOCK_SIZES:
            reasons.append(
                f"blocks of {spec.block_size} tokens (the kernels take"
                f" {', '.join(map(str, BLOCK_SIZES))})"
            )
        if spec.non_causal:
            reasons.append("non-causal blocks (the indexer's kernels are causal)")
        kernels = [AiterMla, AiterIndexer]
        return latents.unsupported_reasons(spec, kernels, reasons + _index_reasons(spec.indexer))

    @classmethod
    def tree_reasons(cls, spec: MlaSpec) -> list[str]:
        """See `MlaBackend.tree_reasons`."""
        return [INDEXED]

    @classmethod
    def describe(cls, spec: MlaSpec) -> list[str]:
        """See `MlaBackend.describe`."""
        if spec.indexer is None:
            return []
        return ["prompts in 8 bits: no: with an indexer prompts run on the same lists as decoding"]

    def __init__(self, spec: MlaSpec) -> None:
        super().__init__(spec)
        assert spec.indexer is not None
        fp8 = specdec.device.device.float8_dtype(spec.device)
        self._indexer = AiterIndexerKernels(spec.indexer, spec.block_size, fp8)
        self._planner = SparsePlanner(self._kernels, spec.indexer.topk)
        self.steady_len = spec.indexer.topk - 1  # the first row of a step makes it `topk`

    @property
    def cache_spec(self) -> LatentLayerSpec:
        """A latent and, in 8 bits with a scale, the indexer's key."""
        assert self.spec.indexer is not None
        index_bytes = self.spec.indexer.head_dim + SCALE_BYTES
        return LatentLayerSpec(self.spec.latent_dim, index_bytes, self._kernels.max_tokens)

    def plan(self, metadata: AttentionMetadata) -> SparsePlan:
        """Index lists and AITER's work plan; only the newest plan of a backend may run."""
        return self._planner.plan(metadata)

    def select(self, rows: IndexerRows, cache: LatentCache, plan: SparsePlan) -> Tensor:
        """See `SparseMlaBackend.select`."""
        return self._indexer.select(rows, cache.index_key, plan)

    def run(
        self,
        rows: MlaRows,
        up: UpProjection,
        cache: LatentCache,
        plan: SparsePlan,
        *,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `MlaBackend.run`; `selected` may come from an earlier layer.

        Raises:
            CapacityError: the cache is larger than the kernel can address.
        """
        assert selected is not None, "every layer of a model with an indexer brings a selection"
        assert plan.serial == plan.buffers.serial, "a newer plan has taken this plan's buffers"
        self._kernels.write(cache, rows.compressed, rows.key_rope, plan.metadata.slot_mapping)
        plan.list_slots(selected, self.spec.block_size)
        entries = plan.entries()
        # What AITER would fill in itself; left out, some versions drop the plan for one of their
        # own.
        splits = entries.work["work_indptr"].numel() - 1
        return self._kernels.attend(rows, up, cache, entries, scale=scale, num_kv_splits=splits)


def _index_reasons(indexer: IndexerSpec) -> list[str]:
    """What of the indexer's shape its kernels do not have."""
    reasons = []
    if indexer.head_dim not in INDEX_HEAD_DIMS:
        reasons.append(f"index keys of {indexer.head_dim} numbers (the kernels take 128)")
    if indexer.num_heads < MIN_INDEX_HEADS or indexer.num_heads & (indexer.num_heads - 1):
        reasons.append(
            f"{indexer.num_heads} index heads (the kernels take powers of two from"
            f" {MIN_INDEX_HEADS} on)"
        )
    return reasons
