"""The wheel: built from this checkout, installed in an environment of its own, run elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec", "drafters", "verifiers", "evals")


def ran(*command: str | Path, cwd: Path) -> str:
    """What a program prints that ends well; it sees nothing of the checkout."""
    environment = {name: one for name, one in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_runs_from_an_installed_wheel(tmp_path: Path) -> None:
    """Catches a package or a data file that the wheel lacks. What it depends on is found where it
    is installed for this process.
    """
    pytest.importorskip("setuptools")
    source, home = tmp_path / "source", tmp_path / "home"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    stored = {"--build-option": "--compression=stored"}  # to compress the drafter takes longest
    build = f"from setuptools import build_meta as b; b.build_wheel({str(tmp_path)!r}, {stored})"
    ran(sys.executable, "-c", build, cwd=source)
    shutil.rmtree(source)
    venv.create(home, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # a path file within: hooks of an editable installation there are not followed
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    program = f"""if True:
        import sys
        from importlib.metadata import entry_points
        import {", ".join(PACKAGES)}
        print(*(module.__file__ for module in ({", ".join(PACKAGES)})))
        (script,) = entry_points(group="console_scripts", name="specdec")
        sys.exit(script.load()())
    """
    command = (home / "bin" / "python", "-c", program, "generate", "Count to five.", "--compare")
    options = ("--max-tokens", "8", "--device", "cpu", "--dtype", "float32")
    files, _, shown = ran(*command, *options, cwd=tmp_path).partition("\n")
    assert all(Path(file).is_relative_to(site) for file in files.split()), files
    assert re.search(r"output +identical", shown), shown
