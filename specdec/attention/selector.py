"""Choosing the attention backend: by name, or the first that can serve the model; the choice is logged once, with its reason."""

import logging

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.errors import BackendError
from specdec.registry import ATTENTION_BACKENDS, resolve

logger = logging.getLogger(__name__)


def refusals(spec: AttentionSpec) -> dict[str, list[str]]:
    """For every known backend, all reasons why it cannot serve `spec`; an empty list means it can."""
    return {name: resolve(ATTENTION_BACKENDS, name, "attention backend").unsupported_reasons(spec) for name in ATTENTION_BACKENDS}


def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first in the registry without a reason against it.

    Raises:
        InvalidInputError: no backend has that name.
        BackendError: the named backend, or every backend, refuses; the message holds all reasons.
    """
    if name != "auto":
        backend = resolve(ATTENTION_BACKENDS, name, "attention backend")
        reasons = backend.unsupported_reasons(spec)
        if reasons:
            raise BackendError(f"attention backend {name!r} cannot serve this model: {'; '.join(reasons)}; try --attention auto")
        return backend(spec)
    refused = refusals(spec)
    for candidate, reasons in refused.items():
        if not reasons:
            skipped = "; ".join(f"{other}: {', '.join(why)}" for other, why in refused.items() if why)
            logger.info("attention backend %s%s", candidate, f" ({skipped})" if skipped else "")
            return resolve(ATTENTION_BACKENDS, candidate, "attention backend")(spec)
    raise BackendError(
        "no attention backend can serve this model: " + "; ".join(f"{n}: {', '.join(r)}" for n, r in refused.items())
    )
