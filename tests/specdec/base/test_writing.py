"""The one way of writing: what it never replaces, what survives a failure, and who writes at the
same time.
"""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from specdec.base import writing
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.base.writing import (
    append,
    check_writable,
    fill_folder,
    make_folder,
    place_of,
    reading_alone,
    remove,
    write_atomically,
    write_text,
)
from tests.helpers.nodes import FULL, NULL, REFUSED, device, look, mounted
from tests.helpers.waiting import HANG

WRITERS: dict[str, Callable[[Path], object]] = {
    "whole": lambda path: write_text(path, "new\n"),
    "added": lambda path: append(path, "new\n", head="head\n"),
    "looked at": check_writable,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_refused_and_stays(
    kind: str, writer: str, linked: bool, tmp_path: Path
) -> None:
    """Catches a FIFO that is waited for, and whatever is renamed over or removed."""
    path = tmp_path / "x"
    REFUSED[kind](path)
    if linked:
        path = tmp_path / "link"
        path.symlink_to("x")
    before = look(tmp_path)
    with pytest.raises(InvalidInputError, match=f"cannot write .*{kind}"):
        WRITERS[writer](path)
    assert look(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_device_is_written_and_stays(writer: str, tmp_path: Path) -> None:
    device(tmp_path / "null", NULL)
    before = look(tmp_path)
    WRITERS[writer](tmp_path / "null")
    assert look(tmp_path) == before and place_of(tmp_path / "null").is_stream


@pytest.mark.parametrize("writer", ["whole", "added"])
def test_a_device_without_room_says_so(writer: str, tmp_path: Path) -> None:
    device(tmp_path / "full", FULL)
    with pytest.raises(CapacityError, match=r"No space left on device.*make room"):
        WRITERS[writer](tmp_path / "full")


@pytest.mark.parametrize("writer", ["whole", "added"])
@pytest.mark.parametrize("there", [False, True])
def test_a_link_stays_and_its_target_is_written(there: bool, writer: str, tmp_path: Path) -> None:
    """Through two links, one of them to another folder; where the target is missing, it is made."""
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    (tmp_path / "far" / "second").symlink_to("target")
    link.symlink_to(tmp_path / "far" / "second")
    if there:
        target.write_text("old\n")
    WRITERS[writer](link)
    assert link.is_symlink() and (tmp_path / "far" / "second").is_symlink()
    assert (
        target.read_text()
        == {"whole": "new\n", "added": "old\nnew\n" if there else "head\nnew\n"}[writer]
    )
    assert len(look(tmp_path)) == 4


@pytest.mark.parametrize("writer", ["whole", "added"])
@pytest.mark.parametrize("begun", [False, True])
def test_an_open_file_of_this_process_is_written_where_it_stands(
    begun: bool, writer: str, tmp_path: Path
) -> None:
    """As /dev/stdout behind `> file`: it is neither replaced, nor cut, nor written over from its
    beginning.
    """
    with (tmp_path / "printed").open("w") as file:
        if begun:
            print("before", file=file, flush=True)
        path = Path(f"/dev/fd/{file.fileno()}")
        check_writable(path)
        WRITERS[writer](path)
        print("after", file=file)
    assert (tmp_path / "printed").read_text() == "before\n" * begun + "new\nafter\n"
    assert len(look(tmp_path)) == 1


def test_a_descriptor_that_is_closed_or_read_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with (tmp_path / "x").open() as file:
        path = f"/dev/fd/{file.fileno()}"
        with pytest.raises(InvalidInputError, match="open for reading alone"):
            check_writable(path)
    with pytest.raises(InvalidInputError, match="Bad file descriptor"):
        check_writable(path)


def grows_shrinks(path: Path) -> None:
    for text in ("a longer text than before", "short"):
        write_text(path, text)
        assert path.read_text() == text


def test_a_mounted_file_is_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with mounted(tmp_path / "x"):
        before = look(tmp_path)
        check_writable(tmp_path / "x")
        grows_shrinks(tmp_path / "x")
        assert look(tmp_path) == before
    assert (tmp_path / "outside").read_text() == "short"


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EXDEV, errno.EPERM])
def test_a_file_that_cannot_be_replaced_is_written_in_place(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("old")
    inode = (tmp_path / "x").stat().st_ino

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "replace", refuse)
    grows_shrinks(tmp_path / "x")
    assert (tmp_path / "x").stat().st_ino == inode
    with pytest.raises(InvalidInputError, match=os.strerror(error)):
        write_text(tmp_path / "new", "x")
    assert len(look(tmp_path)) == 1


def test_a_file_in_a_closed_folder_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(writing, "_is_open", lambda folder: False)
    check_writable(tmp_path / "x")
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new" and len(look(tmp_path)) == 1


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_what_stood_in_place_comes_back_where_writing_fails(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("what was there before")

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(Path, "replace", refuse)
    whole, failing = writing._write_all, [failure]

    def half(file: writing.FileIO, content: bytes) -> None:
        whole(file, content[:5] if failing else content)
        if failing:
            raise failing.pop()

    monkeypatch.setattr(writing, "_write_all", half)
    with pytest.raises((InvalidInputError, KeyboardInterrupt)):
        write_text(tmp_path / "x", "NEW AND LONGER " * 10)
    assert (tmp_path / "x").read_text() == "what was there before"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            CapacityError,
            r"\(No space left on device\).*make room and run",
        ),
        (OSError(errno.EROFS, "Read-only file system"), InvalidInputError, "choose another place"),
        (RuntimeError("PytorchStreamWriter failed writing file"), CapacityError, "make room"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_failed_write_leaves_what_was_there(
    error: BaseException, kind: type[BaseException], message: str | None, tmp_path: Path
) -> None:
    """Catches a file written in place, a remainder that fills the disk, and a full disk that reads
    like a wrong name.
    """
    path = tmp_path / "report.json"
    write_text(path, "before")

    def half(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise error

    with pytest.raises(kind, match=message):
        write_atomically(path, half)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [
        ("report.json", "before")
    ]


def test_a_defect_while_writing_is_not_a_full_disk(tmp_path: Path) -> None:
    def broken(unfinished: Path) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        write_atomically(tmp_path / "x", broken)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from specdec.base.errors import SpecDecError
from specdec.base.writing import append, write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    (write_text if sys.argv[2] == "whole" else append)(Path(sys.argv[1]), "x" * 2000)
except SpecDecError as error:
    print(error)
"""


@pytest.mark.parametrize("writer", ["whole", "added"])
def test_a_limit_of_the_system_takes_nothing(writer: str, tmp_path: Path) -> None:
    """Catches the half of a record that a full disk leaves, behind which another process would
    write.
    """
    path = tmp_path / "x"
    path.write_text("before\n")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, path, writer], capture_output=True, text=True, timeout=HANG
    )
    assert (
        "(File too large); what was written before is kept, so make room" in done.stdout
        and not done.stderr
    )
    assert path.read_text() == "before\n" and len(look(tmp_path)) == 1


def test_rights_stay(tmp_path: Path) -> None:
    """Catches a private file that becomes everybody's, and a new one that is nobody else's."""
    path = tmp_path / "x"
    write_text(path, "a")
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    for rights in (0o600, 0o666):
        path.chmod(rights)
        write_text(path, "b")
        assert path.stat().st_mode & 0o777 == rights


def test_ends_of_names_stay(tmp_path: Path) -> None:
    """Of a trace whose name ends in .gz the profiler asks the name."""
    seen: list[str] = []

    def write(unfinished: Path) -> None:
        seen.append(unfinished.name)
        unfinished.touch()

    write_atomically(tmp_path / "trace.json.gz", write)
    assert seen[0].endswith("trace.json.gz") and seen[0] != "trace.json.gz"


@pytest.mark.parametrize("length", [255, 256, 300, 5000])
@pytest.mark.parametrize("writer", WRITERS)
def test_long_names(writer: str, length: int, tmp_path: Path) -> None:
    """The longest name that a system has can be written, and a longer one is a line."""
    path = tmp_path / ("é" * (length // 2) + "x" * (length % 2))
    if length > 255:
        with pytest.raises(InvalidInputError, match="File name too long"):
            WRITERS[writer](path)
    else:
        WRITERS[writer](path)
    with pytest.raises(InvalidInputError, match="file name too long"):
        make_folder(tmp_path / ("x" * 256))


def test_names_with_nul_and_files_as_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for writer in WRITERS.values():
        with pytest.raises(InvalidInputError, match="no NUL character"):
            writer(tmp_path / "a\0b")
        with pytest.raises(InvalidInputError, match="Not a directory"):
            writer(tmp_path / "file" / "x")


def test_outputs_are_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(None, str(tmp_path / "new.json"))
    with pytest.raises(InvalidInputError, match="it is a folder"):
        check_writable(str(tmp_path))
    with pytest.raises(InvalidInputError, match="missing or closed"):
        check_writable(str(tmp_path / "nowhere" / "x.json"))
    with pytest.raises(InvalidInputError, match="file exists; choose another with --out"):
        make_folder(str(tmp_path / "file"))
    with pytest.raises(
        InvalidInputError, match="'~nobody9' begins with a home that the system does not know"
    ):
        make_folder("~nobody9")
    assert make_folder(str(tmp_path / "a" / "b")).is_dir()


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    """Catches two that share an unfinished file: what one has half written, the other puts in
    place.
    """
    barrier, path = Barrier(2), tmp_path / "x"

    def write(number: int) -> None:
        def meet(unfinished: Path) -> None:
            unfinished.write_text(f"half {number}")
            barrier.wait(HANG)
            unfinished.write_text(f"whole {number}")
            barrier.wait(HANG)
            assert unfinished.read_text() == f"whole {number}"

        write_atomically(path, meet)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    assert path.read_text() in ("whole 0", "whole 1") and len(look(tmp_path)) == 1


def test_lines_of_many_writers_are_whole_behind_one_head(tmp_path: Path) -> None:
    path, barrier = tmp_path / "x", Barrier(4)

    def write(number: int) -> None:
        barrier.wait(HANG)
        for index in range(50):
            append(path, json.dumps([number, index, "x" * 5000]) + "\n", head='"head"\n')

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head == "head" and sorted(line[:2] for line in lines) == [
        [n, i] for n in range(4) for i in range(50)
    ]


def test_nobody_adds_while_a_line_is_written_or_a_journal_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a head that two runs write, and half a line that one of them cuts off while the other
    writes it.
    """
    path, seen = tmp_path / "x", list[str]()
    write = writing._write_all

    def locked(file: writing.FileIO, content: bytes) -> None:
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append("written")
        write(file, content)

    monkeypatch.setattr(writing, "_write_all", locked)
    append(path, "line\n")
    with reading_alone(path) as file, path.open() as other, pytest.raises(BlockingIOError):
        seen.append(str(file is not None))
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert seen == ["written", "True"]


KILLED = """
import os, signal, sys
from pathlib import Path
from specdec.base.writing import write_atomically
def die(path):
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), die)
"""


def test_kills_leave_no_more_than_one_remainder_and_the_next_run_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_text(path, "before")
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, path], timeout=HANG)
        assert done.returncode == -signal.SIGKILL
        assert path.read_text() == "before" and len(look(tmp_path)) == 2
    write_text(path, "after")
    assert path.read_text() == "after" and len(look(tmp_path)) == 1


def test_a_remainder_that_is_no_file_is_let_alone(tmp_path: Path) -> None:
    """A link that somebody has put there leads nowhere else."""
    (tmp_path / "other").write_text("kept")
    (tmp_path / ".unfinished-x").symlink_to("other")
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "other").read_text() == "kept" and (tmp_path / "x").read_text() == "new"
    assert (tmp_path / ".unfinished-x").is_symlink() and len(look(tmp_path)) == 3


def test_only_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "fifo", "link", "missing"):
        remove(tmp_path / name)
    assert [name for name, *_ in look(tmp_path)] == ["fifo", "link"]


FILES = {name: partial(Path.write_text, data=name) for name in ("weights", "config")}


def contents(folder: Path) -> dict[str, str]:
    return {one.name: one.read_text() for one in folder.iterdir()}


@pytest.mark.parametrize("there", ["new", "below a new one", "empty", "linked", "filled"])
def test_a_folder_is_filled(there: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    expected = {name: name for name in FILES}
    if there == "below a new one":
        path = tmp_path / "a" / "b"
    elif there == "linked":
        (tmp_path / "real").mkdir()
        path.symlink_to("real")
    elif there != "new":
        path.mkdir()
    if there == "filled":
        (path / "weights").write_text("old")
        (path / "own").write_text("kept")
        expected["own"] = "kept"
    fill_folder(path, FILES)
    assert contents(path) == expected and path.is_symlink() == (there == "linked")
    assert {one.name for one in tmp_path.iterdir()} <= {"made", "real", "a"}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_folder_that_fails_leaves_what_was_there(
    there: bool, failure: BaseException, tmp_path: Path
) -> None:
    path = tmp_path / "made"
    if there:
        path.mkdir()
        (path / "config").write_text("old")

    def fail(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise failure

    with pytest.raises((CapacityError, KeyboardInterrupt)):
        fill_folder(path, {**FILES, "config": fail})
    assert contents(path) == {"config": "old"} if there else list(tmp_path.iterdir()) == []
