"""Modules without memory: nothing is drawn for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.device.meta import shapes_alone


class Seen(TorchDispatchMode):
    """Notes the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_shapes_alone() -> None:
    with Seen() as seen, shapes_alone():
        made = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
        drawn = nn.init.normal_(tensor=torch.empty(2))
    assert {one.device.type for one in (*made.parameters(), drawn)} == {"meta"}
    assert [tuple(one.shape) for one in made.parameters()] == [(5, 4), (3, 4), (3,), (3,), (3,)]
    assert not any("normal" in name or "uniform" in name for name in seen.names), seen.names
    assert nn.Linear(1, 1, bias=False).weight.device.type == "cpu"
