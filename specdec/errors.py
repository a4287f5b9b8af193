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
