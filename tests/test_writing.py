"""Files are written, removed, and read as JSON in one way each: read from the sources, so that no
new place goes around it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec", "drafters", "verifiers", "evals")

HOMES = {"specdec/base/writing.py", "specdec/base/files.py"}
HANDED = {"write_atomically", "fill_folder"}
"""What is handed to these writes where they say."""

_METHODS = (
    "write_text write_bytes unlink rename rmdir touch truncate ftruncate symlink_to hardlink_to"
    " rmtree copy copy2 copyfile copytree move remove removedirs mkfifo mknod replace chmod"
    " save_file save_model save_pretrained savefig print_png export_chrome_trace"
)
METHODS = {*_METHODS.split()}
OF_MODULES = {"copy": "shutil", "move": "shutil", "remove": "os", "replace": "os"}
"""Methods of other things as well; of paths, `replace` alone is asked for, by its single argument.
"""

ALLOWED = {
    "evals/peers/vllm.py": {"symlink_to"},  # in a temporary folder
    # half a line at its end, of a file that `specdec.base.writing` has locked
    "specdec/base/journal.py": {"truncate"},
    "specdec/engine/guided.py": {"replace"},  # of a step
    # in a temporary folder, where ranks meet
    "specdec/parallel/processes/rendezvous.py": {"rmtree", "open", "rename"},
    "verifiers/decoder.py": {"rename"},  # of weights
    "verifiers/prediction.py": {"rename"},
    "specdec/base/checkpoint/hub.py": {"loads"},  # with a hook
    "verifiers/formats/method.py": {"loads"},  # which names the file itself
    "verifiers/load.py": {"loads"},  # of the embedded model
}


def text_of(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def writes(call: ast.Call, name: str, owner: str) -> bool:
    """Whether a call changes what is on a disk."""
    if name in ("open", "fdopen", "FileIO"):
        given = [*map(ast.unparse, call.args), *(ast.unparse(one.value) for one in call.keywords)]
        if "os.devnull" in given or "os.dup" in " ".join(given):
            return False
        modes = [
            text_of(one)
            for one in [*call.args[:2], *(one.value for one in call.keywords if one.arg == "mode")]
        ]
        return any(set("wax+") & set(mode) and len(mode) <= 3 for mode in modes) or any(
            "O_" in text for text in given
        )
    if name == "save":
        return owner in ("torch", "np", "numpy")
    if name == "dump":
        return owner in ("json", "pickle")
    if name == "replace" and owner != "os":
        return len(call.args) == 1 and not call.keywords and bool(owner)
    return name in METHODS and owner == OF_MODULES.get(name, owner)


def calls(node: ast.AST, handed: bool = False) -> Iterator[tuple[ast.Call, str, str, bool]]:
    """Every call with its name, what it is called on, and whether it is handed to what writes."""
    for child in ast.iter_child_nodes(node):
        inside = handed
        if isinstance(child, ast.Call):
            match child.func:
                case ast.Attribute(value=value, attr=name):
                    yield child, name, ast.unparse(value), handed
                case ast.Name(id=name):
                    yield child, name, "", handed
                    inside = handed or name in HANDED
        yield from calls(child, inside)


def around(root: Path) -> list[str]:
    """One line for every place that goes around the one way."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name in HOMES:
            continue
        for call, called, owner, handed in calls(ast.parse(path.read_text())):
            place = f"{name}:{call.lineno}: "
            # else they are those of specdec.base.writing
            own = owner or called not in ("write_text", "remove")
            if (
                own
                and writes(call, called, owner)
                and not handed
                and called not in ALLOWED.get(name, ())
            ):
                found.append(f"{place}{called} is for specdec.base.writing")
            if called == "expanduser" and owner != "os.path":
                found.append(f"{place}a home is looked up by specdec.base.files.user_path")
            reads = " ".join(map(ast.unparse, call.args))
            json_file = owner == "json" and (
                called == "load" or (called == "loads" and "read_" in reads)
            )
            if json_file and "BUNDLED" not in reads and called not in ALLOWED.get(name, ()):
                found.append(f"{place}JSON of a file is read by specdec.base.files.parse_json")
    return found


def test_nothing_goes_around_the_one_way() -> None:
    assert around(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text('x')", "path.write_bytes(b'x')", "path.unlink()", "os.unlink(path)",
        "os.remove(path)", "os.replace(a, b)", "path.replace(other)", "path.rename(other)",
        "shutil.rmtree(path)", "shutil.copy(a, b)", "open(path, 'w')",
        "path.open('a', encoding='utf-8')", "path.open(mode='r+b')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)", "torch.save(state, path)",
        "save_file(tensors, path)", "json.dump(value, file)", "file.truncate(3)",
        "Path(name).expanduser()", "json.loads(path.read_text())", "json.load(file)",
    ],
)  # fmt: skip
def test_a_way_around_is_found(line: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    file = tmp_path / "evals" / "x.py"
    file.write_text(f"def f():\n    {line}\n")
    assert len(around(tmp_path)) == 1, line


def test_what_is_handed_over_and_what_only_looks_like_it_is_let_through(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "x.py").write_text(
        "write_atomically(path, lambda unfinished: torch.save(state, unfinished))\n"
        "write_text(path, 'x')\ntext.replace('a', 'b')\nreplace(config,"
        " x=1)\nopen(path)\nopen(path, 'rb')\n"
        "open(os.devnull, 'w')\njson.loads(line)\ncopy.copy(x)\nlist.remove(x)\n"
    )
    assert around(tmp_path) == []
