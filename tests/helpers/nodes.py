"""Things in a file system that are no regular files,
each made for one test in a folder of its own.
"""

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NULL, FULL, NO_DISK = os.makedev(1, 3), os.makedev(1, 7), os.makedev(240, 250)


def device(path: Path, number: int, kind: int = stat.S_IFCHR) -> None:
    """A device node, for which one has to be root."""
    try:
        os.mknod(path, kind | 0o666, number)
    except PermissionError:
        pytest.skip("only root makes devices")


REFUSED: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a block device": lambda path: device(path, NO_DISK, stat.S_IFBLK),
    "a folder": lambda path: (path / "kept").mkdir(parents=True),
    "symbolic links": lambda path: path.symlink_to(path.name),  # leads to itself
}
"""What no file can be written to, by the words that a message has for it."""


def look(path: Path) -> list[tuple[str, int, int, str]]:
    """What stands in a folder: names, kinds, inodes, and where links lead."""
    found = [(one, one.lstat()) for one in sorted(path.rglob("*"))]
    return [
        (one.name, info.st_mode, info.st_ino, os.readlink(one) if one.is_symlink() else "")
        for one, info in found
    ]


@contextmanager
def mounted(path: Path) -> Iterator[None]:
    """Mounts another file over an existing one, as containers do, for which one has to be root."""
    outside = path.with_name("outside")
    outside.write_bytes(path.read_bytes())
    done = subprocess.run(["mount", "--bind", outside, path], capture_output=True)
    if done.returncode:
        pytest.skip("only root mounts files")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def pipe(path: Path) -> Iterator[None]:
    """A pipe that somebody may write to, so that who opens it does not wait."""
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    try:
        yield
    finally:
        os.close(held)
