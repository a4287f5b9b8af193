"""Fixtures of these tests."""

from collections.abc import Iterator

import pytest

from tests.helpers.live_server import Live, live_server


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One server for all tests of a file, which leave it as it is."""
    with live_server() as live:
        yield live
