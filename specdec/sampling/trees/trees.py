"""Draft trees on the device: the likeliest paths through candidates, and the walk of one.

A tree is the better the more probable its paths, for the tokens that a step yields are 1 and the
sum of their probabilities (DDTree, arXiv 2604.12989). The walk then follows the target's own
tokens, so a tree is exact however it was chosen.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.base.blocks import MAX_NODES, DraftTree
from specdec.device.deviation import Deviation, mismatches, worst
from specdec.kernels.kernel import Kernel


class BestPaths(NamedTuple):
    """The tree of the most probable paths.

    Attributes:
        tree: of the drafts.
        places: int64 [num_reqs, N], where a draft lies in the table of candidates [K * C].
        scores: float32 [num_reqs, N], of the paths, in falling order.
        num_drafts: int64 [num_reqs], how many of the drafts count, the first; None means all.
    """

    tree: DraftTree
    places: Tensor
    scores: Tensor
    num_drafts: Tensor | None = None


def best_first(scores: Tensor, num_nodes: int) -> BestPaths:
    """The `num_nodes` paths of highest sums, best first, each a draft behind its beginning's.

    Of equal sums the shorter path comes first, then by parents, then by candidates.

    Args:
        scores: float32, at most 0, of C candidates at each of K positions: [num_reqs, K, C]
            whatever came before them, or [num_reqs, K, C, C], where each of the C before gives its
            own to those that follow it; the first position reads row 0.
        num_nodes: N, at most 64.
    """
    depth, count = scores.shape[1], scores.shape[-1]
    paths = sum(count ** min(d, 6) for d in range(1, depth + 1))
    assert 1 <= num_nodes <= MAX_NODES
    if num_nodes > paths:
        return _filled_up(best_first(scores, paths), num_nodes)
    if KERNEL.runs_on(scores.device):
        from specdec.sampling.trees import triton_trees  # it imports Triton

        edges = scores if scores.ndim == 4 else scores[:, :, None].expand(-1, -1, count, -1)
        parents, depths, ancestors, ranks, places, totals = triton_trees.best_first(
            edges, num_nodes
        )
        return BestPaths(DraftTree(parents, depths, ancestors, ranks), places, totals)
    return _level_beams(scores, num_nodes)


def _filled_up(best: BestPaths, num_nodes: int) -> BestPaths:
    """The tree with further drafts behind the anchor that do not count."""
    tree, known = best.tree, best.tree.parents.shape[1]
    rows = torch.arange(known, num_nodes, device=tree.parents.device).expand(len(tree.parents), -1)
    parts = (
        (tree.parents, torch.zeros_like(rows)),
        (tree.depths, torch.ones_like(rows)),
        (tree.ancestors, torch.ones_like(rows) << rows),
        (tree.ranks, torch.zeros_like(rows)),
    )
    whole, more = DraftTree(*(torch.cat(part, dim=1) for part in parts)), (0, num_nodes - known)
    scores = F.pad(best.scores, more, value=-torch.inf)
    return BestPaths(whole, F.pad(best.places, more), scores, torch.full_like(rows[:, 0], known))


def best_chain(edges: Tensor) -> Tensor:
    """The path that takes the highest score behind the candidate before, of equal ones the first.

    Args:
        edges: float32 [num_reqs, K, C, C], as of `best_first`; any numbers.

    Returns:
        int64 [num_reqs, K], the candidate of each position.
    """
    if KERNEL.runs_on(edges.device):
        from specdec.sampling.trees import triton_trees  # it imports Triton

        return triton_trees.best_chain(edges)
    return _followed_edges(edges)


def _followed_edges(edges: Tensor) -> Tensor:
    """`best_chain` in plain torch."""
    ranks = [torch.zeros_like(edges[:, 0, 0, 0], dtype=torch.int64)]
    for position in range(edges.shape[1]):
        chosen = ranks[-1][:, None, None].expand(-1, 1, edges.shape[-1])
        row = edges[:, position].gather(1, chosen).squeeze(1)
        ranks.append(row.sort(dim=1, descending=True, stable=True).indices[:, 0])
    return torch.stack(ranks[1:], dim=1)


def _level_beams(scores: Tensor, num_nodes: int) -> BestPaths:
    """`best_first` in plain torch."""
    depth, count, conditional = scores.shape[1], scores.shape[-1], scores.ndim == 4
    # No level has over N of the best, which continue ones among the best of the level above.
    totals = scores.new_zeros(len(scores), 1)
    kept = torch.zeros(len(scores), 1, dtype=torch.int64, device=scores.device)
    levels = []
    for position in range(depth):
        table = scores[:, position] if conditional else scores[:, position, None]
        if conditional:
            table = table.gather(1, (kept % count)[..., None].expand(-1, -1, count))
        paths = (totals[..., None] + table).flatten(1).sort(dim=1, descending=True, stable=True)
        totals, kept = paths.values[:, :num_nodes], paths.indices[:, :num_nodes]
        levels.append((totals, kept))
    totals, kept = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    totals, best = (x[:, :num_nodes] for x in totals.sort(dim=1, descending=True, stable=True))
    kept, rows = (
        kept.gather(1, best),
        _rows(tuple(part.shape[1] for part, _ in levels), num_nodes, scores.device),
    )
    positions, above = rows.positions[best], rows.parents[best] + kept // count
    ranks = kept % count
    nodes = rows.of_nodes.expand(len(scores), -1)
    row_of = rows.none.expand(len(scores), -1).scatter(1, best + 1, nodes)
    parents = row_of.gather(1, above)
    tree = DraftTree(parents, positions + 1, ancestors_of(parents, depth), ranks)
    return BestPaths(tree, positions * count + ranks, totals)


class _Rows(NamedTuple):
    """The anchor and behind it the paths of all levels, as rows of one table."""

    positions: Tensor  # int64 [paths], of a path's last draft
    parents: Tensor  # int64 [paths], row of the first path that one of this level may continue
    of_nodes: Tensor  # int64 [N], 1 to N
    none: Tensor  # int64 [1 + paths], zeros


@lru_cache(maxsize=64)
def _rows(widths: tuple[int, ...], num_nodes: int, device: torch.device) -> _Rows:
    """Rows of levels of so many paths, made once: on a CPU they are a tree's cost."""
    firsts = accumulate((1, *widths), initial=0)
    pairs = zip(widths, firsts, strict=False)
    levels = [torch.full((width,), first, device=device) for width, first in pairs]
    parents = torch.cat(levels)
    positions = torch.cat([torch.full_like(level, i) for i, level in enumerate(levels)])
    numbers = torch.arange(1, num_nodes + 1, device=device)
    return _Rows(positions, parents, numbers, parents.new_zeros(1 + len(parents)))


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """See `DraftTree.ancestors`; `parents` int64 [num_reqs, N], paths up to `depth`."""
    above = F.pad(
        torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device), (1, 0)
    )
    parents = F.pad(parents, (1, 0))  # the anchor's is itself
    for reach in range((depth - 1).bit_length()):  # each time it reaches twice as far
        parents = parents.gather(1, parents) if reach else parents
        above = above | above.gather(1, parents)
    return above[:, 1:].contiguous()  # as kernels read it


def walk(
    token_ids: Tensor,
    tree: DraftTree,
    target_ids: Tensor,
    depth: int,
    num_drafts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Follows the target's tokens from the anchor on, as far as the tree has them.

    Args:
        token_ids: int64 [num_reqs, N], the drafts.
        tree: of the drafts.
        target_ids: int64 [num_reqs, N + 1], the token that the target puts behind each row.
        depth: D, most tokens of a path, at most N.
        num_drafts: int64 [num_reqs], drafts that count, the first ones; None means all.

    Returns:
        int64 [num_reqs, D + 1], the row at each depth: 0, then the accepted drafts' in order, then
        the depth itself; and int64 [num_reqs], how many are accepted. `target_ids` at these rows
        are the step's tokens, the one behind the last accepted draft included.
    """
    if KERNEL.runs_on(token_ids.device):
        from specdec.sampling.trees import triton_trees  # it imports Triton

        return triton_trees.walk(token_ids, tree, target_ids, depth, num_drafts)
    return _followed(token_ids, tree, target_ids, depth, num_drafts)


def _followed(
    token_ids: Tensor, tree: DraftTree, target_ids: Tensor, depth: int, num_drafts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`walk` in plain torch."""
    drafts = torch.arange(token_ids.shape[1], device=token_ids.device)
    fits = token_ids == target_ids.gather(1, tree.parents)
    if num_drafts is not None:
        fits = fits & (drafts < num_drafts[:, None])
    fitting = (fits.long() << drafts).sum(dim=1, keepdim=True)
    accepted = (tree.ancestors & ~fitting) == 0
    num_accepted = torch.where(accepted, tree.depths, 0).amax(dim=1)
    depths = torch.arange(depth + 1, device=token_ids.device)
    here = accepted[:, None, :] & (tree.depths[:, None, :] == depths[:, None])
    rows = torch.where(here, drafts + 1, 0).amax(dim=2)
    return torch.where(depths <= num_accepted[:, None], rows, depths), num_accepted


def check_trees(device: torch.device) -> Deviation:
    """Trees with many equal scores, and conditional ones; the target mostly agrees with drafts."""
    from specdec.sampling.trees import triton_trees

    generator = torch.Generator().manual_seed(0)
    found = []
    for shape, num_nodes in (((2, 7, 8), 64), ((2, 5, 4, 4), 20)):
        scores = -torch.randint(8, shape, generator=generator) / 4
        edges = scores if scores.ndim == 4 else scores[:, :, None].expand(-1, -1, shape[-1], -1)
        found.append(mismatches(triton_trees.best_chain(edges.to(device)), _followed_edges(edges)))
        on_device = triton_trees.best_first(edges.to(device), num_nodes)
        tree, places, totals, _ = _level_beams(scores, num_nodes)
        plain = (tree.parents, tree.depths, tree.ancestors, tree.ranks, places, totals)
        pairs = zip(on_device, plain, strict=True)
        found += [mismatches(ours, expected) for ours, expected in pairs]
        target_ids = torch.randint(2, (shape[0], num_nodes + 1), generator=generator)
        num_drafts = torch.randint(num_nodes + 1, shape[:1], generator=generator)
        arguments = tree.ranks, tree, target_ids, shape[1], num_drafts
        drafts = tree.ranks.to(device), tree.to(device), target_ids.to(device)
        walked = triton_trees.walk(*drafts, shape[1], num_drafts.to(device))
        pairs = zip(walked, _followed(*arguments), strict=True)
        found += [mismatches(ours, expected) for ours, expected in pairs]
    return worst(found)


KERNEL = Kernel("trees", check_trees)
