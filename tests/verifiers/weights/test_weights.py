"""Joining tensors into layers: packed weights, their order and what becomes plain numbers, and
biases that only some have.
"""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.packed.gguf import Quantized
from specdec.layers.packed.weight import PackedWeight
from verifiers.formats.format import Stored
from verifiers.weights.weights import Weights


def packed(rows: int, seed: int = 0, group: int = 8) -> PackedWeight:
    """A weight of signed bytes, 16 inputs wide."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, 16), dtype=torch.int8, generator=generator)
    return PackedWeight(
        codes,
        torch.rand(rows, 16 // group, generator=generator),
        None,
        group,
        "int8",
        torch.float32,
    )


def test_packed_projections_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output by output, in the order that each asks for, and a bias beside them."""
    made: list[Any] = []
    monkeypatch.setattr(
        "verifiers.weights.weights.linear", lambda *parts, **more: made.append((parts, more))
    )
    first, second = packed(6), packed(4, seed=1)
    order = torch.tensor([5, 0, 3, 1, 2, 4])
    biases = torch.arange(6.0), torch.arange(4.0)
    tensors: dict[str, Stored] = {
        "x.a.weight": first,
        "x.b.weight": second,
        "x.a.bias": biases[0],
        "x.b.bias": biases[1],
    }
    weights = Weights(tensors)
    weights.under("x.").linear("a", "b", reorder=(lambda rows: rows[order], None))
    ((weight, bias), more) = made[0]
    assert isinstance(weight, Quantized) and not more and not weights.tensors
    assert weight.dequantized().equal(torch.cat([first.dequantized()[order], second.dequantized()]))
    assert bias.tolist() == [*order.tolist(), 0, 1, 2, 3]


@pytest.mark.parametrize(
    "other", [packed(4, group=4), torch.randn(4, 16)], ids=["groups", "numbers"]
)
def test_projections_stored_in_several_ways_become_numbers(
    other: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so, once."""
    first = packed(6)
    numbers = other.dequantized() if isinstance(other, Quantized) else other.clone()
    with caplog.at_level(logging.WARNING):
        layer = Weights({"a.weight": first, "b.weight": other}).linear("a", "b")
    assert layer(torch.eye(16)).t().equal(torch.cat([first.dequantized(), numbers]))
    assert [record.message for record in caplog.records] == [
        "a.weight, b.weight are stored in several ways and become plain numbers"
    ]


def test_numbers_of_a_packed_weight() -> None:
    """For who splits it: latent attention's up-projection, a gate."""
    weight = packed(6)
    assert Weights({"a.weight": weight}).tensor("a.weight").equal(weight.dequantized())
    weights = Weights({"a.weight": weight})
    weights.split("a", {"b": torch.tensor([4, 0]), "c": torch.tensor([1])})
    assert weights.tensors.keys() == {"b.weight", "c.weight"}
    assert weights.tensor("b.weight").equal(weight.dequantized()[[4, 0]])


def test_experts_are_one_way_round() -> None:
    """Those of transformers may be transposed, packed ones never are."""
    numbers = torch.randn(2, 16, 6)
    found = Weights({"down_proj": numbers.clone()}).experts("down_proj", transposed=True)
    assert (
        isinstance(found, Tensor) and found.equal(numbers.transpose(1, 2)) and found.is_contiguous()
    )
    weight = PackedWeight.stacked([packed(6), packed(6, seed=1)])
    assert Weights({"down_proj": weight}).experts("down_proj", transposed=True) is weight


@pytest.mark.parametrize(
    "weight",
    [
        torch.eye(2),
        PackedWeight(torch.eye(2).to(torch.int8), torch.ones(2, 1), None, 2, "int8", torch.float32),
    ],
)
def test_a_bias_that_only_some_have(weight: Stored) -> None:
    """DeepSeek's may be one of the compressed keys and values alone: the others add nothing."""
    tensors: dict[str, Stored] = {
        "x.a.weight": weight,
        "x.b.weight": torch.eye(2),
        "x.b.bias": torch.tensor([3.0, 4.0]),
    }
    layer = Weights(tensors).under("x.").linear("a", "b", reorder=(None, lambda rows: rows.flip(0)))
    assert layer(torch.tensor([1.0, 2.0])).tolist() == [1, 2, 6, 4] and not tensors
