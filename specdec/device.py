"""Which device and type to compute in, and how much memory the cache may take by default."""

import os

import torch

from specdec.config import CacheDtype
from specdec.errors import InvalidInputError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first accelerator (ROCm devices answer to "cuda"), else the CPU.

    Raises:
        InvalidInputError: torch does not know the device, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInputError(f"unknown device {name!r}; choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"device {name!r} is not served; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError(f"device {name!r} is not on this machine ({torch.cuda.device_count()} accelerators found); try cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type called `name`; "auto" is bfloat16, or float32 on a CPU without bfloat16 instructions.

    Raises:
        InvalidInputError: the name is not float32, bfloat16 or float16.
    """
    if name == "auto":
        slow_bfloat16 = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
        return torch.float32 if slow_bfloat16 else torch.bfloat16
    if name not in _DTYPES:
        raise InvalidInputError(f"unknown dtype {name!r}; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def rocm_architecture(device: torch.device) -> str | None:
    """AMD architecture of a device, such as "gfx942"; None for anything that is not a ROCm device."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def cache_dtype(name: CacheDtype, device: torch.device) -> torch.dtype | None:
    """Type of the KV cache when it is not the model's: for "fp8" the flavour of e4m3 that the device computes with."""
    if name == "auto":
        return None
    return torch.float8_e4m3fnuz if rocm_architecture(device) == "gfx942" else torch.float8_e4m3fn


def default_cache_bytes(device: torch.device) -> int:
    """Budget of the KV cache when none is stated: half of the free memory of an accelerator, a quarter of a CPU's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
