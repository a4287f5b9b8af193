"""Compares the emulation's signatures with AITER's own, which are read and not imported: neither a
GPU nor ROCm is needed.

    python -m tests.helpers.aiter_emulation.compare_signatures
        the installed amd-aiter
    python -m tests.helpers.aiter_emulation.compare_signatures PATH/aiter 0.1.22
        the package in a checkout
    python -m tests.helpers.aiter_emulation.compare_signatures --repository aiter
        every release and the newest main

Releases are the tags like v0.1.16 and v0.1.16.post1 from the oldest emulated version on. Each is
compared with the newest emulated version not above it; `main`, which is behind the newest tag, with
whichever of those from there on it differs least from.
Exits with 1 when a signature differs, with 2 when there is nothing to compare.
"""

import argparse
import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

from tests.helpers.aiter_emulation.signatures import (
    SOURCES,
    VERSIONS,
    nearest,
    signature,
    version_key,
)

Parameters = list[str]
"""`name` or `name=default` of every parameter."""

Read = Callable[[str], str | None]
"""The text of a file inside the package, None when there is none."""


@cache
def functions(source: str) -> dict[str, Parameters]:
    """The parameters of every function that is compared; of several with one name those of the
    last.
    """
    found = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in SOURCES
    )
    return {node.name: _parameters(node.args) for node in found}


def _parameters(arguments: ast.arguments) -> Parameters:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults)) + list(
        arguments.defaults
    )
    return [
        n if d is None else f"{n}={_plain(ast.unparse(d))}"
        for n, d in zip(names, defaults, strict=True)
    ]


_DEFAULTS = {
    "float('inf')": "inf",
    "MlaVersion.V32.value": "0",
    "80 if get_gfx() == 'gfx942' else 256": "256",
}
"""Defaults that are expressions, as the emulation writes them."""


def _plain(default: str) -> str:
    return _DEFAULTS.get(default, default)


def expected(name: str, version: str) -> Parameters | None:
    """The same list for the emulation."""
    known = signature(name, version)
    if known is None:
        return None
    empty = inspect.Parameter.empty
    return [
        p.name if p.default is empty else f"{p.name}={p.default!r}"
        for p in known.parameters.values()
    ]


def differences(read: Read, version: str) -> list[str]:
    """One line for every function whose parameters differ.

    Args:
        read: the files of the `aiter` package.
        version: its version; the newest emulated version not above it is compared.
    """
    emulated = nearest(VERSIONS, version) or VERSIONS[0]
    lines = []
    for name, path in SOURCES.items():
        source = read(path)
        actual = None if source is None else functions(source).get(name)
        wanted = expected(name, emulated)
        if actual != wanted:
            lines.append(
                f"{name} ({path}): AITER {version} has {actual}, the emulation of {emulated} has"
                f" {wanted}"
            )
    return lines


def folder_reader(folder: Path) -> Read:
    """The files of the `aiter` package in a folder."""
    return lambda path: file.read_text() if (file := folder / path).is_file() else None


def revision_reader(repository: Path, revision: str) -> Read:
    """The files of the `aiter` package at a revision of a git repository;
    nothing is checked out.
    """
    listed = _git(
        repository,
        "ls-tree",
        "-r",
        revision,
        *sorted({f"aiter/{path}" for path in SOURCES.values()}),
    ).splitlines()
    blobs = {
        path.removeprefix("aiter/"): about.split()[2]
        for about, path in (line.split("\t") for line in listed)
    }
    return lambda path: _blob(repository, blobs[path]) if path in blobs else None


@cache
def _blob(repository: Path, name: str) -> str:
    return _git(repository, "cat-file", "blob", name)


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {arguments[0]} in {repository}: {done.stderr.strip()}")
    return done.stdout


def releases(repository: Path) -> dict[str, str]:
    """Revisions to compare and their versions, oldest first, `main` last where there is one."""
    tags = [
        tag
        for tag in _git(repository, "tag", "--list", "v*").split()
        if re.fullmatch(r"v\d+(\.\d+)*(\.post\d+)?", tag)
    ]
    known = {
        tag: tag[1:]
        for tag in sorted(tags, key=version_key)
        if version_key(tag) >= version_key(VERSIONS[0])
    }
    newest = max(known.values(), key=version_key, default=VERSIONS[0])
    has_main = _git(repository, "branch", "--list", "main").strip()
    return known | ({"main": newest} if has_main else {})


def compare_repository(repository: Path) -> int:
    """Prints a line for every release, and below it one for every function that differs; returns
    the exit status.
    """
    wrong, revisions = 0, releases(repository)
    for revision, version in revisions.items():
        read = revision_reader(repository, revision)
        later = [v for v in VERSIONS if version_key(v) > version_key(version)]
        candidates = [version, *(later if revision == "main" else [])]
        version = min(candidates, key=lambda candidate: len(differences(read, candidate)))
        found = differences(read, version)
        wrong += bool(found)
        commit = _git(repository, "log", "-1", "--format=%h of %cs", revision).strip()
        equal = f"{len(SOURCES) - len(found)} of {len(SOURCES)} signatures equal"
        print(f"{revision:<14} {commit}  {equal} the emulation of {nearest(VERSIONS, version)}")
        for line in found:
            print(f"    {line}")
    if not revisions:
        print(f"{repository} has no tag from v{VERSIONS[0]} on and no branch main", file=sys.stderr)
    return 2 if not revisions else int(bool(wrong))


def main(arguments: list[str]) -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.aiter_emulation.compare_signatures", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="the aiter package inside a checkout (default: the installed amd-aiter)",
    )
    parser.add_argument(
        "version", nargs="?", default=VERSIONS[-1], help="of the folder (default %(default)s)"
    )
    parser.add_argument("--repository", type=Path, help="a git repository of AITER, with its tags")
    args = parser.parse_args(arguments)
    if args.repository is not None:
        return compare_repository(args.repository)
    folder, version = args.folder, args.version
    if folder is None:
        try:
            distribution = metadata.distribution("amd-aiter")
        except metadata.PackageNotFoundError:
            print(
                "amd-aiter is not installed; name the aiter folder of a checkout, or --repository",
                file=sys.stderr,
            )
            return 2
        folder, version = Path(str(distribution.locate_file("aiter"))), distribution.version
    numbers = re.match(r"v?(\d+(?:\.\d+)*(?:\.post\d+)?)", version)
    if numbers is None:
        print(f"cannot read the version {version!r}", file=sys.stderr)
        return 2
    found = differences(folder_reader(folder), numbers[1])
    print("\n".join(found) if found else f"all {len(SOURCES)} signatures equal AITER {version}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
