"""`specdec eval` where lm-eval is missing, and options that do not go together."""

from typing import Any

import pytest

from evals.accuracy import command as eval_command
from specdec.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["no task given", "--tasks"]),
        (["--tasks", "bundled", "--log-samples"], ["--log-samples", "--out"]),
        (["--tasks", "bundled", "-k", "0"], ["plain decoding is always evaluated"]),
        (["--tasks", "bundled"], ["lm-eval", "pip install -e '", "[eval]'"]),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    arguments: list[str], fragments: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ImportError in the face of someone who installed the package alone."""

    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr(eval_command, "find_spec", nothing)
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(fragment in error for fragment in fragments), error
