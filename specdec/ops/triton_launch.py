"""Where Triton kernels can run, and what surrounds their launch. Needs no Triton itself."""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor


def unavailable_reasons(device: torch.device) -> list[str]:
    """Why Triton kernels cannot run on `device`; empty when they can.

    A CPU counts when Triton interprets its kernels there, for tests: `TRITON_INTERPRET=1`, set before Triton is imported.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return [f"{device} is not a CUDA or ROCm device"]
    if find_spec("triton") is None:
        return ["triton is not installed (pip install triton)"]
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return [f"compute capability {major}.{minor} (the kernels need 8.0)"]
    return []


def num_processors(device: torch.device) -> int:
    """Multiprocessors or compute units of `device`; 1 for an interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Makes the device of `tensor` current, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
