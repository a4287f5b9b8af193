"""Writes the API reference, HTML made from docstrings: `make docs`, without a network.

    python docs/reference.py build/reference

It has the public names of `specdec`, and the modules that a page or an example names.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import specdec

DOCS = Path(__file__).parent
NAMED = re.compile(
    r"`((?:specdec|drafters|verifiers|evals)(?:\.\w+)+)`"
    r"|^from ((?:specdec|drafters|verifiers|evals)[\w.]*) import (.+)$",
    re.MULTILINE,
)


def named() -> Iterator[tuple[str, str]]:
    """Module and name, empty for the module itself, of what docs name."""
    pages = [*DOCS.glob("*.md"), *DOCS.glob("examples/*.py"), *DOCS.parent.glob("*.md")]
    for page in sorted(pages):
        for whole, module, names in NAMED.findall(page.read_text(encoding="utf-8")):
            if whole:
                parent, _, name = whole.rpartition(".")
                inside = is_package(parent) and find_spec(whole) is not None
                yield (whole, "") if inside else (parent, name)
            else:
                yield from ((module, name.strip()) for name in names.split(","))


def is_package(module: str) -> bool:
    """Whether a module has others in it."""
    found = find_spec(module)
    return found is not None and found.submodule_search_locations is not None


def public() -> dict[str, Any]:
    """Objects by their full names: those of `specdec.__all__`, and what docs name."""
    found = {f"specdec.{name}": getattr(specdec, name) for name in specdec.__all__}
    for module, name in named():
        home = import_module(module)
        found[f"{module}.{name}" if name else module] = getattr(home, name) if name else home
    return found


def write(folder: Path) -> None:
    """Writes `index.html` and a page for each module."""
    import pdoc  # checks of names alone do without it

    for name in specdec.__all__:  # pdoc sees what is there, and these come on first use
        setattr(specdec, name, getattr(specdec, name))
    pdoc.render.configure(docformat="google", search=False)
    modules = sorted({module for module, _ in named()} | {"specdec"})
    pdoc.pdoc(*modules, output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(f"{sys.argv[1]}/index.html")
