"""Errors a user can cause, each with one line: the value, the limit, the way out.

The CLI prints these without a traceback and exits with status 2; anything else is a defect of ours
and keeps its traceback.
"""

import re
import reprlib

LONGEST = 2_000
"""Characters of a message."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class SpecDecError(ValueError):
    """Base class of every error that a user's input can cause.

    Args:
        message: becomes one line: control characters of a value are escaped, as Python writes them,
            and of more than `LONGEST` characters those in the middle are left out.
    """

    def __init__(self, message: str = "") -> None:
        line = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], message)
        if len(line) > LONGEST:
            line = f"{line[: LONGEST * 3 // 4]} ... {line[-LONGEST // 5 :]}"
        super().__init__(line)


class InvalidInputError(SpecDecError):
    """A prompt, option or sampling value outside its range."""


class CapacityError(SpecDecError):
    """Work that does not fit the model's context or the KV cache."""


class UnsupportedModelError(SpecDecError):
    """A model whose architecture cannot be run yet, refused before its weights are read."""


class CheckpointError(SpecDecError):
    """A checkpoint that is missing, damaged, incomplete or made for another target."""


class BackendError(SpecDecError):
    """An attention backend that is unknown or cannot serve this model on this device."""


def one_line(error: BaseException, most: int = 200) -> str:
    """The first characters of a library's message, on one line; without one the error's type.

    >>> one_line(ValueError("no such\\n  file")), one_line(KeyError())
    ('no such file', 'KeyError')
    """
    return " ".join(str(error).split())[:most] or type(error).__name__


class _Shown(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # of more than 4,300 digits, which Python writes for nobody
            return f"<an integer of {x.bit_length():,} bits>"


shown = _Shown().repr
"""A value of a user as messages name it: as Python writes it, and not at length."""
