"""`specdec doctor`: the choice it reports is the one that is made, every reason is said, and the wrong package is named."""

from pathlib import Path

import pytest
import torch

import specdec.device
from specdec.cli import main
from specdec.ops import aiter
from tests.aiter_emulation import Machine, install


def doctor(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> str:
    """What it prints on a CPU in bfloat16."""
    assert main(["doctor", "--device", "cpu", "--dtype", "bfloat16", *options]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, the device, the choice and the reason against the others; only variables that are set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("GPU_ARCHS", raising=False)
    out = doctor(capsys)
    for line in (
        f"torch         {torch.__version__}",
        "amd-aiter     not installed",
        "  rocm_aiter_fa          no: cpu is not a ROCm device",
        "  torch_ref              chosen by --attention auto",
        "  OMP_NUM_THREADS=3",
    ):
        assert line in out, out
    assert "device        cpu, " in out and "GPU_ARCHS" not in out and "warning" not in out


def test_rocm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On AMD the AITER backend is chosen, and an AITER too old for block drafts is said to be."""
    monkeypatch.setattr(specdec.device, "rocm_architecture", lambda device: "gfx942")
    install(monkeypatch, tmp_path, Machine(version="0.1.15"))
    out = doctor(capsys)
    assert "amd-aiter     0.1.15" in out
    assert "  rocm_aiter_fa          chosen by --attention auto" in out
    assert "but not for DFlash drafters: non-causal blocks need amd-aiter 0.1.16" in out
    assert "  rocm_aiter_fa_shuffle  no: the shuffled layout needs amd-aiter 0.1.16" in out
    assert "  torch_ref              works with --attention torch_ref" in out
    assert "no: head size 40" in doctor(capsys, "--head-dim", "40")


def test_wrong_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The unrelated `aiter` of the registry is called by its name, with what to do, on any machine."""
    info = tmp_path / "aiter-0.13.20191203.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiter\nVersion: 0.13.20191203\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = doctor(capsys)
    assert (
        "warning       the installed package 'aiter' is an unrelated async library: uninstall it and install AMD's amd-aiter" in out
    )
    monkeypatch.setattr(specdec.device, "rocm_architecture", lambda device: "gfx942")
    assert "rocm_aiter_fa          no: the installed package 'aiter' is an unrelated" in doctor(capsys)


def test_nothing_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 when no backend can serve the model, and every reason is there."""
    out = doctor(capsys, "--heads", "5", "--kv-heads", "2", status=1)
    assert "chosen" not in out and "torch_ref              no: 5 query heads do not share 2 key heads evenly" in out


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "AITER is not installed"), ("0.1.14", "amd-aiter 0.1.14 is older than 0.1.15")]
)
def test_reasons_of_aiter(monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str) -> None:
    """Missing and old installations."""
    monkeypatch.setattr(aiter, "installed_version", lambda: version)
    assert [why.startswith(reason) for why in aiter.unavailable_reasons()] == [True]


def test_damaged_aiter_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function without an argument we pass, or not there at all, refuses with its name; nothing is imported by guesswork."""
    install(monkeypatch, tmp_path)
    assert aiter.unavailable_reasons() == []
    import aiter as emulated

    monkeypatch.setattr(emulated, "paged_attention_v1", lambda query: query)
    assert "paged_attention_v1 of aiter takes no out, workspace_buffer" in aiter.unavailable_reasons()[0]
    monkeypatch.delattr(emulated, "paged_attention_v1")
    assert "aiter has no paged_attention_v1" in aiter.unavailable_reasons()[0]
