"""The one way to write a user's file: whole or not at all, behind its links, and never in place of
what is no regular file.

Nothing else opens a file for writing, moves or removes one; `tests/test_writing.py` looks.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from specdec.base.errors import CapacityError, InvalidInputError
from specdec.base.files import reason_of, user_path

Write = Callable[[Path], object]

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IN_PLACE = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}
"""Why a file cannot be replaced that may be written: it is mounted, or its folder is closed."""

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
}  # fmt: skip
_MAX_LINKS = 40  # as Linux has it
_OF_TORCH = ("PytorchStreamWriter", "unexpected pos")
"""Words of the RuntimeError by which torch.save reports a full disk."""


class Place(NamedTuple):
    """Where a path leads, behind all links.

    Attributes:
        path: a regular file, a character device, or the name of a file to be made.
        found: what stands there.
        descriptor: an open file of this process that the path names, as /dev/stdout does.
    """

    path: Path
    found: os.stat_result | None
    descriptor: int | None = None

    @property
    def is_stream(self) -> bool:
        """Whether what is written there passes by, and is neither read back nor replaced."""
        is_device = self.found is not None and stat.S_ISCHR(self.found.st_mode)
        return self.descriptor is not None or is_device


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what goes wrong while `path` is written into one line.

    Raises:
        CapacityError: the disk has no room.
        InvalidInputError: the system refuses to write there.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError):
            full, reason = error.errno in NO_ROOM, error.strerror or str(error)
        elif any(words in str(error) for words in _OF_TORCH):
            full, reason = True, str(error).splitlines()[0]
        else:
            raise
        kind, way_out = (
            (CapacityError, "make room") if full else (InvalidInputError, "choose another place")
        )
        what = f"cannot write {str(path)!r} ({reason})"
        way_out = f"what was written before is kept, so {way_out} and run again"
        raise kind(f"{what}; {way_out}") from error


def place_of(path: Path) -> Place:
    """Where writing to `path` leads.

    Raises:
        InvalidInputError: to a folder, a FIFO, a socket or a disk; or the system does not show it.
    """
    if "\0" in str(path):
        what = f"cannot write {str(path)!r}: a name holds no NUL character"
        raise InvalidInputError(f"{what}; choose another")
    descriptors = re.compile(rf"(/proc/(self|{os.getpid()})(/task/\d+)?|/dev)/fd")
    end = path
    with disk_errors(path):
        for _ in range(_MAX_LINKS):
            end = Path(os.path.realpath(end.parent), end.name)
            if descriptors.fullmatch(str(end.parent)) and end.name.isdigit():
                return Place(end, os.fstat(int(end.name)), int(end.name))
            if not end.is_symlink():
                break
            end = end.parent / os.readlink(end)
        else:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        try:
            found = os.lstat(end)
        except FileNotFoundError:
            return Place(end, None)
    if kind := _KINDS.get(stat.S_IFMT(found.st_mode)):
        raise InvalidInputError(f"cannot write {str(path)!r}: it is {kind}; name a file")
    return Place(end, found)


def check_writable(*paths: str | Path | None) -> None:
    """Refuses output files that could not be written, before hours of work and not after.

    Raises:
        InvalidInputError: see `place_of`; or file or folder is closed, or the folder is missing.
    """
    for path in [Path(path) for path in paths if path]:
        place = place_of(path)
        folder = place.path.parent if path.is_symlink() else path.parent
        if place.descriptor is not None:
            closed = fcntl.fcntl(place.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        else:
            closed = place.found is not None and not os.access(place.path, os.W_OK)
        if closed:
            what = f"cannot write {str(path)!r}: it is open for reading alone"
            raise InvalidInputError(f"{what}; choose another place")
        if place.found is None:
            if not _is_open(folder):
                what = f"cannot write {str(path)!r}: folder {str(folder)!r} is missing or closed"
                raise InvalidInputError(f"{what}; make it first")
            with disk_errors(path), _unfinished(place):  # the system alone knows all its reasons
                pass


def check_apart(outputs: Iterable[str | None], inputs: Iterable[str] = ()) -> None:
    """Refuses an output file in whose place another one would be written, or that is an input.

    Raises:
        InvalidInputError: there is one; see also `place_of`.
    """
    taken = {os.path.realpath(path) for path in inputs}
    for path in filter(None, outputs):
        place = place_of(Path(path))
        if str(place.path) in taken and not place.is_stream:
            what = f"{path!r} is named for two things, one of which would be written over the other"
            raise InvalidInputError(f"{what}; choose another place for the output")
        taken.add(str(place.path))


def write_atomically(path: Path, write: Write) -> None:
    """Calls `write(temporary path)` and puts the result at `path`, where failures change nothing.

    Links stay, and the file they lead to is written, with the rights it had. A device or a
    descriptor is told the result. A file that cannot be replaced, as one that a container has
    mounted, is written in place, and gets its content back where that fails.

    Raises:
        CapacityError, InvalidInputError: see `place_of` and `disk_errors`.
    """
    place = place_of(path)
    with disk_errors(path):
        if not place.is_stream:
            place.path.parent.mkdir(parents=True, exist_ok=True)
            if place.found is not None and not os.access(place.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with _unfinished(place) as unfinished:
            write(unfinished)
            if place.is_stream:
                _send(place, unfinished.read_bytes())
            else:
                _put(unfinished, place)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file as a whole or not at all.

    Raises:
        CapacityError, InvalidInputError: see `write_atomically`.
    """
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8", newline=""))


def append(path: Path, text: str, *, head: str = "", private: bool = False) -> None:
    """Adds `text` to a file, behind `head` where the file is empty: all of it or nothing, whoever
    else adds to it. A new file is for its owner alone if it is `private`.

    A device or a descriptor is told `text` alone.

    Raises:
        CapacityError, InvalidInputError: see `place_of` and `disk_errors`.
    """
    place = place_of(path)
    with disk_errors(path):
        if place.is_stream:
            _send(place, text.encode())
            return
        flags, rights = os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600 if private else 0o666
        with _alone(FileIO(os.open(place.path, flags, rights), "a")) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                _write_all(file, (text if size else head + text).encode())
            except BaseException:
                file.truncate(size)
                raise


@contextmanager
def reading_alone(path: Path) -> Iterator[FileIO | None]:
    """A regular file that `append` adds to, which nobody does meanwhile; None where there is none.

    Raises:
        CapacityError, InvalidInputError: see `place_of` and `disk_errors`.
    """
    place = place_of(path)
    if place.is_stream or place.found is None:
        yield None
        return
    with disk_errors(path), _alone(FileIO(place.path, "r+")) as file:
        yield file


def remove(path: Path) -> None:
    """Removes a file, if it is a regular one and there.

    Raises:
        InvalidInputError: the system refuses.
    """
    with disk_errors(path), suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes a folder with all that is in it, if it is there.

    Raises:
        InvalidInputError: the system refuses.
    """
    with disk_errors(path), suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A folder that no other process claims meanwhile.

    Raises:
        InvalidInputError: another one does.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        what = f"folder {str(folder)!r} is in use by another process"
        raise InvalidInputError(f"{what}; choose another") from error
    try:
        yield
    finally:
        os.close(number)


def make_folder(name: str | Path, *, private: bool = False) -> Path:
    """The folder `name`, made if it is missing; for its owner alone if it is `private`.

    Raises:
        InvalidInputError: it cannot be made, or nothing can be written there.
    """
    folder = user_path(name)
    try:
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        what = f"cannot make folder {str(name)!r}: {reason}"
        raise InvalidInputError(f"{what}; choose another with --out") from error
    if not _is_open(folder):
        raise InvalidInputError(f"cannot write to folder {str(name)!r}; choose another with --out")
    return folder


def fill_folder(path: Path, files: Mapping[str, Write]) -> None:
    """Writes files into a folder, in order: the last of them makes the folder whole to readers.

    A folder that is new appears with all of them or not at all. One that exists, and may be
    mounted, is filled file by file; where that fails, files that were not there before go again.

    Raises:
        CapacityError, InvalidInputError: see `write_atomically`.
    """
    with disk_errors(path):
        path = Path(os.path.realpath(path))
        if path.is_dir():
            new = [path / name for name in files if not os.path.lexists(path / name)]
            try:
                for name, write in files.items():
                    write_atomically(path / name, write)
            except BaseException:
                for file in new:
                    remove(file)
                raise
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with _unfinished_folder(path) as unfinished:
            for name, write in files.items():
                write(unfinished / name)
                _sync(unfinished / name)
            unfinished.rename(path)


def _is_open(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def _alone(file: FileIO) -> Iterator[FileIO]:
    """A file while it is locked, and closed afterwards. A file system without locks has none."""
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextmanager
def _names(path: Path) -> Iterator[list[Path]]:
    """Names beside `path` for what is not finished, in order of preference.

    The first is always the same, so that kills leave one at most; others' while they write.
    """
    end = path.name[-40:]  # with its suffix, which tells some writers what to write
    own = path.with_name(f".unfinished-{secrets.token_hex(4)}-{end}")
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError:
        yield [own]
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = [path.with_name(f".unfinished-{end}"), own]
    except OSError:
        names = [own]
    try:
        yield names
    finally:
        os.close(folder)


@contextmanager
def _unfinished(place: Place) -> Iterator[Path]:
    """An empty file for new content: beside the place if that can be, else a temporary one."""
    if place.is_stream or (place.found is not None and not _is_open(place.path.parent)):
        with TemporaryDirectory(prefix="specdec-") as scratch:
            yield Path(scratch, f"content{place.path.suffix}")
        return
    rights = 0o666 if place.found is None else stat.S_IMODE(place.found.st_mode)
    with _names(place.path) as names:
        for path in names:
            remove(path)  # of a process that was killed
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL, rights))
                break
        try:
            yield path
        finally:
            remove(path)


@contextmanager
def _unfinished_folder(path: Path) -> Iterator[Path]:
    with _names(path) as names:
        folder = names[0]
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _put(unfinished: Path, place: Place) -> None:
    """Moves what is finished to its place; a file that has to stay takes the content over."""
    if place.found is not None:
        with suppress(OSError):
            os.chown(unfinished, place.found.st_uid, place.found.st_gid)
        os.chmod(unfinished, stat.S_IMODE(place.found.st_mode))
    _sync(unfinished)
    try:
        unfinished.replace(place.path)
    except OSError as error:
        if place.found is None or error.errno not in _IN_PLACE:
            raise
        _overwrite(place.path, unfinished.read_bytes())


def _sync(path: Path) -> None:
    """A disk that fails late has to do so before anything is moved."""
    with FileIO(path) as file:
        os.fsync(file.fileno())


def _overwrite(path: Path, content: bytes) -> None:
    with FileIO(path, "r+") as file:
        before = file.readall()
        try:
            _fill(file, content)
        except BaseException:
            _fill(file, before)
            raise


def _fill(file: FileIO, content: bytes) -> None:
    file.seek(0)
    _write_all(file, content)
    file.truncate(len(content))
    os.fsync(file.fileno())


def _send(place: Place, content: bytes) -> None:
    """Writes to a device, or to an open file of this process where that stands."""
    if place.descriptor is None:
        # a line that is down would wait
        number = os.open(place.path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        os.set_blocking(number, True)
    else:
        for printed in (sys.stdout, sys.stderr):
            printed.flush()
        number = os.dup(place.descriptor)
    with FileIO(number, "w") as file:
        _write_all(file, content)


def _write_all(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]
