"""Fixtures of these tests."""

import pytest

from tests.evals.bench.fake_vllm import FakeVllm


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)
