"""Where a text's end occurred before, and what followed; the host never waits."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.model.batch import DecodeBatch

NOTHING = -1
"""Stands between texts, and for what is not there; no token has it."""
_BEFORE_THE_TEXT = -2  # in an end that is shorter than what is compared; equal to nothing


class Matches(NamedTuple):
    """Occurrences of a text's end, the longest first as `find` compares, then the latest.

    Attributes:
        ends: int64 [num_reqs, C], place of the last token of each; before the text's last token
            where there is no match.
        lengths: int64 [num_reqs, C], how many tokens up to there are the same, or 0.
    """

    ends: Tensor
    lengths: Tensor


class Texts(NamedTuple):
    """Where to look.

    Attributes:
        pool: int32 [P], past texts with `NOTHING` behind each of them; None for none.
        history: int32 [max_num_seqs, positions], the requests' own texts.
        slots: int64 [num_reqs], their rows.
        seq_lens: int64 [num_reqs], the place of the last token of each.
        max_seq_len: host bound on the places where these texts end.
    """

    pool: Tensor | None
    history: Tensor
    slots: Tensor
    seq_lens: Tensor
    max_seq_len: int


class Limits(NamedTuple):
    """What to look for.

    Attributes:
        occurrences: C.
        longest: M, most tokens of a match.
        compared, shortest: see `find`.
        depth: K, tokens that follow.
    """

    occurrences: int
    longest: int
    compared: int
    shortest: int
    depth: int


class Found(NamedTuple):
    """What followed the best occurrences of texts' ends.

    Attributes:
        continuations: int64 [num_reqs, C, K], see `continued`; the text's last token again and
            again where there is no match.
        lengths: int64 [num_reqs, C], of the matches, see `Matches`.
        slots: int64 [num_reqs], of the requests.
    """

    continuations: Tensor
    lengths: Tensor
    slots: Tensor

    def serves(self, batch: DecodeBatch, count: int) -> bool:
        """Whether a step's best `count` are among these, with what follows; the host looks."""
        _, most, depth = self.continuations.shape
        return count <= most and batch.shape.depth <= depth and torch.equal(self.slots, batch.slots)


def search(texts: Texts, limits: Limits) -> Found:
    """What followed where texts' ends occurred before, in past texts and their own."""
    pool, history, slots, seq_lens, max_seq_len = texts
    count, longest, compared, shortest, depth = limits
    columns, first = history[:, :max_seq_len].index_select(0, slots), 0
    if pool is not None:
        first = len(pool)
        columns = torch.cat([pool.expand(len(columns), -1), columns], dim=1)
    last = seq_lens[:, None] + first
    suffix = last_tokens(columns, first, last, longest)
    matches = find(columns, suffix, count, compared=compared, shortest=shortest, before=last)
    return Found(continued(columns, first, last, matches.ends, depth), matches.lengths, slots)


def last_tokens(texts: Tensor, first: int, last: Tensor, count: int) -> Tensor:
    """int32 [num_reqs, count], tokens of `texts` from `last` back to `first`."""
    places = last - torch.arange(count, device=texts.device)
    return torch.where(places >= first, texts.gather(1, places.clamp(min=0)), _BEFORE_THE_TEXT)


def find(
    texts: Tensor, suffix: Tensor, count: int, *, compared: int, shortest: int, before: Tensor
) -> Matches:
    """The `count` best occurrences of a suffix.

    Args:
        texts: int32 [num_reqs, width], where to look.
        suffix: int32 [num_reqs, M], the latest token first.
        count: C.
        compared: tokens by which matches are told apart everywhere, at most M.
        shortest: tokens of a match that counts, at most `compared`.
        before: int64 [num_reqs, 1], matches end before this place.
    """
    width = texts.shape[1]
    columns = torch.arange(width, dtype=torch.int32, device=texts.device)
    matched = (texts == suffix[:, :1]) & (columns < before)
    lengths = matched.int()
    for j in range(1, min(compared, width)):
        matched = matched[:, 1:] & (texts[:, : width - j] == suffix[:, j : j + 1])
        lengths[:, j:] += matched
    order = torch.where(lengths >= shortest, lengths * width + columns, -1)
    best, ends = F.pad(order, (0, max(0, count - width)), value=-1).topk(count, dim=1)
    matched = best >= 0
    found = torch.where(matched, best // width, 0).long()
    ends = torch.where(matched, ends, before - 1)
    more = torch.arange(compared, suffix.shape[1], device=texts.device)
    if len(more):
        places = ends[..., None] - more
        earlier = texts.gather(1, places.clamp(0, width - 1).flatten(1)).view_as(places)
        agrees = (earlier == suffix[:, None, compared:]) & (places >= 0)
        found = found + (found == compared) * agrees.long().cumprod(dim=2).sum(dim=2)
    return Matches(ends, found)


def continued(texts: Tensor, first: int, last: Tensor, ends: Tensor, count: int) -> Tensor:
    """int64 [num_reqs, C, count], what follows matches; `NOTHING` past the end of a past text.

    In the request's own text, a continuation that reaches the end goes on from its start, as an
    overlapping copy does in LZ77.

    Args:
        texts: int32 [num_reqs, width], past texts with `NOTHING` behind each, then its own.
        first: where that begins.
        last: int64 [num_reqs, 1], the place of its last token.
        ends: int64 [num_reqs, C], of the matches.
        count: tokens.
    """
    # a past text ends before that
    steps = torch.arange(count, device=texts.device) % (last - ends).clamp(min=1)[..., None]
    places = ends[..., None] + 1 + steps
    tokens = texts.gather(1, places.clamp(max=texts.shape[1] - 1).flatten(1)).view_as(places).long()
    return torch.where(tokens.cummin(dim=2).values < 0, NOTHING, tokens) if first else tokens
