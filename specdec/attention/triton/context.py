"""Long prompts through a library, whose kernels know no pages: rows and keys that form squares and
rectangles, in few shapes.

Rows of a request are cut into pieces of `SQUARES`. A piece takes its own keys as a causal square,
and those of its context as a rectangle; the two are merged, with sinks. What is left over goes to
the kernel for prompts:

    piece 0    s           #  rectangles of the library
    piece 1    #s          s  its squares
    piece 2    ##s         o  the kernel for prompts
    the rest   oooo

Where a context is no multiple of `PIECE`, pieces of that size take rectangles alone, and the kernel
for prompts goes on from there (`specdec.attention.triton.triton_prefill.Earlier`). Keys are
gathered from the cache, once per layer and request.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.attention.triton.libraries import Rectangle
from specdec.device.host import to_device
from specdec.kv_cache import LayerCache

SQUARES = (8192, 4096, 2048)
"""Rows of a piece; the largest that fits is taken."""
PIECE = SQUARES[-1]
"""Tokens; as many as a step prefills by default while others decode."""


class Run(NamedTuple):
    """Rows of one launch: a whole piece, or consecutive ones of any requests.

    Attributes:
        metadata: tells the kernel for prompts which they are, counted from the first of `rows`.
        rows: packed rows.
        num_keys: length of the rectangle; 0 where there is none.
        square: the library takes the rest of the keys, too.
        request: whose piece it is.
    """

    metadata: AttentionMetadata
    rows: slice
    num_keys: int
    square: bool
    request: int

    @property
    def num_gathered(self) -> int:
        """Keys that the library is given, from the first of the request."""
        return self.metadata.max_seq_len if self.square else self.num_keys


@dataclass(frozen=True, slots=True)
class PrefillPlan(AttentionMetadata):
    """Metadata of prompts, some of which have rectangles.

    Attributes:
        runs: all rows, once each; the pieces of a request in order.
    """

    runs: tuple[Run, ...] = ()


class _Part(NamedTuple):
    """Consecutive rows of one request."""

    request: int
    num_rows: int
    end: int  # position after the last row
    num_keys: int  # see `Run`
    square: bool = False

    @property
    def is_piece(self) -> bool:
        return self.square or self.num_keys > 0


def plan_rectangles(metadata: AttentionMetadata, block_size: int) -> AttentionMetadata:
    """A `PrefillPlan` if there is a piece, else `metadata`. The host does not wait."""
    if (
        metadata.visibility != "causal"
        or metadata.query_lens is None
        or metadata.seq_lens_host is None
        or PIECE % block_size
    ):
        return metadata
    lengths = enumerate(zip(metadata.query_lens, metadata.seq_lens_host, strict=True))
    parts = [one for request, (num_rows, end) in lengths for one in _parts(request, num_rows, end)]
    if not any(part.is_piece for part in parts):
        return metadata
    cuts = [i for i in range(1, len(parts)) if parts[i].is_piece or parts[i - 1].is_piece]
    groups = [parts[a:b] for a, b in zip([0, *cuts], [*cuts, len(parts)], strict=True)]
    counts = [[0, *accumulate(part.num_rows for part in group)] for group in groups]
    of_parts = [part.end for part in parts] + [part.request for part in parts]
    numbers = sum(counts, of_parts)
    there = to_device(numbers, torch.int32, metadata.seq_lens.device)
    ends, requests, starts = there.tensor_split([len(parts), 2 * len(parts)])
    table = metadata.block_table.index_select(0, requests)
    runs, first_row, first_part = [], 0, 0
    for group, count in zip(groups, counts, strict=True):
        chosen = slice(first_part, first_part + len(group))
        of_rows = AttentionMetadata(
            query_start_loc=starts[: len(count)],
            seq_lens=ends[chosen],
            block_table=table[chosen],
            slot_mapping=metadata.slot_mapping[first_row : first_row + count[-1]],
            num_reqs=len(group),
            num_tokens=count[-1],
            max_query_len=max(part.num_rows for part in group),
            max_seq_len=max(part.end for part in group),
        )
        rows = slice(first_row, first_row + count[-1])
        runs.append(Run(of_rows, rows, group[0].num_keys, group[0].square, group[0].request))
        first_row, first_part, starts = first_row + count[-1], chosen.stop, starts[len(count) :]
    given = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return PrefillPlan(**given, runs=tuple(runs))


def attend(
    query: Tensor,
    cache: LayerCache,
    plan: PrefillPlan,
    rectangle: Rectangle,
    *,
    scale: float,
    sinks: Tensor | None,
    go_on: Callable[..., Any],
    plain: Callable[[Tensor, AttentionMetadata], Tensor],
) -> Tensor:
    """Attention of all rows, whose keys and values the cache holds already.

    Args:
        query: [num_tokens, num_heads, head_dim].
        cache: in the type of `query`.
        plan: of the forward.
        rectangle: the library's kernel.
        scale: factor of the scores.
        sinks: [num_heads], logits that join the softmax, or None.
        go_on: the kernel for prompts, given rows, their metadata, `earlier` and `output`.
        plain: attention of other rows, given their metadata.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.
    """
    # Triton itself is imported only where it is used.
    from specdec.attention.triton.triton_merge import merge_two
    from specdec.attention.triton.triton_prefill import Earlier

    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    gathered_of, key, value = -1, cache.key, cache.value
    for run in reversed(plan.runs):  # the piece of a request that is given the most keys first
        rows, before = query[run.rows], slice(0, run.num_keys)
        if not run.num_gathered:
            output[run.rows] = plain(rows, run.metadata)
            continue
        if run.request != gathered_of:
            blocks = run.metadata.block_table[0, : run.num_gathered // cache.key.shape[1]]
            gathered_of, (key, value) = (
                run.request,
                (side.index_select(0, blocks).flatten(0, 1) for side in cache),
            )
        before_own = key[before], value[before]
        earlier = rectangle(rows, *before_own, scale, False) if run.num_keys else None
        if run.square:
            own = slice(run.num_keys, run.num_gathered)
            later = rectangle(rows, key[own], value[own], scale, True)
            merge_two(earlier, later, sinks, output[run.rows])
        elif earlier is not None:
            known = Earlier(*earlier, run.num_keys)
            go_on(rows, run.metadata, earlier=known, output=output[run.rows])
    return output


def _parts(request: int, num_rows: int, end: int) -> list[_Part]:
    """Pieces of a request's rows, in order; where there is none, all rows together."""
    start = end - num_rows
    if start % PIECE == 0:
        return _squares(request, start, end)
    # the first piece without a context has no rectangle
    first = start if start >= PIECE else start + PIECE
    firsts = range(first, end - PIECE + 1, PIECE)
    if not firsts:
        return [_Part(request, num_rows, end, 0)]
    parts = [_Part(request, PIECE, piece + PIECE, piece // PIECE * PIECE) for piece in firsts]
    ends = [(start, firsts[0]), (firsts[-1] + PIECE, end)]
    before, after = ([_Part(request, b - a, b, 0)] if b > a else [] for a, b in ends)
    return [*before, *parts, *after]


def _squares(request: int, start: int, end: int) -> list[_Part]:
    """The same behind a context of whole pieces."""
    parts = []
    for size in SQUARES:
        while end - start >= size:
            parts.append(_Part(request, size, start + size, start, square=True))
            start += size
    return [*parts, _Part(request, end - start, end, 0)] if end > start else parts
