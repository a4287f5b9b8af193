"""Whether a drafter drafts better than another one for the same conversations."""

from dataclasses import dataclass

from drafters.training.loss.evaluate import ReplayResult

Z = 1.96
"""Standard errors on each side of an interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """tau of two drafters on the same conversations, greedy and sampled ones together.

    The ratio of two pooled taus is that of two sums of steps. Conversations are drawn in pairs, so
    its error is that of a ratio estimate (the delta method).

    Attributes:
        shape: of the drafts.
        before, after: tau.
        ratio: of these.
        low, high: the interval of the ratio.
        conversations: how many.
    """

    shape: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    conversations: int

    @property
    def better(self) -> bool:
        """Whether it is, beyond chance."""
        return self.low > 1

    def __str__(self) -> str:
        """Both taus and the ratio with its interval."""
        return (
            f"held-out tau {self.before:.3f} before and {self.after:.3f} after, in drafts"
            f" {self.shape}: {self.ratio:.3f}x (95 %: {self.low:.3f} to {self.high:.3f},"
            f" {self.conversations} conversations)"
        )


def compared(before: ReplayResult, after: ReplayResult) -> list[Verdict]:
    """Verdicts by shapes of drafts, of which two are enough: the chain and the smallest tree."""
    return [
        of_steps(
            str(shape),
            before.num_emitted,
            [steps[place] for steps in before.num_steps],
            [steps[place] for steps in after.num_steps],
        )
        for place, shape in enumerate(before.shapes[:2])
    ]


def of_steps(shape: str, emitted: list[int], before: list[int], after: list[int]) -> Verdict:
    """The verdict by tokens and verify steps of each conversation.

    >>> of_steps("15", [10, 10, 10], [5, 5, 5], [4, 4, 4])
    Verdict(shape='15', before=2.0, after=2.5, ratio=1.25, low=1.25, high=1.25, conversations=3)
    """
    count, tokens = len(emitted), sum(emitted)
    ratio = sum(before) / sum(after)
    squares = sum((b - ratio * a) ** 2 for b, a in zip(before, after, strict=True))
    error = (squares * count / (count - 1)) ** 0.5 / sum(after)
    taus = tokens / sum(before), tokens / sum(after)
    return Verdict(shape, *taus, ratio, ratio - Z * error, ratio + Z * error, count)
