"""Self-checks: what has never been run on a card is used there once it has agreed with plain torch on that very card.

A check runs one kind of kernel at tiny size and measures how far it is off. Its verdict is kept in the user's cache for this card,
its driver and these versions, so that the next start reads it and runs nothing. NVIDIA's GPUs, where the tests run, need none; on
AMD's other than those in `ARCHITECTURES` kernels are taken by name alone, for some of them spill registers there.

The variable `SPECDEC_KERNELS` overrules all that: "argmax,-fused_layers" takes the one and leaves out the other, unchecked.
What is in `BY_NAME` is checked nevertheless.
"""

import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from filelock import FileLock, Timeout

import specdec.device.device
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.files import cache_folder, parse_json
from specdec.base.registry import KERNELS
from specdec.base.version import __version__
from specdec.base.writing import remove, write_text
from specdec.device.deviation import Deviation

logger = logging.getLogger(__name__)

NAMES = ("rocm_aiter_fa", "triton_fa", *KERNELS, "captured_step")
"""What has a check."""

BY_NAME = ("aiter_layers",)
"""What is used only if `SPECDEC_KERNELS` names it, and after its check all the same: nobody has measured yet whether it pays."""

ARCHITECTURES = ("gfx942", "gfx950")
"""AMD architectures on which a check decides."""

VARIABLE = "SPECDEC_KERNELS"

PATIENCE = 900.0
"""Seconds to wait for another process that is in the midst of the same check; a first one compiles its kernels."""

STARTED = {"started": True}
"""What a file holds while the check runs, and for ever if the process ends in the midst of it."""

_PACKAGES = ("triton", "pytorch-triton-rocm", "triton-rocm", "amd-aiter")


Check = Callable[[], Deviation]
"""Runs a kind of kernel. What it raises counts as a failure."""

Variant = str | torch.dtype
"""What tells one verdict from another under the same name."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes:
        failure: what is wrong, in one line; None when nothing is.
        error, bound: see `Deviation`; None when it came to nothing.
        milliseconds: that it took, compiling included.
    """

    failure: str | None
    error: float | None = None
    bound: float | None = None
    milliseconds: float | None = None


def passes(name: str, device: torch.device, check: Check, *variant: Variant) -> bool:
    """Whether `auto` may use what is called `name` on `device`; see `reasons_against`."""
    return not reasons_against(name, device, check, *variant)


def reasons_against(name: str, device: torch.device, check: Check, *variant: Variant) -> list[str]:
    """Why `auto` should not use what is called `name` on `device`; empty when it may.

    Args:
        name: one of `NAMES`.
        device: where.
        check: decides on AMD's `ARCHITECTURES`; it runs once per machine, and what it raises counts as a failure.
        variant: what else the verdict depends on.

    Raises:
        InvalidInputError: `SPECDEC_KERNELS` holds what is no name.
    """
    assert name in NAMES
    wanted = _asked_for().get(name)
    architecture = specdec.device.device.rocm_architecture(device)
    if wanted is False:
        return [f"{VARIABLE} leaves it out"]
    if name in BY_NAME and not wanted:
        return [f"it is taken by name alone ({VARIABLE}={name})"]
    if name not in BY_NAME:
        if wanted or architecture is None:
            return []
        if architecture not in ARCHITECTURES:
            return [f"on {architecture} it is taken by name alone ({VARIABLE}={name})"]
    verdict = verdict_of(name, device, check, *variant)
    return [f"its self-check failed: {verdict.failure}"] if verdict.failure else []


def named(name: str) -> bool:
    """Whether `SPECDEC_KERNELS` takes what is called `name`."""
    assert name in NAMES
    return _asked_for().get(name, False)


_known: dict[Path, Verdict] = {}
"""Verdicts that this process has asked for, so that each failure is told once."""
_one_at_a_time = RLock()  # a check may ask for another


def verdict_of(name: str, device: torch.device, check: Check, *variant: Variant, again: bool = False) -> Verdict:
    """The verdict that is kept, or else that of `check`, run now; `again` runs it anyway. A failure is logged once per process."""
    path = _folder(device) / f"{title(name, *variant)}.json"
    with _one_at_a_time:
        if again or path not in _known:
            _known[path] = verdict = _kept_or_run(path, check, again)
            if verdict.failure and not again:
                insist = "" if name in BY_NAME else f"{VARIABLE}={name} takes it all the same, "
                logger.warning(
                    "%s is left out on %s: %s (%sspecdec doctor --run checks it again)",
                    title(name, *variant),
                    _card(device),
                    verdict.failure,
                    insist,
                )
        return _known[path]


def title(name: str, *variant: Variant) -> str:
    """What a verdict is called.

    >>> title("few_rows", torch.bfloat16)
    'few_rows-bfloat16'
    """
    return "-".join(str(part).removeprefix("torch.") for part in (name, *variant))


def run(check: Check) -> Verdict:
    """Runs a check, whose errors are its verdict."""
    start = time.perf_counter()
    try:
        with torch.inference_mode():
            error, bound = check()
    except (MemoryError, torch.OutOfMemoryError):
        raise  # nothing is wrong with the kernels
    except Exception as problem:
        reason = " ".join(str(problem).split())[:300]
        return Verdict(f"{type(problem).__name__}{': ' if reason else ''}{reason}")
    spent = round((time.perf_counter() - start) * 1e3, 1)
    right = error <= bound  # false for NaN, too
    return Verdict(None if right else f"its error is {error:.2g}, where {bound:.2g} is allowed", error, bound, spent)


def machine(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: the card, its driver, and the versions of what takes part."""
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "card": _card(device),
        "architecture": specdec.device.device.rocm_architecture(device) or "",
        "driver": _driver(),
        "hip": torch.version.hip or "",
        "torch": torch.__version__,
        "specdec": __version__,
        "AITER_TRITON_ONLY": os.environ.get("AITER_TRITON_ONLY", ""),  # leaves other kernels of AITER
        **versions,
    }


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _driver() -> str:
    """The version of AMD's driver; the one that comes with the kernel has the kernel's."""
    try:
        return Path("/sys/module/amdgpu/version").read_text().strip()
    except OSError:
        return platform.release()


def _asked_for() -> dict[str, bool]:
    """What `SPECDEC_KERNELS` takes and leaves out."""
    words = re.split(r"[\s,]+", os.environ.get(VARIABLE, "").strip(" ,"))
    asked = {word.removeprefix("-"): not word.startswith("-") for word in words if word}
    for name in asked:
        if name not in NAMES:
            known = ", ".join(NAMES)
            raise InvalidInputError(f"{VARIABLE} names {name!r}; known are {known}, and a - before a name leaves it out")
    return asked


def _folder(device: torch.device) -> Path:
    """Where the verdicts of this machine are kept."""
    digest = sha256(json.dumps(machine(device), sort_keys=True).encode()).hexdigest()
    try:
        folder = cache_folder()
    except InvalidInputError:
        folder = Path(os.devnull)  # no home: nothing can be kept
    return folder / "self-check" / digest[:16]


def _kept_or_run(path: Path, check: Check, again: bool) -> Verdict:
    """The verdict in a file, made if there is none. Where none can be kept, the check runs all the same."""
    kept = None if again else _read(path)
    if isinstance(kept, Verdict):
        return kept
    lock = FileLock(path.with_suffix(".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        return Verdict(f"another process has been in the midst of it for {PATIENCE:.0f} s")
    except (OSError, NotImplementedError):
        return run(check)
    try:
        return _decided(path, check, again)
    finally:
        lock.release()


def _decided(path: Path, check: Check, again: bool) -> Verdict:
    """The same under the lock: nobody else is in the midst of this check, so one that was begun ended with its process."""
    kept = _read(path)
    if isinstance(kept, Verdict) and not again:
        return kept
    if kept == "started":
        verdict = Verdict("a process ended in the midst of it, as after a fault of the GPU")
    else:
        _write(path, STARTED)
        logger.info("%s: checked once on this machine, which compiles its kernels", path.stem)
        try:
            verdict = run(check)
        except BaseException:  # stopped from outside, which says nothing about the kernels
            remove(path)
            raise
    _write(path, asdict(verdict))
    return verdict


def _read(path: Path) -> Verdict | str | None:
    """What a file holds: a verdict, "started" of a check that has not come to an end, or nothing that can be read."""
    try:
        content = parse_json(path.read_bytes(), strict=False)
        return "started" if content == STARTED else Verdict(**content)
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Keeps something, if there is room for it."""
    with suppress(SpecDecError):
        write_text(path, json.dumps(content) + "\n")
