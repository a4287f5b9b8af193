"""Draft trees out of paths: continuations of earlier occurrences, or two drafters' own.

Paths with the same tokens are one. Any union is exact: the target's own tokens choose.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.base.blocks import MAX_NODES, DraftTree
from specdec.device.deviation import Deviation, deviation, mismatches, worst
from specdec.kernels.kernel import Kernel
from specdec.sampling.trees.trees import ancestors_of


class ScoredDrafts(NamedTuple):
    """A tree with its tokens.

    Attributes:
        tree: of the drafts.
        token_ids: int64 [num_reqs, N].
        scores: float32 [num_reqs, N], log-probabilities of the paths, in falling order.
        num_drafts: int64 [num_reqs], how many drafts count, the first; others are valid tokens.
        shift: float32 [num_reqs], still to be added to the scores; None for 0.
    """

    tree: DraftTree
    token_ids: Tensor
    scores: Tensor
    num_drafts: Tensor
    shift: Tensor | None = None

    def to(self, device: torch.device) -> "ScoredDrafts":
        """These drafts on another device."""
        moved = (None if tensor is None else tensor.to(device) for tensor in self[1:])
        return ScoredDrafts(self.tree.to(device), *moved)  # type: ignore[arg-type]


def trie(
    continuations: Tensor,
    lengths: Tensor,
    weights: Tensor,
    num_nodes: int,
    *,
    keep: float | Tensor = 1.0,
) -> ScoredDrafts:
    """The tree of what followed a text's end before, each path as likely as its occurrences weigh.

    The probability of a path is that of suffix decoding (snowflakedb/ArcticInference), the shares
    of its branches multiplied, times `keep` for each token. Of equal paths the shorter comes first,
    then that of the first occurrence.

    Args:
        continuations: int64 [num_reqs, M, K], at least 0.
        lengths: int64 [num_reqs, M], tokens of each that count; 0 where there is none.
        weights: float32 [num_reqs, M], above 0, say ones or less for those further back.
        num_nodes: N, at most 64.
        keep: probability per token that it goes on as before: one, or float32 [num_reqs, M].
    """
    if KERNEL.runs_on(continuations.device):
        from specdec.sampling.trees import triton_tries  # it imports Triton

        keeps = keep if isinstance(keep, Tensor) else torch.full_like(weights, keep)
        return ScoredDrafts(*triton_tries.trie(continuations, lengths, weights, num_nodes, keeps))
    return _plain_trie(continuations, lengths, weights, num_nodes, keep)


def _plain_trie(
    continuations: Tensor, lengths: Tensor, weights: Tensor, num_nodes: int, keep: float | Tensor
) -> ScoredDrafts:
    """`trie` in plain torch."""
    places = torch.arange(continuations.shape[2], device=continuations.device)
    depths = places[:, None, None] + 1  # entries by depth, then occurrence
    tokens = torch.where(places < lengths[..., None], continuations, -1)
    agreeing = common_prefixes(tokens)[:, None] >= depths  # [num_reqs, K, M, M]
    # In one order for all depths: rounding makes no path likelier than its beginning.
    own = torch.where(lengths > 0, weights, 0.0)
    kept = own[:, None] * (keep[:, None] if isinstance(keep, Tensor) else keep) ** depths.squeeze(2)
    share = torch.where(agreeing, kept[:, :, None], 0.0).sum(dim=3) / own.sum(dim=1)[:, None, None]
    is_first = ~agreeing.tril(-1).any(dim=3)
    within = (places < depths) & (depths <= lengths[:, None, :, None])
    paths = torch.where(within, tokens[:, None], -1)
    drafts = _best(
        paths.flatten(1, 2), is_first.flatten(1), share.flatten(1), num_nodes, len(places)
    )
    counts = torch.arange(num_nodes, device=paths.device) < drafts.num_drafts[:, None]
    scores = torch.where(counts, drafts.scores, 0.0).log()
    return drafts._replace(scores=scores.cummin(dim=1).values)


def common_prefixes(paths: Tensor) -> Tensor:
    """int64 [num_reqs, M, M]: tokens that two paths [num_reqs, M, K] share; below 0 one ends."""
    alike = (paths[:, :, None] == paths[:, None]) & (paths >= 0)[:, None]
    return alike.long().cumprod(dim=3).sum(dim=3)


def merge_trees(one: ScoredDrafts, other: ScoredDrafts, num_nodes: int, depth: int) -> ScoredDrafts:
    """The `num_nodes` most probable paths of two trees; one in both has its higher probability.

    Args:
        one, other: the trees; of equal paths the shorter comes first, then that of `one`.
        num_nodes: N, at most 64.
        depth: most tokens of a path.
    """
    if KERNEL.runs_on(one.token_ids.device):
        from specdec.sampling.trees import triton_tries  # it imports Triton

        return ScoredDrafts(*triton_tries.merge(one, other, num_nodes, depth))
    return _plain_union(one, other, num_nodes, depth)


def _plain_union(one: ScoredDrafts, other: ScoredDrafts, nodes: int, depth: int) -> ScoredDrafts:
    """`merge_trees` in plain torch."""
    paths = torch.cat([_paths(one, depth), _paths(other, depth)], dim=1)
    same = _same(paths, paths)
    sides = (x.scores if x.shift is None else x.scores + x.shift[:, None] for x in (one, other))
    scores = torch.cat(list(sides), dim=1)
    entries = torch.arange(paths.shape[1], device=paths.device)
    is_first = ~(same & (entries < entries[:, None])).any(dim=2)
    best = torch.where(same, scores[:, None], -torch.inf).amax(dim=2)
    return _best(paths, is_first, best, nodes, depth)


def _paths(drafts: ScoredDrafts, depth: int) -> Tensor:
    """The tokens from the anchor to each draft that counts, int64 [num_reqs, N, depth], then -1."""
    tree, tokens = drafts.tree, drafts.token_ids
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    above = (tree.ancestors[:, :, None] >> nodes) & 1 == 1  # [num_reqs, draft, one on its path]
    # [num_reqs, that one, its depth]
    at = tree.depths[:, :, None] == torch.arange(1, depth + 1, device=nodes.device)
    tokens = torch.where(
        above[..., None] & at[:, None], drafts.token_ids[:, None, :, None], -1
    ).amax(dim=2)
    return torch.where((nodes < drafts.num_drafts[:, None])[..., None], tokens, -1)


def _same(paths: Tensor, others: Tensor) -> Tensor:
    """bool [num_reqs, P, Q]: which of int64 [num_reqs, P, D] and [num_reqs, Q, D] are alike."""
    return (paths[:, :, None] == others[:, None]).all(dim=3)


def _best(paths: Tensor, is_first: Tensor, scores: Tensor, nodes: int, depth: int) -> ScoredDrafts:
    """The best of the paths int64 [num_reqs, P, D], filled up with -1, and all beginnings.

    Args:
        paths: empty ones are no paths.
        is_first: bool [num_reqs, P], of those that are alike the first.
        scores: float32 [num_reqs, P].
        num_nodes, depth: see `merge_trees`.
    """
    count = paths.shape[1]
    assert nodes <= min(MAX_NODES, count)
    depths = (paths >= 0).sum(dim=2)
    scores = torch.where(is_first & (depths > 0), scores, -torch.inf)
    by_depth = depths.sort(dim=1, stable=True).indices
    best = by_depth.gather(
        1, scores.gather(1, by_depth).sort(dim=1, descending=True, stable=True).indices
    )[:, :nodes]
    scores, depths = scores.gather(1, best), depths.gather(1, best)
    paths = paths.gather(1, best[..., None].expand(-1, -1, paths.shape[2]))
    counts = scores > -torch.inf
    rows = torch.arange(1, nodes + 1, device=paths.device)
    last = torch.where(counts, depths - 1, 0)[..., None]
    beginnings = paths.scatter(2, last, -1)
    parents = torch.where(
        _same(beginnings, paths) & counts[..., None] & counts[:, None], rows, 0
    ).amax(dim=2)
    siblings = parents[:, :, None] == parents[:, None]
    tree = DraftTree(
        parents=parents,
        depths=torch.where(counts, depths, 1),
        ancestors=ancestors_of(parents, depth),
        ranks=(siblings & (rows < rows[:, None])).sum(dim=2),
    )
    token_ids = torch.where(counts, paths.gather(2, last).squeeze(2), 0)
    return ScoredDrafts(tree, token_ids, scores, counts.sum(dim=1))


def check_tries(device: torch.device) -> Deviation:
    """Two tries of few different tokens, and their union."""
    from specdec.sampling.trees import triton_tries

    generator = torch.Generator().manual_seed(0)
    plain: list[ScoredDrafts] = []
    found: list[Deviation] = []
    for count, depth, num_nodes in ((6, 5, 20), (8, 3, 12)):
        continuations = torch.randint(3, (3, count, depth), generator=generator)
        lengths = torch.randint(depth + 1, (3, count), generator=generator)
        weights, keep = torch.rand(2, 3, count, generator=generator) + 0.1
        drafts = _plain_trie(continuations, lengths, weights, num_nodes, keep)
        exact = _plain_trie(continuations, lengths, weights.double(), num_nodes, keep.double())
        moved = continuations.to(device), lengths.to(device), weights.to(device)
        ours = ScoredDrafts(*triton_tries.trie(*moved, num_nodes, keep.to(device)))
        far = deviation(ours.scores.exp(), drafts.scores.exp(), exact.scores.exp())
        found += [*_mismatches(ours, drafts), far]
        plain.append(drafts)
    plain[1] = plain[1]._replace(shift=-torch.rand(3, generator=generator))
    one, other = (drafts.to(device) for drafts in plain)
    union = ScoredDrafts(*triton_tries.merge(one, other, 25, 4))
    expected = _plain_union(plain[0], plain[1], 25, 4)
    return worst([*found, *_mismatches(union, expected), mismatches(union.scores, expected.scores)])


KERNEL = Kernel("tries", check_tries)


def _mismatches(ours: ScoredDrafts, expected: ScoredDrafts) -> list[Deviation]:
    """Mismatches of all but the scores."""
    sides = (
        (x.token_ids, x.num_drafts, x.tree.parents, x.tree.depths, x.tree.ancestors, x.tree.ranks)
        for x in (ours, expected)
    )
    return [mismatches(*pair) for pair in zip(*sides, strict=True)]
