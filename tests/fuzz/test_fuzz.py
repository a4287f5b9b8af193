"""A few inputs of every kind, the same each time, and those that broke something before."""

import json
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import bounded
from tests.fuzz.bounded import MAX_BYTES, failures
from tests.fuzz.kind import Kind, line
from tests.fuzz.kinds import KINDS

CASES = [
    json.loads(text) for text in (Path(__file__).parent / "cases.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.share])
def test_any_input_ends_in_a_result_or_a_line(name: str) -> None:
    kind, draw = KINDS[name], Random(0)
    inputs = [case["input"] for case in CASES if case["kind"] == name]
    inputs += [kind.make(draw) for _ in range(kind.share)]
    broken = list(failures(kind, inputs))
    assert not broken, "\n".join(
        f"{json.dumps({'kind': name, 'input': one})}\n{said}" for one, said in broken
    )


def test_cases_are_of_known_kinds() -> None:
    assert CASES and all(case["kind"] in KINDS for case in CASES)


def breaking(one: Any) -> None:
    """Does what must not be done."""
    if one == "raise":
        raise KeyError("x")
    if one == "lines":
        line("two\nlines")
    if one == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if one == "spin":
        while True:
            pass
    if one == "grow":
        bytes(2 * MAX_BYTES)


def test_what_breaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what follows it is looked at all the same."""
    monkeypatch.setattr(bounded, "MAX_SECONDS", 1)
    inputs = ["fine", "raise", "lines", "fine", "die", "spin", "grow", "fine"]
    kind = Kind(lambda draw: None, lambda folder: breaking, 0)
    seen = dict(failures(kind, inputs))
    assert list(seen) == ["raise", "lines", "die", "spin", "grow"]
    assert (
        "KeyError" in seen["raise"] and "2 lines" in seen["lines"] and "MemoryError" in seen["grow"]
    )
    assert "status -9" in seen["die"] and "of the processor" in seen["spin"]
