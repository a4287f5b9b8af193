"""How far an output has come in its grammar, and which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import xgrammar

PERMISSIVE = -1
"""A word of a mask that allows its 32 tokens."""


class GrammarProgress:
    """State of one output on the host, of tokens that were read; drafts leave no trace.

    Args:
        compiled: the grammar, which may still be compiled.
        eos_token_ids: tokens that end the output, the only ones without text allowed.

    Attributes:
        dead_ends: rows of the last masks that are allowed, and no token behind them.
    """

    def __init__(
        self, compiled: Future[xgrammar.CompiledGrammar], eos_token_ids: Sequence[int]
    ) -> None:
        self.compiled = compiled
        self.dead_ends: frozenset[int] = frozenset()
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def ready(self) -> bool:
        """Whether masks can be made, or will never be; see `error`."""
        return self.compiled.done()

    @property
    def error(self) -> BaseException | None:
        """Why the grammar could not be compiled; None otherwise. Only when it is ready."""
        return self.compiled.exception()

    def leave(self) -> None:
        """Waits no longer, so that a grammar for which nobody else waits is not compiled."""
        self.compiled.cancel()

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Takes over output tokens; False if the grammar does not allow one of them."""
        return all(self._matcher.accept_token(token) for token in token_ids)

    def fill(
        self, masks: Tensor, drafts: Sequence[int] = (), parents: Sequence[int] | None = None
    ) -> None:
        """Writes which tokens may follow each row of a block.

        Rows that no output can come to, as behind a draft that is refused, allow everything.

        Args:
            masks: int32 [N + 1, ceil(V / 32)], on the host and contiguous. Bit b of word w is token
                32 w + b.
            drafts: N tokens behind the anchor, in a chain unless `parents` says otherwise.
            parents: of each draft the row that it continues, see `specdec.base.blocks.DraftTree`.
        """
        masks.fill_(PERMISSIVE)
        if not drafts:
            self._matcher.fill_next_token_bitmask(masks)
            self.dead_ends = frozenset() if bool(masks.any()) else frozenset([0])
            return
        parents = range(len(drafts)) if parents is None else parents
        tokens = [0, *drafts]  # the library looks at the drafts alone
        own = torch.tensor(tokens, device="cpu")
        self._matcher.traverse_draft_tree(*_links(parents), own, masks)
        dead = []
        for row in (masks == 0).all(dim=1).nonzero().flatten().tolist():
            if row and self._refused_or_last(masks[parents[row - 1]], tokens[row]):
                masks[row] = PERMISSIVE
            else:
                dead.append(row)
        self.dead_ends = frozenset(dead)

    def constrained(
        self, drafts: Sequence[int], alternatives: Sequence[Sequence[int]]
    ) -> list[int]:
        """A chain's drafts, those that the grammar refuses replaced by the first that it allows.

        From a slot without one on they stay, as none behind it can be accepted.
        """
        kept: list[int] = []
        for draft, others in zip(drafts, alternatives, strict=True):
            likely = (token for token in (draft, *others) if token not in self._never)
            token = next((token for token in likely if self._matcher.accept_token(token)), None)
            if token is None:
                break
            kept.append(token)
            if token in self._eos_token_ids:
                break
        if kept:
            self._matcher.rollback(len(kept))
        return [*kept, *drafts[len(kept) :]]

    def _refused_or_last(self, mask: Tensor, token: int) -> bool:
        """Whether a row needs no mask: it is refused, or the output ends with `token`."""
        return (
            token in self._eos_token_ids
            or token >= 32 * len(mask)
            or not int(mask[token // 32]) >> token % 32 & 1
        )

    @cached_property
    def _never(self) -> frozenset[int]:
        """Tokens without a text, of which the library would warn: special ones, and padding."""
        special = frozenset(self.compiled.result().tokenizer_info.special_token_ids)
        return special - self._eos_token_ids

    @cached_property
    def _matcher(self) -> xgrammar.GrammarMatcher:
        import xgrammar

        return xgrammar.GrammarMatcher(self.compiled.result())


def _links(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """int64 [N + 1] twice: of each row its first child and its next sibling, or -1.

    >>> [links.tolist() for links in _links([0, 1, 0])]
    [[1, 2, -1, -1], [-1, 3, -1, -1]]
    """
    children, siblings, youngest = ([-1] * (len(parents) + 1) for _ in range(3))
    for row, parent in enumerate(parents, start=1):
        if youngest[parent] < 0:
            children[parent] = row
        else:
            siblings[youngest[parent]] = row
        youngest[parent] = row
    return torch.tensor(children, device="cpu"), torch.tensor(siblings, device="cpu")
