"""Compares the emulation's signatures with AITER's own: `python -m tests.helpers.aiter_emulation.compare_signatures [FOLDER]`.

FOLDER is the `aiter` package inside a checkout; without it, the installed `amd-aiter` is looked up. The sources are read, not
imported, so neither a GPU nor ROCm is needed. Exits with 1 when a signature differs from the newest emulated version not above it.
"""

import ast
import inspect
import re
import sys
from importlib import metadata
from pathlib import Path

from tests.helpers.aiter_emulation.signatures import SOURCES, VERSIONS, signature, version_key


def parameters(source: str, name: str) -> list[str] | None:
    """`name` or `name=default` of every parameter of the last function called `name`; None when there is none."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        return None
    arguments = found[-1].args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults)
    return [n if d is None else f"{n}={_plain(ast.unparse(d))}" for n, d in zip(names, defaults, strict=True)]


_DEFAULTS = {
    "float('inf')": "inf",
    "MlaVersion.V32.value": "0",
    "80 if get_gfx() == 'gfx942' else 256": "256",
}
"""Defaults that are expressions, as the emulation writes them."""


def _plain(default: str) -> str:
    return _DEFAULTS.get(default, default)


def expected(name: str, version: str) -> list[str] | None:
    """The same list for the emulation."""
    known = signature(name, version)
    if known is None:
        return None
    empty = inspect.Parameter.empty
    return [p.name if p.default is empty else f"{p.name}={p.default!r}" for p in known.parameters.values()]


def differences(folder: Path, version: str) -> list[str]:
    """One line for every function whose parameters differ.

    Args:
        folder: the `aiter` package.
        version: its version; the newest emulated version not above it is compared.
    """
    nearest = max((v for v in VERSIONS if version_key(v) <= version_key(version)), key=version_key, default=VERSIONS[0])
    lines = []
    for name, path in SOURCES.items():
        file = folder / path
        actual = parameters(file.read_text(), name) if file.is_file() else None
        wanted = expected(name, nearest)
        if actual != wanted:
            lines.append(f"{name} ({path}): AITER {version} has {actual}, the emulation of {nearest} has {wanted}")
    return lines


def main(arguments: list[str]) -> int:
    """Runs the comparison."""
    if arguments:
        folder, version = Path(arguments[0]), arguments[1] if len(arguments) > 1 else VERSIONS[-1]
    else:
        try:
            distribution = metadata.distribution("amd-aiter")
        except metadata.PackageNotFoundError:
            print("amd-aiter is not installed; name the aiter folder of a checkout and its version", file=sys.stderr)
            return 2
        folder, version = Path(str(distribution.locate_file("aiter"))), distribution.version
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if numbers is None:
        print(f"cannot read the version {version!r}", file=sys.stderr)
        return 2
    found = differences(folder, numbers[1])
    print("\n".join(found) if found else f"all {len(SOURCES)} signatures equal AITER {version}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
