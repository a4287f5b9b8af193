"""Whether a composition's models are worth their time, where the host may see other drafts.

With S tokens expected of a step's other drafts, and G more where models draft as well, models pay
while

    (S + G) / (rest + models) > S / rest      or      G / S > models / rest

in seconds of the models' forwards and of the rest of the step. G is what models have added lately
where the others' forecast was alike, so that it need not be known how good a model is where it is
not asked. It is asked again now and then.
"""

from collections.abc import Sequence
from math import log2

MEMORY = 64
"""Observations after which one weighs 1/e."""
ENOUGH = 6
"""Observations of a kind that tell anything."""
MAX_SKIPPED = 32
"""Steps in a row without models."""
_PER_DOUBLING = 2  # buckets, of one more than the forecast

Kind = tuple[int, int, bool]
"""Requests of a step, rows of a block, and whether it is a tree: what its times depend on."""


class _Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, value: float) -> None:
        self.total = self.total * (1 - 1 / MEMORY) + value
        self.weight = self.weight * (1 - 1 / MEMORY) + 1

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


class Gate:
    """What models have cost and added lately."""

    def __init__(self) -> None:
        self._gains: dict[int, _Mean] = {}
        self._models: dict[Kind, _Mean] = {}
        self._rest: dict[Kind, _Mean] = {}
        self._num_skipped = 0

    def pays(self, kind: Kind, forecasts: Sequence[float]) -> bool:
        """Whether models should draft, by what others of each request are expected."""
        gains = [self._gains.get(_bucket(forecast)) for forecast in forecasts]
        known = [gain for gain in gains if gain is not None and gain.weight >= ENOUGH]
        models, rest = self._models.get(kind), self._rest.get(kind)
        if (
            models is None
            or rest is None
            or len(known) < len(gains)
            or self._num_skipped >= MAX_SKIPPED
        ):
            self._num_skipped = 0
            return True
        gained = sum(gain.value for gain in known)
        others = sum(1 + forecast for forecast in forecasts)
        pays = gained * rest.value > models.value * others
        self._num_skipped = 0 if pays else self._num_skipped + 1
        return pays

    def observe(self, forecasts: Sequence[float], gains: Sequence[float]) -> None:
        """Takes over how many more drafts of each request were accepted thanks to models."""
        for forecast, gain in zip(forecasts, gains, strict=True):
            self._gains.setdefault(_bucket(forecast), _Mean()).add(gain)

    def took(self, kind: Kind, rest: float, models: float | None) -> None:
        """Takes over the seconds of a step; None of the models where they did not draft."""
        self._rest.setdefault(kind, _Mean()).add(rest)
        if models is not None:
            self._models.setdefault(kind, _Mean()).add(models)


def _bucket(forecast: float) -> int:
    return int(_PER_DOUBLING * log2(max(forecast, 0.0) + 1))
