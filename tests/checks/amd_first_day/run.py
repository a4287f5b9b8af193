"""Runs a step as a process of its own, with a limit on its time and its output in a file."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checks.amd_first_day.record import json_of
from tests.checks.amd_first_day.steps import Step

ROOT = Path(__file__).parents[3]
LONGEST = 200_000
"""Characters of an output that are kept, the last ones."""

Launch = Callable[[Step, Path], int | None]
"""Runs a step with its output in a file; returns its exit status, or None when its time was up."""


def launch(step: Step, log: Path) -> int | None:
    """See `Launch`."""
    command = [sys.executable, "-m", *step.arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | dict(step.environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that compilers it has started end with it
        )
        try:
            return process.wait(step.minutes * 60)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_step(step: Step, folder: Path, launch: Launch) -> dict[str, Any]:
    """Runs a step.

    Returns:
        Its entry in the record: command, verdict, seconds, output, and the figures it left.
    """
    log = folder / f"{step.name}.txt"
    if step.figures:
        step.figures.unlink(missing_ok=True)  # not those of an earlier run
    started, clock = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
    status = launch(step, log)
    output = log.read_text(errors="replace")
    return {
        "title": step.title, "command": command_of(step), "started": started,
        "seconds": round(time.perf_counter() - clock, 1), "verdict": _verdict(step, status, output),
        "output": output[-LONGEST:], "figures": json_of(step.figures) if step.figures else None,
    }  # fmt: skip


def _verdict(step: Step, status: int | None, output: str) -> str:
    """A command that cannot run here says so by status 2; pytest, and one that was typed wrong,
    mean something else by it.
    """
    if status is None:
        return f"no end after {step.minutes:g} minutes"
    if status == 2 and step.arguments[0] != "pytest" and "\nusage: " not in f"\n{output}":
        return "refused"
    return f"failed ({status})" if status else "passed"


def command_of(step: Step) -> str:
    """The step as a user would type it."""
    return " ".join(
        [
            *(f"{name}={value}" for name, value in step.environ.items()),
            "python -m",
            shlex.join(step.arguments),
        ]
    )
