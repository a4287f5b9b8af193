"""How many threads a CPU gets."""

import os
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_leave_the_core(variables: dict[str, str], expected: str) -> None:
    """Set before torch reads it; catches threads that keep a busy machine's cores from each other,
    and a user's own choice overruled.
    """
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import specdec, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [expected, "False"]
