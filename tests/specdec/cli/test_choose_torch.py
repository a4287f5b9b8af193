"""Set-up on simulated machines: a ROCm build of torch stays, none is replaced by one for CUDA, and
elsewhere nothing changes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.base.errors import InvalidInputError
from specdec.cli.choose_torch import TorchBuild, pins
from tests.helpers.waiting import HANG

ROOT = Path(__file__).parents[3]
CONSTRAINTS = "tokenizers==0.23.3\ntorch==2.13.0\ntqdm==4.70.1\ntriton==3.7.1\n"
OTHERS = "tokenizers==0.23.3\ntqdm==4.70.1\n"
ROCM = TorchBuild("2.11.0+rocm7.1", "7.1.25424", Path("/opt/venv"))
CUDA = TorchBuild("2.13.0+cu130", None, Path("/opt/venv"))


def chosen(build: TorchBuild | None, *gpus: str, named: bool = False) -> str:
    return pins(CONSTRAINTS, build, named=named, needed="2.11", gpus=list(gpus))


def test_without_an_amd_gpu_nothing_changes() -> None:
    assert chosen(None) == chosen(CUDA) == CONSTRAINTS


def test_a_rocm_build_is_kept() -> None:
    """Its version is pinned, and no Triton is, which would be that of CUDA."""
    assert chosen(ROCM, "gfx942") == chosen(ROCM) == OTHERS + "torch==2.11.0+rocm7.1\n"


def test_an_amd_gpu_without_a_rocm_build_stops() -> None:
    """Before gigabytes are fetched; not once a build for CUDA is there."""
    with pytest.raises(
        InvalidInputError,
        match=r"AMD GPU is here \(gfx942\).*make demo TORCH_INDEX=.*PYTHON=.*TORCH=torch",
    ):
        chosen(None, "gfx942", "gfx942")
    assert chosen(CUDA, "gfx942") == CONSTRAINTS


def test_a_build_that_was_named_is_kept() -> None:
    """What follows must not put the usual one over it."""
    assert chosen(ROCM, "gfx942", named=True) == OTHERS + "torch==2.11.0+rocm7.1\n"
    assert chosen(CUDA, named=True) == OTHERS + "torch==2.13.0+cu130\n"


def test_a_rocm_build_that_is_too_old_stops() -> None:
    """pip would take a newer one, for CUDA."""
    with pytest.raises(
        InvalidInputError,
        match=r"torch 2.9.1\+rocm6.4 in /opt/venv is older than 2.11, the oldest that works:"
        r" install a newer",
    ):
        chosen(TorchBuild("2.9.1+rocm6.4", "6.4", Path("/opt/venv")), "gfx942")


def python_with_torch(folder: Path, version: str, hip: str | None) -> Path:
    """A Python that has a torch of that build, and makes environments without pip, which takes
    seconds.
    """
    package = folder / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libamdhip64.so is missing')\n")
    (package / "version.py").write_text(f"__version__ = {version!r}\nhip: str | None = {hip!r}\n")
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$1 $2" in "-m venv") exec {sys.executable} -m venv --without-pip "$3";;'
        f" esac\n"
        f'PYTHONPATH={folder / "packages"} exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


def make(folder: Path, *variables: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`make` of the package's stamp in `folder`, with pip's calls printed instead of made."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "PYTHON", "TORCH"))
    }
    venv = folder / "venv"
    command = [
        "make", f"VENV={venv}", f"PYTHON={folder / 'python'}", "PIP_INSTALL=echo pip", *variables,
        f"{venv}/.package",
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=root, env=environ, capture_output=True, text=True, timeout=HANG, check=False
    )


@pytest.mark.slow
def test_the_container_recipe_copies_what_set_up_reads(tmp_path: Path) -> None:
    """And its target sets up in a folder that has nothing else."""
    recipe = (ROOT / "docs" / "rocm.Dockerfile").read_text().splitlines()
    for line in recipe:
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                place = tmp_path / "image" / target / (source if target == "./" else "")
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                place.parent.mkdir(parents=True, exist_ok=True)
                copy(ROOT / source, place)
    python_with_torch(tmp_path, "2.12.0+rocm7.2", "7.2")
    (run,) = (line for line in recipe if line.startswith("RUN make "))
    assert run.split()[2] == ".venv/.package"
    done = make(tmp_path, root=tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert "torch 2.12.0+rocm7.2" in done.stderr and "is kept" in done.stderr


@pytest.mark.slow
def test_make_keeps_the_rocm_build_of_its_python(tmp_path: Path) -> None:
    """The environment imports it from where it is, though it cannot be imported here, and its
    version is pinned for pip.
    """
    python_with_torch(tmp_path, "2.12.0+rocm7.2", "7.2")
    done = make(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        f"torch 2.12.0+rocm7.2 in {tmp_path / 'packages'} is built for ROCm, and is kept"
        in done.stderr
    )
    venv = tmp_path / "venv"
    lines = (venv / "constraints.txt").read_text().splitlines()
    assert "torch==2.12.0+rocm7.2" in lines and not any(
        line.startswith(("triton", "torch==2.13")) for line in lines
    )
    assert f"pip --constraint {venv}/constraints.txt torch\n" in done.stdout
    code = "from specdec.cli.choose_torch import installed_torch; print(installed_torch().folder)"
    found = subprocess.run(
        [venv / "bin" / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{tmp_path / 'packages'}\n"


@pytest.mark.slow
def test_make_installs_the_build_that_is_named(tmp_path: Path) -> None:
    """From the index and in the version that is said, whatever its Python has, and without the
    pins, which that index may lack.
    """
    python_with_torch(tmp_path, "2.12.0+rocm7.2", "7.2")
    done = make(tmp_path, "TORCH_INDEX=https://example.org/rocm", "TORCH=torch==2.11.0 triton-rocm")
    assert "pip --index-url https://example.org/rocm torch==2.11.0 triton-rocm\n" in done.stdout
    assert not list((tmp_path / "venv").rglob("rocm_torch.pth"))


@pytest.mark.slow
def test_make_elsewhere_is_as_it_was(tmp_path: Path) -> None:
    """A Python with a build for CUDA, or with none: the same versions as ever."""
    python_with_torch(tmp_path, "2.12.0+cu130", None)
    done = make(tmp_path)
    if "an AMD GPU is here" in done.stderr:
        pytest.skip("this machine has an AMD GPU")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv" / "constraints.txt").read_text() == (
        ROOT / "constraints.txt"
    ).read_text()
    assert f"pip --constraint {tmp_path}/venv/constraints.txt torch\n" in done.stdout
    assert not list((tmp_path / "venv").rglob("rocm_torch.pth"))
