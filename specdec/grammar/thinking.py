"""Outputs that think before they answer: a grammar for the answer, a limit for the thinking.

Both are masks that depend on the tokens before a row alone: no draft changes an output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from specdec.base.chat.thinking import Phase, Place, Thinking
from specdec.grammar.progress import PERMISSIVE, GrammarProgress


class ThinkingProgress:
    """State of one output on the host, as `GrammarProgress` has it.

    Args:
        budget: most tokens of the thinking, before what closes it must follow; None sets no limit.
        answer: the grammar of what follows the thinking; None allows everything.
        eos_token_ids: tokens that end the output, and no thinking where an answer has to follow.
    """

    def __init__(
        self,
        thinking: Thinking,
        place: Place,
        budget: int | None,
        answer: GrammarProgress | None,
        eos_token_ids: Collection[int],
    ) -> None:
        self._thinking, self._place, self._budget, self._answer = thinking, place, budget, answer
        marks = {*thinking.opening, *thinking.closing, *thinking.answering}
        self._ends = frozenset(eos_token_ids) - marks
        self.dead_ends: frozenset[int] = frozenset()
        self.compiled: Future[Any] = Future()
        if answer is None:
            self.compiled.set_result(None)
        else:
            self.compiled = answer.compiled

    @property
    def ready(self) -> bool:
        return self._answer is None or self._answer.ready

    @property
    def error(self) -> BaseException | None:
        return None if self._answer is None else self._answer.error

    def leave(self) -> None:
        if self._answer is not None:
            self._answer.leave()

    def advance(self, token_ids: Sequence[int]) -> bool:
        for at, token in enumerate(token_ids):
            if self._place.phase is Phase.BEHIND:
                return self._answered(token_ids[at:])
            only = self._only(self._place)
            if only is not None and token not in only:
                return False
            answers = self._answers(self._place, token)
            self._place = self._thinking.step(self._place, token)
            if answers:
                return self._answered(token_ids[at:])
        return True

    def fill(
        self, masks: Tensor, drafts: Sequence[int] = (), parents: Sequence[int] | None = None
    ) -> None:
        masks.fill_(PERMISSIVE)
        self.dead_ends = frozenset()
        parents = range(len(drafts)) if parents is None else parents
        places, roots = [self._place], [0 if self._may_answer(self._place) else -1]
        for row, (token, parent) in enumerate(zip(drafts, parents, strict=True), start=1):
            before = places[parent]
            places.append(self._thinking.step(before, token))
            if before.phase is Phase.BEHIND or self._answers(before, token):
                roots.append(roots[parent])
            else:
                roots.append(row if self._may_answer(places[row]) else -1)
        for row, place in enumerate(places):
            if place.phase is not Phase.BEHIND:
                self._fill_row(masks[row], place)
        if self._answer is not None:
            for root in {*roots} - {-1}:
                self._fill_answer(masks, root, roots, drafts, parents, places)

    def constrained(
        self, drafts: Sequence[int], alternatives: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `GrammarProgress.constrained`; what must follow is drafted, whatever the drafter
        says."""
        kept, place = list[int](), self._place
        for at, draft in enumerate(drafts):
            only = self._only(place)
            if place.phase is Phase.BEHIND or (only is None and self._answers(place, draft)):
                if self._answer is None:
                    break
                return [*kept, *self._answer.constrained(drafts[at:], alternatives[at:])]
            likely = (one for one in (draft, *alternatives[at]) if only is None or one in only)
            kept.append(next(likely, next(iter(only or ()), draft)))
            place = self._thinking.step(place, kept[-1])
        return [*kept, *drafts[len(kept) :]]

    def _answered(self, token_ids: Sequence[int]) -> bool:
        return self._answer is None or self._answer.advance(token_ids)

    def _may_answer(self, place: Place) -> bool:
        """Whether the next token may be the answer's."""
        starts = place == self._thinking.start and not self._thinking.answering
        return self._answer is not None and (place.phase is Phase.BEHIND or starts)

    def _answers(self, place: Place, token: int) -> bool:
        """Whether a token begins the answer at once."""
        begins = self._may_answer(place) and place.phase is Phase.BEFORE
        return begins and token not in self._thinking.first

    def _only(self, place: Place) -> set[int] | None:
        """The tokens that may follow, unless many may."""
        budget = self._budget if place.phase is Phase.WITHIN else None
        if budget is not None and place.num_thought >= budget:
            return {self._thinking.closing[place.matched]}
        if place.phase is Phase.BEFORE and self._answer is not None and not self._may_answer(place):
            return {form[0] for form in place.left if form}
        return None

    def _fill_row(self, mask: Tensor, place: Place) -> None:
        """The mask of a row that does not answer yet."""
        only = self._only(place)
        if only is not None:
            mask.zero_()
            for token in only:
                _allow(mask, token)
        elif self._answer is not None:
            for token in self._ends:
                if token // 32 < len(mask):
                    mask[token // 32] &= ~_bit(token)

    def _fill_answer(
        self,
        masks: Tensor,
        root: int,
        roots: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        """The masks of an answer that begins behind a row, and of all rows of that answer."""
        assert self._answer is not None
        rows = [root, *(row for row in range(root + 1, len(places)) if roots[row] == root)]
        number = {row: place for place, row in enumerate(rows)}
        tokens = [drafts[row - 1] for row in rows[1:]]
        own = torch.empty(len(rows), masks.shape[1], dtype=masks.dtype)
        self._answer.fill(own, tokens, [number[parents[row - 1]] for row in rows[1:]])
        dead = {rows[place] for place in self._answer.dead_ends}
        if places[root].phase is Phase.BEFORE:
            for token in self._thinking.first:
                _allow(own[0], token)
            dead.discard(root)
        masks[rows] = own
        self.dead_ends |= dead


def _bit(token: int) -> int:
    """The bit of a token in its word, as int32 has it.

    >>> _bit(33), _bit(31)
    (2, -2147483648)
    """
    bit = 1 << token % 32
    return bit - 2**32 if bit >= 2**31 else bit


def _allow(mask: Tensor, token: int) -> None:
    mask[token // 32] |= _bit(token)
