"""Our C++ for CPUs, compiled for others than this one."""

import ctypes
import platform
from hashlib import sha256

import pytest
import torch

from specdec.base.files import cache_folder
from specdec.base.writing import write_atomically
from specdec.device.device import uses_avx512
from specdec.kernels import native

PROCESSORS = ("x86-64", "haswell", "skylake-avx512")
"""Without AVX2, without AVX-512 and without VNNI."""


def library_for(processor: str) -> ctypes.CDLL:
    """The library with the instructions of a processor, kept as the one for this machine is; the
    test is skipped where this one lacks them.
    """
    avx2 = "AVX" in torch.backends.cpu.get_cpu_capability()
    has = {"x86-64": True, "haswell": avx2, "skylake-avx512": uses_avx512()}
    if platform.machine() != "x86_64" or not has[processor]:
        pytest.skip("this CPU has no such instructions")
    options = [option.replace("native", processor) for option in native.OPTIONS]
    about = native.SOURCE.read_bytes(), native._run("g++", "--version"), options
    name = f"{processor}-{sha256(repr(about).encode()).hexdigest()[:16]}.so"
    path = cache_folder() / "compiled" / name
    if not path.exists():
        command = "g++", *options, str(native.SOURCE), "-o"
        write_atomically(path, lambda unfinished: native._run(*command, str(unfinished)))
    return native.declared(ctypes.CDLL(str(path)))
