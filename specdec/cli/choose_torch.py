"""Which build of torch an environment gets; the Makefile runs this before all is installed.

    PYTHON -m specdec.cli.choose_torch --link .venv
        lets a new environment use the ROCm build that PYTHON has
    .venv/bin/python -m specdec.cli.choose_torch
        prints the versions to install, which keep the build that is there

pip chooses a build for CUDA, and would later put it, or its Triton, over one for ROCm.
"""

import argparse
import re
import runpy
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from specdec.base.errors import InvalidInputError
from specdec.base.writing import write_text
from specdec.device import amd_gpus

_ROOT = Path(__file__).parents[2]
_NEEDED = re.compile(r'"torch>=([\d.]+)"')
_OF_TORCH = ("torch==", "triton==")
"""Pins that are those of the build for CUDA."""


class TorchBuild(NamedTuple):
    """The torch that a Python would import.

    Attributes:
        version: its own.
        hip: version of ROCm that it is built for; None for other builds.
        folder: where the package lies.
    """

    version: str
    hip: str | None
    folder: Path


def installed_torch() -> TorchBuild | None:
    """Torch on this Python's path, without importing it, which is slow and needs drivers."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    values = runpy.run_path(str(package / "version.py"))
    return TorchBuild(str(values["__version__"]), values.get("hip"), package.parent)


def link(environment: Path, build: TorchBuild | None) -> None:
    """Makes a ROCm build of this Python importable in `environment`, behind its own."""
    if build is not None and build.hip:
        bases = dict.fromkeys(("base", "platbase"), str(environment))
        packages = Path(sysconfig.get_path("purelib", "venv", bases))
        # As a folder of packages in its own right, since a ROCm build may come with path files.
        line = f"import site; site.addsitedir({str(build.folder)!r})\n"
        write_text(packages / "rocm_torch.pth", line)


def pins(
    constraints: str, build: TorchBuild | None, *, named: bool, needed: str, gpus: list[str]
) -> str:
    """Versions for pip, as lines of a constraints file.

    Args:
        named: the user has said which one to install.
        needed: lowest version of torch.
        gpus: see `amd_gpus.wanting_rocm`.

    Raises:
        InvalidInputError: the build that is to stay is too old, or for CUDA with an AMD GPU.
    """
    if build is None and gpus:
        raise InvalidInputError(
            f"an AMD GPU is here ({', '.join(sorted(set(gpus)))}), and pip's own torch is built for"
            " CUDA; name the index that PyTorch's install page gives for ROCm: make demo"
            " TORCH_INDEX=...; or a Python that has a ROCm build: make demo PYTHON=...; or leave"
            " the GPU alone: make demo TORCH=torch (docs/rocm.md)"
        )
    if build is None or not (build.hip or named):
        return constraints
    if _numbers(build.version) < _numbers(needed):
        raise InvalidInputError(
            f"torch {build.version} in {build.folder} is older than {needed}, the oldest that"
            f" works: install a newer build there,"
            " or name one: make demo TORCH_INDEX=... (docs/rocm.md)"
        )
    others = "".join(
        line for line in constraints.splitlines(keepends=True) if not line.startswith(_OF_TORCH)
    )
    return f"{others}torch=={build.version}\n"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 1 with a line on standard error when there is nothing to install."""
    parser = argparse.ArgumentParser(prog="python -m specdec.cli.choose_torch")
    parser.add_argument(
        "--link", type=Path, metavar="FOLDER", help="the environment that this Python has made"
    )
    parser.add_argument(
        "--named", action="store_true", help="the torch that is there was named by hand"
    )
    args = parser.parse_args(argv)
    build = installed_torch()
    if args.link:
        link(args.link, build)
        return 0
    needed = _NEEDED.search((_ROOT / "pyproject.toml").read_text())
    assert needed is not None
    try:
        constraints = (_ROOT / "constraints.txt").read_text()
        gpus = amd_gpus.wanting_rocm()
        print(pins(constraints, build, named=args.named, needed=needed[1], gpus=gpus), end="")
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return 1
    if build is not None and build.hip and not args.named:
        found = f"torch {build.version} in {build.folder}"
        print(f"  {found} is built for ROCm, and is kept", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
