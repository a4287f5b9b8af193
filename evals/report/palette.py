"""Colors of a page, in light and dark: one for one side, whatever the plot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from evals.report.sides import PLAIN, Side, side_of

_SIDES = (
    ("#1f5fbf", "#7fb0ff"),
    ("#c04f0a", "#ff9f5a"),
    ("#1a7f4b", "#6fd39b"),
    ("#a5308f", "#f08be0"),
    ("#00808a", "#4fd0da"),
    ("#7a5c00", "#d8b84a"),
    ("#6a4fc7", "#b3a0ff"),
    ("#b3273a", "#ff8a96"),
)
_PARTS = (
    ("#d0d4db", "#42474f"),
    ("#a9b0bc", "#646b76"),
    ("#7f8897", "#8b929e"),
    ("#586172", "#b4bac4"),
    ("#333a48", "#dfe3e9"),
)
_PAGE = {
    "ink": ("#1c1c1c", "#ececec"),
    "soft": ("#595959", "#a9adb4"),
    "page": ("#ffffff", "#15171a"),
    "card": ("#f4f5f7", "#202327"),
    "rule": ("#d9dce1", "#3a3f46"),
    "plain": ("#6b6b6b", "#a9adb4"),
    "good": ("#2f7d3a", "#7fd69a"),
    "good-fill": ("#d9efdc", "#1f3d26"),
    "own": ("#2b5d9c", "#7fb0ff"),
    "own-fill": ("#dbe7f6", "#24395a"),
    "note": ("#8a4b08", "#f0b070"),
    "warning": ("#fff3cd", "#4a3d10"),
}
COLORS: dict[str, tuple[str, str]] = {
    **_PAGE,
    **{f"side-{number}": pair for number, pair in enumerate(_SIDES)},
    **{f"part-{number}": pair for number, pair in enumerate(_PARTS)},
}
"""Light and dark by name."""

MARKERS = "os^DvPX*"
"""One for one side, for who tells colors apart badly."""

_NAMES = list(COLORS)


def drawn(name: str) -> str:
    """What stands for a color while matplotlib draws, which knows none that change.

    >>> drawn("ink"), named("fill: " + drawn("ink"))
    ('#0a0b00', 'fill: var(--ink)')
    """
    return f"#0a0b{_NAMES.index(name):02x}"


def named(svg: str) -> str:
    """A drawing with the page's colors in place of what stood for them."""
    return re.sub(r"#0a0b([0-9a-f]{2})", lambda it: f"var(--{_NAMES[int(it[1], 16)]})", svg)


class Palette:
    """Which color and marker a side has.

    Args:
        rows: of the whole report, so that every plot of a page gives a side the same.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        sides = dict.fromkeys(side_of(row) for row in rows if row["drafter"] != PLAIN)
        self._place = {side: place for place, side in enumerate(sides)}

    def name(self, side: Side) -> str:
        """Name of its color, among `COLORS`."""
        if side.drafter == PLAIN:
            return "plain"
        return f"side-{self._place[side] % len(_SIDES)}"

    def color(self, side: Side) -> str:
        """Color that matplotlib draws with."""
        return drawn(self.name(side))

    def marker(self, side: Side) -> str:
        """Marker of matplotlib; where a color comes again, the marker is another."""
        place = self._place.get(side, 0)
        return MARKERS[(place + place // len(_SIDES)) % len(MARKERS)]

    def hatch(self, side: Side) -> str:
        """Hatch of its bars, where its color is another side's as well."""
        return "///" if self._place.get(side, 0) >= len(_SIDES) else ""
