"""What these tests have in common."""

from collections.abc import Iterator

import pytest

from evals import roofline


@pytest.fixture(scope="session", autouse=True)
def little_is_read() -> Iterator[None]:
    """Every bench measures how fast memory is read: a second, and half a gigabyte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(roofline.MEASURED_BYTES, "cpu", 2**22)
        yield
