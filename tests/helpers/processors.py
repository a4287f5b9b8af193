"""Our C++ for CPUs, compiled for others than this one."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from specdec.device.device import uses_avx512
from specdec.kernels import native

PROCESSORS = ("x86-64", "haswell", "skylake-avx512")
"""Without AVX2, without AVX-512 and without VNNI."""


def library_for(processor: str, folder: Path) -> ctypes.CDLL:
    """The library with the instructions of a processor; the test is skipped where this one lacks
    them.
    """
    avx2 = "AVX" in torch.backends.cpu.get_cpu_capability()
    has = {"x86-64": True, "haswell": avx2, "skylake-avx512": uses_avx512()}
    if platform.machine() != "x86_64" or not has[processor]:
        pytest.skip("this CPU has no such instructions")
    options = [option.replace("native", processor) for option in native.OPTIONS]
    path = folder / "library.so"
    subprocess.run(["g++", *options, native.SOURCE, "-o", path], check=True)
    return native.declared(ctypes.CDLL(str(path)))
