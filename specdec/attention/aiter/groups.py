"""What all layers of one forward share on AITER: requests grouped by phase, trimmed block tables,
and gathered context.

    decode    lengths known to the device alone; or one row
    extend    several rows behind a context, lengths known to the host
    prefill   the whole sequence of several tokens, no context
    packed    any of these together, for a kernel that takes them all in one call

Nothing in here reads from the device. A batch whose lengths only the device knows (decoding,
drafting) is one decode group, so its plan is the same with and without a graph being captured.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.attention.ragged import Padded, padded
from specdec.base.sizes import power_of_two
from specdec.kv_cache import blocks_for

Phase = Literal["decode", "extend", "prefill", "packed"]
AnyRows = TypeVar("AnyRows", bound=Any)

CONTEXT_TOKENS = 32 * 1024
"""Most context tokens gathered at once for all extended requests of a forward."""

SHORTEST_TABLE = 512
"""Tokens that the narrowest block table spans: the shortest length of captured steps, too."""


@dataclass(slots=True)
class Trimmed:
    """Block tables that begin at the first block a window reaches, for requests with one row."""

    block_table: Tensor  # int32 [num_reqs, window blocks]
    seq_lens: Tensor  # int32 [num_reqs], counted from that block
    max_seq_len: int


@dataclass(slots=True)
class Context:
    """Cached tokens of some requests, gathered into packed rows."""

    slots: Tensor  # int64 [num_tokens]
    cu_seqlens: Tensor  # int32 [num_reqs + 1]
    max_len: int


@dataclass(frozen=True, kw_only=True)
class Group(AttentionMetadata):
    """Requests of one phase, as if they were all of the forward. Their rows are packed in the order
    of the requests.

    Attributes:
        phase: see the module.
        rows: where they lie among those of the forward; int64 [num_tokens] when scattered.
        block_size: tokens per cache block.
    """

    phase: Phase
    rows: slice | Tensor
    block_size: int
    _trimmed: dict[int, Trimmed] = field(default_factory=dict)
    _contexts: dict[int | None, list[Context]] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Whether rows see positions up to their own."""
        return self.visibility == "causal"

    @cached_property
    def padded(self) -> Padded | None:
        """The rows as blocks of `max_query_len`, where requests have unequal numbers of them."""
        return padded(self) if self.ragged else None

    @cached_property
    def narrow_table(self) -> Tensor:
        """The block table without columns that no request reaches, int32 [num_reqs, width].

        For kernels that are compiled for the width: it is a power of two or the whole table, so
        that few are.
        """
        width = power_of_two(blocks_for(max(self.max_seq_len, SHORTEST_TABLE), self.block_size))
        return self.block_table[:, :width].contiguous()

    def trimmed(self, window: int) -> Trimmed:
        """The block tables from the first block within `window` on; made once per window.

        With blocks of 4, a window of 5 and 11 tokens, position 10 sees 6 to 10:

            blocks     0 1 2 3 | 4 5 6 7 | 8 9 10 .
            kept                 ^^^^^^^   ^^^^^^

        The kernel still masks the first two of these 7 tokens.
        """
        if window not in self._trimmed:
            size = self.block_size
            first = (self.seq_lens - window).clamp(min=0) // size
            width = min(self.block_table.shape[1], blocks_for(window + size - 1, size))
            columns = first[:, None] + torch.arange(width, device=first.device)
            columns = columns.clamp(max=self.block_table.shape[1] - 1)
            table = self.block_table.gather(1, columns.long())
            most = min(self.max_seq_len, window + size - 1, width * size)
            self._trimmed[window] = Trimmed(table, (self.seq_lens - first * size).int(), most)
        return self._trimmed[window]

    def window_context(self, window: int) -> Context:
        """What the rows of extended requests see through `window`, their own tokens included."""
        if window not in self._contexts:
            starts = [max(0, length - window + 1) for length in self._context_lens]
            assert self.seq_lens_host is not None
            self._contexts[window] = [self._context(starts, self.seq_lens_host)]
        return self._contexts[window][0]

    def context_chunks(self) -> list[Context]:
        """The context of extended requests without their own tokens, in chunks that fit the
        workspace together.
        """
        if None not in self._contexts:
            lengths = self._context_lens
            step = max(1, CONTEXT_TOKENS // self.num_reqs)
            self._contexts[None] = [
                self._context(
                    [min(n, start) for n in lengths], [min(n, start + step) for n in lengths]
                )
                for start in range(0, max(lengths), step)
            ]
        return self._contexts[None]

    @property
    def _context_lens(self) -> list[int]:
        """Tokens before the rows of each request, whose lengths the host knows."""
        assert self.query_lens is not None and self.seq_lens_host is not None
        return [n - q for n, q in zip(self.seq_lens_host, self.query_lens, strict=True)]

    def _context(self, starts: list[int], ends: list[int]) -> Context:
        """Positions `[start, end)` of every request."""
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        requests = torch.repeat_interleave(torch.arange(self.num_reqs), torch.tensor(lengths))
        positions = torch.cat([*map(torch.arange, starts, ends)])
        device = self.block_table.device
        requests, positions = (
            requests.to(device, non_blocking=True),
            positions.to(device, non_blocking=True),
        )
        blocks = self.block_table[requests, positions // self.block_size].long()
        host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        cu_seqlens = host.to(device, non_blocking=True)
        slots = blocks * self.block_size + positions % self.block_size
        return Context(slots, cu_seqlens, max(lengths))


@dataclass(slots=True)
class AiterPlan:
    """The groups of a forward, and where its keys and values go."""

    groups: list[Group]
    slot_mapping: Tensor

    def attend(
        self, rows: AnyRows, head_dim: int, kernel: Callable[[Group, AnyRows], Tensor]
    ) -> Tensor:
        """Every group's rows through `kernel`, each back in its place.

        Args:
            rows: a named tuple of packed rows, the first [num_tokens, num_heads, ...].
            head_dim: of the output.
            kernel: from a group and its rows to their output.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        if len(self.groups) == 1:
            return kernel(self.groups[0], rows)
        output = rows[0].new_empty(*rows[0].shape[:2], head_dim)
        for group in self.groups:
            index = group.rows
            assert isinstance(index, Tensor), "a group that is not alone names its rows"
            part = type(rows)(*(tensor.index_select(0, index) for tensor in rows))
            output.index_copy_(0, index, kernel(group, part))
        return output


def plan_groups(metadata: AttentionMetadata, block_size: int) -> AiterPlan:
    """Splits the requests of a forward into phases.

    A prompt of one token is a row like any other: `flash_attn_varlen_func` is wrong for single rows
    in some head sizes and types.
    """
    if metadata.query_lens is None or metadata.seq_lens_host is None:
        return AiterPlan([_whole(metadata, "decode", block_size)], metadata.slot_mapping)
    members: dict[Phase, list[int]] = {}
    lengths = zip(metadata.query_lens, metadata.seq_lens_host, strict=True)
    for i, (count, length) in enumerate(lengths):
        members.setdefault(
            "decode" if count == 1 else "prefill" if count == length else "extend", []
        ).append(i)
    groups = [_group(metadata, phase, m, block_size) for phase, m in members.items()]
    return AiterPlan(groups, metadata.slot_mapping)


def plan_packed(metadata: AttentionMetadata, block_size: int) -> AiterPlan:
    """A plan for Triton's kernels alone: causal rows stay together, bidirectional ones go by the
    number of rows per request.
    """
    if metadata.query_lens is None:
        return AiterPlan([_whole(metadata, "decode", block_size)], metadata.slot_mapping)
    if metadata.visibility == "causal":
        return AiterPlan([_whole(metadata, "packed", block_size)], metadata.slot_mapping)
    members: dict[int, list[int]] = {}
    for i, count in enumerate(metadata.query_lens):
        members.setdefault(count, []).append(i)
    groups = [_group(metadata, "decode", m, block_size) for m in members.values()]
    return AiterPlan(groups, metadata.slot_mapping)


def _whole(metadata: AttentionMetadata, phase: Phase, block_size: int) -> Group:
    """All requests of a forward."""
    parts = {part.name: getattr(metadata, part.name) for part in fields(AttentionMetadata)}
    return Group(**parts, phase=phase, rows=slice(None), block_size=block_size)


def _group(metadata: AttentionMetadata, phase: Phase, members: list[int], block_size: int) -> Group:
    """The given requests of a forward whose lengths the host knows."""
    group = _whole(metadata, phase, block_size)
    if len(members) == metadata.num_reqs:
        return group
    assert metadata.query_lens is not None and metadata.seq_lens_host is not None
    query_lens = [metadata.query_lens[i] for i in members]
    seq_lens = [metadata.seq_lens_host[i] for i in members]
    firsts, device = [0, *accumulate(metadata.query_lens)], metadata.seq_lens.device
    rows = torch.cat([torch.arange(firsts[i], firsts[i + 1]) for i in members])
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    index = torch.tensor(members).to(device, non_blocking=True)
    return replace(
        group,
        rows=rows.to(device, non_blocking=True),
        num_reqs=len(members),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc=starts.to(device, non_blocking=True),
        seq_lens=metadata.seq_lens.index_select(0, index),
        block_table=metadata.block_table.index_select(0, index),
        query_lens=query_lens,
        seq_lens_host=seq_lens,
    )
