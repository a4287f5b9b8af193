"""What is found in a JSON schema, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.grammar.limits import shown
from specdec.grammar.schema.text_rules import Text


@dataclass(slots=True)
class Reading:
    """What was found in a schema.

    Attributes:
        schema: for the library.
        reasons: what it asks for and would not get, each with its place.
        notes: what it asks for and the standard lets be, and so do we.
        texts: strings of our own, by number.
        counts: strings have lengths, or objects a number of properties.
    """

    schema: Any = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a schema something stands; written only where there is something to say of it."""

    step: str
    within: Place | None = None

    def __truediv__(self, step: object) -> Place:
        """What is in it."""
        return Place(str(step), self)

    def __str__(self) -> str:
        """The whole way, or its beginning."""
        steps: list[str] = []
        place: Place | None = self
        while place is not None:
            steps.append(shown(place.step, 40))
            place = place.within
        return shown("/".join(reversed(steps)))
