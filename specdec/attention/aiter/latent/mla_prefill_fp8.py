"""Whole prompts in 8-bit floats, with the assembly kernel that AITER has for gfx950.

Queries, keys and values of a prompt without context are rounded to e4m3 and attended to by tiles,
as `prefill_schedule` deals them to the compute units. A tile whose keys are spread over several
leaves partial results, which a second kernel merges into the output.

A prompt behind a context takes another route. Its rows see the context without a mask, and the
kernel's log-denominators, by which the parts would be merged, are missing for tiles that are not
split and wrong without a mask.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.aiter.groups import Group
from specdec.attention.aiter.latent.latents import HEAD_COUNTS, WORK, pad_heads, quantized
from specdec.attention.aiter.latent.prefill_schedule import QUERY_TILE, Schedule, schedule
from specdec.attention.aiter.scratch import Scratch
from specdec.attention.mla import MlaSpec
from specdec.base.sizes import power_of_two
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterMla

DTYPE = torch.float8_e4m3fn
"""What gfx950 computes with."""

KEY_DIM, VALUE_DIM = 192, 128
WORKS, MERGES = Schedule._fields[:2], Schedule._fields[2:]
"""The lists that each of the two kernels follows."""


@dataclass(frozen=True, slots=True)
class Fp8PrefillPlan:
    """The schedule of one forward's whole prompts; the next plan of its size takes over the memory
    of all but the row starts.
    """

    starts: Tensor  # int32 [num_reqs + 1], of rows and, without a context, of keys
    kv_indices: Tensor  # int32 [num_tokens], 0, 1, 2, ...: keys lie packed
    lists: dict[str, Tensor]  # int32, those of `Schedule`
    max_q_len: int
    num_partial_tiles: int


@dataclass(slots=True)
class Fp8Prefill:
    """Plans and runs it for one model.

    Memory is kept once per power of two of requests and of rows, and never given up.
    """

    spec: MlaSpec
    ops: AiterMla
    scratch: Scratch
    _buffers: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    @property
    def num_heads(self) -> int:
        """Heads with those added that the kernel needs."""
        return next(count for count in HEAD_COUNTS if count >= self.spec.num_heads)

    def plan(self, group: Group) -> Fp8PrefillPlan:
        """Schedules whole prompts from their lengths on the host; none is read from the device."""
        assert group.query_lens is not None, "the host knows the lengths of prompts"
        buffers = self._buffers_for(group.num_reqs, group.max_query_len)
        num_units = buffers["work_indptr"].numel() - 1
        lists = schedule(group.query_lens, self.num_heads, num_units=num_units)
        there = {}
        for name, numbers in lists._asdict().items():
            staged = torch.from_numpy(numbers)
            if self.spec.device.type == "cuda":
                # new every time: the copy of the last plan may still be reading its own
                staged = staged.pin_memory()
            there[name] = buffers[name][: len(staged)].copy_(staged, non_blocking=True)
        return Fp8PrefillPlan(
            starts=group.query_start_loc,
            kv_indices=self.scratch.take("arange", group.num_tokens, torch.int32, torch.arange),
            lists=there,
            max_q_len=group.max_query_len,
            num_partial_tiles=len(lists.reduce_partial_map),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, plan: Fp8PrefillPlan, scale: float
    ) -> Tensor:
        """Causal attention of packed prompts.

        Args:
            query, key: bfloat16 [num_tokens, num_heads, 192].
            value: bfloat16 [num_tokens, num_heads, 128].
            plan: of this forward.
            scale: factor of the scores.

        Returns:
            bfloat16 [num_tokens, num_heads, 128].
        """
        assert self.ops.mla_prefill_ps_asm_fwd is not None
        num_heads = self.num_heads
        (query, query_scale), (key, key_scale), (value, value_scale) = (
            quantized(pad_heads(tensor, num_heads), DTYPE) for tensor in (query, key, value)
        )
        shape = len(query), num_heads, VALUE_DIM
        output = torch.empty(shape, dtype=self.spec.dtype, device=query.device)
        partial, partial_lse = self._partials(plan.num_partial_tiles)
        self.ops.mla_prefill_ps_asm_fwd(
            Q=query,
            K=key,
            V=value,
            qo_indptr=plan.starts,
            kv_indptr=plan.starts,
            kv_page_indices=plan.kv_indices,
            **{name: plan.lists[name] for name in WORKS},
            max_seqlen_q=plan.max_q_len,
            softmax_scale=scale,
            is_causal=True,
            splitData=partial,
            splitLse=partial_lse,
            output=output,
            q_scale=query_scale,
            k_scale=key_scale,
            v_scale=value_scale,
        )
        if plan.num_partial_tiles:
            self.ops.mla_reduce_v1(
                partial_output=partial,
                partial_lse=partial_lse,
                **{name: plan.lists[name] for name in MERGES},
                max_seqlen_q=QUERY_TILE,
                final_output=output,
                final_lse=None,
                **self.ops.reduce_options,
            )
        return output[:, : self.spec.num_heads]

    def _partials(self, num_tiles: int) -> tuple[Tensor, Tensor]:
        """float32 outputs [rows, heads, 128] and log-denominators [rows, heads] of the partial
        tiles, in one buffer.
        """
        num_rows = max(1, num_tiles) * QUERY_TILE
        count = num_rows * self.num_heads
        buffer = self.scratch.take("partials", count * (VALUE_DIM + 1), torch.float32)
        partial, partial_lse = buffer.split([count * VALUE_DIM, count])
        return partial.view(num_rows, self.num_heads, VALUE_DIM), partial_lse.view(
            num_rows, self.num_heads
        )

    def _buffers_for(self, num_reqs: int, max_query_len: int) -> dict[str, Tensor]:
        assert self.ops.get_ps_metadata_info_v1 is not None
        capacity = (power_of_two(num_reqs), power_of_two(max_query_len))
        if capacity not in self._buffers:
            shapes = self.ops.get_ps_metadata_info_v1(
                batch_size=capacity[0],
                num_head_k=self.num_heads,
                max_qlen=capacity[1],
                qlen_granularity=QUERY_TILE,
            )
            self._buffers[capacity] = {
                name: torch.zeros(shape, dtype=dtype, device=self.spec.device)
                for name, (shape, dtype) in zip(WORK, shapes, strict=True)
                if name != "work_meta_data"  # of no use to the kernel
            }
        return self._buffers[capacity]


def unavailable_reasons(spec: MlaSpec) -> list[str]:
    """All reasons why prompts of `spec` cannot be computed in 8 bits on this machine; empty when
    they can. Never raises.
    """
    reasons = []
    if not spec.fp8_prefill:
        reasons.append("prompts are asked for in the model's own type")
    architecture = specdec.device.device.rocm_architecture(spec.device)
    if architecture is None:
        reasons.append(f"{spec.device} is not a ROCm device")
    elif architecture != "gfx950":
        reasons.append(f"architecture {architecture} (the kernel is for gfx950)")
    if broken := aiter.unavailable_reasons(AiterMla):
        reasons += broken
    elif missing := aiter.load(AiterMla).missing:
        reasons.append(f"amd-aiter has no {', '.join(missing)}")
    if spec.dtype != torch.bfloat16:
        reasons.append(f"dtype {spec.dtype} (the kernel writes bfloat16)")
    if spec.qk_nope_head_dim + spec.qk_rope_head_dim != KEY_DIM or spec.v_head_dim != VALUE_DIM:
        reasons.append(f"heads other than {KEY_DIM} numbers per key and {VALUE_DIM} per value")
    if spec.num_heads > HEAD_COUNTS[-1]:
        reasons.append(f"{spec.num_heads} heads (the kernel has up to {HEAD_COUNTS[-1]})")
    return reasons
