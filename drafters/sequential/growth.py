"""Trees that grow level by level, as in EAGLE-2 (arXiv 2406.16858): the network goes on behind the
likeliest paths of a level.

Each level takes a forward, as each draft of a chain does. Its rows are those of all paths so far: a
few rows take hardly longer than one, and see of each other what a verified tree's rows do.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.choice import Guesses
from drafters.sequential.network import Rows
from specdec.attention.backend import TreeRows
from specdec.base.blocks import BlockShape
from specdec.model.batch import DecodeBatch

UNKNOWN = -1e9
"""Score behind a token whose followers were not asked for: below all that is known, and finite."""
MAX_BEAMS = 8
"""Paths of a level behind which the network goes on, at most."""


def num_beams(shape: BlockShape) -> int:
    """Paths of each level behind which the network goes on; all rows are no more than are verified.

    >>> [num_beams(BlockShape(*tree)) for tree in ((3, 2), (7, 4), (15, 6), (31, 7), (63, 7))]
    [3, 2, 3, 5, 8]
    """
    if not shape.is_tree:
        return 1
    return max(1, min(shape.drafts // max(shape.depth - 1, 1), MAX_BEAMS))


class Level(NamedTuple):
    """The likeliest paths of one length, the likeliest first.

    Attributes:
        token_ids: int64 [num_reqs, C], their last tokens.
        scores: float32 [num_reqs, C], log-probabilities of these behind what comes before.
        sums: float32 [num_reqs, C], of the paths.
        places: int64 [num_reqs, C], C times the path of the level before that each continues, 0 on
            the first level, plus the place of its last token among those that continue it.
    """

    token_ids: Tensor
    scores: Tensor
    sums: Tensor
    places: Tensor

    @classmethod
    def first(cls, guesses: Guesses) -> "Level":
        """The first level, of guesses [num_reqs, 1, C]."""
        token_ids, scores = (one[:, 0] for one in guesses)
        places = torch.arange(scores.shape[1], device=scores.device).expand_as(token_ids)
        return cls(token_ids, scores, scores, places)

    def behind(self, guesses: Guesses) -> "Level":
        """The next one, of guesses [num_reqs, beams, C] behind the first paths of this one."""
        _, beams, count = guesses.scores.shape
        sums, places = (self.sums[:, :beams, None] + guesses.scores).flatten(1).topk(count, dim=1)
        token_ids, scores = (one.flatten(1).gather(1, places) for one in guesses)
        return Level(token_ids, scores, sums, places)


def joined(levels: list[Level]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [num_reqs, depth, C], scores for `best_first`, and ranks."""
    of_levels = ((level.token_ids, level.scores, level.places) for level in levels)
    token_ids, scores, places = (torch.stack(one, dim=1) for one in zip(*of_levels, strict=True))
    count = places.shape[-1]
    paths, parents = torch.arange(count, device=places.device), places // count
    continues = parents[:, :, None] == paths[:, None]  # [num_reqs, depth, path before, path]
    return token_ids, torch.where(continues, scores[:, :, None], UNKNOWN), places % count


class Growth:
    """The rows of a tree so far, that of the newest known token before them.

    Args:
        batch: the step.
        last: int64 [num_reqs], position of the network's newest row.
        beams: paths of each level that go on.
        features: [num_reqs, F], of `last`; None without features.
    """

    def __init__(
        self, batch: DecodeBatch, last: Tensor, beams: int, features: Tensor | None
    ) -> None:
        self._batch, self.beams = batch, beams
        self._first = last.clamp(min=0)  # requests that only pad the batch may have read nothing
        rows = torch.arange(1 + beams * (batch.shape.depth - 1), device=last.device)
        depths = (rows + beams - 1) // beams
        self._bits = torch.ones_like(rows) << (rows - 1).clamp(min=0)
        self._depths = depths.expand(batch.num_reqs, -1)
        self._position_ids = (self._first[:, None] + depths).clamp(max=batch.max_model_len - 1)
        self._token_ids = batch.anchors[:, None]
        self._ancestors = torch.zeros_like(self._token_ids)
        self._features = None if features is None else features[:, None]

    def rows(self, level: Level, features: Tensor | None) -> tuple[Rows, Tensor]:
        """The rows, with those of a further level's likeliest paths; and the places int64
        [num_reqs * beams] of the latter.

        Args:
            level: the paths.
            features: [num_reqs * n, F], of what follows the n paths of the level before that went
                on, or the newest known token.
        """
        batch = self._batch
        parents = level.places[:, : self.beams] // level.places.shape[1]
        before, width = self._token_ids.shape[1], self._token_ids.shape[1] + self.beams
        above = self._ancestors[:, -self.beams :].gather(1, parents)
        self._ancestors = torch.cat([self._ancestors, above | self._bits[before:width]], dim=1)
        self._token_ids = torch.cat([self._token_ids, level.token_ids[:, : self.beams]], dim=1)
        if self._features is not None and features is not None:
            behind = features.view(batch.num_reqs, -1, features.shape[1])
            behind = behind.gather(1, parents[..., None].expand(-1, -1, features.shape[1]))
            self._features = torch.cat([self._features, behind], dim=1)
        packed = batch.rows_behind(self._first, width, min_seq_len=batch.min_seq_len)
        tree = TreeRows(self._ancestors.flatten(), self._depths[:, :width].reshape(-1))
        metadata = replace(packed, visibility="ancestors", tree=tree)
        flat = None if self._features is None else self._features.flatten(0, 1)
        tokens = self._token_ids.flatten()
        rows = Rows(tokens, flat, self._position_ids[:, :width].reshape(-1), metadata)
        places = torch.arange(batch.num_reqs * width, device=parents.device).view(-1, width)
        return rows, places[:, before:].reshape(-1)
