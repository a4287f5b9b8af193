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

CONFINED = {
    "aiter": "specdec/kernels/aiter*.py",
    "triton": "*/triton_*.py",
    "lm_eval": "evals/accuracy/lm_eval_*.py",
    "ray": "specdec/cluster/*.py",
    "xgrammar": "specdec/grammar/*.py",
}
"""Libraries that only some files may import, so that everything else works without them."""

PICKLERS = {"pickle", "_pickle", "multiprocessing", "marshal", "shelve", "cloudpickle", "dill"}
OBJECTS = ("gather_object", "_object_list")  # of torch.distributed
"""What reads pickles, or sends them between processes: pickles are code."""

PICKLED = {
    "specdec/base/checkpoint/tensor_files.py": "the error of `torch.load`, which reads weights",
    "specdec/kernels/triton_compile.py": "a pool of children",
    "specdec/serve/processes/setup.py": "a child's set-up, which its parent alone writes",
}
"""The files that use one of them, and for what."""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import, wherever in the file it stands."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def picklers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that reads pickles or sends them."""
    for node in ast.walk(tree):
        found: list[str] = []
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Call(func=ast.Attribute(attr="load"), keywords=keywords):
                given = {one.arg: ast.unparse(one.value) for one in keywords}
                name, wanted = ast.unparse(node.func), given.get("weights_only")
                if "allow_pickle" in given or (name == "torch.load" and wanted != "True"):
                    yield node.lineno, name
            case ast.Call(args=[ast.Constant(value=str(module)), *_]):
                found = [module] if "import" in ast.unparse(node.func) else []
            case ast.Attribute(attr="multiprocessing"):
                found = [node.attr]
            case ast.Attribute(attr=attr) if attr.endswith(OBJECTS):
                yield node.lineno, attr
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in found if PICKLERS & {*name.split(".")})


def offending_imports(root: Path) -> list[str]:
    """One line `file:line: why` for every import that breaks a rule."""
    found = []
    for package, allowed in MAY_IMPORT.items():
        barred = (MAY_IMPORT.keys() | {"tests"}) - allowed - {package}
        for path in sorted((root / package).rglob("*.py")):
            name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text())
            if name not in PICKLED:
                found += [f"{name}:{line}: {what} is of pickles" for line, what in picklers(tree)]
            for line, module in imports(tree):
                top = module.partition(".")[0]
                if top in barred:
                    found.append(f"{name}:{line}: {package} must not import {module}")
                if top in CONFINED and not fnmatch(name, CONFINED[top]):
                    found.append(f"{name}:{line}: only {CONFINED[top]} may import {module}")
    return found


def registry_entries(registry: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and value of every string in the tables of `specdec/base/registry.py`."""
    for statement in registry.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(
            statement.value, ast.Dict
        ):
            for value in statement.value.values:
                assert isinstance(value, ast.Constant), (
                    f"specdec/base/registry.py:{value.lineno}: not a plain string"
                )
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
    registry = root / "specdec" / "base" / "registry.py"
    for line, entry in registry_entries(ast.parse(registry.read_text())):
        module, _, attribute = entry.partition(":")
        stem = root.joinpath(*module.split("."))
        path = next(
            (p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None
        )
        if path is None:
            found.append(f"specdec/base/registry.py:{line}: {entry!r} names no module")
        elif attribute not in defined_names(ast.parse(path.read_text())):
            found.append(
                f"specdec/base/registry.py:{line}: {entry!r} names nothing in"
                f" {path.relative_to(root)}"
            )
    return found


def test_packages_import_only_what_they_may() -> None:
    assert offending_imports(ROOT) == []


def test_registry_names_exist() -> None:
    assert dangling_entries(ROOT) == []


@pytest.mark.parametrize(
    ("name", "source", "offence"),
    [
        (
            "specdec/engine/engine.py",
            "import torch\nfrom drafters.ngram import load",
            ":2: specdec must not import drafters.ngram",
        ),
        ("specdec/a/b.py", "def f():\n    import evals", ":2: specdec must not import evals"),
        (
            "specdec/lazy.py",
            "import_module('verifiers.hf')",
            ":1: specdec must not import verifiers.hf",
        ),
        ("drafters/x.py", "from verifiers import hf", ":1: drafters must not import verifiers"),
        (
            "verifiers/x.py",
            "if TYPE_CHECKING:\n    import drafters.ngram",
            ":2: verifiers must not import drafters.ngram",
        ),
        (
            "evals/x.py",
            "import tests.helpers.guards",
            ":1: evals must not import tests.helpers.guards",
        ),
        (
            "specdec/attention/fa.py",
            "import aiter.ops",
            ":1: only specdec/kernels/aiter*.py may import aiter.ops",
        ),
        (
            "drafters/x.py",
            "import triton.language as tl",
            ":1: only */triton_*.py may import triton.language",
        ),
        (
            "evals/x.py",
            "from lm_eval.api import model",
            ":1: only evals/accuracy/lm_eval_*.py may import lm_eval.api",
        ),
    ],
)
def test_offence_is_reported_with_its_line(
    tmp_path: Path, name: str, source: str, offence: str
) -> None:
    """The check itself can fail."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert offending_imports(tmp_path) == [name + offence]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("evals/x.py", "import drafters, verifiers.hf, specdec"),
        (
            "drafters/x.py",
            "from specdec.model.core import Drafter\nfrom drafters.dflash.config.config import"
            " DFlashConfig",
        ),
        ("specdec/x.py", "import specdec.drafters_like\nfrom .evals import run"),
        ("specdec/kernels/aiter.py", "import aiter"),
        ("specdec/kernels/aiter_triton.py", "import aiter.ops.triton"),
        ("specdec/kernels/triton_fa.py", "import triton"),
        ("specdec/serve/processes/setup.py", "import pickle"),
        ("specdec/x.py", "torch.load(path, weights_only=True); np.load(path)"),
    ],
)
def test_permitted_imports_are_not_reported(tmp_path: Path, name: str, source: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert offending_imports(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from multiprocessing.connection import Pipe", "multiprocessing.connection.Pipe"),
        ("from multiprocessing.reduction import dump", "multiprocessing.reduction.dump"),
        ("from torch import multiprocessing", "torch.multiprocessing"),
        ("import torch.multiprocessing as mp", "torch.multiprocessing"),
        ("torch.multiprocessing.Pipe()", "multiprocessing"),
        ("import_module('marshal')", "marshal"),
        ("dist.broadcast_object_list([1])", "broadcast_object_list"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("torch.load(path)", "torch.load"),
        ("np.load(path, allow_pickle=True)", "np.load"),
    ],
)
def test_what_reads_or_sends_pickles_is_reported(tmp_path: Path, source: str, what: str) -> None:
    """The check itself can fail."""
    path = tmp_path / "specdec" / "x.py"
    path.parent.mkdir()
    path.write_text(f"def f():\n    {source}")
    assert offending_imports(tmp_path) == [f"specdec/x.py:2: {what} is of pickles"]


def test_dangling_registry_entries_are_reported(tmp_path: Path) -> None:
    """The check itself can fail."""
    (tmp_path / "specdec" / "base").mkdir(parents=True)
    (tmp_path / "specdec" / "base" / "registry.py").write_text(
        'TABLE = {\n    "a": "specdec.engine:Engine",\n    "b": "specdec.engine:Motor",\n    "c":'
        ' "specdec.missing:x",\n}\n'
    )
    (tmp_path / "specdec" / "engine.py").write_text("class Engine: ...\n")
    assert dangling_entries(tmp_path) == [
        "specdec/base/registry.py:3: 'specdec.engine:Motor' names nothing in specdec/engine.py",
        "specdec/base/registry.py:4: 'specdec.missing:x' names no module",
    ]
