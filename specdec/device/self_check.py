"""Self-checks: what has never been run on a card is used there once it has agreed with plain torch
on that very card.

A check runs one kind of kernel at tiny size and measures how far it is off. Its verdict is kept in
the user's cache for this card, its driver and these versions, so that the next start reads it and
runs nothing.

On every one of AMD's GPUs a check decides. A kernel that spills registers is slow, not wrong, and
where two ways are right, `times_of` tells the faster. NVIDIA's GPUs, where the tests run, need
none.

The variable `SPECDEC_KERNELS` overrules all that: "argmax,-fused_layers" takes the one and leaves
out the other, unchecked. What is in `BY_NAME` is checked nevertheless.
"""

import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
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

LATENT = ("rocm_aiter_mla", "rocm_aiter_mla_sparse")
NAMES = ("rocm_aiter_fa", "triton_fa", *LATENT, *KERNELS, "captured_step")
"""What has a check."""

BY_NAME = ("aiter_layers",)
"""What is used only if `SPECDEC_KERNELS` names it, and after its check all the same: nobody has
measured yet whether it pays.
"""

VARIABLE = "SPECDEC_KERNELS"

PATIENCE = 900.0
"""Seconds to wait for another process that is in the midst of the same check; a first one compiles
its kernels.
"""

REPEATS = 15
"""Launches of which the median is taken."""

WAIT = 50_000_000
"""Cycles that a GPU waits meanwhile, some 20 ms."""

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
        microseconds: of each way of doing the same, where they were timed.
    """

    failure: str | None
    error: float | None = None
    bound: float | None = None
    milliseconds: float | None = None
    microseconds: dict[str, float] | None = None


def passes(name: str, device: torch.device, check: Check, *variant: Variant) -> bool:
    """Whether `auto` may use what is called `name` on `device`; see `reasons_against`."""
    return not reasons_against(name, device, check, *variant)


def reasons_against(name: str, device: torch.device, check: Check, *variant: Variant) -> list[str]:
    """Why `auto` should not use what is called `name` on `device`; empty when it may.

    Args:
        name: one of `NAMES`.
        device: where.
        check: decides on AMD's GPUs; it runs once per machine. What it raises counts as a failure.
        variant: what else the verdict depends on.

    Raises:
        InvalidInputError: `SPECDEC_KERNELS` holds what is no name.
    """
    assert name in NAMES
    wanted = _asked_for().get(name)
    if wanted is False:
        return [f"{VARIABLE} leaves it out"]
    if name in BY_NAME and not wanted:
        return [f"it is taken by name alone ({VARIABLE}={name})"]
    if name not in BY_NAME and (wanted or specdec.device.device.rocm_architecture(device) is None):
        return []
    verdict = verdict_of(name, device, check, *variant)
    return [f"its self-check failed: {verdict.failure}"] if verdict.failure else []


Ways = Mapping[str, Callable[[], object]]
"""Launches of the same work, the preferred one first."""


def times_of(
    name: str,
    device: torch.device,
    ways: Callable[[], Ways],
    *variant: Variant,
    again: bool = False,
) -> dict[str, float]:
    """Microseconds of each way, measured once per machine and kept as verdicts are.

    Empty where nothing is timed (`races`), if `SPECDEC_KERNELS` names it, or measuring failed.
    """
    if not races(device) or named(name):
        return {}
    path = _folder(device) / f"{title('time', name, *variant)}.json"
    with _one_at_a_time:
        if again or path not in _known:
            verdict = _kept_or_run(path, lambda: _timed(ways(), device), device, again)
            _known[path] = verdict
            if verdict.failure:
                logger.warning("%s cannot be timed: %s", title(name, *variant), verdict.failure)
        return dict(_known[path].microseconds or {})


def races(device: torch.device) -> bool:
    """Whether ways that are right are timed: on AMD's GPUs."""
    return device.type == "cuda" and specdec.device.device.rocm_architecture(device) is not None


def slower(name: str, times: Mapping[str, float]) -> list[str]:
    """Why a way is not taken that is not the fastest; of equal ones the first is.

    >>> slower("a", {"a": 20.0, "b": 10.0}), slower("b", {"a": 20.0, "b": 10.0}), slower("a", {})
    (['20 us, where b takes 10'], [], [])
    """
    best = min(times, key=times.__getitem__, default=name)
    if best == name or name not in times:
        return []
    return [f"{times[name]:.0f} us, where {best} takes {times[best]:.0f}"]


def microseconds(launch: Callable[[], object], device: torch.device) -> float:
    """Median time of a launch on a GPU, after one that compiles. The launches wait until all are
    queued, so that the host, which a captured step does without, has no part in it.
    """
    launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda._sleep(WAIT)
        for event in events[:-1]:
            event.record()
            launch()
        events[-1].record()
        torch.cuda.synchronize()
    return median(start.elapsed_time(end) * 1e3 for start, end in pairwise(events))


def _timed(ways: Ways, device: torch.device) -> Verdict:
    """Times of all; what one of them raises counts as a failure."""
    found: dict[str, float] = {}

    def time_all() -> Deviation:
        for name, launch in ways.items():
            found[name] = round(microseconds(launch, device), 1)
        return Deviation(0.0, 0.0)

    verdict = run(time_all)
    return verdict if verdict.failure else replace(verdict, microseconds=found)


def named(name: str) -> bool:
    """Whether `SPECDEC_KERNELS` takes what is called `name`."""
    return _asked_for().get(name, False)


_known: dict[Path, Verdict] = {}
"""Verdicts that this process has asked for, so that each failure is told once."""
_one_at_a_time = RLock()  # a check may ask for another


def verdict_of(
    name: str, device: torch.device, check: Check, *variant: Variant, again: bool = False
) -> Verdict:
    """The verdict that is kept, or else that of `check`, run now; `again` runs it anyway. A failure
    is logged once per process.
    """
    path = _folder(device) / f"{title(name, *variant)}.json"
    with _one_at_a_time:
        if again or path not in _known:
            _known[path] = verdict = _kept_or_run(path, lambda: run(check), device, again)
            if verdict.failure and not again:
                insist = "" if name in BY_NAME else f"{VARIABLE}={name} takes it all the same, "
                text = "%s is left out on %s: %s (%sspecdec doctor --run checks it again)"
                logger.warning(text, title(name, *variant), _card(device), verdict.failure, insist)
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
    failure = None if right else f"its error is {error:.2g}, where {bound:.2g} is allowed"
    return Verdict(failure, error, bound, spent)


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
        **{name: value for name, value in os.environ.items() if name.startswith("AITER_")},
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
            raise InvalidInputError(
                f"{VARIABLE} names {name!r}; known are {known}, and a - before a name leaves it out"
            )
    return asked


def _folder(device: torch.device) -> Path:
    """Where the verdicts of this machine are kept."""
    digest = sha256(json.dumps(machine(device), sort_keys=True).encode()).hexdigest()
    try:
        folder = cache_folder()
    except InvalidInputError:
        folder = Path(os.devnull)  # no home: nothing can be kept
    return folder / "self-check" / digest[:16]


def _kept_or_run(
    path: Path, make: Callable[[], Verdict], device: torch.device, again: bool
) -> Verdict:
    """The verdict in a file, made if there is none, or none can be kept."""
    kept = None if again else _read(path)
    if isinstance(kept, Verdict):
        return kept
    lock = FileLock(path.with_suffix(".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        return Verdict(f"another process has been running it for {PATIENCE:.0f} s")
    except (OSError, NotImplementedError):
        return make()
    try:
        return _decided(path, make, device, again)
    finally:
        lock.release()


def _decided(path: Path, make: Callable[[], Verdict], device: torch.device, again: bool) -> Verdict:
    """Runs the check under the lock. Nobody else runs it meanwhile, so one that was begun
    ended with its process.
    """
    kept = _read(path)
    if isinstance(kept, Verdict) and not again:
        return kept
    if kept == "started":
        verdict = Verdict("a process ended in the midst of it, as after a fault of the GPU")
    else:
        _write(path, STARTED)
        if not again:
            _say_once(device, path.parent)
            logger.info("checking %s", path.stem)
        try:
            verdict = make()
        except BaseException:  # stopped from outside, which says nothing about the kernels
            remove(path)
            raise
    _write(path, asdict(verdict))
    return verdict


@cache
def _say_once(device: torch.device, folder: Path) -> None:
    """Before the first check of a process whose verdicts lie there."""
    logger.info(
        "on %s: compiling and checking kernels, once, up to %d kinds of 10 s to a minute each;"
        " verdicts go to %s",
        specdec.device.device.describe_device(device),
        len(NAMES),
        folder,
    )


def _read(path: Path) -> Verdict | str | None:
    """What a file holds: a verdict, "started" of a check that has not come to an end, or nothing
    that can be read.
    """
    try:
        content = parse_json(path.read_bytes(), strict=False)
        return "started" if content == STARTED else Verdict(**content)
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Keeps something, if there is room for it."""
    with suppress(SpecDecError):
        write_text(path, json.dumps(content) + "\n")
