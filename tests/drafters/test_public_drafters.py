"""How many public drafters load; `tests.checks.public_drafters` says why others do not."""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.checks import public_targets
from tests.checks.public_drafters import Row, counts, main, refusal, rows
from tests.drafters.published.rows import COMPARED

ASSISTANTS = 5 if find_spec("transformers.models.gemma4_assistant") else 0
LEAST = {"DFlash": 87, "EAGLE-3": 53, "MTP": 29 + ASSISTANTS}
"""Rows of each family that load; a number here only grows."""

RUN = {"DFlash": 58, "EAGLE-3": 33}
"""The same on one GPU of 192 GB; all drafts are compared with others' code."""

IN_TESTS = {"DFlash": 50, "EAGLE-3": 11}
"""Of these, the rows that a test compares."""


@pytest.fixture(scope="module")
def found() -> list[tuple[Row, str | None]]:
    """Every row, and what is in its way; what is no refusal but an error of ours raises here."""
    return [(row, refusal(row)) for row in rows()]


def test_rows_are_those_of_the_list() -> None:
    """The same drafters in the same order as in the list of targets."""
    listed = public_targets.data()["drafters"] + public_targets.data()["others"]
    assert [(row.checkpoint, row.target) for row in rows()] == [
        (entry["checkpoint"], entry["target"]) for entry in listed
    ]
    assert Counter(row.family for row in rows()) == {"DFlash": 90, "EAGLE-3": 55, "MTP": 46}


def test_the_count_does_not_fall(found: list[tuple[Row, str | None]]) -> None:
    loaded = Counter(row.family for row, reason in found if reason is None)
    assert all(loaded[family] >= least for family, least in LEAST.items()), loaded


def test_every_refusal_is_one_line(found: list[tuple[Row, str | None]]) -> None:
    reasons = [reason for _, reason in found if reason is not None]
    assert all(reason and "\n" not in reason for reason in reasons)


@pytest.mark.parametrize(
    "layout",
    ["z-lab", "z-lab DFlash 2", "SpecForge DSpark", "speculators DFlash", "speculators EAGLE-3"],
)
def test_a_wrong_tensor_is_refused(layout: str) -> None:
    """The check itself can fail: a shape, a name, and a key that nobody writes."""
    row = next(row for row in rows() if row.layout == layout)
    assert refusal(row) is None
    assert "fc.weight has shape" in str(
        refusal(replace(row, shapes=row.shapes | {"fc.weight": "H H"}))
    )
    assert "stray" in str(refusal(replace(row, shapes=row.shapes | {"stray.weight": "H"})))
    place = "dflash_config" if "dflash_config" in row.config else None
    twisted = row.config | ({place: row.config[place] | {"twist": 1}} if place else {"twist": 1})
    assert f"{place or 'config.json'} says twist, which this loader does not know" in str(
        refusal(replace(row, config=twisted))
    )


def test_what_would_run_on_one_gpu(found: list[tuple[Row, str | None]]) -> None:
    """Target, tokenizer, head and memory together; a number here only grows."""
    sums = counts(found, gpus=1, gpu_bytes=192 * 10**9)
    for family, least in RUN.items():
        assert sums[family]["and compared"] == sums[family]["all of the four"] >= least, sums
        assert sums[family]["and in tests"] >= IN_TESTS[family], sums
    assert (
        sums["DFlash"]["tokenizer readable"] < 90
        and sums["DFlash"]["fits"] < sums["DFlash"]["target accepted"]
    )


def test_what_is_said_to_be_compared_in_tests_is() -> None:
    """Of layers for multi-token prediction that is `tests/drafters/mtp/test_assistants.py`."""
    said = {row.layout for row in rows() if "tests" in row.compared}
    compared = {layout for layouts in COMPARED.values() for layout in layouts}
    assert said == compared | {"Gemma 4 assistant"}


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """More GPUs hold more."""
    printed = {}
    for gpus in ("1", "8"):
        assert main(["--layout", "speculators DFlash", "--gpus", gpus]) == 0
        lines = capsys.readouterr().out.splitlines()
        printed[gpus] = {line[:22].strip(): line[22:].strip() for line in lines[:12]}
    assert printed["1"]["rows"] == printed["1"]["head loads"] == "10"
    assert int(printed["1"]["fits"]) < int(printed["8"]["fits"])
