"""The one definition of every printed speed: tokens and seconds of runs, and where time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of repeated runs of the same work.

    A run is one call of `generate` with all prompts: `num_tokens` are the output tokens of all its
    requests, `seconds` its wall time, prefill included.

    >>> speed = Speed(num_tokens=[100, 100, 100], seconds=[2.0, 1.0, 4.0])
    >>> speed.tokens_per_second, speed.median, speed.spread
    ([50.0, 100.0, 25.0], 50.0, (25.0, 100.0))
    """

    num_tokens: Sequence[int]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.num_tokens) == len(self.seconds)

    @property
    def tokens_per_second(self) -> list[float]:
        """One entry per run; 0 for a run that took no time."""
        pairs = zip(self.num_tokens, self.seconds, strict=True)
        return [tokens / secs if secs > 0 else 0.0 for tokens, secs in pairs]

    @property
    def median(self) -> float:
        """Median over the runs, in tokens per second; 0 without runs."""
        return median(self.tokens_per_second) if self.seconds else 0.0

    @property
    def spread(self) -> tuple[float, float]:
        """Slowest and fastest run, in tokens per second; 0 and 0 without runs."""
        return min(self.tokens_per_second, default=0.0), max(self.tokens_per_second, default=0.0)

    def ratio(self, baseline: "Speed") -> float | None:
        """How many times faster than `baseline`, median against median; None for one without speed.

        >>> Speed(num_tokens=[100], seconds=[1.0]).ratio(Speed(num_tokens=[100], seconds=[2.0]))
        2.0
        """
        return self.median / baseline.median if baseline.median > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Runs and figures for a JSON report."""
        return {
            "num_tokens": list(self.num_tokens),
            "seconds": list(self.seconds),
            "tokens_per_second": {
                "median": self.median,
                "min": self.spread[0],
                "max": self.spread[1],
            },
        }


TIME_PARTS = ("prefill", "draft", "verify", "accept", "rest")
"""Where the time of decoding goes, in the order of a step."""


def time_split(phases: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Shares of a run's time, which add up to 1.

    Drafting includes what the drafter does with the features of verified rows. The rest is
    scheduling, reading results, and whatever else happens outside the timed phases.

    Args:
        phases: seconds by phase, as `specdec.engine.policy.timing.StepTimer` counts them.
        seconds: wall time of the run, at least the sum of the phases.

    >>> totals = {"draft": 1.0, "verify": 4.0, "context": 1.0, "accept": 0.5, "collect": 0.5}
    >>> time_split(totals, 10.0)
    {'prefill': 0.0, 'draft': 0.2, 'verify': 0.4, 'accept': 0.05, 'rest': 0.35}
    >>> time_split({}, 0.0)["rest"]
    0.0
    """
    counted = {
        "prefill": phases.get("prefill", 0.0),
        "draft": phases.get("draft", 0.0) + phases.get("context", 0.0),
        "verify": phases.get("verify", 0.0),
        "accept": phases.get("accept", 0.0),
    }
    shares = {part: value / seconds if seconds > 0 else 0.0 for part, value in counted.items()}
    rest = max(0.0, seconds - sum(counted.values())) / seconds if seconds > 0 else 0.0
    return shares | {"rest": rest}
