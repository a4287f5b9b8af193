"""Trees out of paths in Triton, one program per request: see `specdec.sampling.trees.tries`.

Paths are entries, each with the entry before it; those that are alike are one. The best entries are
sorted out at once: no path is likelier than its beginning, so that is among them already. A score
is compared as one integer with the depth and the entry. Nothing is done draft by draft, but for the
rows that lead to one, which are followed twice as far in each of a few turns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.base.blocks import MAX_NODES, DraftTree
from specdec.kernels.triton_argmax import token_key
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.sampling.triton_filters import number_of

WARPS = 8
"""So many hold what 63 drafts are compared with, without spilling."""
_LEAST = tl.constexpr(-(2**63))


@triton.constexpr_function
def _turns(depth: int) -> int:
    """Times that paths of up to `depth` entries are doubled until they are whole."""
    return (depth - 1).bit_length()


@triton.jit
def _followed(sums: tl.tensor, before: tl.tensor, TURNS: tl.constexpr) -> tl.tensor:
    """Sums along the paths to entries [N], each with the number of the one before, 0 for none."""
    for _ in tl.static_range(TURNS):
        place = tl.maximum(before - 1, 0)
        sums += tl.where(before > 0, tl.gather(sums, place, 0), 0)
        before = tl.where(before > 0, tl.gather(before, place, 0), 0)
    return sums


@triton.jit
def _store_best(
    key: tl.tensor,  # int64 [ENTRIES], `token_key` of score, depth and entry; the least for none
    # int64 [ENTRIES], the token, then 16 bits with 1 + the entry before, 0 behind the anchor
    link: tl.tensor,
    found: tl.tensor,  # int64 [5, requests, NODES]
    scores: tl.tensor,  # float32 [requests, NODES]
    num_drafts: tl.tensor,  # int64 [requests]
    # the first entry of odd places, those before have even ones; None: all their own
    SECOND: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    LOGARITHMS: tl.constexpr,  # scores become them
) -> None:
    """Writes parents, depths, ancestors, ranks, tokens and scores of the best, and their number."""
    MOST: tl.constexpr = max(2, triton.next_power_of_2(NODES))  # one would be no vector
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, MOST)
    chosen = tl.topk(key, MOST)
    counts = (chosen > _LEAST) & (node < NODES)
    who = 0x7FFFFFFF - (chosen & 0x7FFFFFFF).to(tl.int32)
    entry = tl.where(counts, who & 0xFFFF, 0)
    place = entry
    if SECOND is not None:
        place = tl.where(entry < SECOND, 2 * entry, 2 * (entry - SECOND) + 1)
    its_link = tl.where(counts, tl.gather(link, place, 0), 0)
    before = (its_link & 0xFFFF).to(tl.int32)
    earlier = (node[None, :] < node[:, None]) & counts[None, :]
    is_parent = earlier & (entry[None, :] + 1 == before[:, None])
    parent = tl.max(tl.where(is_parent, node[None, :] + 1, 0), 1)
    above = _followed(tl.full([MOST], 1, tl.int64) << node, parent, _turns(DEPTH))
    score = tl.where(counts, number_of((chosen >> 32).to(tl.int32)), -float("inf"))
    if LOGARITHMS:  # whatever they are rounded to, none is above the one before
        score = tl.where(counts, tl.log(tl.where(counts, score, 1.0)), -float("inf"))
        score = tl.minimum(score, tl.min(tl.where(earlier, score[None, :], float("inf")), 1))
    siblings = (node[None, :] < node[:, None]) & (parent[None, :] == parent[:, None])
    rank = tl.sum(siblings.to(tl.int64), 1)
    within = node < NODES
    stride = tl.num_programs(0).to(tl.int64) * NODES
    place = request * NODES + node
    tl.store(found + place, parent.to(tl.int64), mask=within)
    tl.store(found + stride + place, tl.where(counts, who >> 16, 1).to(tl.int64), mask=within)
    tl.store(found + 2 * stride + place, above, mask=within)
    tl.store(found + 3 * stride + place, rank, mask=within)
    tl.store(found + 4 * stride + place, its_link >> 16, mask=within)
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
    rows = continuations + request * request_stride + one * occurrence_stride
    there = (level < DEPTH) & (level < length[None, :])
    tokens = tl.load(rows[None, :] + level, mask=there, other=-1)
    kept = tl.where(length > 0, tl.load(weights + place, mask=one < COUNT, other=0.0), 0.0)
    keep = tl.load(keeps + place, mask=one < COUNT, other=0.0)
    total = tl.sum(kept, 0)
    total = tl.where(total > 0, total, 1.0)
    agreeing = tl.full([MANY, MANY], 1, tl.int1)
    before = tl.full([MANY], 0, tl.int32)
    keys = tl.full([LEVELS, MANY], _LEAST, tl.int64)
    links = tl.zeros([LEVELS, MANY], tl.int64)
    for depth in range(DEPTH):
        token = tl.max(tl.where(level == depth, tokens, -1), 0)
        agreeing = agreeing & (token[:, None] == token[None, :]) & (token >= 0)[:, None]
        kept = kept * keep
        share = tl.sum(tl.where(agreeing, kept[None, :], 0.0), 1) / total
        first = MANY - tl.max(tl.where(agreeing, MANY - one[None, :], 0), 1)
        key = token_key(share, ((depth + 1) << 16) | (depth * MANY + one))
        key = tl.where((first == one) & (token >= 0), key, _LEAST)
        keys = tl.where(level == depth, key[None, :], keys)
        links = tl.where(level == depth, ((token << 16) | before)[None, :], links)
        before = depth * MANY + first + 1
    key, link = tl.reshape(keys, [LEVELS * MANY]), tl.reshape(links, [LEVELS * MANY])
    _store_best(key, link, found, scores, num_drafts, None, NODES, DEPTH, True)


@triton.jit
def _mixed(token: tl.tensor, depth: tl.tensor) -> tl.tensor:
    """int64 that no other token or depth has, by MurmurHash3's finalizer (public domain)."""
    x = ((token << 16) | depth).to(tl.uint64)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return (x ^ (x >> 33)).to(tl.int64)


@triton.jit
def _tree(
    tokens: tl.tensor,  # int64 [requests, NODES], as all below but where it says otherwise
    parents: tl.tensor,
    depths: tl.tensor,
    logs: tl.tensor,  # float32
    counts: tl.tensor,  # int64 [requests]
    shifts: tl.tensor,  # float32 [requests], of all scores, or None
    request: tl.tensor,
    NODES: tl.constexpr,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tuple:
    """Which drafts of a tree count [SIZE], their tokens, parents, depths, scores and path sums."""
    node = tl.arange(0, SIZE)
    within, place = node < NODES, request * NODES + node
    token = tl.load(tokens + place, mask=within, other=0)
    parent = tl.load(parents + place, mask=within, other=0).to(tl.int32)
    depth = tl.load(depths + place, mask=within, other=0).to(tl.int32)
    score = tl.load(logs + place, mask=within, other=0.0)
    if shifts is not None:
        score += tl.load(shifts + request)
    exists = within & (node < tl.load(counts + request))
    exists = exists & (depth <= DEPTH) & (score > -float("inf"))
    path = _followed(_mixed(token, depth), parent, _turns(DEPTH))
    return (exists, token, parent, depth, score, path)


@triton.jit
def _union_kernel(
    tokens: tl.tensor,  # see `_tree`; of the first tree
    parents: tl.tensor,
    depths: tl.tensor,
    logs: tl.tensor,
    counts: tl.tensor,
    shifts: tl.tensor,
    other_tokens: tl.tensor,  # of the other one
    other_parents: tl.tensor,
    other_depths: tl.tensor,
    other_logs: tl.tensor,
    other_counts: tl.tensor,
    other_shifts: tl.tensor,
    found: tl.tensor,  # see `_store_best`
    scores: tl.tensor,
    num_drafts: tl.tensor,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = max(triton.next_power_of_2(FIRST), triton.next_power_of_2(SECOND))
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SIZE)
    await_previous(OVERLAP)
    exists, token, parent, depth, score, path = _tree(
        tokens, parents, depths, logs, counts, shifts, request, FIRST, SIZE, DEPTH
    )
    other_exists, other_token, other_parent, other_depth, other_score, other_path = _tree(
        other_tokens, other_parents, other_depths, other_logs, other_counts, other_shifts, request,
        SECOND, SIZE, DEPTH,
    )  # fmt: skip
    # Equal sums are equal paths, but for chance in 64 bits: a wrong draft, and no output.
    same = (path[:, None] == other_path[None, :]) & exists[:, None] & other_exists[None, :]
    score = tl.maximum(score, tl.max(tl.where(same, other_score[None, :], -float("inf")), 1))
    # of the other tree's drafts, those of the first count from 1 on
    twin = tl.max(tl.where(same, node[:, None] + 1, 0), 0)
    row = tl.where(twin > 0, twin, FIRST + node + 1)
    other_parent = tl.where(other_parent > 0, tl.gather(row, tl.maximum(other_parent - 1, 0), 0), 0)
    key = tl.where(exists, token_key(score, (depth << 16) | node), _LEAST)
    other_key = token_key(other_score, (other_depth << 16) | (FIRST + node))
    other_key = tl.where(other_exists & (twin == 0), other_key, _LEAST)
    links = tl.join((token << 16) | parent, (other_token << 16) | other_parent)
    links = tl.reshape(links, [2 * SIZE])
    keys = tl.reshape(tl.join(key, other_key), [2 * SIZE])
    _store_best(keys, links, found, scores, num_drafts, FIRST, NODES, DEPTH, False)


Drafts = tuple[DraftTree, Tensor, Tensor, Tensor]
"""The fields of `specdec.sampling.trees.tries.ScoredDrafts`, without a shift."""


def trie(
    continuations: Tensor, lengths: Tensor, weights: Tensor, num_nodes: int, keep: Tensor
) -> Drafts:
    """See `specdec.sampling.trees.tries.trie`.

    Args:
        continuations: int64 [num_reqs, M, K], the last axis contiguous.
        lengths: int64 [num_reqs, M].
        weights, keep: float32 [num_reqs, M].
    """
    num_reqs, count, depth = continuations.shape
    assert continuations.stride(-1) == 1 and count * depth < 2**15
    assert continuations.dtype == lengths.dtype == torch.int64
    assert weights.shape == keep.shape == lengths.shape
    assert weights.dtype == keep.dtype == torch.float32
    room = _room(num_reqs, num_nodes, continuations.device)
    of_paths = (part.contiguous() for part in (lengths, weights, keep))
    options = {"COUNT": count, "DEPTH": depth, "NODES": num_nodes, "num_warps": WARPS}
    options |= overlap_options(continuations.device)
    with on_device(continuations):
        launch, strides = _trie_kernel[(num_reqs,)], continuations.stride()[:2]
        launch(continuations, *of_paths, *room, *strides, **options)
    return _drafts(*room)


def merge(
    one: tuple[*Drafts, Tensor | None],
    other: tuple[*Drafts, Tensor | None],
    num_nodes: int,
    depth: int,
) -> Drafts:
    """See `specdec.sampling.trees.tries.merge_trees`; of the trees all fields of `ScoredDrafts`."""
    num_reqs, first = one[1].shape
    room = _room(num_reqs, num_nodes, one[1].device)
    parts = (
        part
        for tree, token_ids, *rest in (one, other)
        for part in (token_ids, tree.parents, tree.depths, *rest)
    )
    trees = [None if part is None else part.contiguous() for part in parts]
    options = {"FIRST": first, "SECOND": other[1].shape[1], "DEPTH": depth, "NODES": num_nodes}
    options |= {"num_warps": WARPS, **overlap_options(one[1].device)}
    with on_device(one[1]):
        _union_kernel[(num_reqs,)](*trees, *room, **options)
    return _drafts(*room)


def _room(num_reqs: int, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For the outcome of so many requests."""
    assert 1 <= num_nodes <= MAX_NODES
    found = torch.empty(5, num_reqs, num_nodes, dtype=torch.int64, device=device)
    scores = torch.empty(num_reqs, num_nodes, dtype=torch.float32, device=device)
    return found, scores, found.new_empty(num_reqs)


def _drafts(found: Tensor, scores: Tensor, num_drafts: Tensor) -> Drafts:
    *tree, token_ids = found
    return DraftTree(*tree), token_ids, scores, num_drafts
