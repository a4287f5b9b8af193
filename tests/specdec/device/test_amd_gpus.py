"""What is said of AMD GPUs on simulated machines, as the kernel's driver shows them."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.attention.aiter.fa import CDNA, RDNA
from specdec.device import amd_gpus, device
from specdec.device.amd_gpus import (
    UNKNOWN,
    architectures,
    free_of_apu,
    wanting_rocm,
    why_unseen,
)
from specdec.device.device import unseen_gpu
from tests.conftest import pytest_report_header


def machine(root: Path, *versions: int, kfd: bool = True, render: bool = True) -> Path:
    """The files of a machine with a processor and GPUs of these versions."""
    for index, version in enumerate((0, *versions)):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{index}"
        node.mkdir(parents=True)
        (node / "properties").write_text(
            f"cpu_cores_count {0 if version else 96}\ngfx_target_version {version}\n"
        )
    (root / "dev/dri").mkdir(parents=True)
    if kfd:
        (root / "dev/kfd").touch()
    if render:
        (root / "dev/dri/renderD128").touch()
    return root


def why(root: Path, *, rocm: bool = True, **environ: str) -> str | None:
    return why_unseen("torch 2.13.0, built for X,", rocm=rocm, root=root, environ=environ)


def test_architectures(tmp_path: Path) -> None:
    """Processors are no GPUs, and minor and step are hexadecimal."""
    assert architectures(machine(tmp_path, 90402, 90402, 90500, 110501, 90010)) == [
        "gfx942", "gfx942", "gfx950", "gfx1151", "gfx90a",
    ]  # fmt: skip
    assert architectures(tmp_path / "elsewhere") == []


GIB = 2**30


def apu(root: Path, index: int = 0, **sizes: int) -> Path:
    """The files of a GPU that shares the host's memory, in GiB, and of the host."""
    folder = root / f"sys/class/drm/card{index}/device"
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        if name != "available":
            (folder / f"mem_info_{name}").write_text(f"{size * GIB}\n")
    (root / "proc").mkdir(exist_ok=True)
    kib = sizes.get("available", 0) * 2**20
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {kib} kB\n")
    return root


@pytest.mark.parametrize(
    ("sizes", "free"),
    [
        # what is set aside is the larger part, and the host's memory another
        ({"vram_total": 96, "vram_used": 6, "gtt_total": 16, "gtt_used": 1, "available": 12}, 90),
        # hardly any is set aside
        ({"vram_total": 1, "vram_used": 1, "gtt_total": 62, "gtt_used": 2, "available": 100}, 60),
        ({"vram_total": 1, "vram_used": 1, "gtt_total": 62, "gtt_used": 2, "available": 40}, 40),
        ({"vram_total": 1, "vram_used": 1, "gtt_total": 62, "gtt_used": 63, "available": 40}, 0),
    ],
)
def test_memory_of_a_gpu_within_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], free: int
) -> None:
    """By the kernel's count, whatever ROCm tells; half of it is for the cache."""
    root = apu(tmp_path, **sizes)
    assert free_of_apu(root) == free * GIB
    integrated = SimpleNamespace(is_integrated=1, gcnArchName="gfx1151")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: integrated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * GIB, 62 * GIB))
    monkeypatch.setattr(device, "free_of_apu", lambda: free_of_apu(root))
    gpu = torch.device("cuda", 0)
    assert device.free_memory(gpu) == free * GIB
    assert device.default_cache_bytes(gpu) == free * GIB // 2
    integrated.is_integrated = 0  # a card of its own: the driver is asked, within reason
    assert device.free_memory(gpu) == 62 * GIB


def test_memory_that_the_kernel_does_not_tell(tmp_path: Path) -> None:
    """Files that are missing, or GPUs that are several."""
    assert free_of_apu(tmp_path) is None
    root = apu(tmp_path, gtt_total=62)
    assert free_of_apu(root) is None
    sizes = {"vram_total": 1, "vram_used": 1, "gtt_total": 62, "gtt_used": 2}
    assert free_of_apu(apu(tmp_path / "two", 1, **sizes)) == 0
    assert free_of_apu(apu(tmp_path / "two", 2, **sizes)) is None


def test_a_gpu_that_the_container_may_not_read(tmp_path: Path) -> None:
    root = machine(tmp_path, 90402)
    properties = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    properties.unlink()
    properties.mkdir()  # reading it fails, for root as well
    assert architectures(root) == wanting_rocm(root) == [UNKNOWN]


def test_who_should_get_rocm(tmp_path: Path) -> None:
    """A served GPU that can be opened, and no NVIDIA GPU beside it; not the graphics of every
    processor.
    """
    assert wanting_rocm(machine(tmp_path / "a", 90402)) == ["gfx942"]
    assert wanting_rocm(machine(tmp_path / "b", 90402, kfd=False)) == []
    assert wanting_rocm(machine(tmp_path / "c", 100306)) == [], "gfx1036, within Ryzen 7000"
    assert wanting_rocm(machine(tmp_path / "d", 100306, 110000)) == ["gfx1100"]
    root = machine(tmp_path / "e", 90402)
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").touch()
    assert wanting_rocm(root) == []
    assert wanting_rocm(tmp_path / "elsewhere") == []
    assert amd_gpus.SERVED[:5] == (*CDNA, *RDNA), "what AITER's backends serve"
    for version, name in ((90010, "gfx90a"), (100300, "gfx1030"), (120500, "gfx1250")):
        assert wanting_rocm(machine(tmp_path / name, version)) == [name], "for our own kernels"


@pytest.mark.parametrize(
    ("options", "environ", "reason"),
    [
        (
            {"rocm": False},
            {},
            "torch 2.13.0, built for X, finds none: install a ROCm build of torch (docs/rocm.md)",
        ),
        (
            {},
            {"HIP_VISIBLE_DEVICES": ""},
            "HIP_VISIBLE_DEVICES is '' and hides every GPU: unset it",
        ),
        ({}, {"ROCR_VISIBLE_DEVICES": "2,3"}, "ROCR_VISIBLE_DEVICES is '2,3' and hides every GPU"),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES is '-1' and hides every GPU"),
        (
            {},
            {"ROCR_VISIBLE_DEVICES": "GPU-1234", "HIP_VISIBLE_DEVICES": "5,0"},
            "finds none: see whether rocminfo lists it",
        ),
        (
            {"kfd": False},
            {},
            "/dev/kfd is missing: start the container with --device /dev/kfd --device /dev/dri",
        ),
    ],
)
def test_reasons(
    tmp_path: Path, options: dict[str, Any], environ: dict[str, str], reason: str
) -> None:
    """Each with its way out, behind what is here."""
    root = machine(tmp_path, 90402, 90402, kfd=options.get("kfd", True))
    said = why(root, rocm=options.get("rocm", True), **environ)
    assert (
        said is not None and said.startswith("an AMD GPU is here (gfx942), but ") and reason in said
    )


@pytest.mark.parametrize("closed", ["dev/kfd", "dev/dri/renderD128"])
def test_files_that_may_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """Names the file and the group that opens it."""
    root = machine(tmp_path, 90402)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != root / closed)
    group = (root / closed).group()
    said = why(root)
    assert said is not None
    assert (
        f"you may not open /{closed}: join its group, sudo usermod -aG {group} $USER, and log in"
        f" again" in said
    )


def test_nothing_is_said_without_one(tmp_path: Path) -> None:
    """A processor alone, whatever the build of torch; and a GPU that torch sees."""
    assert why(machine(tmp_path), rocm=False) is not None, "the driver's device is there"
    assert why(tmp_path / "elsewhere", rocm=False) is None


def test_a_gpu_that_torch_sees_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.device.device.why_unseen", lambda build, rocm: f"{build} {rocm}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "7.1.2")
    assert unseen_gpu() == f"torch {torch.__version__}, built for ROCm 7.1.2, True"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unseen_gpu() is None


def test_the_tests_say_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` on a machine whose GPU torch does not see must not look like a run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("specdec.device.device.unseen_gpu", lambda: None)
    assert (
        pytest_report_header().startswith("device: cpu, ") and "GPU" not in pytest_report_header()
    )
    monkeypatch.setattr(
        "specdec.device.device.unseen_gpu", lambda: "an AMD GPU is here, but hidden"
    )
    assert pytest_report_header().endswith("; no GPU is used: an AMD GPU is here, but hidden")
