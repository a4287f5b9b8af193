"""Folders below the user's cache with what can be made again: made once, and whole or not there."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from specdec.base.errors import CapacityError, InvalidInputError, SpecDecError
from specdec.base.files import parse_json
from specdec.base.writing import fill_folder, write_text

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Written last: of every other file its name, size, SHA-256 and, in nanoseconds, its time."""

Source = TypeVar("Source")

_Entry = tuple[int, str, int]


def kept_folder(
    folder: Path,
    find: Callable[[], Source],
    make: Callable[[Source], Mapping[str, bytes]],
    *,
    what: str,
) -> Path:
    """A folder with these files, made by the first call.

    Later calls look at the sizes and times of the files there, and read all of one whose time has
    changed. Processes that call at the same time make it once.

    Args:
        find: gives what the files are made of; where it fails, nothing is made.
        make: gives the content of every file.

    Raises:
        CapacityError: the disk, or a limit on file sizes, has no room.
        InvalidInputError: the cache folder cannot be written.
    """
    if _is_whole(folder):
        return folder
    root, source = folder.parent, find()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not _is_whole(folder):  # another process may have made it meanwhile
                if folder.exists():
                    logger.warning("%s in %s is damaged, and is made again", what, folder)
                _install(make(source), folder, what)
    except (OSError, InvalidInputError) as error:
        reason = error.__cause__ or error
        raise InvalidInputError(
            f"cannot write the model cache {root}: {getattr(reason, 'strerror', None) or reason};"
            " set SPECDEC_CACHE to a folder that can be written"
        ) from error
    return folder


def sha256_of(path: Path) -> str:
    """In hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether every file that the manifest names is there as written; unreadable ones are not."""
    try:
        manifest: dict[str, _Entry] = parse_json((folder / MANIFEST).read_bytes())
        found = {name: (folder / name).stat() for name in manifest}
        if any(found[name].st_size != size for name, (size, _, _) in manifest.items()):
            return False
        later = [name for name, (*_, time) in manifest.items() if found[name].st_mtime_ns != time]
        if any(sha256_of(folder / name) != manifest[name][1] for name in later):
            return False
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    if later:  # a copy, which is not to be read again at every start
        with suppress(SpecDecError):
            digests = {name: digest for name, (_, digest, _) in manifest.items()}
            _write_manifest(digests, folder / MANIFEST)
    return True


def _write_manifest(digests: Mapping[str, str], path: Path) -> None:
    """Writes a manifest beside the files that it names."""
    found = {name: (path.parent / name).stat() for name in digests}
    entries = {name: [one.st_size, digests[name], one.st_mtime_ns] for name, one in found.items()}
    write_text(path, json.dumps(entries))


def _install(files: Mapping[str, bytes], folder: Path, what: str) -> None:
    """Puts files and their manifest into a folder, over damaged ones. The caller holds the lock."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    writes = {name: partial(Path.write_bytes, data=content) for name, content in files.items()}
    try:
        fill_folder(folder, {**writes, MANIFEST: partial(_write_manifest, digests)})
    except CapacityError as error:
        needed, free = sum(map(len, files.values())), shutil.disk_usage(folder.parent).free
        reason = getattr(error.__cause__, "strerror", error)
        raise CapacityError(
            f"{what} takes {needed:,} bytes in {folder.parent}, where {free:,} are free ({reason});"
            " make room, or set SPECDEC_CACHE to a folder on another disk"
        ) from error
