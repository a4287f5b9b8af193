"""The one definition of every printed figure of acceptance, from the counts of verify steps."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, count, zip_longest
from typing import Any

from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError

MAX_COUNT = 2**16
"""Above any count of a verify step; a list may have an entry for each number below it."""

PREDICTED = -1
"""The part of a step whose drafts were copied from what the request predicted."""

_BY_STEP = ("num_drafted", "num_accepted", "num_emitted", "tree_sizes", "parts")
_TOTALS = ("num_drafted", "num_verified", "num_accepted", "num_emitted")
_FIGURES: tuple[str, ...] = ("tau", "mean_accepted", "acceptance_rate", "num_offered", "histogram")
_FIGURES += ("drafted_histogram", "verified_by_slot", "steps_by_shape")
_FIGURES += ("num_by_rank", "share_by_rank")


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """What the verify steps of one request, or of several pooled ones, offered, kept and put out.

    The prefill is not a verify step, so the first output token appears nowhere here. A last step
    that a stop condition cuts short counts with what it kept.

    Attributes:
        num_drafted: positions for which drafts were offered, one entry per verify step.
        num_accepted: drafts accepted, one entry per verify step.
        num_emitted: tokens output, one entry per verify step: accepted drafts and a token more.
        tree_sizes: drafts that formed a tree, one entry per verify step; 0 for a chain.
        num_by_rank: accepted drafts of trees by place among the position's candidates.
        parts: which part of a composition of drafters drafted, one entry per verify step;
            `PREDICTED` where drafts were copied from the prediction.

    >>> stats = AcceptanceStats([3, 3, 0, 3], num_accepted=[3, 1, 0, 2], num_emitted=[4, 2, 1, 2])
    >>> stats.num_steps, stats.tau, stats.mean_accepted
    (4, 2.25, 1.5)
    """

    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_emitted: list[int] = field(default_factory=list)
    tree_sizes: list[int] = field(default_factory=list)
    num_by_rank: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tree_sizes:
            object.__setattr__(self, "tree_sizes", [0] * len(self.num_drafted))
        if not self.parts:
            object.__setattr__(self, "parts", [0] * len(self.num_drafted))
        steps = {len(getattr(self, name)) for name in _BY_STEP}
        if len(steps) > 1:
            what = f"statistics are of {' and '.join(map(str, sorted(steps)))} steps"
            raise InvalidInputError(f"{what}; all lists have an entry for each")

    def check(self) -> None:
        """Looks at numbers that somebody else wrote, as in a journal that was edited.

        Raises:
            InvalidInputError: one of them counts nothing.

        >>> AcceptanceStats([10**5], [0], [1]).check()
        Traceback (most recent call last):
        specdec.base.errors.InvalidInputError: num_drafted holds 100000; it must lie in [0, 65536)
        """
        for name in _BY_STEP:
            least = PREDICTED if name == "parts" else 0
            for value in getattr(self, name):
                if not least <= value < MAX_COUNT:
                    limits = f"[{least}, {MAX_COUNT})"
                    raise InvalidInputError(f"{name} holds {value}; it must lie in {limits}")

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return len(self.num_emitted)

    @property
    def num_verified(self) -> list[int]:
        """Drafts verified, one entry per verify step; a tree has several for a position.

        >>> AcceptanceStats([3, 5], [3, 2], num_emitted=[4, 3], tree_sizes=[0, 16]).num_verified
        [3, 16]
        """
        sizes = zip(self.tree_sizes, self.num_drafted, strict=True)
        return [size or drafted for size, drafted in sizes]

    @property
    def tau(self) -> float:
        """Tokens output per verify step; 1 for plain decoding, 0 without steps.

        >>> AcceptanceStats(num_drafted=[0, 0], num_accepted=[0, 0], num_emitted=[1, 1]).tau
        1.0
        """
        return sum(self.num_emitted) / self.num_steps if self.num_steps else 0.0

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted per verify step, `tau` less the target's own token; 0 without steps."""
        return sum(self.num_accepted) / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> list[float]:
        """P(draft position i accepted), over the steps that offered a draft at position i.

        Not conditional on positions before it, so it never rises where all steps offer as many.

        >>> AcceptanceStats([2, 2, 1, 0], [2, 0, 1, 0], num_emitted=[3, 1, 2, 1]).acceptance_rate
        [0.6666666666666666, 0.5]
        """
        accepted = (sum(kept > position for kept in self.num_accepted) for position in count())
        return [kept / offered for offered, kept in zip(self.num_offered, accepted, strict=False)]

    @property
    def num_offered(self) -> list[int]:
        """Steps that offered a draft at position i; never rises.

        >>> AcceptanceStats([2, 2, 1, 0], [2, 0, 1, 0], num_emitted=[3, 1, 2, 1]).num_offered
        [3, 2]
        """
        places = range(max(self.num_drafted, default=0))
        return [sum(drafted > place for drafted in self.num_drafted) for place in places]

    @property
    def histogram(self) -> list[int]:
        """Entry `n` counts the verify steps that put out `n` tokens.

        >>> AcceptanceStats([2, 2, 2], num_accepted=[2, 0, 2], num_emitted=[3, 1, 3]).histogram
        [0, 1, 0, 2]
        """
        return occurrences(self.num_emitted)

    @property
    def drafted_histogram(self) -> list[int]:
        """Entry `n` counts the verify steps of `n` drafts, in a chain or a tree.

        >>> AcceptanceStats([2, 0, 2], [2, 0, 0], num_emitted=[3, 1, 1]).drafted_histogram
        [1, 0, 2]
        """
        return occurrences(self.num_verified)

    @property
    def verified_by_slot(self) -> list[int]:
        """Verify steps that verified a draft of slot i: its place among those of its request, the
        likeliest first. So a budget was spent by slot, and `drafted_histogram` says how by request.

        >>> AcceptanceStats([2, 3, 0], [2, 2, 0], [3, 3, 1], tree_sizes=[0, 5, 0]).verified_by_slot
        [2, 2, 1, 1, 1]
        """
        return at_least(self.drafted_histogram)

    @property
    def steps_by_shape(self) -> dict[str, int]:
        """Verify steps by their drafts, fewest first, as `BlockShape` names them.

        >>> stats = AcceptanceStats([3, 7, 7, 5], [3, 0, 1, 2], [4, 1, 2, 3], [0, 0, 0, 16])
        >>> stats.steps_by_shape
        {'3': 1, '7': 2, 'tree 16': 1}
        """
        drafts = Counter(zip(self.num_verified, self.tree_sizes, strict=True))
        counts = sorted(drafts.items())
        return {str(BlockShape(n, tree_depth=size)): steps for (n, size), steps in counts}

    @property
    def share_by_rank(self) -> list[float]:
        """The share of each rank among the accepted drafts of trees.

        >>> AcceptanceStats([2, 2], [2, 2], [3, 3], [8, 8], num_by_rank=[3, 0, 1]).share_by_rank
        [0.75, 0.0, 0.25]
        """
        return [count / (sum(self.num_by_rank) or 1) for count in self.num_by_rank]

    @property
    def by_part(self) -> list[tuple[int, float]]:
        """For each part of a composition: its verify steps, and its drafts accepted in one.

        >>> AcceptanceStats([3, 3, 3, 0], [3, 2, 1, 0], [4, 3, 2, 1], parts=[0, 2, 2, 0]).by_part
        [(1, 3.0), (0, 0.0), (2, 1.5)]
        """
        kept: list[list[int]] = [[] for _ in range(max(self.parts, default=-1) + 1)]
        steps = zip(self.parts, self.num_drafted, self.num_accepted, strict=True)
        for part, drafted, accepted in steps:
            if drafted and part != PREDICTED:
                kept[part].append(accepted)
        return [(len(one), sum(one) / len(one) if one else 0.0) for one in kept]

    @property
    def num_predicted(self) -> tuple[int, int]:
        """Drafts copied from what requests predicted: those accepted, and those rejected.

        >>> parts = [PREDICTED, PREDICTED, 0]
        >>> AcceptanceStats([3, 3, 3], [3, 2, 1], [4, 3, 2], parts=parts).num_predicted
        (5, 1)
        """
        copied = [part == PREDICTED for part in self.parts]
        accepted = sum(compress(self.num_accepted, copied))
        return accepted, sum(compress(self.num_drafted, copied)) - accepted

    def to_dict(self) -> dict[str, Any]:
        """Totals and figures for a JSON report."""
        return {
            "num_steps": self.num_steps,
            **{name: sum(getattr(self, name)) for name in _TOTALS},
            **{name: getattr(self, name) for name in _FIGURES},
            "by_part": [list(part) for part in self.by_part],  # as JSON has it
        }


def at_least(histogram: Sequence[int]) -> list[int]:
    """How many are at least 1, 2, ..., from how often 0, 1, 2, ... occur.

    >>> at_least([5, 2, 0, 1])
    [3, 1, 1]
    """
    return list(accumulate(reversed(histogram[1:])))[::-1]


def occurrences(values: Sequence[int], least: int = 0) -> list[int]:
    """How often each of 0, 1, 2, ... occurs, with `least` entries or more."""
    counts = Counter(values)
    return [counts[value] for value in range(max(least, max(values, default=-1) + 1))]


def pooled(stats: Iterable[AcceptanceStats]) -> AcceptanceStats:
    """All verify steps of all requests as one; its `tau` weighs long outputs more than short ones.

    >>> short = AcceptanceStats(num_drafted=[3], num_accepted=[3], num_emitted=[4])
    >>> long = AcceptanceStats(num_drafted=[3, 3, 3], num_accepted=[0, 1, 0], num_emitted=[1, 2, 1])
    >>> pooled([short, long]).tau
    2.0
    """
    every = list(stats)
    by_step = {name: [*chain.from_iterable(getattr(x, name) for x in every)] for name in _BY_STEP}
    ranks = zip_longest(*(one.num_by_rank for one in every), fillvalue=0)
    return AcceptanceStats(**by_step, num_by_rank=[sum(counts) for counts in ranks])


def mean_tau(stats: Iterable[AcceptanceStats]) -> float:
    """Mean of the `tau` of requests, all weighing the same; those without steps are left out.

    >>> short = AcceptanceStats(num_drafted=[3], num_accepted=[3], num_emitted=[4])
    >>> long = AcceptanceStats(num_drafted=[3, 3, 3], num_accepted=[0, 1, 0], num_emitted=[1, 2, 1])
    >>> round(mean_tau([short, long, AcceptanceStats()]), 3)
    2.667
    """
    taus = [one.tau for one in stats if one.num_steps]
    return sum(taus) / len(taus) if taus else 0.0
