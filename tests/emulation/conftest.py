"""Fixtures of these tests."""

from pathlib import Path

import pytest

from tests.helpers.aiter_emulation_case import Load, loader


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """See `loader`."""
    return loader(monkeypatch, tmp_path)
