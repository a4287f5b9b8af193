"""Trees out of paths in Triton, one program of one warp per request: what `specdec.sampling.tries` puts together.

Paths are entries, each with the entry before it; those that are alike are one. The best is taken again and again: no path is
likelier than its beginning, so that is among the chosen already. A score is compared as one integer with the depth and the entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.blocks import MOST_NODES, DraftTree
from specdec.kernels.triton_argmax import token_key
from specdec.kernels.triton_candidates import number_of
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

_LEAST = tl.constexpr(-(2**63))
_SMALL = 16
"""Occurrences up to which one warp holds a table of all pairs."""


@triton.jit
def _store_best(
    key: tl.tensor,  # int64 [ENTRIES], `token_key` of score, depth and entry; the least for none
    link: tl.tensor,  # int64 [ENTRIES], the token, then 16 bits with 1 + the entry before, 0 behind the anchor
    found: tl.tensor,  # int64 [5, requests, NODES]
    scores: tl.tensor,  # float32 [requests, NODES]
    num_drafts: tl.tensor,  # int64 [requests]
    ENTRIES: tl.constexpr,
    NODES: tl.constexpr,
    LOGARITHMS: tl.constexpr,  # scores become them
) -> None:
    """Writes parents, depths, ancestors, ranks and tokens of the best entries, their scores, and how many there are."""
    request = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, ENTRIES)
    node = tl.arange(0, triton.next_power_of_2(NODES))
    row_of = tl.zeros([ENTRIES], tl.int32)
    chosen = tl.full([triton.next_power_of_2(NODES)], _LEAST, tl.int64)
    above = tl.zeros([triton.next_power_of_2(NODES)], tl.int64)
    parent = tl.zeros([triton.next_power_of_2(NODES)], tl.int32)
    token = tl.zeros([triton.next_power_of_2(NODES)], tl.int64)
    for n in range(NODES):
        best = tl.max(key, 0)
        here = (key == best) & (key > _LEAST)
        its_link = tl.sum(tl.where(here, link, 0), 0)
        row = tl.sum(tl.where(entry + 1 == (its_link & 0xFFFF).to(tl.int32), row_of, 0), 0)
        bit = tl.full([], 1, tl.int64) << n
        above = tl.where(node == n, tl.sum(tl.where(node + 1 == row, above, 0), 0) | bit, above)
        parent = tl.where(node == n, row, parent)
        token = tl.where(node == n, its_link >> 16, token)
        chosen = tl.where(node == n, best, chosen)
        row_of = tl.where(here, n + 1, row_of)
        key = tl.where(here, _LEAST, key)
    counts = chosen > _LEAST
    score = tl.where(counts, number_of((chosen >> 32).to(tl.int32)), -float("inf"))
    earlier = node[None, :] < node[:, None]
    if LOGARITHMS:  # whatever they are rounded to, none is above the one before
        score = tl.where(counts, tl.log(tl.where(counts, score, 1.0)), -float("inf"))
        score = tl.minimum(score, tl.min(tl.where(earlier, score[None, :], float("inf")), 1))
    depth = (0x7FFFFFFF - (chosen & 0x7FFFFFFF)) >> 16
    rank = tl.sum((earlier & (parent[None, :] == parent[:, None])).to(tl.int64), 1)
    within = node < NODES
    stride = tl.num_programs(0).to(tl.int64) * NODES
    place = request * NODES + node
    tl.store(found + place, parent.to(tl.int64), mask=within)
    tl.store(found + stride + place, tl.where(counts, depth, 1), mask=within)
    tl.store(found + 2 * stride + place, above, mask=within)
    tl.store(found + 3 * stride + place, rank, mask=within)
    tl.store(found + 4 * stride + place, token, mask=within)
    tl.store(scores + place, score, mask=within)
    tl.store(num_drafts + request, tl.sum(counts.to(tl.int64), 0))


@triton.jit
def _trie_kernel(
    continuations: tl.tensor,  # int64 [requests, COUNT, DEPTH]
    lengths: tl.tensor,  # int64 [requests, COUNT]
    weights: tl.tensor,  # float32 [requests, COUNT]
    keeps: tl.tensor,  # the same
    found: tl.tensor,  # see `_store_best`
    scores: tl.tensor,
    num_drafts: tl.tensor,
    request_stride: tl.tensor,
    occurrence_stride: tl.tensor,
    COUNT: tl.constexpr,
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    MANY: tl.constexpr = triton.next_power_of_2(COUNT)
    LEVELS: tl.constexpr = triton.next_power_of_2(DEPTH)
    request = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, MANY)
    level = tl.arange(0, LEVELS)[:, None]
    await_previous(OVERLAP)
    place = request * COUNT + one
    length = tl.load(lengths + place, mask=one < COUNT, other=0)
    kept = tl.where(length > 0, tl.load(weights + place, mask=one < COUNT, other=0.0), 0.0)
    keep = tl.load(keeps + place, mask=one < COUNT, other=0.0)
    total = tl.sum(kept, 0)
    total = tl.where(total > 0, total, 1.0)
    agreeing = tl.full([MANY, MANY], 1, tl.int1)
    before = tl.full([MANY], 0, tl.int32)
    keys = tl.full([LEVELS, MANY], _LEAST, tl.int64)
    links = tl.zeros([LEVELS, MANY], tl.int64)
    rows = continuations + request * request_stride + one * occurrence_stride
    for depth in range(DEPTH):
        token = tl.load(rows + depth, mask=depth < length, other=-1)
        agreeing = agreeing & (token[:, None] == token[None, :]) & (token >= 0)[:, None]
        kept = kept * keep
        share = tl.sum(tl.where(agreeing, kept[None, :], 0.0), 1) / total
        first = MANY - tl.max(tl.where(agreeing, MANY - one[None, :], 0), 1)
        key = tl.where((first == one) & (token >= 0), token_key(share, ((depth + 1) << 16) | (depth * MANY + one)), _LEAST)
        keys = tl.where(level == depth, key[None, :], keys)
        links = tl.where(level == depth, ((token << 16) | before)[None, :], links)
        before = depth * MANY + first + 1
    key, link = tl.reshape(keys, [LEVELS * MANY]), tl.reshape(links, [LEVELS * MANY])
    _store_best(key, link, found, scores, num_drafts, LEVELS * MANY, NODES, True)


@triton.jit
def _union_kernel(
    tokens: tl.tensor,  # int64 [requests, FIRST], of the first tree, as all below but where it says otherwise
    parents: tl.tensor,
    depths: tl.tensor,
    logs: tl.tensor,  # float32
    counts: tl.tensor,  # int64 [requests]
    other_tokens: tl.tensor,  # int64 [requests, SECOND], of the other tree
    other_parents: tl.tensor,
    other_depths: tl.tensor,
    other_logs: tl.tensor,
    other_counts: tl.tensor,
    found: tl.tensor,  # see `_store_best`
    scores: tl.tensor,
    num_drafts: tl.tensor,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    ENTRIES: tl.constexpr = triton.next_power_of_2(FIRST + SECOND)
    request = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, ENTRIES)
    await_previous(OVERLAP)
    is_first, place, number = entry < FIRST, request * FIRST + entry, entry - FIRST
    is_other, other_place = (number >= 0) & (number < SECOND), request * SECOND + number
    token = tl.load(tokens + place, mask=is_first, other=0) + tl.load(other_tokens + other_place, mask=is_other, other=0)
    before = tl.load(other_parents + other_place, mask=is_other, other=0)
    before = tl.where(before > 0, before + FIRST, 0) + tl.load(parents + place, mask=is_first, other=0)
    depth = tl.load(depths + place, mask=is_first, other=0) + tl.load(other_depths + other_place, mask=is_other, other=0)
    score = tl.load(logs + place, mask=is_first, other=0.0) + tl.load(other_logs + other_place, mask=is_other, other=0.0)
    exists = (is_first & (entry < tl.load(counts + request))) | (is_other & (number < tl.load(other_counts + request)))
    exists = exists & (depth <= DEPTH) & (score > -float("inf"))
    score = tl.where(exists, score, -float("inf"))
    link = (token << 16) | before
    # Parents come before their children, so a draft of the other tree that is the same as an earlier one hands its children over.
    for n in range(FIRST, FIRST + SECOND):
        its_link = tl.sum(tl.where(entry == n, link, 0), 0)
        its_score = tl.max(tl.where(entry == n, score, -float("inf")), 0)
        same = exists & (link == its_link) & (entry < n)
        twin = ENTRIES - tl.max(tl.where(same, ENTRIES - entry, 0), 0)
        is_twin = twin < ENTRIES
        score = tl.where(entry == twin, tl.maximum(score, its_score), score)
        exists = exists & ~(is_twin & (entry == n))
        link = tl.where(is_twin & ((link & 0xFFFF) == n + 1), (link >> 16 << 16) | (twin + 1), link)
    key = tl.where(exists & (score > -float("inf")), token_key(score, (depth.to(tl.int32) << 16) | entry), _LEAST)
    _store_best(key, link, found, scores, num_drafts, ENTRIES, NODES, False)


Drafts = tuple[DraftTree, Tensor, Tensor, Tensor]
"""The fields of `specdec.sampling.tries.ScoredDrafts`."""


def trie(continuations: Tensor, lengths: Tensor, weights: Tensor, num_nodes: int, keep: Tensor) -> Drafts:
    """See `specdec.sampling.tries.trie`.

    Args:
        continuations: int64 [num_reqs, M, K], the last axis contiguous.
        lengths: int64 [num_reqs, M].
        weights, keep: float32 [num_reqs, M].
        num_nodes: N.
    """
    num_reqs, count, depth = continuations.shape
    assert continuations.stride(-1) == 1 and continuations.dtype == lengths.dtype == torch.int64 and count * depth < 2**15
    assert weights.shape == keep.shape == lengths.shape and weights.dtype == keep.dtype == torch.float32
    found, scores, num_drafts = _room(num_reqs, num_nodes, continuations.device)
    with on_device(continuations):
        _trie_kernel[(num_reqs,)](
            continuations,
            lengths.contiguous(),
            weights.contiguous(),
            keep.contiguous(),
            found,
            scores,
            num_drafts,
            *continuations.stride()[:2],
            COUNT=count,
            DEPTH=depth,
            NODES=num_nodes,
            num_warps=1 if count <= _SMALL else 4,
            **overlap_options(continuations.device),
        )
    return _drafts(found, scores, num_drafts)


def merge(one: Drafts, other: Drafts, num_nodes: int, depth: int) -> Drafts:
    """See `specdec.sampling.tries.merge_trees`."""
    num_reqs, first = one[1].shape
    second = other[1].shape[1]
    found, scores, num_drafts = _room(num_reqs, num_nodes, one[1].device)
    trees = [part.contiguous() for tree, *rest in (one, other) for part in (rest[0], tree.parents, tree.depths, *rest[1:])]
    with on_device(found):
        _union_kernel[(num_reqs,)](
            *trees,
            found,
            scores,
            num_drafts,
            FIRST=first,
            SECOND=second,
            DEPTH=depth,
            NODES=num_nodes,
            num_warps=1,
            **overlap_options(found.device),
        )
    return _drafts(found, scores, num_drafts)


def _room(num_reqs: int, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For the outcome of so many requests."""
    assert 1 <= num_nodes <= MOST_NODES
    found = torch.empty(5, num_reqs, num_nodes, dtype=torch.int64, device=device)
    scores = torch.empty(num_reqs, num_nodes, dtype=torch.float32, device=device)
    return found, scores, found.new_empty(num_reqs)


def _drafts(found: Tensor, scores: Tensor, num_drafts: Tensor) -> Drafts:
    *tree, token_ids = found
    return DraftTree(*tree), token_ids, scores, num_drafts
