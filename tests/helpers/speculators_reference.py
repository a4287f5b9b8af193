"""The public `speculators` package, which tests compare with."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

_FOR_DATA_ALONE = (
    "openai", "openai.types", "openai.types.chat", "openai.types.completion", "hs_connectors",
)  # fmt: skip
"""Packages that it imports for the generation of data, which no test does."""


def speculators(module: str) -> Any:
    """A module of the package, such as "models.eagle3.core"; skips the test that asks for it where
    the package is not installed.
    """
    if find_spec("speculators") is None:
        pytest.skip("the package `speculators` is not installed")
    missing = [name for name in _FOR_DATA_ALONE if find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: MagicMock() for name in missing})
    found = import_module(f"speculators.{module}")
    for name in missing:  # nobody else takes them for the packages
        del sys.modules[name]
    for config in list(
        vars(found).values()
    ):  # older Transformers leave a name of torch open in their configs
        if isinstance(config, type) and issubclass(config, BaseModel):
            config.model_rebuild(_types_namespace={"torch": torch})
    return found


def refined(
    head: Any, passes: int, anchors: Tensor, before: Tensor, rows: Tensor, logits: Tensor
) -> Tensor:
    """What free-running passes of an `XPressRefinerHead` draft, int64 [n, B - 1].

    Args:
        head: of the package.
        passes: how many.
        anchors, before: int64 [n], and the tokens before them.
        rows, logits: [n, B, H] and [n, B, V], of all rows of the blocks.
    """
    known, tokens = head.hidden_cache(rows), logits.argmax(-1)
    for _ in range(passes):
        previous = torch.cat([before[:, None], anchors[:, None], tokens[:, 1:-1]], dim=1)
        tokens = (logits + head.block_bias(previous, hcache=known)).argmax(-1)
    return tokens[:, 1:]
