"""Latent attention on a pretended ROCm machine: shapes, requests in a cache of scattered blocks,
and what AITER's backend has to make of them.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.mla import MlaBackend, MlaRows, MlaSpec, UpProjection
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.kv_cache import LatentCache
from tests.helpers.attention_case import metadata_of, scattered
from tests.helpers.bounds import assert_as_exact
from tests.helpers.trees import Parents, sight_of, with_trees


def spec(**changes: Any) -> MlaSpec:
    """The shape of DeepSeek-V2-Lite, which every kernel takes."""
    values: dict[str, Any] = {
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "num_heads": 16,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "block_size": 16,
    }  # fmt: skip
    return MlaSpec(**{**values, **changes})


def tiny(**changes: Any) -> MlaSpec:
    """A small shape in float32."""
    small = {
        "dtype": torch.float32,
        "num_heads": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
    }
    return spec(**{**small, "v_head_dim": 12, "block_size": 4, **changes})


class Case:
    """Requests whose context lies in a cache of scattered blocks, and the rows of one layer behind
    it.

    Latents are numbers that the cache holds exactly, so that one of 8 bits adds no error.

    Args:
        spec: shape.
        lengths: tokens of each request, its rows included.
        widths: rows of each request; None of them known to the host when `uniform`.
        trees: parents of the drafts of each request, for rows that see their ancestors; see
            `tests.helpers.trees`.
    """

    def __init__(
        self,
        spec: MlaSpec,
        lengths: list[int],
        widths: list[int],
        *,
        uniform: bool,
        causal: bool = True,
        trees: Sequence[Parents] = (),
    ) -> None:
        torch.default_generator.manual_seed(0)
        self.spec, self.widths, self.causal, self.scale = spec, widths, causal, 0.1
        self.trees = trees
        heads, rank, nope, rope = (
            spec.num_heads,
            spec.kv_lora_rank,
            spec.qk_nope_head_dim,
            spec.qk_rope_head_dim,
        )
        self.num_blocks, self.slots, table = scattered(lengths, spec.block_size)
        num_rows = sum(widths)
        self.latents = [
            torch.randn(n, rank + rope).to(spec.kv_dtype).to(spec.dtype) for n in lengths
        ]
        new = torch.cat(
            [latent[-width:] for latent, width in zip(self.latents, widths, strict=True)]
        )
        self.rows = MlaRows(
            torch.randn(num_rows, heads, nope).to(spec.dtype),
            torch.randn(num_rows, heads, rope).to(spec.dtype),
            *new.split([rank, rope], dim=-1),
        )
        self.up = UpProjection(
            (torch.randn(heads, nope, rank) * rank**-0.5).to(spec.dtype),
            (torch.randn(heads, rank, spec.v_head_dim) * rank**-0.5).to(spec.dtype),
        )
        self.metadata = metadata_of(
            lengths, widths, self.slots, table, spec.device, uniform=uniform, causal=causal
        )
        if trees:
            self.metadata = with_trees(self.metadata, trees)

    def cache(self) -> LatentCache:
        """A cache with the context; what was never written is poison."""
        spec = self.spec
        latent = torch.full(
            (self.num_blocks, spec.block_size, spec.latent_dim), torch.nan, dtype=torch.float32
        )
        for slots, values, width in zip(self.slots, self.latents, self.widths, strict=True):
            latent.flatten(0, 1)[slots[:-width]] = values[:-width].float()
        return LatentCache(
            latent.to(spec.kv_dtype),
            torch.empty(self.num_blocks, spec.block_size, 0, dtype=torch.uint8),
        )

    def attend(self, backend: MlaBackend, *, layers: int = 1) -> Tensor:
        """Plans once and runs every layer."""
        plan = backend.plan(self.metadata)
        for _ in range(layers - 1):
            backend.run(self.rows, self.up, self.cache(), plan, scale=self.scale)
        return backend.run(self.rows, self.up, self.cache(), plan, scale=self.scale)

    def want(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Attention over keys and values of every head, written out in `dtype`."""
        key_up, value_up = (tensor.to(dtype) for tensor in self.up)
        outputs, first = [], 0
        for i, (latent, width) in enumerate(zip(self.latents, self.widths, strict=True)):
            compressed, rope = latent.to(dtype).split(
                [self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], dim=-1
            )
            part = slice(first, first + width)
            scores = torch.einsum(
                "qhn,hnr,kr->hqk", self.rows.query_nope[part].to(dtype), key_up, compressed
            )
            scores = (
                scores + torch.einsum("qhe,ke->hqk", self.rows.query_rope[part].to(dtype), rope)
            ) * self.scale
            if self.trees:
                scores = scores.masked_fill(sight_of(self.trees[i], len(latent)).hidden, -torch.inf)
            elif self.causal:
                hidden = torch.ones(width, len(latent), dtype=torch.bool).triu(
                    len(latent) - width + 1
                )
                scores = scores.masked_fill(hidden, -torch.inf)
            outputs.append(
                torch.einsum("hqk,kr,hrv->qhv", scores.softmax(-1), compressed, value_up)
            )
            first += width
        return torch.cat(outputs)

    def with_eight_bit_queries(self, dtype: torch.dtype) -> "Case":
        """The same with queries on latents that are rounded: the maps of keys are the identity."""
        rows, rank = self.rows, self.spec.kv_lora_rank
        absorbed = torch.bmm(rows.query_nope.transpose(0, 1), self.up.key).transpose(0, 1)
        whole = torch.cat([absorbed, rows.query_rope], -1)
        scale = torch.exp2(torch.ceil(torch.log2(whole.float().abs().max() / 448)))
        rounded = (whole.float() / scale).to(dtype).double() * scale
        same = copy.copy(self)
        same.rows = rows._replace(query_nope=rounded[..., :rank], query_rope=rounded[..., rank:])
        same.up = self.up._replace(key=torch.eye(rank).expand(self.spec.num_heads, rank, rank))
        return same

    def plain(self) -> Tensor:
        """What `torch_ref` makes of it in the model's type."""
        reference = TorchRefMlaBackend(replace(self.spec, cache_dtype=None))
        clean = LatentCache(
            self.cache().latent.to(self.spec.dtype).nan_to_num(), self.cache().index_key
        )
        return reference.run(
            self.rows, self.up, clean, reference.plan(self.metadata), scale=self.scale
        )


def assert_right(case: Case, backend: MlaBackend, layers: int = 1) -> None:
    """The backend's output is as exact as that of `torch_ref`, from the queries that it rounds."""
    got, plain, want = case.attend(backend, layers=layers), case.plain(), case.want()
    if backend.query_dtype.itemsize == 1:
        assert case.metadata.query_lens is None, "rows of prompts are not rounded"
        rounded = case.with_eight_bit_queries(backend.query_dtype).want()
        assert_as_exact(want.to(got.dtype), plain, want)
        plain, want = (rounded + (plain - want)).to(plain.dtype), rounded
    assert_as_exact(got, plain, want)


SHAPES: dict[str, tuple[list[int], list[int], bool]] = {
    "single": ([40, 1, 33, 16], [1, 1, 1, 1], True),
    "block": ([40, 5, 33, 21], [5, 5, 5, 5], True),
    "verify": ([40, 8, 33], [8, 8, 8], True),
    "prefill": ([17, 1, 33], [17, 1, 33], False),
    "extend": ([40, 23, 33], [3, 2, 17], False),
    "mixed": ([40, 17, 35, 33, 50], [3, 17, 1, 33, 20], False),
}


"""Lengths, rows, and whether only the device knows them."""
