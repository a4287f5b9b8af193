"""Whether there is a GPU at all, asked in a process of its own: one that a fault has taken away
takes the process that asks with it, or makes it wait for ever.
"""

import subprocess
import sys
from typing import NamedTuple

PATIENCE = 180.0
"""Seconds for an answer; the first one loads ROCm's libraries."""

_ASK = """
import torch
from specdec.device.device import unseen_gpu
if not torch.cuda.is_available():
    raise SystemExit(unseen_gpu() or "torch finds no GPU here")
x = torch.ones(64, 64, device="cuda")
assert float((x @ x).sum()) == 64.0**3
print(torch.cuda.device_count())
"""


class Gpus(NamedTuple):
    """What was found: how many GPUs, and with none why."""

    number: int
    why_none: str = ""


def find_gpus() -> Gpus:
    """Multiplies on the first GPU and counts them all."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Gpus(0, f"a product of two small matrices has not ended after {PATIENCE:g} s")
    if done.returncode == 0:
        return Gpus(int(done.stdout.split()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Gpus(0, lines[-1][:300] if lines else f"the process ended with {done.returncode}")
