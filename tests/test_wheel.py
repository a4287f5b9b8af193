"""The wheel: built from this checkout, installed in an environment of its own, run elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import venv
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
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    build = ("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path)
    ran(*pip, *build, source, cwd=tmp_path)
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(ran(python, "-c", where, cwd=tmp_path).strip())
    ran(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # a path file within: hooks of an editable installation there are not followed
    others = ran(sys.executable, "-c", where, cwd=tmp_path).strip()
    (site / "others.pth").write_text(others)

    imported = (
        f"import {', '.join(PACKAGES)}; print(*(m.__file__ for m in ({', '.join(PACKAGES)})))"
    )
    files = ran(python, "-c", imported, cwd=tmp_path).split()
    assert len(files) == 4 and all(Path(file).is_relative_to(site) for file in files), files
    command = (home / "bin" / "specdec", "generate", "Count to five.", "--compare")
    options = ("--max-tokens", "16", "--device", "cpu", "--dtype", "float32")
    shown = ran(*command, *options, cwd=tmp_path)
    assert re.search(r"output +identical", shown), shown
