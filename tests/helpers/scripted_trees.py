"""Drafters of trees that know the answer, for tests: right along one path, which ends at another
draft every step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.base.blocks import DraftTree
from specdec.kv_cache import LayerCache
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput, Verifier
from tests.helpers.scripted import BoundScript, ScriptedDrafter
from tests.helpers.trees import Parents, path_to

FIRST = 5
"""Steps by which a request begins later in the turn than the one before it."""


class ScriptedTrees(ScriptedDrafter):
    """Proposes trees that follow the known continuation of each prompt to one draft, and leave it
    there.

    Drafts beside that path are wrong where they leave it. Behind a wrong draft the first is the
    right token of its position, so who looks at the position alone is led astray. Siblings are
    different tokens.

    Args:
        outputs: prompt -> its whole output.
        trees: the shapes, all of as many drafts; request `i` has that of its prompt's index modulo
            their number.
        ends: rows, 0 for the anchor, at which the right path ends: one a step, again and again;
            requests begin at different ones. Left out, every row in turn.
    """

    draws_trees = True

    def __init__(
        self,
        outputs: dict[tuple[int, ...], list[int]],
        trees: Sequence[Parents],
        ends: Sequence[int] | None = None,
    ) -> None:
        paths = [[path_to(parents, row) for row in range(len(parents) + 1)] for parents in trees]
        super().__init__(outputs, max(len(path) - 1 for tree in paths for path in tree))
        self.trees, self.paths = trees, paths
        self.ends = list(range(len(trees[0]) + 1)) if ends is None else list(ends)

    def bind(self, verifier: Verifier, caches: Sequence[LayerCache], **run: Any) -> "BoundTrees":
        return BoundTrees(self, verifier, run["max_num_seqs"], run["max_len"])


class BoundTrees(BoundScript):
    """The same in one engine."""

    drafter: ScriptedTrees

    def __init__(
        self, drafter: ScriptedTrees, verifier: Verifier, max_num_seqs: int, max_len: int
    ) -> None:
        super().__init__(drafter, verifier, max_num_seqs, max_len)
        device = verifier.device
        self.shape = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.steps = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.ends = torch.tensor(drafter.ends, device=device)
        self.parents = torch.tensor([list(parents) for parents in drafter.trees], device=device)
        self.depths = torch.tensor(
            [[len(path) - 1 for path in tree[1:]] for tree in drafter.paths], device=device
        )
        self.ancestors = torch.tensor(
            [[_word(path) for path in tree[1:]] for tree in drafter.paths], device=device
        )
        self.siblings = torch.tensor([_places(parents) for parents in drafter.trees], device=device)
        offsets = [
            [_offsets(parents, tree[end]) for end in range(len(tree))]
            for parents, tree in zip(drafter.trees, drafter.paths, strict=True)
        ]
        self.offsets = torch.tensor(offsets, device=device)  # [shapes, ends, drafts]

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        index = self.write(slot, token_ids)
        self.shape[slot], self.steps[slot] = index % len(self.drafter.trees), index * FIRST

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        if not batch.shape.is_tree:
            return super().propose(batch)
        shape, steps = (
            self.shape.index_select(0, batch.slots),
            self.steps.index_select(0, batch.slots),
        )
        self.steps.index_copy_(0, batch.slots, steps + 1)
        end = self.ends.index_select(0, steps % len(self.ends))

        def cut(table: Tensor) -> Tensor:
            return table.index_select(0, shape)[:, : batch.k]

        depths = cut(self.depths)
        rows = self.script.index_select(0, batch.slots)
        right = rows.gather(1, (batch.seq_lens[:, None] + depths).clamp(max=rows.shape[1] - 1))
        offsets = self.offsets.flatten(0, 1).index_select(0, shape * self.offsets.shape[1] + end)[
            :, : batch.k
        ]
        tree = DraftTree(cut(self.parents), depths, cut(self.ancestors), cut(self.siblings))
        return DraftOutput(token_ids=(right + offsets) % self.vocab_size, tree=tree)


def _word(path: list[int]) -> int:
    """The bits of a path's rows but the anchor's, as int64 has them."""
    word = sum(1 << (row - 1) for row in path[1:])
    return word - (word >> 63 << 64)


def _places(parents: Parents) -> list[int]:
    """Of each draft, how many siblings come before it."""
    return [list(parents[:index]).count(parent) for index, parent in enumerate(parents)]


def _offsets(parents: Parents, path: list[int]) -> list[int]:
    """What to add to the right token of its position for each draft."""
    leaves = [parent in path for parent in parents]
    return [
        0 if row in path else place + leaves[row - 1]
        for row, place in enumerate(_places(parents), 1)
    ]
