"""Our own C++ for CPUs, `cpu.cpp`: this machine's compiler makes a library of it at first use."""

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec.base.errors import InvalidInputError, SpecDecError, one_line
from specdec.base.files import cache_folder
from specdec.base.writing import write_atomically

logger = logging.getLogger(__name__)

NO_COMPILER = "no C++ compiler; install g++, or name one in CXX"
MAX_SECONDS = 300
"""Seconds that a compiler may take."""
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
    """Arguments of `attend` and `store`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("stride", ctypes.c_int64),
    )


@cache
def native() -> ctypes.CDLL | None:
    """The compiled library; None, which is said once, where none can be made."""
    try:
        return _library()
    except (OSError, AttributeError, SpecDecError, subprocess.SubprocessError) as error:
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
    library.store.argtypes = (ctypes.POINTER(Attention), number)
    library.best.argtypes = (pointer, number, number, number, pointer, pointer, number)
    return library


def _library() -> ctypes.CDLL:
    """The one of this source, compiler and CPU: from the cache, or made and put there."""
    compiler = _compiler()
    about = (SOURCE.read_bytes(), *compiler, _run(*compiler, "--version"), _processor(), *OPTIONS)
    path = cache_folder() / "compiled" / f"cpu-{sha256(repr(about).encode()).hexdigest()[:16]}.so"
    with suppress(OSError, AttributeError):  # missing, not whole, or on a disk that runs nothing
        return declared(ctypes.CDLL(str(path)))
    logger.warning("compiling for this CPU, once: a few seconds")
    with TemporaryDirectory(prefix="specdec-") as scratch:
        made = Path(scratch, path.name)
        _run(*compiler, *OPTIONS, str(SOURCE), "-o", str(made))
        if not made.exists():
            raise InvalidInputError(f"{shlex.join(compiler)} compiles nothing; is it a compiler?")
        try:
            write_atomically(path, lambda unfinished: unfinished.write_bytes(made.read_bytes()))
            return declared(ctypes.CDLL(str(path)))
        except (OSError, AttributeError, SpecDecError) as error:
            logger.warning(
                "compiled at every start, unless SPECDEC_CACHE names another folder: %s",
                one_line(error),
            )
        return declared(ctypes.CDLL(str(made)))


def _run(*command: str) -> str:
    """What a compiler prints, in English."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "LC_ALL": "C"}}
    run = subprocess.run(command, capture_output=True, timeout=MAX_SECONDS, **given)
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else f"it ended with {run.returncode}"
        raise InvalidInputError(f"{command[0]} cannot compile {SOURCE.name}: {reason}")
    return run.stdout.decode(errors="replace")


def _compiler() -> list[str]:
    """The command: `CXX`, options included, or the first that there is."""
    if stated := os.environ.get("CXX"):
        try:
            command = [stated] if shutil.which(stated) else shlex.split(stated)
        except ValueError as error:
            raise InvalidInputError(f"CXX is {stated!r}: {one_line(error)}") from error
        if not command or shutil.which(command[0]) is None:
            raise InvalidInputError(
                f"CXX is {stated!r}, which is no program; name one, or unset CXX"
            )
        return command
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise InvalidInputError(NO_COMPILER)


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(names)}))
