"""Choosing the attention backend: by name, or the first that can serve the model, on AMD
the fastest; the choice is logged, with its reason.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch

import specdec.device.device
from specdec.attention.backend import BY_NAME, AttentionBackend, AttentionSpec
from specdec.attention.check import times_of_backends
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.base.errors import BackendError
from specdec.base.registry import ATTENTION_BACKENDS, MLA_BACKENDS, resolve
from specdec.device.self_check import named, races, slower

logger = logging.getLogger(__name__)


def refusals(spec: AttentionSpec | MlaSpec, *, auto: bool = False) -> dict[str, list[str]]:
    """For every backend of the spec's kind, all reasons why it cannot serve `spec`; an empty list
    means it can.

    With `auto`, also why "auto" passes over those that would serve it by name, as far as the first
    that it does not pass over. On AMD's GPUs it passes over all but the fastest of those that are
    right.
    """
    found: dict[str, list[str]] = {}
    race = auto and isinstance(spec, AttentionSpec) and races(spec.device)
    for name in _table(spec):
        found[name] = _reasons(_resolve(name, spec), spec, auto)
        if auto and not found[name] and (named(name) or not race):
            break
    right = [_resolve(name, spec) for name, reasons in found.items() if not reasons]
    if race and len(right) > 1 and isinstance(spec, AttentionSpec):
        times = times_of_backends(right, spec.each[0])
        found |= {backend.name: slower(backend.name, times) for backend in right}
    return found


def describe(name: str, spec: AttentionSpec | MlaSpec) -> list[str]:
    """What the backend called `name` says of how it would serve `spec`."""
    backend = _resolve(name, spec)
    return _of_each(backend.describe, spec)


@overload
def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend: ...
@overload
def select_backend(name: str, spec: MlaSpec) -> MlaBackend: ...
def select_backend(name: str, spec: AttentionSpec | MlaSpec) -> AttentionBackend | MlaBackend:
    """The backend called `name`, or for "auto" the first in the registry without a reason against
    it.

    Raises:
        InvalidInputError: no backend has that name.
        BackendError: the named backend, or every backend, refuses; the message holds all reasons.
    """
    if name != "auto":
        backend = _resolve(name, spec)
        reasons = _unsupported(backend, spec)
        if reasons:
            what = f"attention backend {name!r} cannot serve this model: {'; '.join(reasons)}"
            raise BackendError(f"{what}; try --attention auto")
        _say(name, {}, spec.device)
        return backend(spec)
    refused = refusals(spec, auto=True)
    for candidate, reasons in refused.items():
        if not reasons:
            _say(candidate, refused, spec.device)
            return _resolve(candidate, spec)(spec)
    raise BackendError(
        "no attention backend can serve this model: "
        + "; ".join(f"{n}: {', '.join(r)}" for n, r in refused.items())
    )


def _say(chosen: str, refused: Mapping[str, list[str]], device: torch.device) -> None:
    """One line: where attention runs, on what, and why on nothing that would be better there.

    Nothing is refused where it was chosen by name.
    """
    slow = bool(refused) and chosen == "torch_ref" and device.type == "cuda"
    level = logging.WARNING if slow else logging.INFO
    if not logger.isEnabledFor(level):  # asking a device for its name takes a driver
        return
    kind = "ROCm" if specdec.device.device.rocm_architecture(device) else device.type
    skipped = "; ".join(
        f"{name}: {', '.join(why)}"
        for name, why in refused.items()
        if why and why != BY_NAME and _suits(name, kind)
    )
    logger.log(
        level,
        "on %s: attention %s%s%s",
        specdec.device.device.describe_device(device),
        chosen,
        " in plain torch, which is slow" if slow else "",
        f" ({skipped})" if skipped else "",
    )


def _suits(name: str, kind: str) -> bool:
    """Whether a backend is made for such devices."""
    return kind == "ROCm" or (kind == "cuda" and not name.startswith("rocm_"))


def tree_reasons(backend: AttentionBackend | MlaBackend) -> list[str]:
    """All reasons why `backend` cannot verify draft trees, for any layer; empty when it can."""
    reasons = _of_each(type(backend).tree_reasons, backend.spec)
    if isinstance(backend.spec, AttentionSpec) and any(one.chunk for one in backend.spec.each):
        reasons.append("layers that attend within chunks take each row for a request of its own")
    return reasons


def ragged_reasons(backend: AttentionBackend | MlaBackend) -> list[str]:
    """All reasons why `backend` cannot verify fewer rows of one request than of another; empty when
    it can.
    """
    return _of_each(type(backend).ragged_reasons, backend.spec)


def _reasons(backend: Any, spec: AttentionSpec | MlaSpec, auto: bool) -> list[str]:
    against = _of_each(backend.reasons_against_auto, spec) if auto else []
    return against or _unsupported(backend, spec)


def _unsupported(backend: Any, spec: AttentionSpec | MlaSpec) -> list[str]:
    """What the backend has to say against `spec`, and what is against it whatever the backend."""
    size, chunks = (
        spec.block_size,
        [one.chunk for one in spec.each if one.chunk] if isinstance(spec, AttentionSpec) else [],
    )
    uneven = [
        f"blocks of {size} tokens do not divide chunks of {chunk}"
        for chunk in chunks
        if chunk % size
    ]
    return [*_of_each(backend.unsupported_reasons, spec), *uneven]


def _of_each(ask: Callable[[Any], list[str]], spec: AttentionSpec | MlaSpec) -> list[str]:
    """What is to be said about every shape of layers, and of what several share once."""
    specs = spec.each if isinstance(spec, AttentionSpec) else (spec,)
    return list(dict.fromkeys(line for one in specs for line in ask(one)))


def _table(spec: AttentionSpec | MlaSpec) -> dict[str, str]:
    return MLA_BACKENDS if isinstance(spec, MlaSpec) else ATTENTION_BACKENDS


def _resolve(name: str, spec: AttentionSpec | MlaSpec) -> Any:
    """The backend class called `name` for specs of this kind."""
    kind = "attention backend" if isinstance(spec, AttentionSpec) else "latent attention backend"
    return resolve(_table(spec), name, kind)
