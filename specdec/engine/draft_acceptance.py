"""How many tokens steps give, by the shape of their blocks: how likely drafts are accepted, estimated while decoding."""

from collections import Counter
from collections.abc import Sequence
from math import log2

from specdec.blocks import BlockShape

MEMORY = 64
"""Steps after which what they taught weighs 1/e; those that did not try a position teach nothing about it."""

_LATE = 8  # the same, of what tells whether acceptance has changed
_FIRST_GUESS = 0.9  # of the first position before anything is known; high, so that drafting is tried
_GUESS_WEIGHT = 0.5  # in observations
_HOPE = {False: 1.3, True: 1.6}  # times as many drafts are accepted of a tree as of a chain, until there has been one; by sampled
_HOPE_PER_DOUBLING = 1.1  # the same between a tree and one of twice as many drafts
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

    def forget(self) -> None:
        """Begins anew: the position before has changed."""
        self.reached = self.accepted = self._late_reached = self._late_accepted = 0.0


class AcceptanceEstimate:
    """P(a draft is accepted | those before it are), by position, over all requests of late steps.

    A position without evidence of its own is taken to be like the one before it. Where late steps cannot be explained by the
    longer past, only they count.

    Args:
        most: positions.
    """

    def __init__(self, most: int) -> None:
        self._positions = [_Position() for _ in range(most)]

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

    def expected_tokens(self, k: int) -> float:
        """Tokens that a request gets from a step of `k` drafts, on average."""
        rate, alive, tokens = _FIRST_GUESS, 1.0, 1.0
        for estimate in self._positions[:k]:
            rate = (estimate.accepted + _GUESS_WEIGHT * rate) / (estimate.reached + _GUESS_WEIGHT)
            alive *= rate
            tokens += alive
        return tokens


class BlockAcceptance:
    """What each shape of a block gives. Chains teach about all chains, by position, and a tree about all smaller ones.

    Args:
        rungs: shapes that steps may have.
        sampled: the target samples, and a tree has what its noise may choose.
    """

    def __init__(self, rungs: Sequence[BlockShape], *, sampled: bool = False) -> None:
        self._hope = _HOPE[sampled]
        self._chain = AcceptanceEstimate(max(shape.depth for shape in rungs if not shape.is_tree))
        self._trees = {shape: AcceptanceEstimate(shape.depth) for shape in sorted(rungs) if shape.is_tree}

    @property
    def has_evidence(self) -> bool:
        """Whether a chain has been verified."""
        return self._chain.has_evidence

    def observe(self, shape: BlockShape, num_accepted: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Takes over a step: the drafts that requests accepted, and of a tree their rows, for each request that accepted any."""
        if not shape.is_tree:
            self._chain.observe(shape.drafts, num_accepted)
        for tree, estimate in self._trees.items() if shape.is_tree else ():
            if tree.drafts <= shape.drafts:  # the first rows are the smaller tree
                kept = [sum(row <= tree.drafts for row in path) for path in paths]
                estimate.observe(tree.depth, kept + [0] * (len(num_accepted) - len(paths)))

    def expected_tokens(self, shape: BlockShape) -> float:
        """Tokens that a request gets from a step, on average."""
        if not shape.is_tree:
            return self._chain.expected_tokens(shape.drafts)
        if self._trees[shape].has_evidence:
            return self._trees[shape].expected_tokens(shape.depth)
        known = [tree for tree, estimate in self._trees.items() if tree < shape and estimate.has_evidence]
        if not known:
            return 1 + self._hope * (self._chain.expected_tokens(shape.depth) - 1)
        hope: float = _HOPE_PER_DOUBLING ** log2(shape.rows / known[-1].rows)
        return 1 + hope * (self.expected_tokens(known[-1]) - 1)
