"""Runs programs that a model wrote, each in a process of its own: `evals.accuracy.confined`."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from evals.accuracy import confined
from specdec.base.errors import SpecDecError

SECONDS = 5
"""Seconds of the processor's time that a program may take."""

WAIT_SECONDS = 60
"""Seconds that a program may sleep or wait."""


def passes(program: str) -> bool:
    """Whether a program ends without an error, within its limits.

    Raises:
        SpecDecError: this machine cannot confine it, so it was not run.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as answer:
        try:
            subprocess.run(
                [sys.executable, "-I", str(Path(confined.__file__)), str(SECONDS)],
                input=f"{word}\n{program}".encode(errors="replace"),
                stdout=answer,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                timeout=WAIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        answer.seek(0)
        said = answer.read()
    if said == confined.UNCONFINED:
        raise SpecDecError(
            "programs that a model writes run in a process confined by seccomp, which this machine"
            " does not allow; evaluate on Linux (x86-64 or ARM64), without stricter limits"
        )
    return said == word.encode()
