"""What `auto` takes on every AMD GPU beside every AITER, as the docs say it; and one line wherever
plain torch is left.

Self-checks pass here, or fail, as they are told to: what they compute, other tests show.
"""

import logging
from pathlib import Path

import pytest

from tests.checks import amd_tables
from tests.helpers.amd_cards import AITER, CARDS, takes

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("part", ["auto", "cards"])
def test_the_tables(part: str) -> None:
    """Nine architectures, five AITERs: the docs say what one command prints."""
    make, page = amd_tables.PARTS[part]
    text = (DOCS / page).read_text()
    way_out = f"python -m tests.checks.amd_tables --only {part} --write"
    assert amd_tables.replaced(text, part, make()) == text, way_out


@pytest.mark.parametrize("version", AITER)
@pytest.mark.parametrize("architecture", CARDS)
def test_plain_torch_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    version: str | None,
) -> None:
    """And why on nothing better: for every kind of attention, whatever else is there."""
    failing = ("rocm_aiter_fa", "triton_fa", "rocm_aiter_mla", "rocm_aiter_mla_sparse")
    with caplog.at_level(logging.INFO):
        chosen = takes(monkeypatch, tmp_path, architecture, version, failing)
    assert chosen == ["torch_ref"] * 3
    lines = [record.getMessage() for record in caplog.records if "attention" in record.message]
    assert len(lines) == 3 and "triton_fa: its self-check failed" in lines[0]
    for line, name in zip(lines, ("fa", "mla", "mla_sparse"), strict=True):
        assert "attention torch_ref" in line and f"rocm_aiter_{name}: " in line
