"""What the log of a run says."""

import csv
from pathlib import Path


def with_answers(toy: Path, folder: Path) -> Path:
    (folder / "run").mkdir(parents=True)
    for name in ("target", "prompts.txt", "run/answers"):
        (folder / name).symlink_to(toy / name)
    return folder


def log_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "run" / "training" / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def figures(folder: Path) -> list[tuple[str, ...]]:
    """What two equal runs have in common: everything but times."""
    return [
        tuple(row[name] for name in ("step", "loss", "train_tau", "lr", "grad_norm", "tau"))
        for row in log_rows(folder)
    ]
