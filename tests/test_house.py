"""The structure of the sources as figures that only fall, read without importing anything.

    python -m tests.test_house            # prints the figures
    python -m tests.test_house --lower    # keeps them where they have fallen

A room is a folder, or a file at the root of `specdec`; each other package is one room. An arrow is
one room that imports another one. A floor lies one above the highest that it imports.
`tests/house.json` holds the figures and arrows as they are: a change may take from them, never add.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import grimp
import networkx
import pytest

ROOT = Path(__file__).parents[1]
HELD = ROOT / "tests" / "house.json"
PACKAGES = ("specdec", "drafters", "verifiers", "evals")
COLUMNS = 100
FULL = 15
"""Files of a folder that reads at a glance."""

NOUNLESS = re.compile(r"\s*(Of|Those|That|Its|Told|Who|Them) ")

Import = tuple[str, str]
"""Two modules, the first of which imports the second."""


class House:
    """What the files of our packages import from each other, wherever in a file the import stands.

    Args:
        root: the folder that holds the packages.
        packages: their names; the rooms of the first are looked at one by one.
    """

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self.root, self.packages = root, packages
        sys.path.insert(0, str(root))
        try:
            self._graph = grimp.build_graph(*packages, cache_dir=None)
        finally:
            sys.path.remove(str(root))

    @property
    def imports(self) -> list[Import]:
        graph = self._graph
        found = (
            (one, other)
            for one in graph.modules
            for other in graph.find_modules_directly_imported_by(one)
        )
        return sorted(found)

    def arrows(self, *packages: str) -> dict[tuple[str, str], list[Import]]:
        """Rooms of which the first imports the second, with the imports."""
        found: dict[tuple[str, str], list[Import]] = {}
        for pair in self.imports:
            rooms = self.room(pair[0]), self.room(pair[1])
            if rooms[0] != rooms[1] and {module.partition(".")[0] for module in pair} <= {
                *packages
            }:
                found.setdefault(rooms, []).append(pair)
        return found

    def lines(self, *pairs: Import) -> list[str]:
        """`file:line: source` of each import."""
        details = [
            found
            for one, other in pairs
            for found in self._graph.get_import_details(importer=one, imported=other)
        ]
        return [
            f"{self._path(found['importer'])}:{found['line_number']}: {found['line_contents']}"
            for found in details
        ]

    def new_arrows(self, kept: dict[str, list[str]]) -> list[str]:
        """Imports from a room that did not import that other room before."""
        pairs = {
            arrow: found
            for arrow, found in self.arrows(*self.packages).items()
            if arrow[1] not in kept.get(arrow[0], [])
        }
        return [f"{line} (a new arrow)" for found in pairs.values() for line in self.lines(*found)]

    def circles(self) -> list[list[str]]:
        """Files that import each other, directly or not."""
        parts = networkx.strongly_connected_components(networkx.DiGraph(self.imports))
        return sorted(sorted(part) for part in parts if len(part) > 1)

    def upward(self) -> list[str]:
        """The fewest imports between rooms without which their circles would be gone."""
        arrows = self.arrows(*self.packages)
        pairs = [arrows[arrow] for arrow in self.climbing()]
        inside = [
            sorted(self._graph.nominate_cycle_breakers(name))
            for name in PACKAGES[1:]
            if name in self._graph.modules
        ]
        return [line for found in [*pairs, *inside] for line in self.lines(*found)]

    def climbing(self) -> list[tuple[str, str]]:
        """Arrows without which there would be no circle of rooms."""
        rooms = grimp.ImportGraph()
        rooms.add_module("of")
        for one, other in self.arrows(*self.packages):
            rooms.add_import(importer=f"of.{one}", imported=f"of.{other}")
        return [(one[3:], other[3:]) for one, other in sorted(rooms.nominate_cycle_breakers("of"))]

    def figures(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for what, packages in (
            (self.packages[0], self.packages[:1]),
            ("the project", self.packages),
        ):
            arrows = networkx.DiGraph([*self.arrows(*packages)])
            found[f"rooms of {what}"] = len(arrows)
            found[f"arrows of {what}"] = arrows.number_of_edges()
            arrows.remove_edges_from(self.climbing())
            found[f"floors of {what}"] = networkx.dag_longest_path_length(arrows) + 1
        found["upward imports"] = len(self.upward())
        found["circles of files"] = len(self.circles())
        folders = Counter(path.parent for path in sources(self.root, *self.packages))
        found[f"folders of more than {FULL} files"] = sum(size > FULL for size in folders.values())
        found["files of the largest folder"] = max(folders.values())
        found[f"lines over {COLUMNS} columns"] = num_long_lines(self.root)
        found["docstrings without a subject"] = len(nounless(self.root))
        return found

    def as_held(self) -> dict[str, Any]:
        """What `tests/house.json` is to hold."""
        arrows: dict[str, list[str]] = {}
        for one, other in sorted(self.arrows(*self.packages)):
            arrows.setdefault(one, []).append(other)
        return {"figures": self.figures(), "arrows": arrows}

    def room(self, module: str) -> str:
        package, _, inside = module.partition(".")
        return package if package != self.packages[0] else inside.partition(".")[0] or "__init__"

    def _path(self, module: str) -> str:
        stem = self.root.joinpath(*module.split("."))
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        return path.relative_to(self.root).as_posix()


def sources(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def num_lines(*folders: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in sources(ROOT, *folders))


def num_long_lines(root: Path) -> int:
    code = (path.read_text() for path in sources(root, *PACKAGES, "docs", "tests"))
    texts = [*code, *prose(root), *comments(root)]
    return sum(len(line) > COLUMNS for text in texts for line in text.splitlines())


def comments(root: Path) -> Iterator[str]:
    """Lines of settings and of the Makefile that are a comment alone."""
    files = git("ls-files", "*.toml", "*.yaml", "*.yml", "Makefile", "*Dockerfile").split()
    for path in map(root.joinpath, files):
        if path.is_file():  # another root may be a test's
            yield "\n".join(re.findall(r"^\s*@?# .*$", path.read_text(), flags=re.MULTILINE))


def prose(root: Path) -> Iterator[str]:
    """Pages without code, tables and pictures, which may be wider."""
    for path in [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("drafters/*/*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        yield re.sub(r"^ *(\||!\[).*$", "", text, flags=re.MULTILINE)


def nounless(root: Path) -> list[str]:
    """Docstrings that begin with a pronoun or "Of", so that a reader has to guess their subject."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: {node.value.value.strip().splitlines()[0]}"
        for path in sources(root, *PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and NOUNLESS.match(node.value.value)
    ]


def new_long_lines() -> list[str]:
    """Of the last commit and the working tree."""
    lines = git("diff", "--unified=0", "HEAD~1", "--", "*.py", "*.md").splitlines()
    return [line for line in lines if line.startswith("+") and len(line) > COLUMNS + 1]


def git(*arguments: str) -> str:
    """What git prints; nothing outside a clone, or of what a shallow one lacks."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def kept_before() -> list[str]:
    """The versions of `tests/house.json`, the oldest first."""
    commits = git("log", "--reverse", "--format=%H", "--", "tests/house.json").split()
    return [text for commit in commits if (text := git("show", f"{commit}:tests/house.json"))]


@cache
def house() -> House:
    return House(ROOT)


def held() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(HELD.read_text())
    return content


def report() -> str:
    """All figures, and how many lines there are."""
    figures = house().figures() | {
        "source lines": num_lines(*PACKAGES),
        "test lines": num_lines("tests"),
    }
    return "\n".join(f"{name:<36}{figure:>8,}" for name, figure in figures.items())


def raised() -> list[str]:
    """What is worse than what is kept, with the lines that make it so."""
    kept, found = held(), house().figures()
    risen = [name for name in found if found[name] > kept["figures"].get(name, found[name])]
    lines = [f"{name}: {found[name]:,} instead of {kept['figures'][name]:,}" for name in risen]
    lines += house().new_arrows(kept["arrows"])
    if "upward imports" in risen:
        lines += house().upward()
    if "circles of files" in risen:
        lines += [f"a circle: {', '.join(circle)}" for circle in house().circles()]
    if f"lines over {COLUMNS} columns" in risen:
        lines += new_long_lines()
    if "docstrings without a subject" in risen:
        lines += nounless(ROOT)
    return lines


def test_no_figure_rises_and_none_falls_unkept() -> None:
    print("\n" + report())
    assert raised() == []
    assert house().as_held() == held(), "it got better: run `python -m tests.test_house --lower`"


def test_no_commit_raised_a_figure() -> None:
    """As far as the clone reaches back."""
    versions = [json.loads(text)["figures"] for text in kept_before()] + [held()["figures"]]
    for before, after in pairwise(versions):
        assert [name for name in before if name in after and after[name] > before[name]] == []


def built(root: Path, **files: str) -> House:
    """A house of the rooms `a` and `b`, each one file of this source, and of `c`, a file of its
    own.
    """
    for name, source in {"a": "", "b": "", "": "", **files}.items():
        path = root / "built" / name / "__init__.py" if name != "c" else root / "built" / "c.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return House(root, ("built",))


def test_rooms_floors_and_arrows_are_counted(tmp_path: Path) -> None:
    figures = built(tmp_path, a="import built.b", c="from built import a\nimport built.b").figures()
    assert [figures[f"{what} of built"] for what in ("rooms", "floors", "arrows")] == [3, 3, 3]
    assert figures["upward imports"] == figures["circles of files"] == 0


@pytest.mark.parametrize(
    "climbs",
    [
        "import built.c",
        "def f():\n    from built import c",
        "if TYPE_CHECKING:\n    import built.c",
    ],
)
def test_an_import_that_climbs_is_named_with_its_line(tmp_path: Path, climbs: str) -> None:
    """The check itself can fail."""
    house = built(tmp_path, a=climbs, c="import built.a")
    assert house.circles() == [["built.a", "built.c"]]
    assert house.upward() in (
        ["built/c.py:1: import built.a"],
        house.lines(("built.a", "built.c")),
    )
    assert house.new_arrows({"c": ["a"]}) == [
        f"{line} (a new arrow)" for line in house.lines(("built.a", "built.c"))
    ]


def test_what_is_long_and_what_lacks_a_subject_is_seen(tmp_path: Path) -> None:
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "x.py").write_text('"""Of rows."""\nX = 3\n"""Rows of a step."""\n')
    assert nounless(tmp_path) == ["specdec/x.py:1: Of rows."]
    long = "word " * 21
    (tmp_path / "page.md").write_text(f"{long}\n\n| {long} |\n\n```\n{long}\n```\n")
    assert num_long_lines(tmp_path) == 1


if __name__ == "__main__":
    print(report())
    if "--lower" in sys.argv:
        if HELD.exists() and (lines := raised()):
            sys.exit("\n".join(lines))
        HELD.write_text(json.dumps(house().as_held(), indent=1) + "\n")
