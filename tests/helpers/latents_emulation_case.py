"""Latents that the tests of AITER's emulation attend to."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.aiter_emulation_case import attention, starts

RANK, ROPE = 32, 16


class Latents:
    """A batch of uniform queries over a cache of scattered latents, and what the decode functions
    are called with.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 16,
        query_len: int = 1,
        causal: bool = True,
        query: torch.dtype = torch.bfloat16,
        cache: torch.dtype = torch.bfloat16,
        rank: int = RANK,
        rope: int = ROPE,
    ) -> None:
        torch.manual_seed(1)
        self.lengths, self.heads, self.query_len, self.causal, self.rank = (
            lengths, heads, query_len, causal, rank,
        )  # fmt: skip
        num_slots, width = sum(lengths) + 5, rank + rope
        self.latents = torch.randn(num_slots, width).to(cache)
        self.indices = torch.randperm(num_slots)[: sum(lengths)].int()
        self.q = torch.randn(len(lengths) * query_len, heads, width).to(query)
        self.o = torch.full((len(self.q), heads, rank), torch.nan, dtype=torch.bfloat16)
        self.queries, self.keys = starts([query_len] * len(lengths)), starts(lengths)
        self.pages = torch.ones(len(lengths), dtype=torch.int32)
        self.scales = {"q_scale": torch.full((1,), 0.5), "kv_scale": torch.full((1,), 1.5)}
        self.factors = tuple(
            s.item() if t.itemsize == 1 else 1.0
            for s, t in zip(self.scales.values(), (query, cache), strict=True)
        )

    def plan(self, aiter: Any, **changes: Any) -> dict[str, Tensor]:
        """The outputs of the planner, by the names that `mla_decode_fwd` gives them."""
        sizes = aiter.get_mla_metadata_info_v1(
            len(self.lengths),
            self.query_len,
            self.heads,
            self.q.dtype,
            self.latents.dtype,
            False,
            fast_mode=True,
        )
        names = (
            "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map",
            "reduce_partial_map",
        )  # fmt: skip
        plan = {
            name: torch.full(shape if isinstance(shape, tuple) else (shape,), 77).to(dtype)
            for name, (shape, dtype) in zip(names, sizes, strict=True)
        }
        self.replan(aiter, plan, **changes)
        return plan

    def replan(self, aiter: Any, plan: dict[str, Tensor], **changes: Any) -> None:
        """Plans into buffers that exist."""
        outputs = {
            ("work_metadata_ptrs" if name == "work_meta_data" else name): tensor
            for name, tensor in plan.items()
        }
        arguments = {
            "seqlens_qo_indptr": self.queries, "seqlens_kv_indptr": self.keys,
            "kv_last_page_lens": self.pages, "num_heads_per_head_k": self.heads, "num_heads_k": 1,
            "is_causal": self.causal, "max_seqlen_qo": self.query_len,
            "uni_seqlen_qo": self.query_len, "dtype_q": self.q.dtype,
            "dtype_kv": self.latents.dtype,
        }  # fmt: skip
        aiter.get_mla_metadata_v1(**{**arguments, **outputs, **changes})

    def decode(self, aiter: Any, plan: dict[str, Tensor] | None, **changes: Any) -> Any:
        """Calls `mla_decode_fwd`; `causal` is passed only where it matters, since old versions lack
        it.
        """
        arguments = {
            "q": self.q,
            "kv_buffer": self.latents.view(-1, 1, 1, self.latents.shape[1]),
            "o": self.o,
            "qo_indptr": self.queries,
            "kv_indptr": self.keys,
            "kv_indices": self.indices,
            "kv_last_page_lens": self.pages,
            "max_seqlen_q": self.query_len,
            "sm_scale": 0.2,
            **({} if self.causal else {"causal": False}),
            **(self.scales if self.latents.dtype.itemsize == 1 else {}),
            **(plan or {}),
        }
        return aiter.mla_decode_fwd(**{**arguments, **changes})

    def wanted(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """What belongs into `o`, and the logarithms of the denominators, in `dtype`; a softmax over
        no keys sums to 0.
        """
        latents = self.latents.to(dtype)[self.indices.long()] * self.factors[1]
        outs, logs = [], []
        for rows, own in zip(
            self.q.to(dtype).split(self.query_len), latents.split(self.lengths), strict=True
        ):
            keys = own[:, None].expand(-1, self.heads, -1)
            out, log = attention(
                rows * self.factors[0], keys, keys[..., : self.rank], 0.2, self.causal, dtype
            )
            outs.append(out)
            logs.append(log)
        return torch.cat(outs), torch.cat(logs)
