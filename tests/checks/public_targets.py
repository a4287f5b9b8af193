"""Counts for how many public drafters the target would run on one GPU, or several, and says what is
in the way of the others.

    python -m tests.checks.public_targets                    # the DFlash family, 192 GB of one GPU
    python -m tests.checks.public_targets --all              # EAGLE-3 and prediction layers too
    python -m tests.checks.public_targets --gpu-memory 141   # another GPU
    python -m tests.checks.public_targets --gpus 8           # up to 8, if the target divides

A row is one drafter for one target; whether we have its head is not asked.
`tests/verifiers/public_targets.json` holds of every target the entries of its config that decide,
and the size of its weights: sizes are right to a sixth, and where a config was not to be seen,
entries are those of the family in transformers. `unverified` marks targets of which not even the
model type is sure; `tokenizer` names the files of a tokenizer that we do not read. No weight is
read and nothing is fetched.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from verifiers.needs import Needs, needs_of

DATA = Path(__file__).parents[1] / "verifiers" / "public_targets.json"

TOO_LARGE = "its weights need"
"""How the reason begins that more GPUs would answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter and what its target needs."""

    checkpoint: str
    head: str
    target: str
    needs: Needs


@cache
def data() -> dict[str, Any]:
    """The content of the data file."""
    content: dict[str, Any] = json.loads(DATA.read_text())
    return content


@cache
def target_needs(target: str, gpu_bytes: int, gpus: int = 1) -> Needs:
    """What a public target needs on so many GPUs of that size, with the attention that runs
    anywhere.
    """
    entry = data()["targets"][target]
    return needs_of(
        entry["config"],
        name=target,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        gpu_bytes=gpu_bytes,
        total_size=int(entry["gigabytes"] * 1e9),
        packed=True,
        max_gpus=gpus,
        divides=gpus > 1,
    )


def rows(gpu_bytes: int, *, gpus: int = 1, everything: bool = False) -> list[Row]:
    """All rows of the DFlash family, or of every family."""
    entries = data()["drafters"] + (data()["others"] if everything else [])
    needs = {entry["target"]: target_needs(entry["target"], gpu_bytes, gpus) for entry in entries}
    return [
        Row(entry["checkpoint"], entry["head"], entry["target"], needs[entry["target"]])
        for entry in entries
    ]


def missing_types(found: Iterable[Row]) -> Counter[str]:
    """Rows per model type that more GPUs alone would not unlock, of targets that fit one."""
    refused = [
        row.needs
        for row in found
        if any(not reason.startswith(TOO_LARGE) for reason in row.needs.missing)
    ]
    return Counter(needs.text_type or needs.model_type for needs in refused if needs.gpus <= 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the count and every refusal; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=192,
        metavar="GB",
        help="memory of one GPU (default 192)",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of the machine (default 1)"
    )
    parser.add_argument("--all", action="store_true", help="heads of every family")
    args = parser.parse_args(argv)
    found = rows(int(args.gpu_memory * 1e9), gpus=args.gpus, everything=args.all)
    accepted = [row for row in found if row.needs.would_run]
    refused = {row.target: row.needs for row in found if not row.needs.would_run}
    counts = Counter(row.target for row in found)
    gpus = "one GPU" if args.gpus == 1 else f"up to {args.gpus} GPUs"
    print(
        f"{len(accepted)} of {len(found)} drafters have a target that would run on {gpus} of"
        f" {args.gpu_memory:g} GB\n"
    )
    for target, needs in {row.target: row.needs for row in accepted}.items():
        print(f"  {counts[target]:>2}  {target:<34} {needs.runs_on}; {needs.weights / 1e9:.0f} GB")
    print(f"\n{len(found) - len(accepted)} have none\n")
    for target, needs in refused.items():
        print(f"  {counts[target]:>2}  {target:<34} {'; '.join(needs.missing)}")
    print("\nwhat each model type that is missing would add, of targets that fit one GPU")
    for model_type, count in missing_types(found).most_common():
        print(f"  {count:>2}  {model_type}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
