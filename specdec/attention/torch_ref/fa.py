"""Reference attention in plain torch: the oracle for every other backend, and the CPU path.

Kernel: gathers a request's blocks and calls `scaled_dot_product_attention`; with sinks or a
softcap, which that function does not have, the same maths is written out in float32. Shapes: any
head size, any group size, any block size. Layout: plain. Host: never waits for the device. Known
gap: the gather copies the context once per layer, so on an accelerator it is right, not fast.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Scoring,
    TreeRows,
    Visibility,
)
from specdec.attention.ragged import padded
from specdec.kv_cache import LayerCache, blocks_for

KEYS_STEP = 64
"""torch's CPU kernel adds up 16-bit values in an order that depends on the number of keys. With
numbers in steps, a token decoded alone and the same token verified among drafts nearly always have
the same number, and then the same bits.
"""


@dataclass(slots=True)
class _Segment:
    """Requests attended to in one call, padded to equally many query rows if theirs differ."""

    widths: Tensor  # [num_reqs, 1], query rows of each request
    width: int  # the most of them
    num_keys: int  # keys gathered per request, at least the longest sequence; whole blocks
    seq_lens: Tensor  # [num_reqs, 1]
    blocks: Tensor  # int32 [num_reqs * blocks per request]
    visibility: Visibility
    # packed rows of the queries; a tensor int64 [num_reqs * width] names row 0 for padding
    rows: slice | Tensor
    tree: TreeRows | None = None
    kept: Tensor | None = None  # int64, places in `rows` that are not padding; None when none is
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, groups: int, spare: int = 0) -> Tensor:
        """Additive mask [num_reqs, 1, groups * width + spare, num_keys], 0 where a key is seen;
        made once per window.

        Spare rows see everything. Causal, and the same with a window of 3, for 2 rows on 4 tokens;
        a bidirectional block sees all 4, and a row of a tree what is above it:

            1 1 1 0      0 1 1 0
            1 1 1 1      0 1 1 1
        """
        if window not in self.masks:
            device = self.seq_lens.device
            keys = torch.arange(self.num_keys, device=device)
            queries = self.seq_lens - self.widths + torch.arange(self.width, device=device)
            queries = queries[:, :, None]
            causal = self.visibility == "causal"
            seen = keys <= queries if causal else keys < self.seq_lens[:, :, None]
            if self.tree is not None:
                seen = self._of_tree(self.tree, keys, window)
            elif window is not None:
                seen = seen & (queries - keys < window)
                if self.visibility == "full":
                    seen = seen & (keys - queries < window)
                if self.kept is not None:
                    # padding has to see something, or it yields NaN
                    seen = seen | (queries >= self.seq_lens[:, :, None])
            zeros = torch.zeros(len(seen), self.width, self.num_keys, dtype=dtype, device=device)
            mask = zeros.masked_fill_(~seen, -torch.inf)
            self.masks[window] = F.pad(mask.repeat(1, groups, 1), (0, 0, 0, spare))[:, None]
        return self.masks[window]

    def _of_tree(self, tree: TreeRows, keys: Tensor, window: int | None) -> Tensor:
        """bool [num_reqs, width, num_keys]: what rows see, each from where its depth places it."""
        # of the request, below 0 in its context
        row = (keys - (self.seq_lens - self.widths))[:, None]
        places = row.clamp(0, self.width - 1).expand(-1, self.width, -1)
        of_rows = tree.seen(self.width, window).gather(2, places) & (row >= 0) & (row < self.width)
        distance = tree.depths.view(-1, self.width, 1) - row
        return of_rows | ((row < 0) & (distance < window) if window is not None else row < 0)


@dataclass(slots=True)
class TorchRefPlan:
    """Segments of the packed rows, and where their keys and values go.

    Attributes:
        metadata: that it was made for.
        call: what `specdec.layers.ops.cpu` makes of it, once.
    """

    segments: list[_Segment]
    slot_mapping: Tensor
    metadata: AttentionMetadata
    call: Any = None


class TorchRefBackend(AttentionBackend):
    """Plain torch on any device."""

    name = "torch_ref"
    prefill_tokens = 2048  # its masks have a number for every row and key

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """All reasons why plain torch cannot serve `spec`; empty when it can."""
        reasons = []
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            reasons.append(f"dtype {spec.dtype} (it takes float32, bfloat16 and float16)")
        if spec.kv_dtype != spec.dtype:
            what = f"a {spec.kv_dtype} cache (it stores keys and values in the model's own type)"
            reasons.append(what)
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(
                f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly"
            )
        return reasons

    @classmethod
    def tree_reasons(cls, spec: AttentionSpec) -> list[str]:
        """None: masks are free."""
        return []

    @classmethod
    def ragged_reasons(cls, spec: AttentionSpec) -> list[str]:
        """None: rows that a request does not have are padding."""
        return []

    def plan(self, metadata: AttentionMetadata) -> TorchRefPlan:
        """One segment when all requests have equally many rows, else groups of like size."""
        if metadata.ragged:
            segments = [self._padded(metadata)]
        elif metadata.query_lens is None or metadata.seq_lens_host is None:
            widths = torch.full_like(metadata.seq_lens, metadata.max_query_len)
            segments = [
                self._segment(
                    metadata, slice(None), widths, metadata.max_query_len, metadata.max_seq_len
                )
            ]
            segments[0].tree = metadata.tree
        else:
            segments = self._groups(metadata, metadata.query_lens, metadata.seq_lens_host)
        return TorchRefPlan(segments, metadata.slot_mapping, metadata)

    def _segment(
        self,
        metadata: AttentionMetadata,
        requests: slice | Tensor,
        widths: Tensor,
        width: int,
        num_keys: int,
    ) -> _Segment:
        step = KEYS_STEP if self.spec.device.type == "cpu" and self.spec.dtype.itemsize == 2 else 1
        num_blocks = blocks_for(-(-num_keys // step) * step, self.spec.block_size)
        num_blocks = min(num_blocks, metadata.block_table.shape[1])
        return _Segment(
            widths=widths[:, None],
            width=width,
            num_keys=num_blocks * self.spec.block_size,
            seq_lens=metadata.seq_lens[requests][:, None],
            blocks=metadata.block_table[requests][:, :num_blocks].reshape(-1),
            visibility=metadata.visibility,
            rows=slice(None),
        )

    def _padded(self, metadata: AttentionMetadata) -> _Segment:
        """All requests, each with as many rows as any may have: only the device knows them."""
        width, widths = metadata.max_query_len, metadata.query_start_loc.long().diff()
        segment = self._segment(metadata, slice(None), widths, width, metadata.max_seq_len)
        segment.rows, segment.kept, segment.tree = padded(metadata)
        return segment

    def _groups(
        self, metadata: AttentionMetadata, query_lens: list[int], seq_lens: list[int]
    ) -> list[_Segment]:
        """Segments of a prefill, whose lengths the host knows."""
        device = metadata.seq_lens.device
        starts = [0, *accumulate(query_lens)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            groups.setdefault(_size_class(device, i, count, length), []).append(i)
        segments = []
        for members in groups.values():
            width = max(query_lens[i] for i in members)
            widths = torch.tensor([query_lens[i] for i in members], device=device)
            requests = torch.tensor(members, device=device)
            num_keys = max(seq_lens[i] for i in members)
            segment = self._segment(metadata, requests, widths, width, num_keys)
            if len(members) == 1:
                segment.rows = slice(starts[members[0]], starts[members[0] + 1])
            else:
                places = [
                    (starts[i] + j if j < query_lens[i] else -1)
                    for i in members
                    for j in range(width)
                ]
                segment.rows = torch.tensor([max(place, 0) for place in places], device=device)
                kept = [n for n, place in enumerate(places) if place >= 0]
                segment.kept = torch.tensor(kept, device=device)
            segments.append(segment)
        return segments

    def read(
        self, query: Tensor, cache: LayerCache, plan: TorchRefPlan, **how: Unpack[Scoring]
    ) -> Tensor:
        """See `AttentionBackend.read`."""
        attend = partial(self._attend, **how)
        if len(plan.segments) == 1 and plan.segments[0].rows == slice(None):
            return attend(query, cache, plan.segments[0])
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for segment in plan.segments:
            rows = attend(query[segment.rows], cache, segment)
            if isinstance(segment.rows, Tensor) and segment.kept is not None:
                output.index_copy_(0, segment.rows[segment.kept], rows[segment.kept])
            else:
                output[segment.rows] = rows
        return output

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.write`."""
        for stored, new in ((cache.key, key), (cache.value, value)):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slot_mapping, new)

    def _attend(
        self,
        query: Tensor,
        cache: LayerCache,
        segment: _Segment,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one segment, [rows, num_heads, head_dim] in and out."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = cache.key.shape[2]
        groups, width = num_heads // num_kv_heads, segment.width
        # Heads that share a key head become rows of one attention, so that keys are read once and
        # one token fills a product.
        if width > 1:
            query = query.reshape(-1, width, num_kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        q = query.reshape(-1, num_kv_heads, groups * width, head_dim)
        # [num_reqs, num_kv_heads, num_keys, head_dim]
        k, v = (
            tensor.index_select(0, segment.blocks)
            .view(-1, segment.num_keys, num_kv_heads, head_dim)
            .transpose(1, 2)
            for tensor in cache
        )
        if sinks is None and softcap is None:
            spare = _spare_rows(q)
            mask = segment.mask(window, query.dtype, groups, spare)
            if spare:
                q = F.pad(q, (0, 0, 0, spare))
            padded = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            out = padded[:, :, : groups * width]
        else:
            mask = segment.mask(window, query.dtype, groups)
            out = _weigh(q, k, v, mask, scale, softcap, sinks)
        if width > 1:
            out = out.view(-1, num_kv_heads, groups, width, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows, num_heads, head_dim)


def _size_class(device: torch.device, index: int, num_rows: int, seq_len: int) -> tuple[int, ...]:
    """Requests of a prefill with equal classes share one call.

    A CPU takes requests one by one. On an accelerator, where every call costs a launch, those whose
    lengths round up to the same powers of two go together, so padding at most doubles the rows and
    the keys.
    """
    return (index,) if device.type == "cpu" else (num_rows.bit_length(), seq_len.bit_length())


def _spare_rows(query: Tensor) -> int:
    """Rows to add to `query` [num_reqs, kv_heads, rows, D], so that a row's result does not depend
    on how many are beside it.

    torch's CPU kernel takes rows in tiles of a multiple of 32, and products of fewer than 4 of them
    round 16-bit numbers in another order. A token decoded alone would then differ in its last bit
    from the same token verified among drafts.
    """
    last_tile = query.shape[2] % 32
    if query.device.type == "cpu" and query.dtype.itemsize == 2 and 0 < last_tile < 4:
        return 4 - last_tile
    return 0


def _weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention in float32 with a softcap on the scores and a sink logit per head in the
    denominator.

    `q` [num_reqs, kv_heads, groups * width, D] holds the rows of all heads that share a key head,
    head by head.
    """
    k, v = k.float(), v.float()
    # [num_reqs, kv_heads, groups * width, num_keys]
    scores = q.float() @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.float()
    if sinks is not None:
        num_kv_heads, rows = scores.shape[1:3]
        repeats = rows * num_kv_heads // len(sinks)
        sink = sinks.float().view(num_kv_heads, -1).repeat_interleave(repeats, dim=1)
        scores = torch.cat([scores, sink[None, :, :, None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v).to(q.dtype)
