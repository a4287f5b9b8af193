"""Losses of a drafter trained in two workers of Ray Train beside those of one process, over the
same batches.

    python -m tests.checks.ray_train --steps 20

A toy target answers once. Then the same steps are taken three times: by one process, by one process
that adds up the gradients of two halves of every batch, and by two workers, each with one of these
halves. The first two differ by rounding alone, so the workers may differ from either by a few times
that and the last digit of the log. A worker that saw other sequences, or losses that were averaged
twice, would differ by far more.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from drafters.training.stages import run_stages
from specdec.cli.main import main as specdec
from tests.drafters.training.toy import as_flags, toy_config, write_prompts, write_target

NAMES = ("loss", "train_tau", "grad_norm")
RESOLUTION = 1e-4
"""Of the numbers in `log.csv`, as a share of them: the fifth digit."""

ROOM = 8
"""How many times the difference of the two splits in one process the workers may differ, whose sums
have another order again.
"""


def losses(folder: Path) -> list[dict[str, float]]:
    """By step, as `log.csv` has them."""
    with (folder / "training" / "log.csv").open(newline="") as file:
        return [
            {name: float(row[name]) for name in NAMES}
            for row in csv.DictReader(file)
            if row["loss"]
        ]


def train(folder: Path, steps: int, workers: int | None, **changes: Any) -> list[dict[str, float]]:
    """Losses of a run of its own over the answers of `folder`."""
    run = folder / f"run-{workers}-{changes.get('accumulation', 1)}"
    shutil.copytree(folder / "run", run)
    config = toy_config(folder, out=str(run), max_steps=steps, log_every=1, heldout=4, **changes)
    ray = [] if workers is None else ["--workers", str(workers), "--ray"]
    assert specdec(["train", "train", *as_flags(config), *ray]) == 0
    return losses(run)


def most(one: list[dict[str, float]], other: list[dict[str, float]], name: str) -> float:
    """The largest difference of a number, as a share of it."""
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(one, other, strict=True))


def main() -> int:
    """Prints every step, and whether the losses are the same within rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="of training (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_target(folder / "target")
        write_prompts(folder / "prompts.txt", count=80)
        assert run_stages(("answers",), toy_config(folder, heldout=4))
        one = train(folder, args.steps, None)
        halves = train(folder, args.steps, None, accumulation=2)
        two = train(folder, args.steps, 2)
    assert len(one) == len(halves) == len(two) == args.steps
    print(f"{'step':>4}{'one process':>16}{'in two halves':>16}{'two workers':>16}")
    for step, rows in enumerate(zip(one, halves, two, strict=True), start=1):
        print(f"{step:>4}" + "".join(f"{row['loss']:>16}" for row in rows))
    right = True
    for name in NAMES:
        rounding, found = (
            most(one, halves, name),
            min(most(one, two, name), most(halves, two, name)),
        )
        right &= found <= ROOM * rounding + RESOLUTION
        print(f"{name}: halves differ by {rounding:.1e}, workers by {found:.1e} of it at most")
    print("the same within rounding" if right else "DIFFERENT")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
