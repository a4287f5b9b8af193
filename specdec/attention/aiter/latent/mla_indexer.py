"""The indexer of sparse latent attention on AITER: keys in 8 bits, scores, and the best positions
of every row.

    phase     scores                                               best positions
    prefill   fp8_mqa_logits on keys gathered from the cache       top_k_per_row_prefill
    decode    deepgemm_fp8_paged_mqa_logits on the cache           top_k_per_row_decode

Prefill is what the host knows the lengths of. When no sequence is longer than `topk`, every
position is chosen and none is scored.

Exact and not: queries and keys are rounded to e4m3, each with a power of two of its own as scale
(per head, per token), so the selection may differ from one made with unrounded scores. Each depends
on its own token alone, so a row selects the same positions whether it is decoded by itself,
verified in a block or prefilled in any chunk. Equal scores are decided by the lower position from
amd-aiter 0.1.20 on; before that AITER decides them as it likes.

Cache: a block is the keys of its tokens, then their scales; keys lie as the matrix instructions
read them, in tiles of 16 x 16.
"""

import torch
from torch import Tensor

from specdec.attention.aiter.latent.mla_sparse_plan import IndexChunk, SparsePlan
from specdec.attention.mla import IndexerRows, IndexerSpec
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterIndexer

SCALE_BYTES = 4
"""Bytes of a key's scale, a float32."""

SCORE_COLUMNS = 256
"""Keys that the decode kernel scores at a time; it may write that far."""

MAX_SCORE_BYTES = 2**31
"""Scores that one call of the decode kernel may write: before 0.1.18 it computes their addresses in
32 bits.
"""

SMALLEST_AMPLITUDE = 1e-4
"""Vectors smaller than this are scaled as if they were that large, as AITER does with keys."""


class AiterIndexerKernels:
    """The indexer's kernels for one model on one device.

    Args:
        spec: shape of the indexer.
        block_size: tokens per cache block, a multiple of 16.
        fp8: flavor of e4m3 that the architecture computes with.
    """

    def __init__(self, spec: IndexerSpec, block_size: int, fp8: torch.dtype) -> None:
        self.spec, self.block_size, self.fp8 = spec, block_size, fp8
        self._ops = aiter.load(AiterIndexer)

    def select(self, rows: IndexerRows, cache: Tensor, plan: SparsePlan) -> Tensor:
        """Writes keys to `cache` uint8 [num_blocks, block_size, head_dim + 4], then selects.

        Returns:
            int32 [num_tokens, topk], positions in any order, -1 where a row has fewer.
        """
        self._ops.indexer_k_quant_and_cache(
            k=rows.key.contiguous(),
            kv_cache=cache,
            slot_mapping=plan.metadata.slot_mapping,
            quant_block_size=self.spec.head_dim,
            scale_fmt="ue8m0",
            preshuffle=True,
        )
        if plan.metadata.max_seq_len <= self.spec.topk:
            return self._everything(plan.positions)
        query, scale = self._quantized(rows.query)
        weights = rows.weights * scale  # the kernels know scales of keys only
        if plan.chunks is None:
            return self._select_paged(query, weights, cache, plan)
        return torch.cat(
            [self._select_gathered(query, weights, cache, plan, chunk) for chunk in plan.chunks]
        )

    def _quantized(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """`query` in 8 bits, and its scales float32 [num_tokens, num_heads], powers of two."""
        query = query.float()
        amplitude = query.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_AMPLITUDE)
        scale = (amplitude / torch.finfo(self.fp8).max).log2_().ceil_().exp2_()
        return (query / scale).to(self.fp8), scale.squeeze(-1)

    def _everything(self, positions: Tensor) -> Tensor:
        """All positions up to the row's own."""
        columns = torch.arange(self.spec.topk, device=positions.device)
        return torch.where(columns <= positions[:, None], columns, -1).int()

    def _select_paged(
        self, query: Tensor, weights: Tensor, cache: Tensor, plan: SparsePlan
    ) -> Tensor:
        """As many rows per request as every other, with lengths that only the device knows."""
        metadata = plan.metadata
        width, table = metadata.max_query_len, metadata.block_table.contiguous()
        if plan.scores is None:
            # The kernel leaves out keys past the row; as each layer leaves out the same, the first
            # fill serves all.
            columns = -(-metadata.max_seq_len // SCORE_COLUMNS) * SCORE_COLUMNS
            shape = metadata.num_tokens, columns
            plan.scores = torch.full(shape, -torch.inf, dtype=torch.float32, device=query.device)
        selected = self._room(metadata.num_tokens, query.device)
        step = max(1, MAX_SCORE_BYTES // (width * plan.scores.shape[1] * plan.scores.itemsize))
        for begin in range(0, metadata.num_reqs, step):
            requests = slice(begin, min(begin + step, metadata.num_reqs))
            rows = slice(requests.start * width, requests.stop * width)
            self._ops.deepgemm_fp8_paged_mqa_logits(
                q_fp8=query[rows].unflatten(0, (-1, width)),
                kv_cache=cache.unsqueeze(2),
                weights=weights[rows],
                out_logits=plan.scores[rows],
                context_lens=metadata.seq_lens[requests],
                kv_indices=table[requests],
                max_model_len=plan.scores.shape[1],
                Preshuffle=True,
                KVBlockSize=self.block_size,
                ChunkK=SCORE_COLUMNS,
            )
            self._ops.top_k_per_row_decode(
                logits=plan.scores[rows],
                next_n=width,
                seqLens=metadata.seq_lens[requests],
                indices=selected[rows],
                numRows=rows.stop - rows.start,
                stride0=plan.scores.stride(0),
                stride1=plan.scores.stride(1),
                k=self.spec.topk,
                **self._ops.top_k_options,
            )
        return selected

    def _select_gathered(
        self, query: Tensor, weights: Tensor, cache: Tensor, plan: SparsePlan, chunk: IndexChunk
    ) -> Tensor:
        """The rows of a chunk on the keys of its requests, packed."""
        if chunk.max_seq_len <= self.spec.topk:
            return self._everything(plan.positions[chunk.rows])
        keys = torch.empty(chunk.num_keys, self.spec.head_dim, dtype=self.fp8, device=query.device)
        scales = torch.empty(chunk.num_keys, 1, dtype=torch.float32, device=query.device)
        self._ops.cp_gather_indexer_k_quant_cache(
            kv_cache=cache,
            dst_k=keys,
            dst_scale=scales,
            block_table=plan.metadata.block_table[chunk.requests].contiguous(),
            cu_seq_lens=chunk.cu_seq_lens,
            preshuffle=True,
        )
        scores: Tensor = self._ops.fp8_mqa_logits(
            Q=query[chunk.rows],
            KV=keys,
            kv_scales=scales.view(-1),
            weights=weights[chunk.rows],
            cu_starts=chunk.starts,
            cu_ends=chunk.ends,
            clean_logits=True,
        )
        # Whether indices would count from a row's start is not the same in every version. From 0
        # there is no difference; other requests' keys before the start are -inf, and where they
        # fill a short row up they are
        # dropped here.
        selected = self._room(len(scores), query.device)
        self._ops.top_k_per_row_prefill(
            logits=scores,
            rowStarts=torch.zeros_like(chunk.starts),
            rowEnds=chunk.ends,
            indices=selected,
            values=None,
            numRows=len(scores),
            stride0=scores.stride(0),
            stride1=scores.stride(1),
            k=self.spec.topk,
            **self._ops.top_k_options,
        )
        selected -= chunk.starts[:, None]
        return selected.clamp_(min=-1)

    def _room(self, num_rows: int, device: torch.device) -> Tensor:
        return torch.empty(num_rows, self.spec.topk, dtype=torch.int32, device=device)
