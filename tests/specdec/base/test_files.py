"""Files of a user: what is read, and what a message names."""

from pathlib import Path

import pytest

from specdec.base.errors import InvalidInputError
from specdec.base.files import (
    cache_folder,
    parse_json,
    read_json,
    read_jsonl,
    read_lines,
    read_toml,
    user_path,
)


def test_lines_of_any_editor(tmp_path: Path) -> None:
    """Catches a byte order mark or a carriage return that becomes part of a prompt, and places that
    count from zero.
    """
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


DEEP = "[" * 100_000
ODD = {
    DEEP: "nested too deeply", '{"a": ' * 100_000: "nested too deeply",
    '{"a": NaN}': "NaN is no number of JSON", '{"a": -Infinity}': "-Infinity is no number of JSON",
    '{"a": 1e999}': "1e999 is no number of JSON", '{"a": 1' + "0" * 5000 + "}": "digits",
    "{\n": r"at line 2, column 1", "": "at column 1", "5": "is a JSON int",
    "null": "is a JSON NoneType", '"a"': "is a JSON str",
}  # fmt: skip


@pytest.mark.parametrize("text", ODD, ids=lambda text: text[:10])
def test_odd_json_is_one_line(text: str, tmp_path: Path) -> None:
    """Catches a RecursionError, and numbers that are none."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidInputError, match=ODD[text]) as caught:
        read_json(tmp_path / "x.json", way_out="give a report")
    assert str(caught.value).endswith("; give a report") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_python_s_own_json_is_read_where_it_is_meant_to_be() -> None:
    """Journals keep log-probabilities, which may be infinite, and configs of public models have
    them.
    """
    assert parse_json('[-Infinity, "\\ud800"]', strict=False) == [-float("inf"), "\ud800"]
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match="not UTF-8 text, byte 1"):
        parse_json(b'"\xff"')


@pytest.mark.parametrize(
    "text",
    ["a = " + DEEP, "a", "a = 1\na = 2", b"a = '\xff'"],
    ids=["deep", "half", "twice", "bytes"],
)
def test_odd_toml_is_one_line(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(
        InvalidInputError, match=r"'.*x.toml' is not TOML \(.*\); write options"
    ) as caught:
        read_toml(tmp_path / "x.toml", way_out="write options")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^cannot read '.*x.toml': no such .*; way out$"):
        read_toml(tmp_path / "x.toml", way_out="way out")


@pytest.mark.parametrize("variable", ["SPECDEC_CACHE", "HOME"])
def test_a_home_that_nobody_has_is_one_line(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With HOME unset for a user without a name, which a container's number is."""
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    if variable == "HOME":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    else:
        monkeypatch.setenv("SPECDEC_CACHE", "~nobody9/x")
    with pytest.raises(
        InvalidInputError,
        match="home that the system does not know; set SPECDEC_CACHE to a whole path",
    ):
        cache_folder()
    with pytest.raises(InvalidInputError, match="write the path without ~"):
        user_path("~nobody9/x")
