"""Attention over a paged cache on made-up requests, and the right answer: what the tests of every
backend compare.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.kv_cache import KVLayerSpec, LayerCache, PagedKVCache, blocks_for
from tests.helpers.bounds import assert_as_exact
from tests.helpers.trees import Parents, sight_of, with_trees


def spec(**changes: Any) -> AttentionSpec:
    """A shape that every kernel takes."""
    values: dict[str, Any] = {
        "device": torch.device("cpu"), "dtype": torch.bfloat16, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 64, "block_size": 16,
    }  # fmt: skip
    return AttentionSpec(**{**values, **changes})


def _products(a: Tensor, b: Tensor) -> Tensor:
    """[heads, rows, inner] times [heads, inner, columns], term by term where the order of sums
    matters.
    """
    if a.dtype == torch.float64:
        return a @ b
    total = a.new_zeros(*a.shape[:2], b.shape[2])
    for i in range(a.shape[2]):
        total += a[:, :, i, None] * b[:, i, None]
    return total


def attention(
    query: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    dtype: torch.dtype,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    trees: Sequence[Parents] = (),
    chunk: int | None = None,
) -> Tensor:
    """The definition [num_tokens, num_heads, head_dim], in `dtype`, request by request; the rows'
    own keys are in the cache.

    Of rows that see ancestors it is told the `trees`, and does not read the metadata's.

    In float64 the right answer. In float32 a plain one, whose products are added term by term, the
    order in which errors grow most: no sensible kernel exceeds them by much, and they hardly differ
    between machines.
    """
    block_size, num_kv_heads = cache.key.shape[1:3]
    starts = metadata.query_start_loc.tolist()
    outputs = []
    for i, length in enumerate(metadata.seq_lens.tolist()):
        q = query[starts[i] : starts[i + 1]].to(dtype)
        places = torch.arange(length, device=query.device)
        slots = (
            metadata.block_table[i, places // block_size].long() * block_size + places % block_size
        )
        k, v = (
            t.flatten(0, 1)[slots].to(dtype).repeat_interleave(q.shape[1] // num_kv_heads, dim=1)
            for t in cache
        )
        scores = _products(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        ahead = places - places[length - len(q) :, None]
        hidden = (ahead > 0) & (metadata.visibility == "causal")
        if trees:
            hidden, ahead = (side.to(query.device) for side in sight_of(trees[i], length))
        if window is not None:
            hidden |= ahead.abs() >= window
        if chunk is not None:
            hidden |= places // chunk != places[length - len(q) :, None] // chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat(
                [scores, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)], dim=-1
            )
        weights = scores.softmax(-1)[..., :length]
        outputs.append(_products(weights, v.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outputs)


def scattered(lengths: list[int], size: int, spare: int = 2) -> tuple[int, list[Tensor], Tensor]:
    """Requests in blocks of `size` that lie anywhere in a cache: how many blocks it has, the slots
    of each request's tokens, and the block table with `spare` columns behind the longest request.
    """
    counts = [blocks_for(n, size) for n in lengths]
    tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
    places = [torch.arange(n) for n in lengths]
    slots = [t[p // size] * size + p % size for t, p in zip(tables, places, strict=True)]
    table = torch.full((len(lengths), max(counts) + spare), int(tables[0][0]), dtype=torch.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks.int()
    return sum(counts) + 1, slots, table


def metadata_of(
    lengths: list[int],
    widths: list[int],
    slots: list[Tensor],
    table: Tensor,
    device: torch.device,
    *,
    uniform: bool,
    causal: bool,
) -> AttentionMetadata:
    """The last `widths` rows of requests in the blocks of `scattered`; see `Case`."""
    last = [own[len(own) - width :] for own, width in zip(slots, widths, strict=True)]
    starts = [0, *itertools.accumulate(widths)]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        block_table=table.to(device),
        slot_mapping=torch.cat(last).to(device),
        num_reqs=len(lengths),
        num_tokens=sum(widths),
        max_query_len=max(widths),
        max_seq_len=max(lengths) + 2 * uniform,
        visibility="causal" if causal else "full",
        query_lens=None if uniform else widths,
        seq_lens_host=None if uniform else lengths,
    )


def _rows(keys: list[Tensor], values: list[Tensor], parts: list[slice]) -> dict[str, Any]:
    """The given part of every request's keys and values, packed."""
    return {
        name: torch.cat([t[p] for t, p in zip(side, parts, strict=True)])
        for name, side in (("key", keys), ("value", values))
    }


class Case:
    """Requests whose context lies in a cache of scattered blocks, and the metadata of their last
    rows.

    Keys and values are numbers that the cache holds exactly, so that one of 8 bits adds no error.

    Args:
        spec: shape.
        lengths: tokens of each request, its rows included.
        widths: rows of each request; None of them known to the host when `uniform`.
        spare: columns of the block table behind the blocks of the longest request.
        trees: parents of the drafts of each request, for rows that see their ancestors; see
            `tests.helpers.trees`.
        packed: cut the rows' queries, keys and values from one tensor, as a joined product yields
            them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: list[int],
        widths: list[int],
        *,
        uniform: bool,
        causal: bool = True,
        spare: int = 2,
        packed: bool = False,
        trees: Sequence[Parents] = (),
    ) -> None:
        torch.default_generator.manual_seed(0)  # the other devices' generators take their time
        self.spec, self.trees = spec, trees
        device = spec.device
        heads, dim, size = spec.num_kv_heads, spec.head_dim, spec.block_size
        self.num_blocks, slots, table = scattered(lengths, size, spare)
        self.old_slots = torch.cat(
            [s[: len(s) - w] for s, w in zip(slots, widths, strict=True)]
        ).to(device)
        keys, values = (
            [torch.randn(n, heads, dim).to(spec.kv_dtype).to(device, spec.dtype) for n in lengths]
            for _ in "kv"
        )
        self.old = _rows(
            keys, values, [slice(0, n - w) for n, w in zip(lengths, widths, strict=True)]
        )
        self.new = _rows(
            keys, values, [slice(n - w, n) for n, w in zip(lengths, widths, strict=True)]
        )
        self.query = torch.randn(sum(widths), spec.num_heads, dim).to(device, spec.dtype)
        if packed:
            product = torch.cat([self.query, *self.new.values()], dim=1)
            self.query, *rows = product.split([spec.num_heads, heads, heads], dim=1)
            self.new = dict(zip(self.new, rows, strict=True))
        self.metadata = replace(
            metadata_of(lengths, widths, slots, table, device, uniform=uniform, causal=causal),
            max_seq_len=min(max(lengths) + 2 * uniform, table.shape[1] * size),
        )
        if trees:
            self.metadata = with_trees(self.metadata, trees)

    def cache(self) -> LayerCache:
        """An empty cache."""
        kv = KVLayerSpec(self.spec.num_kv_heads, self.spec.head_dim)
        return PagedKVCache(
            [kv],
            num_blocks=self.num_blocks,
            block_size=self.spec.block_size,
            dtype=self.spec.kv_dtype,
            device=self.spec.device,
        ).layers[0]

    def attend(self, backend: AttentionBackend, layers: int = 1, **how: Any) -> Tensor:
        """Writes the context, plans and runs."""
        cache = self.cache()
        backend.write(cache, self.old["key"], self.old["value"], self.old_slots)
        plan = backend.plan(self.metadata)
        if layers == 2:  # a plan serves every layer
            backend.run(self.query, cache=cache, plan=plan, **self.new, **how)
        return backend.run(self.query, cache=cache, plan=plan, **self.new, **how)

    def filled(self) -> LayerCache:
        """A cache in float32 that holds everything, the rows' own keys and values too."""
        cache = LayerCache(*(side.float() for side in self.cache()))
        for stored, name in zip(cache, ("key", "value"), strict=True):
            for rows, slots in ((self.old, self.old_slots), (self.new, self.metadata.slot_mapping)):
                stored.flatten(0, 1)[slots] = rows[name].float()
        return cache

    def exact(self, **how: Any) -> Tensor:
        """The right answer, in float64."""
        return attention(
            self.query, self.filled(), self.metadata, dtype=torch.float64, trees=self.trees, **how
        )

    def check(self, got: Tensor, *, added: float = 0.0, **how: Any) -> None:
        """`got`, from `attend`, is as exact as the definition computed in float32; of 16 bits, as
        the right answer rounded.

        Args:
            added: what a kernel adds to the denominator, of which 1 belongs to the largest score:
                the plain one is as far off.
        """
        cache, exact = self.filled(), self.exact(**how)
        if got.dtype == torch.float32:
            plain = attention(
                self.query, cache, self.metadata, dtype=torch.float32, trees=self.trees, **how
            ) * (1 - added)
        else:
            plain = exact.to(got.dtype)
        assert_as_exact(got, plain, exact)

    def want(self, **how: Any) -> Tensor:
        """The same from torch_ref, in float32."""
        exact = replace(self.spec, dtype=torch.float32, cache_dtype=None)
        case = Case.__new__(Case)
        case.__dict__ = {**self.__dict__, "spec": exact, "query": self.query.float()}
        case.old, case.new = (
            {name: tensor.float() for name, tensor in side.items()} for side in (self.old, self.new)
        )
        return case.attend(TorchRefBackend(exact), **how)
