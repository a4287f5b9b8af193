"""Our own C++ for CPUs, `cpu.cpp`: this machine's compiler makes a library of it at first use."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path

from specdec.base.errors import InvalidInputError, SpecDecError, one_line
from specdec.base.files import cache_folder
from specdec.base.writing import write_atomically

logger = logging.getLogger(__name__)

NO_COMPILER = "no C++ compiler; install g++, or name one in CXX"
SOURCE = Path(__file__).with_name("cpu.cpp")
OPTIONS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-std=c++17", "-ffp-contract=off", "-w"),
)


class Part(ctypes.Structure):
    """Outputs of one of ggml's types, laid out."""

    _fields_ = (("tiles", ctypes.c_void_p), ("type", ctypes.c_int32), ("outputs", ctypes.c_int32))


_POINTERS = (
    *("qkv", "cos", "sin", "keys", "values"),
    *("out", "query_norm", "key_norm", "slots", "ancestors", "lengths", "blocks"),
)
_NUMBERS = (
    *("requests", "width", "heads", "kv_heads", "dim"),
    *("num_blocks", "block_size", "causal", "threads"),
)


class Attention(ctypes.Structure):
    """Arguments of `attend`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    )


@cache
def native() -> ctypes.CDLL | None:
    """The compiled library; None, which is said once, where none can be made."""
    try:
        return declared(ctypes.CDLL(str(_compiled())))
    except (OSError, SpecDecError, subprocess.SubprocessError) as error:
        reason = one_line(error)
        logger.warning("plain torch computes on this CPU, more slowly: %s", reason)
        return None


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of what its functions are given."""
    pointer, number, large = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.packed_bytes.argtypes, library.packed_bytes.restype = (number, large, large), large
    library.pack.argtypes = (number, pointer, large, large, pointer, number)
    library.multiply.argtypes = (
        *(ctypes.POINTER(Part), number, pointer, large, number, number),
        *(pointer, pointer, pointer, number, number),
    )
    library.norm_rows.argtypes = (pointer, large, number, number, pointer, ctypes.c_float, pointer)
    library.gate_rows.argtypes = (pointer, number, number, pointer, number)
    library.attend.argtypes = (ctypes.POINTER(Attention),)
    return library


def _compiled() -> Path:
    """The library's file, made unless there is one of this source, compiler and CPU."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    about = (SOURCE.read_text(), version.stdout, _processor(), *OPTIONS)
    path = cache_folder() / "compiled" / f"cpu-{sha256(repr(about).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    logger.warning("compiling for this CPU, once: some 10 s")

    def compile_to(unfinished: Path) -> None:
        command = [compiler, *OPTIONS, str(SOURCE), "-o", str(unfinished)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            said = run.stderr.strip().splitlines() or [f"it ended with {run.returncode}"]
            raise InvalidInputError(f"{compiler} cannot compile {SOURCE.name}: {said[0]}")

    write_atomically(path, compile_to)
    return path


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise InvalidInputError(NO_COMPILER)


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(names)}))
