"""What pytest is told about all tests."""

import pytest

from specdec.cli.doctor import describe_device


def pytest_report_header() -> str:
    """Where the tests run, and why not on the GPU that is there."""
    from specdec.device import resolve_device, unseen_gpu

    reason = unseen_gpu()
    return f"device: {describe_device(resolve_device())}" + (f"; no GPU is used: {reason}" if reason else "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the slow ones, so that no worker is left alone with them in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
