"""How many cores a process may compute on."""

import math
import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy, at least 1.

    Torch counts the cores it may run on and sees no container's quota of their time. Threads beyond
    the quota are stopped in turn, and the others wait for them in every operation.

    Args:
        cgroup: where the kernel shows the limits of the process's control group, version 2 or 1.
    """
    tells = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if tells else os.cpu_count() or 1
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            files = (cgroup / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text().strip() for file in files)
    except (OSError, ValueError):
        return cores  # no control groups, or none that can be read: no limit is known
    if quota in ("max", "-1"):
        return cores
    return min(cores, math.ceil(int(quota) / int(period)))
