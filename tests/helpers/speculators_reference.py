"""The public `speculators` package, which tests compare with."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest

_FOR_DATA_ALONE = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "hs_connectors")
"""Packages that it imports for the generation of data, which no test does."""


def speculators(module: str) -> Any:
    """A module of the package, such as "models.eagle3.core"; skips the test that asks for it where the package is not installed."""
    if find_spec("speculators") is None:
        pytest.skip("the package `speculators` is not installed")
    for name in _FOR_DATA_ALONE:
        sys.modules.setdefault(name, MagicMock())
    return import_module(f"speculators.{module}")
