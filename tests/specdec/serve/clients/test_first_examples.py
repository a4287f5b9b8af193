"""What public clients make of our server: the first things that their manuals show, with those that
are installed. `python -m tests.checks.clients` has the others.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

pytest.importorskip("xgrammar")

from tests.checks.clients.examples import PACKAGES, Example, Served
from tests.helpers.live_server import MODEL, live_server
from tests.helpers.tools import tool_decoder


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with live_server(tool_decoder()) as live:
        yield Served(f"{live.url}/v1", MODEL)


@pytest.mark.parametrize(
    ("package", "example"),
    [(package, one) for package, examples in PACKAGES.items() for one in examples],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_first_example_works(served: Served, package: str, example: Example) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    example(served)
