"""AITER's own Triton kernels, on a GPU or in Triton's interpreter: its sources have to be given."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.aiter_real import REPOSITORY, REVISIONS, missing

pytestmark = pytest.mark.slow


def check(*options: str) -> str:
    """What `tests.checks.aiter_triton` prints."""
    command = [sys.executable, "-m", "tests.checks.aiter_triton", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith("all right\n")
    return done.stdout


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    "options",
    [
        ["--part", "calls"],
        ["--part", "models", "--tiny", "gpt_oss", "--tokens", "4", "--prompts", "2"],
    ],
)
def test_real_kernels(options: list[str]) -> None:
    """Single calls are as exact as plain torch,
    and whole generations equal torch_ref in float32.
    """
    check(*options)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(
    not os.environ.get(REPOSITORY),
    reason=f"to run {', '.join(REVISIONS)}, name a git repository of AITER in {REPOSITORY}",
)
@pytest.mark.parametrize("revision", REVISIONS)
def test_other_versions(revision: str) -> None:
    """The single calls, on what is exported from a repository; what specdec refuses is garbage in
    all of them.
    """
    printed = check(
        "--part", "calls", "--repository", os.environ[REPOSITORY], "--revisions", revision
    )
    assert (
        "unified_attention, shuffled" in printed
        and "garbage on AITER, specdec refuses it" in printed
    )
