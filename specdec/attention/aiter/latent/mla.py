"""Multi-head latent attention on AMD GPUs with AITER's kernels.

>>> print(table(ROUTES))
phase    when            kernel
prefill  gfx950, causal  prefill_fp8
prefill  any             varlen
extend   any             chunked_varlen
decode   any             decode

`prefill_fp8` is mla_prefill_ps_asm_fwd and mla_reduce_v1 on keys and values built and rounded; the
two of `varlen` are flash_attn_varlen_func on keys and values built, from the rows and from gathered
context; `decode` is mla_decode_fwd on the latents, in entries of 4, 3 or 2 causal rows, or of one,
such as those of draft trees (see `mla_entries`); of up to 17 where queries are in 8 bits: on
gfx950, from an 8-bit cache.

Layouts: plain. Cache: the model's type or 8-bit floats. Host: never waits for the device.
Architectures: gfx942, gfx950. Known gaps: each entry reads its tokens by itself, so five rows of 16
bits, or all of a draft tree, read the context as many times; heads fill up to multiples of 16.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.aiter.groups import AiterPlan, Group, plan_groups
from specdec.attention.aiter.latent import latents, mla_prefill_fp8
from specdec.attention.aiter.latent.latents import AiterLatentBackend, Entries
from specdec.attention.aiter.latent.mla_entries import EntryPlanner
from specdec.attention.aiter.latent.mla_prefill_fp8 import Fp8Prefill, Fp8PrefillPlan
from specdec.attention.aiter.routes import Route, always, choose, table
from specdec.attention.aiter.scratch import Scratch
from specdec.attention.aiter.varlen import attend, attend_in_chunks
from specdec.attention.backend import AttentionMetadata
from specdec.attention.mla import MlaRows, MlaSpec, UpProjection
from specdec.kernels.aiter import AiterMla
from specdec.kv_cache import LatentCache, LatentLayerSpec

__all__ = ["ROUTES", "RocmAiterMlaBackend", "table"]

KEY_VALUE_DIMS = ((192, 128), (256, 256))


@dataclass(slots=True)
class MlaPlan(AiterPlan):
    """The groups of a forward, where its latents go, and what the groups that need it are told
    besides.

    Plans of one size share their memory, so only the newest plan of a backend may run.
    """

    number: int = 0
    decode: Entries | None = None
    fp8_prefill: Fp8PrefillPlan | None = None


class MlaLayer(NamedTuple):
    """What distinguishes one layer from the next."""

    up: UpProjection
    cache: LatentCache
    scale: float


class RocmAiterMlaBackend(AiterLatentBackend):
    """AITER's latent attention over every position."""

    name = "rocm_aiter_mla"

    @classmethod
    def unsupported_reasons(cls, spec: MlaSpec) -> list[str]:
        """All reasons why AITER cannot serve `spec` on this machine; empty when it can."""
        reasons = []
        if spec.indexer is not None:
            reasons.append("an indexer chooses what rows attend to (use rocm_aiter_mla_sparse)")
        key_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        if (key_dim, spec.v_head_dim) not in KEY_VALUE_DIMS:
            known = ", ".join(f"{k} and {v}" for k, v in KEY_VALUE_DIMS)
            reasons.append(
                f"keys of {key_dim} and values of {spec.v_head_dim} numbers (the kernels take"
                f" {known})"
            )
        return latents.unsupported_reasons(spec, [AiterMla], reasons)

    @classmethod
    def tree_reasons(cls, spec: MlaSpec) -> list[str]:
        """None: rows list what they see."""
        return []

    @classmethod
    def ragged_reasons(cls, spec: MlaSpec) -> list[str]:
        """None: each row is an entry of its own then."""
        return []

    @classmethod
    def describe(cls, spec: MlaSpec) -> list[str]:
        """See `MlaBackend.describe`: whether prompts are computed in 8 bits, or all reasons why
        not.
        """
        if spec.indexer is not None:
            return []
        prompts = "; ".join(mla_prefill_fp8.unavailable_reasons(spec))
        queries = "; ".join(latents.reasons_against_eight_bit_queries(spec))
        return [
            f"prompts in 8 bits: {'no: ' + prompts if prompts else 'yes, those without a context'}",
            f"queries in 8 bits: {'no: ' + queries if queries else 'yes, those of decoding'}",
        ]

    def __init__(self, spec: MlaSpec) -> None:
        eight_bits = not latents.reasons_against_eight_bit_queries(spec)
        super().__init__(spec, eight_bit_queries=eight_bits)
        scratch = Scratch(spec.device)
        self._planner = EntryPlanner(self._kernels, scratch)
        self.fp8_prefill_reasons = mla_prefill_fp8.unavailable_reasons(spec)
        """Why prompts are not computed in 8 bits; empty when they are."""
        self._fp8_prefill = (
            None if self.fp8_prefill_reasons else Fp8Prefill(spec, self._kernels.ops, scratch)
        )
        self._num_plans = 0

    @property
    def prefill_dtype(self) -> torch.dtype:
        """See `MlaBackend.prefill_dtype`."""
        if self.fp8_prefill_reasons:
            return self.spec.dtype
        return specdec.device.device.float8_dtype(self.spec.device)

    @property
    def cache_spec(self) -> LatentLayerSpec:
        """See `MlaBackend.cache_spec`."""
        return LatentLayerSpec(width=self.spec.latent_dim, max_tokens=self._kernels.max_tokens)

    def plan(self, metadata: AttentionMetadata) -> MlaPlan:
        """Requests grouped by phase, and the work of the groups; the same whether or not a graph is
        being captured.
        """
        split = plan_groups(metadata, self.spec.block_size)
        self._num_plans += 1
        plan = MlaPlan(split.groups, split.slot_mapping, self._num_plans)
        for group in plan.groups:
            kernel = choose(ROUTES, group, self)
            if kernel is RocmAiterMlaBackend.decode:
                plan.decode = self._planner.plan(group)
            elif kernel is RocmAiterMlaBackend.prefill_fp8:
                assert self._fp8_prefill is not None
                plan.fp8_prefill = self._fp8_prefill.plan(group)
        return plan

    def run(
        self,
        rows: MlaRows,
        up: UpProjection,
        cache: LatentCache,
        plan: MlaPlan,
        *,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `MlaBackend.run`."""
        assert selected is None, "a model with an indexer runs on rocm_aiter_mla_sparse"
        assert plan.number == self._num_plans, "a newer plan has taken over the memory of this one"
        self._kernels.write(cache, rows.compressed, rows.key_rope, plan.slot_mapping)
        layer = MlaLayer(up, cache, scale)

        def attend_group(group: Group, rows: MlaRows) -> Tensor:
            return choose(ROUTES, group, self)(self, group, plan, layer, rows)

        return plan.attend(rows, self.spec.v_head_dim, attend_group)

    def prefill_fp8(self, group: Group, plan: MlaPlan, layer: MlaLayer, rows: MlaRows) -> Tensor:
        """Rows that are whole sequences, on keys and values built and rounded."""
        assert self._fp8_prefill is not None and plan.fp8_prefill is not None
        keys = _keys_and_values(*rows[2:], layer.up)
        return self._fp8_prefill.attend(_query(rows), *keys, plan.fp8_prefill, layer.scale)

    def varlen(self, group: Group, plan: MlaPlan, layer: MlaLayer, rows: MlaRows) -> Tensor:
        """Attends on keys and values as they are."""
        key, value = _keys_and_values(*rows[2:], layer.up)
        ops, scale = self._kernels.ops, layer.scale
        out: Tensor = attend(
            ops, group, _query(rows), key, value, softmax_scale=scale, causal=group.causal
        )
        return out

    def chunked_varlen(self, group: Group, plan: MlaPlan, layer: MlaLayer, rows: MlaRows) -> Tensor:
        """Rows on their own keys, then on keys and values built from each chunk of the context."""
        key, value = _keys_and_values(*rows[2:], layer.up)

        def read(slots: Tensor) -> tuple[Tensor, Tensor]:
            latent = layer.cache.latent.flatten(0, 1).index_select(0, slots).to(key.dtype)
            widths = [self.spec.kv_lora_rank, self.spec.qk_rope_head_dim]
            compressed, key_rope = latent.split(widths, dim=-1)
            return _keys_and_values(compressed, key_rope, layer.up)

        return attend_in_chunks(
            self._kernels.ops, group, _query(rows), key, value, read, softmax_scale=layer.scale
        )

    def decode(self, group: Group, plan: MlaPlan, layer: MlaLayer, rows: MlaRows) -> Tensor:
        """Rows on the latents themselves, the maps absorbed into query and output."""
        assert plan.decode is not None
        return self._kernels.attend(
            rows, layer.up, layer.cache, plan.decode, scale=layer.scale, num_kv_splits=0
        )


ROUTES = (
    Route(
        "prefill",
        "gfx950, causal",
        lambda group, backend: group.causal and not backend.fp8_prefill_reasons,
        RocmAiterMlaBackend.prefill_fp8,
    ),
    Route("prefill", "", always, RocmAiterMlaBackend.varlen),
    Route("extend", "", always, RocmAiterMlaBackend.chunked_varlen),
    Route("decode", "", always, RocmAiterMlaBackend.decode),
)


def _query(rows: MlaRows) -> Tensor:
    return torch.cat([rows.query_nope, rows.query_rope], dim=-1)


def _keys_and_values(
    compressed: Tensor, key_rope: Tensor, up: UpProjection
) -> tuple[Tensor, Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, v_head_dim] of `compressed` [n, rank] and
    `key_rope` [n, rope].
    """
    nope = torch.matmul(compressed, up.key.transpose(1, 2)).transpose(0, 1)
    key = torch.cat([nope, key_rope[:, None].expand(-1, nope.shape[1], -1)], dim=-1)
    return key, torch.matmul(compressed, up.value).transpose(0, 1).contiguous()
