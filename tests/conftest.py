"""What pytest is told about all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the slow ones, so that no worker is left alone with them in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
