"""Which package may import which, read from the sources without importing them."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT: dict[str, set[str]] = {
    "specdec": set(),
    "drafters": {"specdec"},
    "verifiers": {"specdec"},
    "evals": {"specdec", "drafters", "verifiers"},
}
"""Of this project's own packages; none of them may import the tests."""

FLOORS: dict[str, list[set[str]]] = {
    "specdec": [
        {"errors", "sizes", "deviation", "blocks"},
        {"files"},
        {"packages", "validation", "tensor_files", "messages", "writing"},
        {"grammar"},
        {"amd_gpus", "config", "sampling_params", "metrics", "registry", "hub"},
        {"device", "kinds", "kv_cache", "parallel"},
        {"self_check"},
        {"kernels"},
        {"attention"},
        {"layers"},
        {"sampling"},
        {"batch"},
        {"core"},
        {"scratch", "engine", "loading", "drafter_choice"},
        {"decoder", "provenance", "journal"},
        {"cluster"},
        {"cli"},
        {"serve"},
        {"__init__", "__main__"},
    ],
    "drafters": [
        {"copied_keys"},
        {"keys"},
        {"algorithms", "attention", "checkpoint", "choice", "head", "license", "vocabulary"},
        {"dspark", "dflash2", "domino", "sequential", "suffix", "composed"},
        {"dflash", "draft_model", "eagle3", "mtp", "ngram"},
        {"load", "shipped"},
        {"convert", "fit"},
        {"training"},
        {"__init__"},
    ],
    "evals": [
        {"divergence", "manual_prompts", "roofline", "speed"},
        {"prompt_sets"},
        {"runner", "report", "system"},
        {"peers", "profile", "accuracy"},
        {"bench"},
        {"__init__"},
    ],
}
"""Rooms of a package, files at its root among them, from the ground up. A room imports from its package only what lies below."""

CONFINED = {
    "aiter": "specdec/kernels/aiter*.py",
    "triton": "specdec/kernels/triton_*.py",
    "lm_eval": "evals/accuracy/lm_eval_*.py",
    "pickle": "specdec/tensor_files.py",
    "ray": "specdec/cluster/*.py",
    "xgrammar": "specdec/grammar/*.py",
}
"""Libraries that only some files may import, so that everything else works without them; pickles are code."""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import, wherever in the file it stands."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def offending_imports(root: Path) -> list[str]:
    """One line `file:line: why` for every import that breaks a rule."""
    found = []
    for package, allowed in MAY_IMPORT.items():
        barred = (MAY_IMPORT.keys() | {"tests"}) - allowed - {package}
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for line, module in imports(ast.parse(path.read_text())):
                top = module.partition(".")[0]
                if top in barred:
                    found.append(f"{name}:{line}: {package} must not import {module}")
                if top in CONFINED and not fnmatch(name, CONFINED[top]):
                    found.append(f"{name}:{line}: only {CONFINED[top]} may import {module}")
    return found


def rooms(root: Path, package: str) -> dict[str, list[Path]]:
    """Files by room."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / package).rglob("*.py")):
        found.setdefault(path.relative_to(root / package).parts[0].removesuffix(".py"), []).append(path)
    return found


def imported_rooms(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Line and room of every import from the file's own package; what `package` itself offers is a room called `__init__`."""
    tree = ast.parse(path.read_text())
    for line, module in imports(tree):
        if module.startswith(f"{package}."):
            yield line, module.split(".")[1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            yield from ((node.lineno, alias.name if alias.name.islower() else "__init__") for alias in node.names)


def climbing_imports(root: Path) -> list[str]:
    """One line `file:line: why` for every room without a floor, and for every import from a room that does not lie below."""
    found = []
    for package, floors in FLOORS.items():
        floor_of = {room: number for number, names in enumerate(floors) for room in names}
        for room, paths in rooms(root, package).items():
            if room not in floor_of:
                found.append(f"{package}/{room}: has no floor in FLOORS")
                continue
            for path in paths:
                for line, other in imported_rooms(path, package):
                    if other != room and floor_of.get(other, 0) >= floor_of[room] and not other.startswith("__version"):
                        found.append(f"{path.relative_to(root)}:{line}: {room} lies below or beside {other} and must not import it")
    return found


def registry_entries(registry: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and value of every string in the tables of `specdec/registry.py`."""
    for statement in registry.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            for value in statement.value.values:
                assert isinstance(value, ast.Constant), f"specdec/registry.py:{value.lineno}: not a plain string"
                yield value.lineno, str(value.value)


def defined_names(module: ast.Module) -> set[str]:
    """Names that the top level of a module binds."""
    names: set[str] = set()
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


def dangling_entries(root: Path) -> list[str]:
    """One line `file:line: why` for every registry entry that names nothing."""
    found = []
    registry = root / "specdec" / "registry.py"
    for line, entry in registry_entries(ast.parse(registry.read_text())):
        module, _, attribute = entry.partition(":")
        stem = root.joinpath(*module.split("."))
        path = next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)
        if path is None:
            found.append(f"specdec/registry.py:{line}: {entry!r} names no module")
        elif attribute not in defined_names(ast.parse(path.read_text())):
            found.append(f"specdec/registry.py:{line}: {entry!r} names nothing in {path.relative_to(root)}")
    return found


def test_packages_import_only_what_they_may() -> None:
    assert offending_imports(ROOT) == []


def test_rooms_import_only_from_below() -> None:
    assert climbing_imports(ROOT) == []


@pytest.mark.parametrize(
    ("name", "source", "offence"),
    [
        (
            "specdec/kernels/x.py",
            "import torch\nfrom specdec.layers.linear import Linear",
            ":2: kernels lies below or beside layers",
        ),
        (
            "specdec/core.py",
            "if TYPE_CHECKING:\n    from specdec.decoder import x",
            ":2: core lies below or beside decoder",
        ),
        ("specdec/attention/a.py", "from specdec import engine", ":1: attention lies below or beside engine"),
        ("evals/report/x.py", "import evals.bench.bench", ":1: report lies below or beside bench"),
        ("specdec/attic/x.py", "", "specdec/attic: has no floor in FLOORS"),
    ],
)
def test_a_climbing_import_is_reported_with_its_line(tmp_path: Path, name: str, source: str, offence: str) -> None:
    """The check itself can fail."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (line,) = climbing_imports(tmp_path)
    assert line.startswith(name + offence if offence.startswith(":") else offence)


def test_registry_names_exist() -> None:
    assert dangling_entries(ROOT) == []


@pytest.mark.parametrize(
    ("name", "source", "offence"),
    [
        ("specdec/engine/engine.py", "import torch\nfrom drafters.ngram import load", ":2: specdec must not import drafters.ngram"),
        ("specdec/a/b.py", "def f():\n    import evals", ":2: specdec must not import evals"),
        ("specdec/lazy.py", "import_module('verifiers.hf')", ":1: specdec must not import verifiers.hf"),
        ("drafters/x.py", "from verifiers import hf", ":1: drafters must not import verifiers"),
        ("verifiers/x.py", "if TYPE_CHECKING:\n    import drafters.ngram", ":2: verifiers must not import drafters.ngram"),
        ("evals/x.py", "import tests.helpers.guards", ":1: evals must not import tests.helpers.guards"),
        ("specdec/attention/fa.py", "import aiter.ops", ":1: only specdec/kernels/aiter*.py may import aiter.ops"),
        ("drafters/x.py", "import triton.language as tl", ":1: only specdec/kernels/triton_*.py may import triton.language"),
        ("evals/x.py", "from lm_eval.api import model", ":1: only evals/accuracy/lm_eval_*.py may import lm_eval.api"),
    ],
)
def test_offence_is_reported_with_its_line(tmp_path: Path, name: str, source: str, offence: str) -> None:
    """The check itself can fail."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert offending_imports(tmp_path) == [name + offence]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("evals/x.py", "import drafters, verifiers.hf, specdec"),
        ("drafters/x.py", "from specdec.core import Drafter\nfrom drafters.dflash.config import DFlashConfig"),
        ("specdec/x.py", "import specdec.drafters_like\nfrom .evals import run"),
        ("specdec/kernels/aiter.py", "import aiter"),
        ("specdec/kernels/aiter_triton.py", "import aiter.ops.triton"),
        ("specdec/kernels/triton_fa.py", "import triton"),
    ],
)
def test_permitted_imports_are_not_reported(tmp_path: Path, name: str, source: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert offending_imports(tmp_path) == []


def test_dangling_registry_entries_are_reported(tmp_path: Path) -> None:
    """The check itself can fail."""
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "registry.py").write_text(
        'TABLE = {\n    "a": "specdec.engine:Engine",\n    "b": "specdec.engine:Motor",\n    "c": "specdec.missing:x",\n}\n'
    )
    (tmp_path / "specdec" / "engine.py").write_text("class Engine: ...\n")
    assert dangling_entries(tmp_path) == [
        "specdec/registry.py:3: 'specdec.engine:Motor' names nothing in specdec/engine.py",
        "specdec/registry.py:4: 'specdec.missing:x' names no module",
    ]
