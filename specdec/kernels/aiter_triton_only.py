"""AITER's Triton kernels without the rest of AITER, for GPUs without its C++ and assembly kernels.

AITER imports without its compiled part when `AITER_TRITON_ONLY` is 1 at that moment. Of what
attention needs, two functions are left then. They are written for AMD's Triton, which takes
scheduling options that other builds of Triton do not know.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specdec.kernels import aiter
from specdec.kernels.aiter import AiterTriton

VARIABLE = "AITER_TRITON_ONLY"

TRITON_ONLY_VERSION = (0, 1, 16)
"""From it, AITER imports without its compiled part."""

AMD_OPTIONS = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint"})
"""Launch options that only AMD's Triton has. They steer scheduling, never the result."""

_KERNELS = "aiter.ops.triton._triton_kernels"
"""Package of the kernels that the two functions launch."""


def requested() -> bool:
    """Whether the user asked AITER itself for nothing but Triton."""
    return os.environ.get(VARIABLE) == "1"


def unavailable_reasons() -> list[str]:
    """Why the two functions cannot be used, with the way out; empty when they can."""
    text = aiter.installed_version()
    if text is None:
        return aiter.unavailable_reasons(AiterTriton)
    if aiter.known_numbers(text) < TRITON_ONLY_VERSION:
        oldest = aiter.dotted(TRITON_ONLY_VERSION)
        return [
            f"amd-aiter {text} does not import without its C++ kernels: install {oldest} or newer"
        ]
    with _triton_only():
        why = aiter.loading_error(AiterTriton)
    return [f"the Triton kernels of amd-aiter {text} cannot be used: {why}"] if why else []


def load() -> AiterTriton:
    """Imports AITER's Triton functions, and makes them run on a Triton that is not AMD's; raises as
    `aiter.load` does.
    """
    with _triton_only():
        functions = aiter.load(AiterTriton)
    if torch.version.hip is None:
        _drop_amd_options()
    return functions


@contextmanager
def _triton_only() -> Iterator[None]:
    """AITER reads the variable while it is imported; what the user set comes back afterwards."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _drop_amd_options() -> None:
    """Lets AITER's kernels be launched with AMD's options, leaving out those that a kernel does not
    declare itself.

    Stock Triton refuses a launch with an option it does not know. Kernels change in nothing else.
    """
    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.startswith(_KERNELS) else ():
            # an autotuner passes its configurations to the kernel inside
            while hasattr(getattr(kernel, "fn", None), "run"):
                kernel = kernel.fn
            if (
                hasattr(kernel, "arg_names")
                and hasattr(kernel, "run")
                and not hasattr(kernel.run, "without_amd_options")
            ):
                kernel.run = _without_amd_options(kernel.run, frozenset(kernel.arg_names))


def _without_amd_options(run: Callable[..., Any], declared: frozenset[str]) -> Callable[..., Any]:
    dropped = AMD_OPTIONS - declared

    def launch(*args: Any, **options: Any) -> Any:
        return run(*args, **{name: value for name, value in options.items() if name not in dropped})

    launch.without_amd_options = True  # type: ignore[attr-defined]
    return launch
