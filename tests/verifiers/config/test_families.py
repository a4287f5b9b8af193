"""The files of `verifiers/families` together."""

from collections import Counter
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import verifiers.families
from verifiers.config.families import ARCHITECTURES, FAMILIES, READ_AS, WRAPPERS

ROOT = Path(verifiers.families.__path__[0]).parent


def test_nothing_is_said_twice() -> None:
    """A model type, a composite, a second name, an architecture of GGUF files."""
    modules = walk_packages(verifiers.families.__path__, "verifiers.families.")
    files = [import_module(module.name).FAMILIES for module in modules if not module.ispkg]
    families = [family for file in files for family in file.values()]
    said = {
        "types": [model_type for file in files for model_type in file],
        "composites": [name for family in families for name in family.wrappers],
        "second names": [name for family in families for name in family.aliases],
        "architectures": [name for family in families for name in family.gguf],
    }
    twice = {what: [name for name, n in Counter(of).items() if n > 1] for what, of in said.items()}
    assert {what: names for what, names in twice.items() if names} == {}
    assert list(map(len, said.values())) == list(
        map(len, (FAMILIES, WRAPPERS, READ_AS, ARCHITECTURES))
    )


def test_no_other_file_names_a_model_type() -> None:
    """But for tokenizers of GGUF files, whose kinds go by names of models."""
    names = {*FAMILIES, *WRAPPERS, *READ_AS, *ARCHITECTURES}
    files = {path.relative_to(ROOT): path.read_text() for path in ROOT.rglob("*.py")}
    found = {
        str(path): [name for name in sorted(names) if f'"{name}"' in text]
        for path, text in files.items()
        if path.parts[0] != "families" and path != Path("gguf/tokenizer.py")
    }
    assert {path: types for path, types in found.items() if types} == {}
