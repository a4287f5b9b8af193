"""Files of a user: what is read, what a message names, and what survives a failed write."""

import errno
from pathlib import Path

import pytest

from specdec.errors import CapacityError, InvalidInputError
from specdec.files import check_writable, make_folder, read_jsonl, read_lines, write_atomically, write_text


def test_lines_of_any_editor(tmp_path: Path) -> None:
    """Catches a byte order mark or a carriage return that becomes part of a prompt, and places that count from zero."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": 1}\r\n\r\n{"a": "\u2028"}'.encode())
    assert read_jsonl(path) == [(f"{path}:1", {"a": 1}), (f"{path}:3", {"a": "\u2028"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no row; give a file"),
        (b"\n \r\n", "holds no row"),
        (b"{}\n{", r"rows.jsonl:2 is not JSON \(.* at column 2\)"),
        (b"[1]", "rows.jsonl:1 is a JSON list"),
        (b"a\xff", r"not UTF-8 text \(byte 1\)"),
        (None, "no such file or directory; give a file"),
    ],
)
def test_what_cannot_be_read_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        read_jsonl(path)
    with pytest.raises(InvalidInputError, match="embedded null byte; write text"):
        read_lines(Path("a\0b"), what="row", way_out="write text")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError, r"\(No space left on device\).*make room and run again"),
        (OSError(errno.EROFS, "Read-only file system"), InvalidInputError, "choose another place"),
        (RuntimeError("PytorchStreamWriter failed writing file"), CapacityError, "make room"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_failed_write_leaves_what_was_there(
    error: BaseException, kind: type[BaseException], message: str | None, tmp_path: Path
) -> None:
    """Catches a file written in place, a remainder that fills the disk, and a full disk that reads like a wrong name."""
    path = tmp_path / "report.json"
    write_text(path, "before")

    def half(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise error

    with pytest.raises(kind, match=message):
        write_atomically(path, half)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("report.json", "before")]


def test_a_defect_while_writing_is_not_a_full_disk(tmp_path: Path) -> None:
    def broken(unfinished: Path) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        write_atomically(tmp_path / "x", broken)


def test_outputs_are_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(None, str(tmp_path / "new.json"))
    with pytest.raises(InvalidInputError, match="it is a folder"):
        check_writable(str(tmp_path))
    with pytest.raises(InvalidInputError, match="missing or closed"):
        check_writable(str(tmp_path / "nowhere" / "x.json"))
    with pytest.raises(InvalidInputError, match="file exists; choose another with --out"):
        make_folder(str(tmp_path / "file"))
    assert make_folder(str(tmp_path / "a" / "b")).is_dir()
