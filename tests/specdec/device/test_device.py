"""How many threads a CPU gets."""

import os
from pathlib import Path

import pytest
import torch

from specdec.base.cores import usable_cores
from specdec.device.device import resolve_device

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, CORES),
        ({"cpu.max": "99900000 100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ({}, CORES),
        ({"cpu.max": "?\n"}, CORES),
    ],
)
def test_a_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """Both versions of control groups, a fraction of a core, no limit, and no such files."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_cores(tmp_path) == expected


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("3", 3)])
def test_threads_follow_the_quota_unless_told_otherwise(
    variable: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches threads that a container cannot run, and a user's own choice overruled."""
    monkeypatch.setattr("specdec.device.device.usable_cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        resolve_device("cpu")
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
