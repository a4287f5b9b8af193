"""Errors a user can cause, each with one line: the value, the limit, the way out.

The CLI prints these without a traceback and exits with status 2; anything else is a defect of ours and keeps its traceback.
"""


class SpecDecError(ValueError):
    """Base class of every error that a user's input can cause."""


class InvalidInputError(SpecDecError):
    """A prompt, option or sampling value outside its range."""


class CapacityError(SpecDecError):
    """Work that does not fit the model's context or the KV cache."""


class UnsupportedModelError(SpecDecError):
    """A model whose architecture this package cannot run yet, refused before its weights are read."""


class CheckpointError(SpecDecError):
    """A checkpoint that is missing, damaged, incomplete or made for another target."""


class BackendError(SpecDecError):
    """An attention backend that is unknown or cannot serve this model on this device."""


def one_line(error: BaseException, most: int = 200) -> str:
    """The beginning of a library's message, of so many characters, on one line; the error's type where it says nothing.

    >>> one_line(ValueError("no such\\n  file")), one_line(KeyError())
    ('no such file', 'KeyError')
    """
    return " ".join(str(error).split())[:most] or type(error).__name__
