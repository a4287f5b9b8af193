"""An n-gram drafter for engines of a cluster that tells what they do, and does what goes wrong
there.

The target's folder holds a `plan` for it, which names another folder: that gets a line in
`begun.jsonl` for every prompt that an engine begins.
"""

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafters.ngram import load_ngram
from specdec.model.core import BoundDrafter, Drafter, Verifier
from specdec.session import provenance
from tests.helpers.waiting import wait_until

HOME = "tests.helpers.cluster_drafter:load"


def begun(folder: Path) -> list[tuple[int, list[int]]]:
    """Process and prompt of every beginning so far."""
    path = folder / "begun.jsonl"
    return (
        [(line["pid"], line["prompt"]) for line in map(json.loads, path.read_text().splitlines())]
        if path.exists()
        else []
    )


def load(path: Path | None, *, verifier: Verifier) -> Drafter:
    """The drafter; in the second engine, where the plan says so, on a machine that has another
    device.
    """
    plan = json.loads((Path(verifier.name) / "plan").read_text())
    folder = Path(plan["folder"])
    if plan.get("other_device") and list(folder.glob("loaded-*")):
        provenance.device_name = lambda device: "another GPU"
    (folder / f"loaded-{os.getpid()}").touch()
    drafter: Any = load_ngram(path, verifier=verifier)
    bind = drafter.bind

    def watched(*args: Any, **options: Any) -> BoundDrafter:
        bound: Any = bind(*args, **options)
        begin = bound.begin

        def telling(slot: int, token_ids: Sequence[int]) -> None:
            _begin(folder, plan, list(token_ids))
            begin(slot, token_ids)

        bound.begin = telling
        made: BoundDrafter = bound
        return made

    drafter.bind = watched
    return drafter


def _begin(folder: Path, plan: dict[str, Any], prompt: list[int]) -> None:
    if len(prompt) < 2:
        return  # the warm-up
    with (folder / "begun.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "prompt": prompt}) + "\n")
    wait_until(lambda: _both(folder, plan))  # else one engine may do it all
    if len(begun(folder)) > plan.get("most", math.inf):
        wait_until((folder / "go_on").exists)
    if prompt == plan.get("poison"):
        keys = {
            plan["prompts"].index(prompt) for pid, prompt in begun(folder) if pid == os.getpid()
        }
        # its own, and the other slot's may be unfinished
        wait_until(lambda: len(keys - _kept(folder)) <= 2)
        os.kill(os.getpid(), signal.SIGKILL)


def _kept(folder: Path) -> set[int]:
    """Which prompts have their answers in the journal."""
    path = folder / "kept.jsonl"
    lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
    keys = [json.loads(line)["key"] for line in lines if line.endswith("\n")]
    return {int(key) for key in keys if key.isdigit()}


def _both(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether the second engine is there too; one that is to give itself away must have begun a
    prompt.
    """
    there = (
        {pid for pid, _ in begun(folder)}
        if plan.get("other_device")
        else set(folder.glob("loaded-*"))
    )
    return len(there) >= 2
