"""From what a user calls a drafter to what makes it for a target."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch

from specdec.base.errors import CapacityError, InvalidInputError, SpecDecError
from specdec.base.registry import (
    CHECKPOINTS,
    COMPOSITION,
    DRAFTERS,
    drafter_name,
    import_attribute,
    parts_of,
    resolve,
)
from specdec.engine.engine import SpecEngine
from specdec.model.core import Drafter, Verifier
from specdec.model.weights import Exchange
from specdec.parallel.collectives import all_agree
from specdec.parallel.executor import collective_rpc, executor_of
from specdec.parallel.group import group_of
from specdec.parallel.plain import on_ranks

DrafterChoice = str | Path | Drafter | Callable[..., Drafter] | None
"""See `find_drafter`."""


def find_drafter(choice: DrafterChoice) -> Callable[[Verifier], Drafter | None]:
    """What makes the drafter once the target is loaded; a wrong name is refused before.

    Ranks that compute the target together each make it.

    Args:
        choice: a name in the registry; "auto", which chooses by the target's name
            (`specdec.base.registry.drafter_name`); None or "none"; a checkpoint by folder or hub
            name; several of these with + between them, of which in every step the one drafts that
            promises most; a function `(path | None, *, verifier) -> Drafter`, also as
            "module:function"; or a drafter that is ready.

    Raises:
        InvalidInputError: none of these; or, when it is made, the other ranks cannot make it.
    """
    make = _maker(choice)
    return lambda verifier: (
        make(verifier) if executor_of(verifier) is None else _made_by_all(choice, verifier)
    )


def _made_by_all(choice: DrafterChoice, verifier: Verifier) -> Drafter | None:
    if hasattr(choice, "bind") or getattr(choice, "__module__", None) == "__main__":
        what = f"drafter is a {type(choice).__name__} of this process"
        what = f"{what}, and every rank of the target's group makes its own"
        raise InvalidInputError(f"{what}; give a name, a checkpoint or module:function")
    if callable(choice):
        choice = f"{choice.__module__}:{choice.__qualname__}"
    return collective_rpc(verifier, _make_drafter, choice, verifier, keep=True)


@on_ranks
def _make_drafter(choice: DrafterChoice, verifier: Verifier) -> Drafter | None:
    return _maker(choice)(verifier)


@on_ranks
def stage(engine: SpecEngine, choice: DrafterChoice) -> SpecDecError | None:
    """Makes a drafter whose weights are to replace an engine's, on every rank; or what is wrong."""
    error: SpecDecError | None = None
    engine.staged = None
    try:
        if engine.drafter is None:
            raise InvalidInputError("nothing drafts, so there are no weights to replace")
        fresh = _maker(choice)(engine.verifier)
        if fresh is None:
            raise InvalidInputError(f"drafter {choice!r} has no weights; name a checkpoint")
        engine.staged = Exchange(engine.drafter, fresh, str(choice))
    except SpecDecError as refused:
        error = refused
    except torch.OutOfMemoryError:
        error = CapacityError("there is no memory for other weights beside those in use")
    if not all_agree(error is None, group_of(engine.verifier)) and error is None:
        error = InvalidInputError(f"another rank cannot use drafter {choice!r}; its log says why")
    return error


def _maker(choice: DrafterChoice) -> Callable[[Verifier], Drafter | None]:
    """`find_drafter` for one rank."""
    if choice is None or choice == "none":
        return lambda verifier: None
    if isinstance(choice, str) and len(names := parts_of(choice)) > 1:
        return _composed(choice, names)
    if choice in ("auto", "embedded"):
        return lambda verifier: _maker(drafter_name(str(choice), verifier.name))(verifier)
    path: str | Path | None = None
    if isinstance(choice, str) and choice in DRAFTERS:
        loader = resolve(DRAFTERS, choice, "drafter")
    elif isinstance(choice, Path) or (isinstance(choice, str) and _is_checkpoint(choice)):
        loader, path = resolve(CHECKPOINTS, "drafter", "loader"), choice
    elif isinstance(choice, str) and ":" in choice:
        loader = import_attribute(choice)
    elif isinstance(choice, str):
        what = f"unknown drafter {choice!r} (known: auto, {', '.join(DRAFTERS)}, none)"
        way_out = "is named by its folder or as owner/name, a function as module:function"
        raise InvalidInputError(f"{what}; a checkpoint {way_out}")
    elif hasattr(choice, "bind") and not isinstance(choice, type):
        ready = cast(Drafter, choice)
        return lambda verifier: ready
    elif callable(choice):
        loader = choice
    else:
        what = f"drafter is a {type(choice).__name__}; give a name, a path"
        way_out = "a function (path, *, verifier) -> Drafter, a Drafter or None"
        raise InvalidInputError(f"{what}, {way_out}")
    _check_loader(loader, choice)
    return lambda verifier: _made(loader(path, verifier=verifier), choice)


def _check_loader(loader: object, choice: object) -> None:
    """Refuses what cannot be called as a loader is."""
    reason = "it is no function"
    if callable(loader):
        try:
            signature(loader).bind(None, verifier=None)
            return
        except ValueError:  # written in C, without a signature
            return
        except TypeError as error:
            reason = str(error)
    what = f"drafter {choice!r} loads no drafter: {reason}"
    raise InvalidInputError(f"{what}; give a function (path, *, verifier) -> Drafter")


def _composed(choice: str, names: Sequence[str]) -> Callable[[Verifier], Drafter]:
    if "" in names or "none" in names:
        what = f"drafter is {choice!r}"
        raise InvalidInputError(f"{what}; write names with + between them, such as suffix+auto")
    makers, compose = [_maker(name) for name in names], import_attribute(COMPOSITION)
    return lambda verifier: cast(Drafter, compose([make(verifier) for make in makers]))


def _is_checkpoint(name: str) -> bool:
    """Whether `name` is a folder, or in the form of one or of a hub name."""
    return os.path.exists(os.path.expanduser(name)) or "/" in name.partition(":")[0]


def _made(drafter: Any, choice: object) -> Drafter:
    if not hasattr(drafter, "bind"):
        what = f"{choice!r} made a {type(drafter).__name__}, which has no bind"
        raise InvalidInputError(f"{what}; see docs/drafters.md")
    made: Drafter = drafter
    return made
