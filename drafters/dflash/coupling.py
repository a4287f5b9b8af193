"""How far a drafter's probabilities, and the noise that the target will choose by, are to be
trusted: weights a and b per slot.

The target's token is believed to be x with probability softmax(a log q + b g)
(`specdec.sampling.trees.candidates`). Where q is an average over all that earlier slots may say,
both are less than 1. `specdec couple` fits them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from drafters.keys import is_number, require

MOST = 100
"""Largest weight, and largest temperature."""
APART = 0.001
"""Least distance of temperatures."""

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Coupling:
    """Fitted weights, interpolated between temperatures, and constant beyond the outermost.

    Attributes:
        temperatures: T of them, rising.
        a: of log q, by temperature and slot, above 0.
        b: of the noise, likewise, at least 0.

    Raises:
        CheckpointError: other numbers, or other shapes.
    """

    temperatures: Row
    a: tuple[Row, ...]
    b: tuple[Row, ...]

    def __post_init__(self) -> None:
        found = self.temperatures
        rising = all(later - earlier >= APART for earlier, later in pairwise(found))
        require(
            bool(found) and found[0] > 0 and found[-1] <= MOST and rising,
            f"coupling has temperatures {list(found)}; they must rise from above 0 to {MOST} at"
            f" most, at least {APART} apart",
        )
        for name, rows in (("a", self.a), ("b", self.b)):
            require(
                len(rows) == len(found),
                f"coupling has {len(rows)} rows of {name} for {len(found)} temperatures; one each",
            )
            wrong = [
                x for row in rows for x in row if not (0 <= x <= MOST and (x > 0 or name == "b"))
            ]
            rule = f"{'above' if name == 'a' else 'at least'} 0 and at most {MOST}"
            what = f"coupling has {wrong[0] if wrong else ''} in {name}; it must be {rule}"
            require(not wrong, what)

    def check(self, slots: int) -> None:
        """Refuses rows that are not of so many slots; CheckpointError: one is not."""
        lengths = {len(row) for row in (*self.a, *self.b)}
        require(
            lengths == {slots},
            f"coupling has rows of {sorted(lengths)} numbers; this drafter's blocks have {slots}"
            f" drafts",
        )

    def json(self) -> dict[str, Any]:
        """As `config.json` holds it."""
        return {
            "temperatures": list(self.temperatures),
            "a": [list(row) for row in self.a],
            "b": [list(row) for row in self.b],
        }


def parse_coupling(raw: Any) -> Coupling | None:
    """What `config.json` says under "coupling"; None says nothing.

    Raises:
        CheckpointError: anything but temperatures, a and b.
    """
    if raw is None:
        return None
    right = isinstance(raw, Mapping) and raw.keys() == {"temperatures", "a", "b"}
    said = sorted(raw) if isinstance(raw, Mapping) else type(raw).__name__
    what = f"coupling is {said}; it must be an object with temperatures, a and b, or be left out"
    require(right, what)
    tables = (raw[name] if isinstance(raw[name], list) else [None] for name in ("a", "b"))
    return Coupling(_numbers(raw["temperatures"]), *(tuple(map(_numbers, rows)) for rows in tables))


def _numbers(raw: Any) -> Row:
    right = isinstance(raw, list) and all(map(is_number, raw))
    require(
        right,
        "coupling must hold a list of numbers as temperatures, and a and b one list of numbers for"
        " each of them",
    )
    return tuple(map(float, raw))


class CouplingTable:
    """The weights on a device."""

    def __init__(self, coupling: Coupling, device: torch.device) -> None:
        temperatures = torch.tensor(coupling.temperatures, dtype=torch.float32, device=device)
        rows = coupling.a, coupling.b  # [2, T, K]
        table = torch.tensor(rows, dtype=torch.float32, device=device)
        self._starts, self._widths = temperatures[:-1], temperatures.diff()
        self._first, self._changes = table[:, :1], table.diff(dim=1)

    def at(self, temperature: Tensor, slots: int) -> Tensor:
        """float32 [2, num_reqs, slots], a and b at temperatures float32 [num_reqs]."""
        # of each change, [num_reqs, T - 1]
        shares = ((temperature[:, None] - self._starts) / self._widths).clamp(0, 1)
        return self._first[..., :slots] + (
            shares[..., None] * self._changes[:, None, :, :slots]
        ).sum(dim=2)
