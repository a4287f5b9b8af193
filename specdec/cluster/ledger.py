"""Which rows were being answered when an engine died."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """How a row may be answered."""

    AMONG_OTHERS = "among others"
    ALONE = "alone"
    NEVER = "never"


class Ledger:
    """Rows that have begun and not ended; an actor on the driver's machine, whose end is the run's.

    An engine that dies takes all its rows with it, and any of them may be why. Ray gives them to an
    engine again, where each now runs alone. One that was alone when its engine died is not tried a
    third time.
    """

    def __init__(self) -> None:
        self._begun: dict[str, bool] = {}  # whether it was alone

    def verdict(self, key: str) -> Verdict:
        """How a row that an engine has just been given may be answered."""
        if key not in self._begun:
            return Verdict.AMONG_OTHERS
        return Verdict.NEVER if self._begun[key] else Verdict.ALONE

    def begin(self, key: str, *, alone: bool) -> None:
        self._begun[key] = alone

    def end(self, key: str) -> None:
        self._begun.pop(key, None)
