"""Which device and type to compute in, and how much memory the cache may take by default."""

import os
import platform

import torch

from specdec.base.config import CacheDtype
from specdec.base.cores import usable_cores
from specdec.base.errors import InvalidInputError
from specdec.device.amd_gpus import free_of_apu, why_unseen

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first accelerator (ROCm devices answer to "cuda"),
    else the CPU.

    For a CPU, torch is kept from starting more threads than the process may use at once;
    `OMP_NUM_THREADS` overrules that.

    Raises:
        InvalidInputError: torch does not know the device, or this machine does not have it.
    """
    device = _find_device(name)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    return device


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        what = f"unknown device {name!r}"
        raise InvalidInputError(f"{what}; choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"device {name!r} is not served; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError(
            f"device {name!r} is not on this machine ({torch.cuda.device_count()} accelerators"
            f" found); try cpu"
        )
    return device


def torch_build() -> str:
    """What torch is built for, such as "ROCm 7.1"."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"


def unseen_gpu() -> str | None:
    """Why torch finds no GPU although an AMD GPU is here, with the way out; None when it finds one,
    or none is here.
    """
    if torch.cuda.is_available():
        return None
    build = f"torch {torch.__version__}, built for {torch_build()},"
    return why_unseen(build, rocm=torch.version.hip is not None)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type called `name`; "auto" is bfloat16, float32 on a CPU without its instructions; see
    also `specdec.layers.packed.check.fastest_dtype`.

    Raises:
        InvalidInputError: the name is not float32, bfloat16 or float16.
    """
    if name == "auto":
        slow_bfloat16 = device.type == "cpu" and not (
            uses_avx512() and torch.cpu._is_avx512_bf16_supported()
        )
        return torch.float32 if slow_bfloat16 else torch.bfloat16
    if name not in _DTYPES:
        raise InvalidInputError(f"unknown dtype {name!r}; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def uses_avx512() -> bool:
    """Whether torch's own CPU kernels use AVX-512: the CPU has it, and `ATEN_CPU_CAPABILITY` does
    not ask for less.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def rocm_architecture(device: torch.device) -> str | None:
    """AMD architecture of a device, such as "gfx942"; None for what is no ROCm device."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def float8_dtype(device: torch.device) -> torch.dtype:
    """The flavor of e4m3 that a device computes with, if it has 8-bit floats at all."""
    return torch.float8_e4m3fnuz if rocm_architecture(device) == "gfx942" else torch.float8_e4m3fn


def cache_dtype(name: CacheDtype, device: torch.device) -> torch.dtype | None:
    """Type of the KV cache when it is not the model's: for "fp8" the flavor of e4m3 that the device
    computes with.
    """
    if name == "auto":
        return None
    return float8_dtype(device)


def default_cache_bytes(device: torch.device) -> int:
    """Budget of the KV cache when none is stated: half of the free memory of an accelerator, a
    quarter of a CPU's memory.
    """
    if device.type == "cuda":
        return free_memory(device) // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def free_memory(device: torch.device) -> int:
    """Bytes that an accelerator has free.

    Of an AMD GPU within a processor ROCm tells what is set aside for it alone, or more than there
    is; there the kernel's count goes before.
    """
    free, total = torch.cuda.mem_get_info(device)
    if rocm_architecture(device) and torch.cuda.get_device_properties(device).is_integrated:
        counted = free_of_apu()
        if counted is not None:
            return counted
    return min(free, total)


def describe_device(device: torch.device) -> str:
    """Kind, name and, for an AMD device, architecture."""
    if device.type == "cpu":
        return f"cpu, {os.cpu_count()} cores, {platform.machine()}"
    architecture = rocm_architecture(device)
    kind = f"ROCm {architecture}" if architecture else "CUDA"
    return f"{device}, {torch.cuda.get_device_name(device)}, {kind}"
