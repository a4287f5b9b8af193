"""How many tokens steps give, by the shape of their blocks: how likely drafts are accepted,
estimated while decoding.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from specdec.base.blocks import BlockShape

MEMORY, _LONG, _ALL = 48, 512, 2048
"""Steps after which what they taught weighs 1/e: about a text's acceptance, about trees beside each
other, which a text changes little, and about all texts.
"""

OTHERS, MAX_OTHERS = 6.0, 32.0
"""Observations that those of all texts count for, once all requests of a batch are others: before
anything is known of how texts differ, and at most.
"""
TEXTS, KNOWN = 32, 64.0
"""Texts after which what they taught of their differences weighs 1/e, and observations for which
the guess `OTHERS` counts there.
"""

SMALLER = 32.0
"""Observations that a guess from smaller shapes counts for, beside those of a tree itself."""

FIRST_GUESS = 0.9
"""Acceptance of a draft before anything is known; high, so that drafting is tried."""
_PATHS = 32  # of a step, which tell enough; with 256 requests all would take a twentieth of a step
_WEIGHT = 0.5  # of a guess, in observations
_HOPE = 1.15  # times as many drafts accepted of a tree as of a chain as deep, before there is one


class _Ratio:
    """How many times as much there is of one thing as of another, by late steps that had both.

    Args:
        memory: steps after which what they taught weighs 1/e.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self.whole = self.part = 0.0
        self._ever = self._of_it = 0.0  # the same over all texts
        self._memory = memory

    @property
    def of_all(self) -> float:
        """The ratio over all texts."""
        return self._of_it / max(self._ever, 1e-9)

    def observe(self, whole: float, part: float) -> None:
        """Takes over a step."""
        self.whole += whole - self.whole / self._memory
        self.part += part - self.part / self._memory
        if whole:
            self._ever += whole - self._ever / _ALL
            self._of_it += part - self._of_it / _ALL

    def fade(self, most: float) -> None:
        """Becomes that of all texts, and counts for no more than so many observations."""
        self.whole = min(self.whole, most)
        self.part = self.whole * self.of_all

    def value(self, guess: float, weight: float = _WEIGHT) -> float:
        """The ratio, where a `guess` counts for `weight` observations."""
        return (self.part + weight * guess) / (self.whole + weight)


class AcceptanceEstimate:
    """P(a draft is accepted | those before it are), by position, over all requests of late steps.

    A position without evidence of its own is taken to be like the one before it.

    Args:
        most: positions.
        guess: P at the first position before anything is known.
    """

    def __init__(self, most: int, guess: float = FIRST_GUESS) -> None:
        self._positions, self._guess = [_Ratio() for _ in range(most)], guess
        self._expected = list[float]()  # by the length of a chain, from 0 on; empty when outdated
        self._text = 0, 0  # first drafts of the texts of now, and accepted ones
        self._variance = _Ratio(TEXTS)  # between texts

    @property
    def has_evidence(self) -> bool:
        """Whether any draft has been verified."""
        return self.evidence > 0

    @property
    def evidence(self) -> float:
        """Observations of the first position."""
        return self._positions[0].whole if self._positions else 0.0

    def observe(self, k: int, num_accepted: Sequence[int]) -> None:
        """Takes over one step of `k` drafts, with what each request accepted of them."""
        reached, ended = len(num_accepted), Counter(num_accepted)
        self._expected.clear()
        if k:
            drafts, accepted = self._text
            self._text = drafts + reached, accepted + reached - ended[0]
        for place, position in enumerate(self._positions[:k]):
            accepted = reached - ended[place]
            position.observe(reached, accepted)
            reached = accepted

    def fade(self) -> float:
        """Other texts begin: what all have taught counts for the more observations the less texts
        differ, as in empirical Bayes; returns how many.
        """
        self._expected.clear()
        (drafts, accepted), self._text = self._text, (0, 0)
        rate = self._positions[0].of_all if self._positions else 0.0
        chance = max(rate * (1 - rate), 1e-9)  # variance of one draft
        if drafts >= OTHERS:
            apart = accepted / drafts - rate
            self._variance.observe(drafts, drafts * apart**2 - chance)
        variance = self._variance.value(chance / OTHERS, KNOWN)
        most = chance / max(variance, chance / MAX_OTHERS)
        for position in self._positions:
            position.fade(most)
        return most

    def expected(self, k: int) -> float:
        """Drafts that a request accepts of a chain of `k`, on average."""
        if not self._expected:
            rate, alive, drafts = self._guess, 1.0, 0.0
            self._expected.append(drafts)
            for position in self._positions:
                rate = position.value(rate)
                alive *= rate
                drafts += alive
                self._expected.append(drafts)
        return self._expected[min(k, len(self._positions))]


class Path(NamedTuple):
    """What was accepted of a tree.

    Attributes:
        rows: of the drafts, from the anchor's child on, each above the one before.
        ranks: of each among the candidates of its position, see `DraftTree.ranks`.
    """

    rows: Sequence[int]
    ranks: Sequence[int]


class BlockAcceptance:
    """What each shape of a block gives. A step tells about all shapes whose drafts it had: those of
    a chain or a tree are the first of larger ones, and those of a chain are on one path of a tree.

    Args:
        arms: shapes that steps may have.
        likeliest_first: see `specdec.model.core.Drafter.likeliest_first`.
        guess: see `AcceptanceEstimate`.
    """

    def __init__(
        self,
        arms: Sequence[BlockShape],
        *,
        likeliest_first: bool = False,
        guess: float = FIRST_GUESS,
    ) -> None:
        self._likeliest_first = likeliest_first
        most = max(shape.depth for shape in arms)
        self._chain = AcceptanceEstimate(most, guess)
        # what trees are compared with: the chain on the path of the likeliest, if there is one, or
        # else the smallest tree, by its depth
        self._level = self._chain if likeliest_first else AcceptanceEstimate(most, guess)
        trees = sorted(shape for shape in arms if shape.is_tree and not shape.budget)
        # times as many drafts accepted of a tree as of the next smaller one
        self._growths = {tree: _Ratio(_LONG) for tree in trees}
        # drafts accepted of a request, of late
        self._late = {tree: _Ratio() for tree in trees}
        self._num_trees = 0  # that were verified, in steps
        # drafts accepted of a request, by step
        self._shared = {shape: _Ratio() for shape in arms if shape.budget}

    @property
    def has_evidence(self) -> bool:
        """Whether any draft has been verified."""
        shared = any(one.whole for one in self._shared.values())
        return shared or self._chain.has_evidence or self._level.has_evidence

    def observe(
        self, shape: BlockShape, num_accepted: Sequence[int], paths: Sequence[Path]
    ) -> None:
        """Takes over a step: the drafts that requests accepted, and of a tree their path, for each
        request that accepted any.
        """
        if not num_accepted:
            return
        if shape.budget:
            self._shared[shape].observe(1.0, sum(num_accepted) / len(num_accepted))
        elif shape.is_tree:
            self._observe_tree(shape, paths, len(num_accepted))
        else:
            self._chain.observe(shape.drafts, num_accepted)
            for late in self._late.values():
                late.observe(0, 0)

    def _observe_tree(self, shape: BlockShape, paths: Sequence[Path], num_reqs: int) -> None:
        self._num_trees += 1
        every = -(-num_reqs // _PATHS)  # one in so many, others in the next step
        none = [0] * ((num_reqs - len(paths)) // every)
        paths = paths[self._num_trees % every :: every]
        num_reqs = max(1, len(none) + len(paths))
        # the first rows are the smaller tree
        kept = {
            tree: [min(bisect(path.rows, tree.drafts), tree.depth) for path in paths]
            for tree in self._growths
            if tree.drafts <= shape.drafts
        }
        smallest, level = next(iter(kept.items()))
        if self._likeliest_first:
            leading = [[*map(bool, path.ranks), True].index(True) for path in paths]
            # How long the likeliest path is in the tree is not known; half of the drafts are on it,
            # nearly always.
            sure = min(shape.depth, (shape.drafts + 1) // 2)
            self._chain.observe(sure, [min(count, sure) for count in leading] + none)
            level = [min(count, smallest.depth) for count in leading]
        else:
            self._level.observe(smallest.depth, level + none)
        sums = sum(level), *map(sum, kept.values())
        for tree, (smaller, larger) in zip(kept, pairwise(sums), strict=True):
            self._growths[tree].observe(smaller / num_reqs, larger / num_reqs)
        for tree, late in self._late.items():
            late.observe(num_reqs * (tree in kept), sum(kept.get(tree, ())))

    def fade(self) -> None:
        """See `AcceptanceEstimate.fade`; how trees do beside each other is kept."""
        most = self._chain.fade()
        if self._level is not self._chain:
            most = self._level.fade()
        for late in self._late.values():
            late.fade(most)

    def expected_tokens(self, shape: BlockShape) -> float:
        """Tokens that a request gets from a step, on average."""
        if shape.budget:
            return 1 + self._shared[shape].value(_HOPE * self._chain.expected(ceil(shape.budget)))
        if not shape.is_tree:
            return 1 + self._chain.expected(shape.drafts)
        level = self._chain if not self._level.has_evidence else self._level
        smaller = level.expected(next(iter(self._growths)).depth)
        drafts, evidence = smaller, level.evidence
        for tree, growth in self._growths.items():
            chain = level.expected(tree.depth)
            drafts *= growth.value(_HOPE * chain / max(smaller, 1e-9))
            late = self._late[tree]
            drafts = late.value(drafts, SMALLER + max(0.0, evidence - late.whole))
            evidence = late.whole
            if tree == shape:
                break
            smaller = chain
        return 1 + drafts
