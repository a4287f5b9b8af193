"""What public clients make of our server: the first things that their manuals show, with those that
are installed. `python -m tests.checks.clients` has the others.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

pytest.importorskip("xgrammar")

from specdec.sampling.params import SamplingDefaults
from tests.checks.clients.examples import PACKAGES, Example, Served
from tests.helpers.live_server import MODEL, live_server
from tests.helpers.tools import tool_decoder


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    decoder = tool_decoder()
    decoder.verifier.defaults = SamplingDefaults(min_tokens=8)  # no answer is empty by chance
    with live_server(decoder) as live:
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
