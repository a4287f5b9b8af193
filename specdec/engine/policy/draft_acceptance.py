"""How many tokens steps give, by the shape of their blocks: how likely drafts are accepted,
estimated while decoding.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2
from typing import NamedTuple

from specdec.base.blocks import BlockShape

MEMORY = 64
"""Steps after which what they taught weighs 1/e; those that did not try a position teach nothing
about it.
"""

OTHERS = 2.0
"""Observations that those of earlier texts count for, once all requests of a batch are others."""

_LATE = 8  # the same, of what tells whether acceptance has changed
FIRST_GUESS = 0.9
"""Acceptance of the first position before anything is known; high, so that drafting is tried."""
_GUESS_WEIGHT = 0.5  # in observations
# of a chain's accepted drafts so many more with each doubling of a tree's rows; by sampled
_HOPE = {False: 0.1, True: 0.25}
_FADES = 0.5  # of what one doubling gives more, the next one does, until there has been one
_GROWTH_WEIGHT = 4.0  # accepted drafts that outweigh these guesses
_LONG = 512  # steps after which what they taught about trees beside each other weighs 1/e
_CHANGE = 2.5  # standard deviations by which late acceptance must differ to be another one


class _Position:
    """How often a position was reached and accepted, lately and over longer."""

    def __init__(self) -> None:
        self.reached = self.accepted = 0.0
        self._late_reached = self._late_accepted = 0.0

    def observe(self, reached: int, accepted: int) -> bool:
        """Takes over a step; returns whether acceptance has changed."""
        self.reached += reached - self.reached / MEMORY
        self.accepted += accepted - self.accepted / MEMORY
        self._late_reached += reached - self._late_reached / _LATE
        self._late_accepted += accepted - self._late_accepted / _LATE
        changed = self._has_changed()
        if changed:
            self.reached, self.accepted = self._late_reached, self._late_accepted
        return changed

    def _has_changed(self) -> bool:
        """Whether late acceptance cannot be explained by that of before."""
        reached, accepted = self.reached - self._late_reached, self.accepted - self._late_accepted
        if reached <= self._late_reached:
            return False
        rate = min(1.0, max(0.0, accepted / reached))
        # Of two binomial variables, and one more so that few observations never suffice.
        variance = 1 + self._late_reached * rate * (1 - rate) * (1 + self._late_reached / reached)
        return (self._late_accepted - rate * self._late_reached) ** 2 > _CHANGE**2 * variance

    def fade(self) -> None:
        """Counts for few observations: the texts are others."""
        share = min(1.0, OTHERS / max(self.reached, 1e-9))
        self.reached, self.accepted = self.reached * share, self.accepted * share
        self._late_reached = self._late_accepted = 0.0

    def forget(self) -> None:
        """Begins anew: the position before has changed."""
        self.reached = self.accepted = self._late_reached = self._late_accepted = 0.0


class AcceptanceEstimate:
    """P(a draft is accepted | those before it are), by position, over all requests of late steps.

    A position without evidence of its own is taken to be like the one before it. Where late steps
    cannot be explained by the longer past, only they count.

    Args:
        most: positions.
        guess: P at the first position before anything is known.
    """

    def __init__(self, most: int, guess: float = FIRST_GUESS) -> None:
        self._positions, self._guess = [_Position() for _ in range(most)], guess

    @property
    def has_evidence(self) -> bool:
        """Whether any draft has been verified."""
        return bool(self._positions) and self._positions[0].reached > 0

    def observe(self, k: int, num_accepted: Sequence[int]) -> None:
        """Takes over one step of `k` drafts, with what each request accepted of them."""
        counts = Counter(num_accepted)
        reached = len(num_accepted)
        for position, estimate in enumerate(self._positions[:k]):
            if not reached:
                break
            accepted = reached - counts[position]
            if estimate.observe(reached, accepted):
                for later in self._positions[position + 1 :]:
                    later.forget()
            reached = accepted

    def fade(self) -> None:
        """What other texts taught counts for `OTHERS` observations of each position."""
        for position in self._positions:
            position.fade()

    def expected_tokens(self, k: int) -> float:
        """Tokens that a request gets from a step of `k` drafts, on average."""
        rate, alive, tokens = self._guess, 1.0, 1.0
        for estimate in self._positions[:k]:
            rate = (estimate.accepted + _GUESS_WEIGHT * rate) / (estimate.reached + _GUESS_WEIGHT)
            alive *= rate
            tokens += alive
        return tokens


class Path(NamedTuple):
    """What was accepted of a tree.

    Attributes:
        rows: of the drafts, from the anchor's child on.
        ranks: of each among the candidates of its position, see `DraftTree.ranks`.
    """

    rows: Sequence[int]
    ranks: Sequence[int]


class _Growth:
    """How many times as many drafts are accepted of a tree as of the next smaller one, by steps
    that had both.

    Whether a text is easy or hard changes that little, so it is remembered for longer than
    acceptance.
    """

    def __init__(self, memory: int = _LONG) -> None:
        self.larger = self.smaller = 0.0
        self._memory = memory

    def observe(self, smaller: float, larger: float) -> None:
        self.smaller += smaller - self.smaller / self._memory
        self.larger += larger - self.larger / self._memory

    def times(self, guess: float) -> float:
        return (self.larger + _GROWTH_WEIGHT * guess) / (self.smaller + _GROWTH_WEIGHT)


class BlockAcceptance:
    """What each shape of a block gives. A step tells about all shapes whose drafts it had: those of
    a chain or a tree are the first of larger ones, and those of a chain are on one path of a tree.

    Args:
        arms: shapes that steps may have.
        sampled: the target samples, and a tree has what its noise may choose.
        likeliest_first: see `specdec.model.core.Drafter.likeliest_first`.
        guess: see `AcceptanceEstimate`.
    """

    def __init__(
        self,
        arms: Sequence[BlockShape],
        *,
        sampled: bool = False,
        likeliest_first: bool = False,
        guess: float = FIRST_GUESS,
    ) -> None:
        self._hope, self._likeliest_first = _HOPE[sampled], likeliest_first
        self._chain = AcceptanceEstimate(
            max(shape.depth for shape in arms if not shape.is_tree), guess
        )
        self._trees = sorted(shape for shape in arms if shape.is_tree and not shape.budget)
        self._growths = {tree: _Growth() for tree in self._trees}
        # drafts accepted of a request, by step
        self._shared = {shape: _Growth(MEMORY) for shape in arms if shape.budget}
        # What trees are compared with: the chain of as many drafts as the smallest, or else that
        # tree.
        self._level = (
            self._chain
            if likeliest_first
            else AcceptanceEstimate(self._trees[0].depth if self._trees else 0, guess)
        )

    @property
    def has_evidence(self) -> bool:
        """Whether any draft has been verified."""
        shared = any(one.smaller for one in self._shared.values())
        return shared or self._chain.has_evidence or self._level.has_evidence

    def observe(
        self, shape: BlockShape, num_accepted: Sequence[int], paths: Sequence[Path]
    ) -> None:
        """Takes over a step: the drafts that requests accepted, and of a tree their path, for each
        request that accepted any.
        """
        if shape.budget:
            if num_accepted:
                self._shared[shape].observe(1.0, sum(num_accepted) / len(num_accepted))
            return
        if not shape.is_tree:
            self._chain.observe(shape.drafts, num_accepted)
        if not shape.is_tree or not num_accepted:
            return
        none = [0] * (len(num_accepted) - len(paths))
        # the first rows are the smaller tree
        tried = [tree for tree in self._trees if tree.drafts <= shape.drafts]
        kept = {
            tree: [sum(row <= tree.drafts for row in path.rows[: tree.depth]) for path in paths]
            for tree in tried
        }
        level = kept[tried[0]]
        if self._likeliest_first:
            # How long the likeliest path is in the tree is not known; half of the drafts are on it,
            # nearly always.
            sure = min(shape.depth, (shape.drafts + 1) // 2)
            leading = [
                next((i for i, rank in enumerate(path.ranks) if rank), len(path.ranks))
                for path in paths
            ]
            self._chain.observe(sure, [min(count, sure) for count in leading] + none)
            level = [min(count, tried[0].depth) for count in leading]
        else:
            self._level.observe(tried[0].depth, level + none)
        totals = [sum(level), *(sum(kept[tree]) for tree in tried)]
        for tree, (smaller, larger) in zip(tried, pairwise(totals), strict=True):
            self._growths[tree].observe(smaller / len(num_accepted), larger / len(num_accepted))

    def fade(self) -> None:
        """See `AcceptanceEstimate.fade`; how trees do beside each other is kept."""
        self._chain.fade()
        if self._level is not self._chain:
            self._level.fade()

    def expected_tokens(self, shape: BlockShape) -> float:
        """Tokens that a request gets from a step, on average."""
        if shape.budget:
            alike = self._chain.expected_tokens(ceil(shape.budget)) - 1
            return 1 + self._shared[shape].times((1 + self._hope) * alike)
        if not shape.is_tree:
            return self._chain.expected_tokens(shape.drafts)
        smallest = self._trees[0]
        if not self._growths[smallest].smaller:
            return 1 + self._hoped(shape)
        drafts, guess = self._level.expected_tokens(smallest.depth) - 1, 1.0
        for place, tree in enumerate(self._trees[: self._trees.index(shape) + 1]):
            if place == 1:
                guess = self._hoped(tree) / self._hoped(smallest)
            times = self._growths[tree].times(guess)
            drafts, guess = drafts * times, 1 + _FADES * (times - 1)
        return 1 + drafts

    def _hoped(self, tree: BlockShape) -> float:
        """Drafts accepted of a tree, before there has been one: more than of a chain as deep, the
        more the larger it is.
        """
        return (1 + self._hope * (log2(tree.rows) - 1.5)) * (
            self._chain.expected_tokens(tree.depth) - 1
        )
