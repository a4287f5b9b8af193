"""Where Triton kernels can run, and what surrounds their launch. Needs no Triton itself."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import specdec.device.device
from specdec.base.packages import install_command

HOPPER_SHARED_MEMORY = 227 * 1024
AMD_SHARED_MEMORY = {"gfx950": 160 * 1024}
"""Bytes of shared memory of architectures that have more than the others' 64 KiB."""


def unavailable_reasons(device: torch.device) -> list[str]:
    """Why Triton kernels cannot run on `device`; empty when they can.

    A CPU counts when Triton interprets its kernels there, for tests: `TRITON_INTERPRET=1`, set
    before Triton is imported.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return [f"{device} is not a CUDA or ROCm device"]
    if find_spec("triton") is None:
        return [f"triton is not installed ({install_command('triton')})"]
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        major, minor = torch.cuda.get_device_capability(device)
        return [f"compute capability {major}.{minor} (the kernels need 8.0)"]
    alike_keys()
    return []


@cache
def alike_keys() -> None:
    """Gives a kernel the same key in every process, by which Triton finds it compiled.

    Triton (up to 3.7) adds what a called function uses to its caller before it has looked into that
    function, so that a caller's key depends on which kernel was launched first.
    """
    from triton.runtime import jit

    finder: Any = jit.DependenciesFinder
    if add := getattr(finder, "_update_hash", None):

        def add_known(self: Any, function: Any) -> None:
            getattr(function, "cache_key", None)  # looks into it
            add(self, function)

        finder._update_hash = add_known


def num_processors(device: torch.device) -> int:
    """Multiprocessors or compute units of `device`; 1 for an interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes of a processor's fast memory that one program can have; an interpreter has no such
    limit.
    """
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    if architecture := specdec.device.device.rocm_architecture(device):
        return AMD_SHARED_MEMORY.get(architecture, 64 * 1024)
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


def num_stages(stage_bytes: int, memory: int, *, most: int) -> int:
    """Iterations whose loads can be under way at once, given what each loads and what there is; a
    little is left for the compiler.

    >>> [num_stages(32768, size, most=3) for size in (HOPPER_SHARED_MEMORY, 99 * 1024, 64 * 1024)]
    [3, 2, 1]
    """
    return max(1, min(most, (memory - 8192) // stage_bytes))


@lru_cache(maxsize=16)
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Options of every launch: on Hopper and later a kernel may be set up while the one before it
    comes to its end.

    It then waits for that one itself (`specdec.kernels.triton_overlap`), and the pause between the
    two is shorter.
    """
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    ):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Makes the device of `tensor` current, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
