"""What a block sees in training: one predicate, run as FlexAttention or as a dense mask.

Keys are the `context_len` features of a sequence, then the blocks' rows, which alone query.

    context (features)         block 0   block 1
    0 1 2 3 4 5 6 7 8 9 ...    a . . .   b . . .
    x x x                      x x x x                rows of block 0, anchor at position 3
    x x x x x x                          x x x x      rows of block 1, anchor at position 6

The anchor's own feature is not visible: a live run does not have it yet. Where several sequences
share a row, the keys before the start of the anchor's own are not visible, either.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from specdec.base.errors import InvalidInputError

Kind = tuple[bool, int | None]
"""Causal inside the block, and sliding window, of a draft layer."""

TILE = 128
"""Queries, and keys, of a tile of FlexAttention's."""

_compiled_flex: Callable[..., Any] | None = None


def visible(
    anchors: Tensor,
    context_len: int,
    block_size: int,
    kind: Kind,
    sequence: Tensor,
    query: Tensor,
    key: Tensor,
    starts: Tensor | None = None,
) -> Tensor:
    """Whether block row `query` of `sequence` sees `key`; all broadcast."""
    causal, window = kind
    block, row = query // block_size, query % block_size
    anchor = anchors[sequence, block]
    behind = key - context_len  # keys of the blocks come after those of the context
    key_block, key_row = behind // block_size, behind % block_size
    in_context = key < anchor
    if starts is not None:
        in_context = in_context & (key >= starts[sequence, block])
    in_block = (behind >= 0) & (key_block == block)
    if causal:
        in_block = in_block & (key_row <= row)
    if window is not None:
        in_context = in_context & (anchor + row - key < window)
        in_block = in_block & ((row - key_row).abs() < window)
    return in_context | in_block


def use_flex(choice: str, device: torch.device) -> bool:
    """Whether `choice`, "auto", "flex" or "dense", means FlexAttention on this device.

    Raises:
        InvalidInputError: FlexAttention cannot train there.
    """
    if choice == "flex" and device.type != "cuda":
        what = f"mask-path flex cannot train on {device.type}, where FlexAttention has no gradient"
        raise InvalidInputError(f"{what}; choose dense")
    return choice == "flex" or (choice == "auto" and device.type == "cuda")


@dataclass(slots=True)
class BlockAttention:
    """Attention of one batch of training blocks.

    Attributes:
        anchors: int64 [S, N], position of each block's first row, less than T. A block that is not
            valid has anchor 0, or its start: without any context it sees itself alone.
        context_len: features per sequence, T.
        block_size: rows per block, B.
        flex: run FlexAttention, else a dense mask.
        starts: int64 [S, N], where a block's context begins, None is 0.
    """

    anchors: Tensor
    context_len: int
    block_size: int
    flex: bool
    starts: Tensor | None = None
    _masks: dict[Kind, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Block rows per sequence."""
        return self.anchors.shape[1] * self.block_size

    def dense_mask(self, kind: Kind) -> Tensor:
        """bool [S, 1, rows, T + rows]."""
        device = self.anchors.device
        sequence = torch.arange(self.anchors.shape[0], device=device)[:, None, None]
        query = torch.arange(self.num_rows, device=device)[:, None]
        key = torch.arange(self.context_len + self.num_rows, device=device)
        sizes = self.context_len, self.block_size
        return visible(self.anchors, *sizes, kind, sequence, query, key, self.starts)[:, None]

    def block_mask(self, kind: Kind) -> BlockMask:
        """The mask for FlexAttention: which tiles are seen follows from the anchors in them."""
        anchors, context_len, block_size = self.anchors, self.context_len, self.block_size
        starts = self.starts
        rows, device = self.num_rows, anchors.device

        def mask_mod(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible(anchors, context_len, block_size, kind, sequence, query, key, starts)

        first = torch.arange(0, rows, TILE, device=device)
        owners = torch.arange(len(first) * TILE, device=device).clamp(max=rows - 1) // block_size
        owners = owners.view(-1, TILE)  # the block of each row
        of_rows = anchors[:, owners]  # [S, tiles, TILE]
        least, most = of_rows.amin(dim=-1)[..., None], of_rows.amax(dim=-1)[..., None]
        start = torch.arange(0, context_len + rows, TILE, device=device)
        end = start + TILE  # behind the last key
        seen = start < most
        if kind[1] is None:
            whole = (end <= least) & (end <= context_len)
        else:
            seen = seen & (end > least - kind[1])
            whole = torch.zeros_like(seen)
        if starts is not None:
            begun = starts[:, owners]
            seen = seen & (end > begun.amin(dim=-1)[..., None])
            whole = whole & (start >= begun.amax(dim=-1)[..., None])
        first_key, last_key = ((x - context_len) // block_size for x in (start, end - 1))
        own = (first_key <= owners[:, -1:]) & (last_key >= owners[:, :1])
        tiles = [_in_order(part) for part in ((seen | own) & ~whole, whole)]
        seq_lengths = (rows, context_len + rows)
        return BlockMask.from_kv_blocks(
            *tiles[0], *tiles[1], BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=seq_lengths
        )

    def __call__(self, kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the block rows.

        Args:
            kind: of the draft layer.
            query: [S, rows, heads, D].
            key, value: [S, T + rows, kv_heads, D].

        Returns:
            [S, rows, heads, D].
        """
        if kind not in self._masks:
            self._masks[kind] = self.block_mask(kind) if self.flex else self.dense_mask(kind)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        attend = _flex if self.flex else _dense
        return attend(q, k, v, self._masks[kind]).transpose(1, 2)


def _in_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers int32 [S, 1, Q], and indices int32 [S, 1, Q, K], of chosen tiles bool [S, Q, K]."""
    chosen = tiles[:, None].int()
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), order.int()


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    # with a mask, the memory-efficient CUDA kernel takes only as many key heads as query heads
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    global _compiled_flex
    # The kernel proper exists on CUDA alone; elsewhere the same predicate goes the same way.
    if q.device.type != "cuda":
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    if _compiled_flex is None:
        # One compilation per padded length; past the limit torch would silently run the uncompiled,
        # enormous version.
        torch._dynamo.config.recompile_limit = 128
        torch._dynamo.config.accumulated_recompile_limit = 1024
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    out: Tensor = _compiled_flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out
