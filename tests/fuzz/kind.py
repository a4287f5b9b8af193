"""What a kind of input is, and what has to hold of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from specdec.base.errors import SpecDecError

LONGEST = 2_000
"""Characters of a line at most."""

Check = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """Inputs of one sort.

    Attributes:
        make: an input, in the words of `tests.fuzz.notation`, so that it can be written down.
        start: gives what looks at one, in a process and a folder of its own.
        share: inputs of a test, beside those of the other kinds.
    """

    make: Callable[[Random], Any]
    start: Callable[[Path], Check]
    share: int


class Broken(AssertionError):
    """What must hold does not."""


def line(text: str) -> str:
    """The text, which is one line."""
    if not text.strip() or len(text.splitlines()) != 1 or len(text) > LONGEST:
        raise Broken(
            f"a message of {len(text.splitlines())} lines, {len(text):,} characters: {text[:300]!r}"
        )
    return text


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` gives, or None where a line says why it gives nothing."""
    try:
        return work()
    except SpecDecError as error:
        line(str(error))
        return None
