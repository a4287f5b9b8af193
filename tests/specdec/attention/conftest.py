"""Fixtures of these tests."""

from pathlib import Path

import pytest

from tests.helpers.rocm import Install, pretend_rocm


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """See `pretend_rocm`."""
    return pretend_rocm(monkeypatch, tmp_path)
