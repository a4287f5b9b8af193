"""HumanEval's task, the processes that run its programs, and how sure its figures are."""

from pathlib import Path
from typing import Any

import pytest

from evals.accuracy import confined
from evals.accuracy.sandbox import passes
from evals.certainty import mcnemar, paired, rights
from evals.report.table import eval_table
from specdec.base.errors import SpecDecError

try:
    sandboxed = passes("")
except SpecDecError:
    sandboxed = False
needs_sandbox = pytest.mark.skipif(not sandboxed, reason="this machine has no seccomp filters")

CALL = """import ctypes
def call(number, *arguments):
    return ctypes.CDLL(None).syscall(number, *arguments)
"""
CODE = """import ctypes, mmap
def run(code):
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex(code))
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_int)(start)()
"""
PROBLEM = {
    "task_id": "own/0",
    "prompt": 'def twice(x: int) -> int:\n    """Twice x."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n",
}


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import collections, hashlib, math, random, re, statistics, typing",
        "print('x' * 100_000)",
        "import os; assert os.listdir('.') == []",
        "import numpy; assert numpy.zeros(3).sum() == 0",
        "assert open('/dev/null').read() == ''",
        "assert __name__ == '__main__'",
        "assert len('é') == 1",
        "import os; os.dup(2); os.get_blocking(2)",
        # Where the answer goes there is no room for more.
        "import os; assert os.write(3, bytes(99)) == 32; os.lseek(3, 0, 0)",
    ],
)
def test_what_a_program_may_do(program: str) -> None:
    assert passes(program)


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "def f(:",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import sys; sys.exit(70)",
        "import socket; socket.socket()",
        "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0",
        "open('file', 'w')",
        "import os; os.open('file', os.O_RDONLY | os.O_CREAT)",
        "import os; os.mkdir('folder')",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.kill(os.getppid(), 0)",
        "import fcntl, os; fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.fcntl(3, fcntl.F_SETSIG, 9)",
        "import fcntl, os; fcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, fcntl.DN_MODIFY)",
        "import fcntl; fcntl.fcntl(open('/dev/null'), fcntl.F_SETLK, bytes(32))",
        f"{CALL}assert call(425, 1, ctypes.create_string_buffer(120)) >= 0  # io_uring_setup",
        f"{CALL}assert call(0x40000000 + 39) > 0  # getpid of x32",
        f"{CODE}assert run('b814000000cd80c3') > 0  # getpid of 32-bit programs, of x86",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
        "x = bytearray(4 << 30)",
    ],
)
def test_what_a_program_may_not_do(program: str) -> None:
    assert not passes(program)


@needs_sandbox
@pytest.mark.parametrize(
    "action", ["remove(path)", "truncate(path, 0)", "rename(path, 'x')", "chmod(path, 0)"]
)
def test_files_outlive_a_program(action: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    mode = file.stat().st_mode
    assert not passes(f"import os; path = {str(file)!r}; os.{action}")
    assert (file.read_text(), file.stat().st_mode) == ("content", mode)


@needs_sandbox
def test_a_program_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.accuracy.sandbox.SECONDS", 1)
    assert not passes("while True: pass")
    monkeypatch.setattr("evals.accuracy.sandbox.WAIT_SECONDS", 0.5)
    assert not passes("import time; time.sleep(1000)")


@pytest.mark.parametrize(
    ("known", "changed"),
    [("platform.machine()", "'riscv64'"), ("(most, most)", "(most + 1, most)")],
)
def test_nothing_runs_unconfined(
    known: str, changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches programs that run, or are judged, on a machine without filters, or with limits that
    cannot be set.
    """
    broken = tmp_path / "confined.py"
    broken.write_text(Path(confined.__file__).read_text().replace(known, changed))
    monkeypatch.setattr(confined, "__file__", str(broken))
    with pytest.raises(SpecDecError, match="seccomp"):
        passes(f"import os; os.mkdir({str(tmp_path / 'made')!r})")
    assert not (tmp_path / "made").exists()


@needs_sandbox
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return 2 * x", 1.0),
        ("    return x + x\n```\nThis adds.", 1.0),
        ("    return x", 0.0),
        ("    return 2 * x\n)", 0.0),
    ],
)
def test_answers_are_judged_by_the_tests(answer: str, right: float) -> None:
    pytest.importorskip("lm_eval")
    from evals.accuracy.humaneval_task import judged

    assert judged(PROBLEM, [answer]) == {"pass@1": right}


def test_which_answers_are_right() -> None:
    """Catches answers out of order, filters mixed up, and scores that are no judgement."""
    every = [(1, "a", 0.0), (0, "a", 1.0), (0, "b", 0), (1, "b", 0), (2, "a", 1), (2, "b", True)]
    metrics = {"metrics": ["exact", "score"], "score": 0.5}
    records = [metrics | {"doc_id": doc, "filter": name, "exact": one} for doc, name, one in every]
    assert rights(records) == {"exact,a": "101", "exact,b": "001"}
    assert paired("1100", "1011") == {"first_only": 1, "second_only": 2, "p": 1.0}
    assert mcnemar(2, 12) == pytest.approx(2 * (1 + 14 + 91) / 2**14)


def side(right: str) -> dict[str, Any]:
    metric: dict[str, Any] = {"value": right.count("1") / len(right), "stderr": 0.1, "right": right}
    metric["interval"] = (0.2, 0.8)
    return {"metrics": {"exact,a": metric}, "tokens_per_second": 1.0, "acceptance": None}


def test_the_table_says_what_differs() -> None:
    """Sides that are judged differently, and partings in steps of the type where there are many."""
    parting = {"position": 0, "plain_token": "a", "speculative_token": "b", "resolution": 0.25}
    differences = [parting | {"doc_id": doc, "margin": doc / 8} for doc in range(12)]
    task = {"task": "t", "num_samples": 20, "plain": side("1100"), "speculative": side("1010")}
    task |= {"peers": {"hf": side("0011")}, "ratio": 1.0, "differences": differences}
    lines = "\n".join(eval_table({"settings": {"k": 3}, "tasks": [task]}))
    assert "1 right with plain alone, 1 with speculative alone" in lines
    assert "2 right with plain alone, 2 with hf alone (McNemar, p = 1)" in lines
    assert "0.5000  0.2000 to 0.8000" in lines
    assert "2.75 steps of the type apart in the median, and at most 5.5." in lines
    assert lines.count("  sample ") == 10
