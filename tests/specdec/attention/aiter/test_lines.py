"""docs/rocm-tests.md and the tests it speaks of: every line has one, and no test is named after a line that is not there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[4]
COUNTS = {"a": 5, "b": 7, "c": 7, "d": 6, "e": 6}
"""Lines of each list. A line leaves the page together with its number here, not by accident."""


def lines_of(page: str) -> dict[str, str]:
    """What each line holds, by its number in lower case."""
    found = re.findall(r"^\| ([A-E]\d+) \| (.+) \|$", page, re.MULTILINE)
    assert len(dict(found)) == len(found), "a number stands twice"
    return {number.lower(): holds for number, holds in found}


def named_after(folder: Path) -> dict[str, list[str]]:
    """Names of the tests of each line, from the sources."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_([a-e]\d+)_\w", node.name)):
                found.setdefault(match[1], []).append(f"{path.name}::{node.name}")
    return found


def missing(lines: dict[str, str], tests: dict[str, list[str]]) -> list[str]:
    """Lines without a test, and tests without a line. A line that begins with *hardware* has none, and must not."""
    wanted = {number for number, holds in lines.items() if not holds.startswith("*hardware*")}
    return sorted({f"no test of {number}" for number in wanted - tests.keys()} | {f"no line {n}" for n in tests.keys() - wanted})


def test_every_line_has_a_test_and_every_test_a_line() -> None:
    """A renamed or deleted test would otherwise take its line's proof along unseen."""
    lines = lines_of((ROOT / "docs" / "rocm-tests.md").read_text())
    assert set(lines) == {f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)}
    assert missing(lines, named_after(ROOT / "tests")) == []


def test_the_check_itself_can_fail(tmp_path: Path) -> None:
    """Both ways round, and for lines of the hardware."""
    lines = lines_of("| A1 | Something. |\n| A2 | *hardware*: a figure. |\n| A3 | More. Its speed is *hardware*. |\n")
    (tmp_path / "test_x.py").write_text(
        "def test_a1_works(): ...\nclass T:\n    def test_a2_too(self): ...\ndef test_b9_x(): ...\n"
    )
    assert missing(lines, named_after(tmp_path)) == ["no line a2", "no line b9", "no test of a3"]
