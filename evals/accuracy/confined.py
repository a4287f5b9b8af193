"""A process that reads a program which a model wrote, confines itself, and runs the program.

It may compute and read files. Every other system call is refused by a seccomp filter: it opens no
file to write, makes no socket, process or thread, signals nobody, and cannot lift its limits. That
keeps the machine whole; a program that looks for the word among its own frames can say that it
passed. This file imports nothing of the package.
"""

import ctypes
import fcntl
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable
from typing import Any

MEMORY = 2 * 2**30
"""Bytes of address space."""

UNCONFINED = b"not confined"
"""Said by a process that could not confine itself, and so ran nothing."""

# By machine: the code of its system calls (AUDIT_ARCH), openat, open or None, fcntl, and the others
# that are allowed: those that read, write what is open, map memory, tell the time, sleep, handle
# signals of its own, tell names of users and of the machine, and end it.
_CALLS: dict[str, tuple[int, int, int | None, int, str]] = {
    "x86_64": (
        0xC000003E,
        257,
        2,
        72,
        "0 1 3 4 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 23 24 25 28 32 33 35 39 60 63 78 79 89"
        " 96 98 99 100 102 104 107 108 110 111 131 137 138 158 186 201 202 204 217 218 219 228 229"
        " 230 231 239 262 267 269 270 271 273 318 332 334 439",
    ),
    "aarch64": (
        0xC00000B7,
        56,
        None,
        25,
        "17 23 43 44 48 57 61 62 63 64 65 66 67 72 73 78 79 80 93 94 96 98 99 101 113 114 115"
        " 123 124 128 132 134 135 139 153 160 165 169 172 173 174 175 176 177 178 179 214 215 216"
        " 222 226 233 236 278 291 293 439",
    ),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Of fcntl; others lock files, or have the kernel signal any process when something happens.
_HARMLESS = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # the error is EPERM
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # places in what the filter is shown
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def _filter(machine: str) -> bytes:
    """The filter's instructions."""
    code, openat, open_, control, allowed = _CALLS[machine]
    program = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, code), (_RETURN, 0, 0, _REFUSE)]
    program.append((_LOAD, 0, 0, _NUMBER))
    program += _allow(map(int, allowed.split()))
    for opening, flags in ((openat, 2), (open_, 1)):
        if opening is not None:
            program += [(_EQUAL, 0, 4, opening), (_LOAD, 0, 0, _ARGUMENTS + 8 * flags)]
            program += [(_ANY_BIT, 0, 1, _WRITES), (_RETURN, 0, 0, _REFUSE)]
            program.append((_RETURN, 0, 0, _ALLOW))
    program += [(_EQUAL, 1, 0, control), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _ARGUMENTS + 8)]
    program += [*_allow(_HARMLESS), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("HBBI", *one) for one in program)


def _allow(values: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """Instructions that allow the call where what was loaded is one of `values`."""
    tests = [((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)) for value in values]
    return [instruction for test in tests for instruction in test]


def confine(seconds: int, size: int) -> None:
    """Confines this process for good.

    Args:
        seconds: of the processor's time that it may take.
        size: bytes that an open file may grow to.

    Raises:
        OSError: it cannot be confined here.
        ValueError: a limit of its own is stricter.
    """
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        raise OSError("neither Linux on x86-64 nor on ARM64")
    for limit, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, size),
    ):
        resource.setrlimit(limit, (most, most))
    instructions = _filter(platform.machine())
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HL", len(instructions) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses a seccomp filter")


def main() -> None:
    """Reads a word and a program; writes the word once the program has ended without an error."""
    seconds = int(sys.argv[1])
    word, _, source = sys.stdin.read().partition("\n")
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)
    try:
        confine(seconds, len(word))
    except (OSError, ValueError):
        os.write(answer, UNCONFINED)
        os._exit(1)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<program>", "exec"), names)
    os.write(answer, word.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
