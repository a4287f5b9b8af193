"""`specdec eval` where lm-eval is missing, and options that do not go together."""

import argparse
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


def test_the_harness_s_own_spellings_are_known() -> None:
    parser = argparse.ArgumentParser()
    eval_command.add_arguments(parser)
    ours = "--num-fewshot 2 --chat --system s --log-samples --out o --max-num-seqs 4"
    theirs = "--num_fewshot 2 --apply_chat_template --system_instruction s --log_samples"
    theirs += " --output_path o --batch_size 4"
    tasks = ["--tasks", "a", "b"]
    one, other = (parser.parse_args([*tasks, *words.split()]) for words in (ours, theirs))
    assert one == other
    more = argparse.Namespace(
        gen_kwargs="top_p=0.5,temperature=0,top_k=4", max_tokens=None, temperature=0.7, top_k=20
    )
    assert eval_command._gen_kwargs(more) == {
        "top_p": 0.5,
        "temperature": 0.7,
        "top_k": 20,
        "do_sample": True,
    }
