"""No test is decided by how long something takes: waiting is done in `tests.helpers.waiting`, for
events.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
CLOCKS = {"sleep", "time", "monotonic", "perf_counter"}
"""Functions of `time`."""
LIMITED = {"wait", "join", "result", "alarm", "wait_for", "communicate"}
"""Methods whose only argument may be a number of seconds."""


def clocks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each clock, sleep and limit of its own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        limits = [one.value for one in node.keywords if one.arg in {"timeout", "seconds", "read"}]
        limits += node.args[-1:] if name in LIMITED else []
        own = any(
            isinstance(limit, ast.Constant) and isinstance(limit.value, int | float)
            for limit in limits
        )
        if (
            own
            or (owner == "time" and name in CLOCKS)
            or (owner == "asyncio" and name == "sleep" and ast.unparse(node.args[0]) != "0")
        ):
            yield node.lineno, ast.unparse(node)


def test_no_test_has_a_clock_of_its_own() -> None:
    own = ("helpers/waiting.py", "checks/", "fuzz/__main__.py")
    found = [
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path in sorted(TESTS.rglob("*.py"))
        if not path.relative_to(TESTS).as_posix().startswith(own)
        for line, text in clocks(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(["wait for an event, with tests.helpers.waiting:", *found])


def test_clocks_are_seen() -> None:
    lines = [
        *("time.sleep(1)", "process.wait(10)", "run(timeout=5)", "x.run(timeout=5)"),
        *("pool.submit().result(HANG)", "httpx.Timeout(HANG, read=1.0)", "await asyncio.sleep(0)"),
    ]
    assert [line for line, _ in clocks(ast.parse("\n".join(lines)))] == [1, 2, 4, 6]
