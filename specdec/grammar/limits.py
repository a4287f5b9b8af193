"""What a grammar may take at most, and what is said of one that takes more."""

from __future__ import annotations

from specdec.base.errors import InvalidInputError

MAX_CHARACTERS = 2**20
"""Most characters of a grammar's text: schema, pattern, rules, or all choices as JSON."""

MAX_PATTERN_CHARACTERS = 2**14
"""Most characters of a regular expression, and of a schema's patterns that differ together."""

DEEPEST = 100
"""Schemas within schemas, and groups within groups of a pattern."""

MAX_COMPARISONS = 200_000
"""Parts of a schema looked at to tell options, types and references apart."""

MAX_STATES = 1000
"""Most states of the automaton of a string with lookaheads, lengths or several patterns."""

MAX_EXPRESSIONS = 100_000
"""Most expressions that are made on the way there."""

MAX_REASONS = 8
"""Reasons that one refusal names."""

QUEUES = {0.25: 2, 4.0: 1, 20.0: 1}
"""By seconds of a processor that one grammar may take to compile, how many are compiled at once.
What takes more begins again in the next queue, behind its like; in the last it is refused.
"""

QUICK_SECONDS, MAX_SECONDS = min(QUEUES), max(QUEUES)

MAX_MEMORY = 2**30
"""Bytes that compiling one grammar may take."""

MAX_COMPILED = 2**26
"""Characters of what a grammar is compiled to, where it took long and so is not compiled again."""

MAX_WAITING = 256
"""Grammars that wait to be compiled."""


def check_size(what: str, size: int, most: int) -> None:
    """Raises:
    InvalidInputError: a text is too long.
    """
    if size > most:
        message = f"{what} has {size:,} characters and the limit is {most:,}"
        raise InvalidInputError(f"{message}; make it smaller")


def shown(text: object, most: int = 120) -> str:
    """A value in a message: no more of it than its beginning.

    >>> shown("a" * 200, 9)
    'aaaaaaaaa...'
    """
    some = str(text)
    return some if len(some) <= most else f"{some[:most]}..."
