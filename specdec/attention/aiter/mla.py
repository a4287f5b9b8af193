"""Multi-head latent attention on AMD GPUs with AITER's kernels.

    phase     condition                           kernel
    prefill   gfx950, 8-bit cache, causal         mla_prefill_ps_asm_fwd and mla_reduce_v1 on keys and values built and rounded
              else                                flash_attn_varlen_func on keys and values built from the rows themselves
    extend                                        the same on the rows, then on keys and values built from gathered context,
                                                  merged by log-sum-exp
    decode    causal, a multiple of 4, 3, 2 rows  mla_decode_fwd on the latents, as many rows per entry
              else                                mla_decode_fwd on the latents, one row per entry: what is not causal, and
                                                  counts such as 5 and 7, for which there is no kernel

Layouts: plain. Cache: the model's type or 8-bit floats. Host: never waits for the device. Architectures: gfx942, gfx950.
Known gaps: each entry reads its tokens by itself, so five rows read the context five times; heads fill up to multiples of 16.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import specdec.device
from specdec.attention.aiter import mla_prefill as rocm_aiter_mla_prefill
from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.aiter.mla_plan import HEAD_MULTIPLE, DecodePlan, DecodePlanner
from specdec.attention.aiter.mla_prefill import Fp8Prefill, Fp8PrefillPlan, pad_heads
from specdec.attention.aiter.plan import Context, Group, plan_groups
from specdec.attention.backend import AttentionMetadata
from specdec.attention.merge import merge
from specdec.attention.mla import IndexerRows, MlaBackend, MlaRows, MlaSpec, UpProjection
from specdec.errors import CapacityError
from specdec.kernels import aiter
from specdec.kv_cache import LatentCache, LatentLayerSpec

ARCHITECTURES = ("gfx942", "gfx950")
LATENT_DIMS = (512, 64)
KEY_VALUE_DIMS = ((192, 128), (256, 256))
MAX_HEADS = 128


@dataclass(slots=True)
class MlaPlan:
    """The groups of a forward, where its latents go, and what the groups that need it are told besides.

    Plans of one size share their memory, so only the newest plan of a backend may run.
    """

    number: int
    groups: list[Group]
    slot_mapping: Tensor
    decode: DecodePlan | None = None
    fp8_prefill: Fp8PrefillPlan | None = None


class RocmAiterMlaBackend(MlaBackend):
    """AITER's latent attention over every position."""

    name = "rocm_aiter_mla"

    @classmethod
    def unsupported_reasons(cls, spec: MlaSpec) -> list[str]:
        """All reasons why AITER cannot serve `spec` on this machine; empty when it can."""
        architecture = specdec.device.rocm_architecture(spec.device)
        if architecture is None:
            return [f"{spec.device} is not a ROCm device"]
        reasons = []
        if architecture not in ARCHITECTURES:
            reasons.append(f"architecture {architecture} (AITER's kernels are for {' and '.join(ARCHITECTURES)})")
        reasons += aiter.unavailable_reasons("mla")
        if spec.indexer is not None:
            reasons.append("an indexer chooses what rows attend to (use rocm_aiter_mla_sparse)")
        return reasons + _shape_reasons(spec, architecture)

    def __init__(self, spec: MlaSpec) -> None:
        super().__init__(spec)
        self._ops = aiter.load_mla()
        self._is_fp8 = spec.kv_dtype.itemsize == 1
        self._cache_scale = torch.full((1,), spec.cache_scale, dtype=torch.float32, device=spec.device)
        self._one = torch.ones(1, dtype=torch.float32, device=spec.device)
        self._num_heads = -(-spec.num_heads // HEAD_MULTIPLE) * HEAD_MULTIPLE
        self._decode_planner = DecodePlanner(spec, self._ops, self._num_heads)
        self.fp8_prefill_reasons = rocm_aiter_mla_prefill.unavailable_reasons(spec)
        """Why prompts are not computed in 8 bits; empty when they are."""
        self._fp8_prefill = None if self.fp8_prefill_reasons else Fp8Prefill(spec, self._ops)
        self._num_plans = 0

    @property
    def multi_head(self) -> type[RocmAiterFaBackend]:
        """See `MlaBackend.multi_head`."""
        return RocmAiterFaBackend

    @property
    def cache_spec(self) -> LatentLayerSpec:
        """See `MlaBackend.cache_spec`."""
        return LatentLayerSpec(width=self.spec.latent_dim)

    def plan(self, metadata: AttentionMetadata) -> MlaPlan:
        """Requests grouped by phase, and the work of the groups; the same whether or not a graph is being captured."""
        split = plan_groups(metadata, self.spec.block_size)
        self._num_plans += 1
        plan = MlaPlan(self._num_plans, split.groups, split.slot_mapping)
        for group in plan.groups:
            if group.phase == "decode":
                plan.decode = self._decode_planner.plan(group)
            elif group.phase == "prefill" and group.causal and self._fp8_prefill is not None:
                plan.fp8_prefill = self._fp8_prefill.plan(group)
        return plan

    def select(self, rows: IndexerRows, cache: LatentCache, plan: MlaPlan) -> Tensor:
        """Not for this backend, which refuses models with an indexer."""
        raise AssertionError("a model with an indexer runs on rocm_aiter_mla_sparse")

    def run(
        self, rows: MlaRows, up: UpProjection, cache: LatentCache, plan: MlaPlan, *, scale: float, selected: Tensor | None = None
    ) -> Tensor:
        """See `MlaBackend.run`."""
        assert selected is None, "a model with an indexer runs on rocm_aiter_mla_sparse"
        assert plan.number == self._num_plans, "a newer plan has taken over the memory of this one"
        self._write(cache, rows, plan.slot_mapping)
        if len(plan.groups) == 1:
            return self._attend(plan.groups[0], plan, rows, up, cache, scale)
        output = rows.query_nope.new_empty(*rows.query_nope.shape[:2], self.spec.v_head_dim)
        for group in plan.groups:
            index = group.rows
            assert isinstance(index, Tensor), "a group that is not alone names its rows"
            part = MlaRows(*(tensor.index_select(0, index) for tensor in rows))
            output.index_copy_(0, index, self._attend(group, plan, part, up, cache, scale))
        return output

    def _write(self, cache: LatentCache, rows: MlaRows, slot_mapping: Tensor) -> None:
        """Stores the latents at `slot_mapping`, converted to the type of the cache."""
        num_slots, most_slots = cache.latent.shape[0] * cache.latent.shape[1], 2**31 // self.spec.latent_dim
        if num_slots > most_slots:
            raise CapacityError(
                f"the KV cache has {num_slots:,} tokens and AITER's latent kernels address {most_slots:,}: give it less memory"
            )
        compressed, key_rope = rows.compressed, rows.key_rope
        if self._is_fp8:  # the writer converts without saturating
            most = torch.finfo(self.spec.kv_dtype).max * self.spec.cache_scale
            compressed, key_rope = compressed.clamp(-most, most), key_rope.clamp(-most, most)
        self._ops.concat_and_cache_mla(
            kv_c=compressed.contiguous(),
            k_pe=key_rope.contiguous(),
            kv_cache=cache.latent,
            slot_mapping=slot_mapping,
            kv_cache_dtype="fp8" if self._is_fp8 else "auto",
            scale=self._cache_scale,
        )

    def _attend(self, group: Group, plan: MlaPlan, rows: MlaRows, up: UpProjection, cache: LatentCache, scale: float) -> Tensor:
        """Attention of a group's rows: the table at the top of this file."""
        if group.phase == "decode":
            assert plan.decode is not None
            return self._decode(plan.decode, rows, up, cache, scale)
        query = torch.cat([rows.query_nope, rows.query_rope], dim=-1)
        key, value = _keys_and_values(rows.compressed, rows.key_rope, up)
        if group.phase == "extend":
            return self._extend(group, query, key, value, up, cache, scale)
        if plan.fp8_prefill is not None:
            assert self._fp8_prefill is not None
            return self._fp8_prefill.attend(query, key, value, plan.fp8_prefill, scale)
        return self._varlen(group, query, key, value, scale, causal=group.causal)

    def _decode(self, plan: DecodePlan, rows: MlaRows, up: UpProjection, cache: LatentCache, scale: float) -> Tensor:
        """Rows on the latents themselves, the maps absorbed into query and output."""
        absorbed = torch.bmm(rows.query_nope.transpose(0, 1), up.key).transpose(0, 1)
        query = pad_heads(torch.cat([absorbed, rows.query_rope], dim=-1), self._num_heads)
        output = torch.empty(*query.shape[:2], self.spec.kv_lora_rank, dtype=query.dtype, device=query.device)
        self._ops.mla_decode_fwd(
            q=query,
            kv_buffer=cache.latent.view(-1, 1, 1, self.spec.latent_dim),
            o=output,
            qo_indptr=plan.qo_indptr,
            kv_indptr=plan.kv_indptr,
            kv_indices=plan.kv_indices,
            kv_last_page_lens=plan.kv_last_page_lens,
            max_seqlen_q=plan.max_seqlen_q,
            page_size=1,
            nhead_kv=1,
            sm_scale=scale,
            num_kv_splits=0,  # left open, some batches would go to a kernel that ignores the plan and whose lists no graph may hold
            q_scale=self._one if self._is_fp8 else None,
            kv_scale=self._cache_scale if self._is_fp8 else None,
            **plan.work,
        )
        # Where it folds heads, the call gives `output` new storage: no view of it may be older than this line.
        return torch.bmm(output[:, : self.spec.num_heads].transpose(0, 1), up.value).transpose(0, 1)

    def _extend(
        self, group: Group, query: Tensor, key: Tensor, value: Tensor, up: UpProjection, cache: LatentCache, scale: float
    ) -> Tensor:
        """Rows on their own keys, then on each chunk of the context, merged by the logarithms of their denominators."""
        out, lse = self._varlen(group, query, key, value, scale, causal=group.causal, return_lse=True)
        for chunk in group.context_chunks():
            latent = cache.latent.flatten(0, 1).index_select(0, chunk.slots)
            if self._is_fp8:
                latent = latent.to(query.dtype) * self._cache_scale.to(query.dtype)
            compressed, key_rope = latent.split([self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], dim=-1)
            key, value = _keys_and_values(compressed, key_rope, up)
            part, part_lse = self._varlen(group, query, key, value, scale, chunk, causal=False, return_lse=True)
            out, lse = merge(out, lse, part, part_lse)
        return out.to(query.dtype)

    def _varlen(
        self,
        group: Group,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        context: Context | None = None,
        *,
        causal: bool,
        return_lse: bool = False,
    ) -> Any:
        """Rows on packed keys: those of `context`, or the rows' own when there is none.

        Returns:
            [num_tokens, num_heads, v_head_dim], and with `return_lse` log-denominators float32 [num_heads, num_tokens] beside it.
        """
        return self._ops.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=group.query_start_loc,
            cu_seqlens_k=context.cu_seqlens if context else group.query_start_loc,
            max_seqlen_q=group.max_query_len,
            max_seqlen_k=context.max_len if context else group.max_query_len,
            softmax_scale=scale,
            causal=causal,
            return_lse=return_lse,
        )


def _keys_and_values(compressed: Tensor, key_rope: Tensor, up: UpProjection) -> tuple[Tensor, Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, v_head_dim] of `compressed` [n, rank] and `key_rope` [n, rope]."""
    nope = torch.matmul(compressed, up.key.transpose(1, 2)).transpose(0, 1)
    key = torch.cat([nope, key_rope[:, None].expand(-1, nope.shape[1], -1)], dim=-1)
    return key, torch.matmul(compressed, up.value).transpose(0, 1).contiguous()


def _shape_reasons(spec: MlaSpec, architecture: str) -> list[str]:
    """What of the model's shape the kernels do not have."""
    reasons = []
    fp8 = torch.float8_e4m3fnuz if architecture == "gfx942" else torch.float8_e4m3fn
    if spec.dtype != torch.bfloat16:
        reasons.append(f"dtype {spec.dtype} (the kernels take bfloat16)")
    if spec.kv_dtype not in (spec.dtype, fp8):
        reasons.append(f"a {spec.kv_dtype} cache ({architecture} computes with {fp8})")
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) != LATENT_DIMS:
        rank, rope = LATENT_DIMS
        reasons.append(f"latents of {spec.kv_lora_rank} and {spec.qk_rope_head_dim} numbers (the kernels take {rank} and {rope})")
    key_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    if (key_dim, spec.v_head_dim) not in KEY_VALUE_DIMS:
        known = ", ".join(f"{k} and {v}" for k, v in KEY_VALUE_DIMS)
        reasons.append(f"keys of {key_dim} and values of {spec.v_head_dim} numbers (the kernels take {known})")
    if spec.num_heads > MAX_HEADS:
        reasons.append(f"{spec.num_heads} heads (the kernels take up to {MAX_HEADS})")
    return reasons
