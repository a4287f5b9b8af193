"""What is known so far: one JSON for the machine and every step, and a page made from it."""

import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specdec.base.files import parse_json
from specdec.device import amd_gpus
from specdec.device.device import describe_device, resolve_device, torch_build
from specdec.session.provenance import commit, versions
from tests.checks.amd_first_day.expected import table

SCHEMA = "specdec amd_first_day 2"
LINES = (40, 20, 10, 5)
"""Of an output that the page shows, the last ones: as many as leave it within `MOST`. The JSON has
all.
"""
MOST = 60_000
"""Characters of a page; an issue takes little more."""


def machine() -> dict[str, Any]:
    """What the figures depend on beside the commands."""
    packages = {}
    for name in ("amd-aiter", "triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": describe_device(resolve_device()),
        "GPUs": ", ".join(amd_gpus.architectures()) or "none that the driver shows",
        "torch for": torch_build(),
        "versions": ", ".join(
            f"{name} {version}" for name, version in (versions() | packages).items()
        ),
        "commit": commit() or "none",
        "kernel": platform.release(),
        "driver": _first_line(Path("/sys/module/amdgpu/version")),
        "ROCm": _first_line(Path("/opt/rocm/.info/version")),
        "memory": f"{torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"
        if torch.cuda.is_available()
        else "no GPU",
    }


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return "not told"


def read(path: Path) -> dict[str, Any]:
    """Steps of an earlier run, by name; none where there was none."""
    if not path.exists():
        return {}
    content = json_of(path)
    steps = content.get("steps") if isinstance(content, dict) else None
    if not isinstance(steps, dict) or content.get("schema") != SCHEMA:
        raise SystemExit(
            f"{path} is not a record of this version; move it away, or choose another folder with"
            f" --out"
        )
    return steps


def json_of(path: Path) -> Any:
    """What a file holds; None where there is no whole one, as of a step that was ended."""
    try:
        return parse_json(path.read_bytes(), strict=False)
    except (OSError, ValueError):
        return None


def write(folder: Path, about: Mapping[str, Any], steps: Mapping[str, Any]) -> None:
    """Writes `result.json` and `page.md`, each in one go, so that an interruption leaves the last
    ones.
    """
    content = {"schema": SCHEMA, "machine": dict(about), "steps": dict(steps)}
    for name, text in (
        ("result.json", json.dumps(content, indent=1)),
        ("page.md", page(about, steps)),
    ):
        half = folder / f"{name}.part"
        half.write_text(text)
        half.replace(folder / name)


def counts(entries: Iterable[Mapping[str, Any]]) -> str:
    """How many steps have passed, which a machine without a kernel cannot all do.

    >>> counts([{"verdict": "passed"}, {"verdict": "refused"}, {"verdict": "failed (1)"}])
    '1 of 3 steps passed, 1 refused by this machine, 1 failed.'
    """
    verdicts = [entry["verdict"] for entry in entries]
    passed, refused = (verdicts.count(one) for one in ("passed", "refused"))
    failed = len(verdicts) - passed - refused
    rest = f", {refused} refused by this machine" if refused else ""
    return f"{passed} of {len(verdicts)} steps passed{rest}, {failed} failed."


def page(about: Mapping[str, Any], steps: Mapping[str, Any]) -> str:
    """Markdown: the machine, a table of the steps, and of every output the end, behind what is said
    to be wrong before it.
    """
    pages = (_page(about, steps, lines) for lines in LINES)
    return next((text for text in pages if len(text) <= MOST), _page(about, steps, 0))


def _page(about: Mapping[str, Any], steps: Mapping[str, Any], max_lines: int) -> str:
    lines = [f"# specdec on {about['device']}", "", counts(steps.values()), ""]
    if figures := table(steps):
        lines += [*figures, ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items()), ""]
    lines += ["| step | what it shows | verdict | seconds |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {step['title']} | {step['verdict']} | {step['seconds']} |"
        for name, step in steps.items()
    ]
    for name, step in steps.items():
        output = [
            line.rstrip()[:200]
            for line in step["output"].replace("\r", "\n").splitlines()
            if line.strip()
        ]
        cut = max(len(output) - max_lines, 0)
        output = [line for line in output[:cut] if "WRONG" in line][:max_lines] + output[cut:]
        lines += [
            "",
            f"<details><summary>{name}: {step['verdict']}</summary>",
            "",
            f"`{step['command']}`",
            "",
        ]
        lines += ["```text", *output, "```", "", "</details>"]
    return "\n".join([*lines, ""])
