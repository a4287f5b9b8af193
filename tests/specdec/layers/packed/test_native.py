"""How our C++ for CPUs is made, kept and found again, on machines that are in a bad way."""

import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from specdec.kernels import native as library
from specdec.kernels.native import NO_COMPILER, declared, native
from specdec.layers.linear_choice import linear
from specdec.layers.packed.cpu import GgufLinear
from tests.helpers.waiting import HANG
from tests.specdec.layers.packed.test_cpu import weight_of

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler")

NAMES = sorted(set(re.findall(r"\blibrary\.(\w+)\.argtypes", inspect.getsource(declared))))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache with a space in its name; the source has functions that do nothing."""
    source = tmp_path / "a source.cpp"
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in NAMES))
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "a cache"))
    return tmp_path / "a cache" / "compiled"


def compiler(tmp_path: Path, does: str = "") -> Path:
    """A compiler with a space in its name that does something else first, unless asked what it is;
    its uses are lines in `uses`.
    """
    script = tmp_path / "a compiler"
    first = f'echo once >> "{tmp_path}/uses"; {does or ":"}'
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version) ;; *) {first};; esac\nexec c++ "$@"\n')
    script.chmod(0o755)
    return script


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def found() -> Any:
    """What a new process would find."""
    return native.__wrapped__()


def test_it_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also by a compiler with options, or with spaces in its name."""
    monkeypatch.setenv("CXX", str(compiler(tmp_path)))
    assert found() and found()
    monkeypatch.setenv("CXX", f"'{tmp_path}/a compiler' -pipe")
    assert found() and found()
    assert (tmp_path / "uses").read_text() == "once\n" * 2 and len(list(cache.iterdir())) == 2


def test_another_cpu_has_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a home that machines share."""
    assert found()
    monkeypatch.setattr(library, "_processor", lambda: "one without AVX-512")
    assert found() and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"no library", None])
def test_a_file_that_is_no_library_is_made_anew(
    content: bytes | None, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Empty, of something else, or of a source with other functions."""
    assert found()
    (file,) = cache.iterdir()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "another"))  # nothing of it is loaded yet
    file = tmp_path / "another" / "compiled" / file.name
    file.parent.mkdir(parents=True)
    if content is None:
        subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", "-o", str(file)], check=True)
    else:
        file.write_bytes(content)
    before = file.read_bytes()
    assert found() and file.read_bytes() != before


def test_no_place_to_keep_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is compiled for this process alone, which a line says."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "cache"))
    assert found()
    assert "unless SPECDEC_CACHE names another folder" in warnings_of(caplog)


def test_two_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin before either ends."""
    run, both, made = library._run, threading.Barrier(2), list[Any]()

    def waiting(*command: str) -> str:
        if "--version" not in command:
            both.wait(HANG)
        return run(*command)

    monkeypatch.setattr(library, "_run", waiting)
    threads = [threading.Thread(target=lambda: made.append(found())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and all(made) and len(list(cache.iterdir())) == 1


def test_killed_midway(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is kept of it, and the next process makes the library."""
    lines = (
        "from pathlib import Path",
        "from specdec.kernels import native",
        f"native.SOURCE = Path({str(library.SOURCE)!r})",
        "native.native()",
    )
    env = {**os.environ, "CXX": str(compiler(tmp_path, "kill -9 $PPID; exit 1"))}
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=env)
    assert run.returncode == -signal.SIGKILL
    assert not cache.exists() or not list(cache.iterdir())
    assert found() and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("no-such-compiler", "CXX is 'no-such-compiler', which is no program; name one, or unset"),
        ("'c++", 'CXX is "\'c++": No closing quotation'),
        ("/usr/bin/env true", "/usr/bin/env true compiles nothing"),
        ("false", "false cannot compile a source.cpp: it ended with 1"),
        ("cat", "cat cannot compile a source.cpp: cat: "),
    ],
)
def test_odd_compilers(
    stated: str,
    reason: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was asked for is never left aside for another; a line says why plain torch computes."""
    monkeypatch.setenv("CXX", stated)
    assert found() is None
    assert f"plain torch computes on this CPU, more slowly: {reason}" in warnings_of(caplog)
    assert not cache.exists()


def test_no_compiler(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights become numbers, which one line says."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            layers = [linear(weight_of("Q4_K", 70, 768)) for _ in range(2)]
        assert not any(isinstance(layer, GgufLinear) for layer in layers)
        assert warnings_of(caplog) == (
            f"plain torch computes on this CPU, more slowly: {NO_COMPILER}"
        )
    finally:
        native.cache_clear()
