"""`specdec.sampling.trees.trees` in Triton: one program of one warp per request.

The builder keeps the best draft that is not yet chosen behind each one that is, and the best that
remains of its siblings: the next of the tree is among them. A sum of scores is compared as one
integer with the draft's depth, parent, the parent's candidate and its own, which also tells who it
is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.base.blocks import DraftTree
from specdec.kernels.triton_argmax import token_key
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.sampling.triton_filters import number_of

_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _children(row: tl.tensor, before: tl.tensor, who: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Keys of the candidates behind a draft whose sum is `before`; see `_best_first_kernel`."""
    child = tl.arange(0, triton.next_power_of_2(COUNT))
    exists = child < COUNT
    score = before + tl.load(row + child, mask=exists, other=0.0)
    return tl.where(exists, token_key(score, who | child), _LEAST)


@triton.jit
def _best_first_kernel(
    edges: tl.tensor,  # float32 [requests, DEPTH, COUNT, COUNT]
    parents: tl.tensor,  # int64 [requests, NODES], as all below but the sums
    depths: tl.tensor,
    ancestors: tl.tensor,
    ranks: tl.tensor,
    places: tl.tensor,
    totals: tl.tensor,  # float32 [requests, NODES]
    request_stride: tl.tensor,
    depth_stride: tl.tensor,
    parent_stride: tl.tensor,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, triton.next_power_of_2(NODES))
    edges += request * request_stride
    chosen = tl.full([triton.next_power_of_2(NODES)], _LEAST, tl.int64)
    sums = tl.zeros([triton.next_power_of_2(NODES)], tl.float32)
    above = tl.zeros([triton.next_power_of_2(NODES)], tl.int64)
    await_previous(OVERLAP)
    # A draft's identity: 7 bits of depth, 7 of its parent's row, 8 of its candidate, 8 of its own.
    frontier = tl.where(node == 0, tl.max(_children(edges, 0.0, 1 << 23, COUNT), 0), _LEAST)
    for n in range(NODES):
        best = tl.max(frontier, 0)
        who = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        depth, parent, rank = who >> 23, (who >> 16) & 127, who & 255
        is_parent = node == parent - 1
        before = tl.sum(tl.where(is_parent, sums, 0.0), 0)
        siblings = edges + (depth - 1) * depth_stride + ((who >> 8) & 255) * parent_stride
        sibling = _children(siblings, before, who - rank, COUNT)
        sibling = tl.max(tl.where(sibling < best, sibling, _LEAST), 0)
        total = number_of((best >> 32).to(tl.int32))
        behind = edges + tl.minimum(depth, DEPTH - 1) * depth_stride + rank * parent_stride
        who = ((depth + 1) << 23) | ((n + 1) << 16) | (rank << 8)
        child = tl.max(_children(behind, total, who, COUNT), 0)
        child = tl.where(depth < DEPTH, child, _LEAST)
        frontier = tl.where(frontier == best, sibling, frontier)
        frontier = tl.where(node == n + 1, child, frontier)
        chosen = tl.where(node == n, best, chosen)
        sums = tl.where(node == n, total, sums)
        bit = tl.full([], 1, tl.int64) << n
        above = tl.where(node == n, tl.sum(tl.where(is_parent, above, 0), 0) | bit, above)
    place = request * NODES + node
    within = node < NODES
    who = 0x7FFFFFFF - (chosen & 0x7FFFFFFF)
    depth, rank = who >> 23, who & 255
    tl.store(parents + place, (who >> 16) & 127, mask=within)
    tl.store(depths + place, depth, mask=within)
    tl.store(ancestors + place, above, mask=within)
    tl.store(ranks + place, rank, mask=within)
    tl.store(places + place, (depth - 1) * COUNT + rank, mask=within)
    tl.store(totals + place, sums, mask=within)


def best_first(edges: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """See `specdec.sampling.trees.trees.best_first`.

    Args:
        edges: float32 [num_reqs, K, C, C], the last axis contiguous.

    Returns:
        [num_reqs, N]: int64 parents, depths, ancestors, ranks and places, float32 sums.
    """
    num_reqs, depth, _, count = edges.shape
    assert edges.dtype == torch.float32 and edges.stride(-1) == 1
    assert num_nodes <= 64 and count <= 256
    found = torch.empty(5, num_reqs, num_nodes, dtype=torch.int64, device=edges.device)
    totals = torch.empty(num_reqs, num_nodes, dtype=torch.float32, device=edges.device)
    options = {"NODES": num_nodes, "DEPTH": depth, "COUNT": count, "num_warps": 1}
    options |= overlap_options(edges.device)
    with on_device(edges):
        _best_first_kernel[(num_reqs,)](edges, *found, totals, *edges.stride()[:3], **options)
    return *found, totals


@triton.jit
def _best_chain_kernel(
    edges: tl.tensor,  # float32 [requests, DEPTH, COUNT, COUNT]
    ranks: tl.tensor,  # int64 [requests, DEPTH]
    request_stride: tl.tensor,
    depth_stride: tl.tensor,
    parent_stride: tl.tensor,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    edges += request * request_stride
    rank = tl.zeros([], tl.int32)
    await_previous(OVERLAP)
    for position in range(DEPTH):
        best = tl.max(_children(edges + rank * parent_stride, 0.0, 0, COUNT), 0)
        rank = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        tl.store(ranks + request * DEPTH + position, rank.to(tl.int64))
        edges += depth_stride


def best_chain(edges: Tensor) -> Tensor:
    """See `specdec.sampling.trees.trees.best_chain`; the last axis of `edges` is contiguous."""
    num_reqs, depth, _, count = edges.shape
    assert edges.dtype == torch.float32 and edges.stride(-1) == 1 and count <= 256
    ranks = torch.empty(num_reqs, depth, dtype=torch.int64, device=edges.device)
    options = {"DEPTH": depth, "COUNT": count, "num_warps": 1, **overlap_options(edges.device)}
    with on_device(edges):
        _best_chain_kernel[(num_reqs,)](edges, ranks, *edges.stride()[:3], **options)
    return ranks


@triton.jit
def _walk_kernel(
    token_ids: tl.tensor,  # int64 [requests, NODES]
    parents: tl.tensor,  # int64 [requests, NODES]
    depths: tl.tensor,  # int64 [requests, NODES]
    ancestors: tl.tensor,  # int64 [requests, NODES]
    target_ids: tl.tensor,  # int64 [requests, NODES + 1]
    num_drafts: tl.tensor,  # int64 [requests], or None
    path: tl.tensor,  # int64 [requests, DEPTH + 1]
    num_accepted: tl.tensor,  # int64 [requests]
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, triton.next_power_of_2(NODES))
    place = request * NODES + node
    exists = node < NODES
    step = tl.arange(0, triton.next_power_of_2(DEPTH + 1))
    await_previous(OVERLAP)
    parent = tl.load(parents + place, mask=exists, other=0)
    wanted = tl.load(target_ids + request * (NODES + 1) + parent, mask=exists, other=0)
    fits = exists & (tl.load(token_ids + place, mask=exists, other=0) == wanted)
    if num_drafts is not None:
        fits = fits & (node < tl.load(num_drafts + request))
    fitting = tl.sum(tl.where(fits, tl.full([], 1, tl.int64) << node.to(tl.int64), 0), 0)
    accepted = exists & ((tl.load(ancestors + place, mask=exists, other=0) & ~fitting) == 0)
    depth = tl.load(depths + place, mask=exists, other=0)
    count = tl.max(tl.where(accepted, depth, 0), 0)
    tl.store(num_accepted + request, count)
    path += request * (DEPTH + 1)
    tl.store(path + step, step.to(tl.int64), mask=(step <= DEPTH) & ((step == 0) | (step > count)))
    tl.store(path + depth, node.to(tl.int64) + 1, mask=accepted)


def walk(
    token_ids: Tensor, tree: DraftTree, target_ids: Tensor, depth: int, num_drafts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `specdec.sampling.trees.trees.walk`; all are contiguous."""
    num_reqs, num_nodes = token_ids.shape
    drafts = token_ids, tree.parents, tree.depths, tree.ancestors, target_ids
    assert all(x.is_contiguous() for x in drafts) and depth <= num_nodes
    assert target_ids.shape == (num_reqs, num_nodes + 1)
    path = torch.empty(num_reqs, depth + 1, dtype=torch.int64, device=token_ids.device)
    num_accepted = torch.empty(num_reqs, dtype=torch.int64, device=token_ids.device)
    options = {"NODES": num_nodes, "DEPTH": depth, "num_warps": 1}
    options |= overlap_options(token_ids.device)
    with on_device(token_ids):
        _walk_kernel[(num_reqs,)](*drafts, num_drafts, path, num_accepted, **options)
    return path, num_accepted
