"""What training will take is said before, by arithmetic that agrees with what is allocated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from drafters.training.config import TrainConfig
from drafters.training.loss.blocks import block_hidden
from drafters.training.loss.memory import memory_of, saved_bytes
from drafters.training.optimizer import MasterOptimizer
from tests.drafters.tiny import TINY, tiny_model
from tests.drafters.training.small import sequences

LARGE = replace(
    TINY,
    block_size=16,
    mask_token_id=248_319,
    target_layer_ids=(1, 16, 31, 46, 61),
    windows=(None,) * 5,
    causal=(False,) * 5,
    hidden_size=5120,
    intermediate_size=17_408,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248_320,
    num_target_layers=64,
)
"""A drafter for a target of 27 billion parameters."""


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "ema": 0.9}])
def test_weights_and_optimizer_take_what_is_said(changes: dict[str, Any]) -> None:
    config = TrainConfig(out="x", **changes)
    model = tiny_model()
    kind: dict[str, Any] = {"kind": config.optimizer, "ema": config.ema}
    optimizer = MasterOptimizer(model, lr=1e-3, weight_decay=0.0, clip=1.0, **kind)
    model.bfloat16()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    weights = sum(2 * weight.nbytes for weight in model.parameters())
    optimizer.accumulate()
    optimizer.step(torch.tensor(1.0), 1.0)
    gradients = sum(master.nbytes for master in optimizer.masters.values())
    state = optimizer.state_dict()
    kinds = [part for name, part in state.items() if name not in ("steps", "step")]
    held = sum(tensor.nbytes for part in kinds for tensor in part.values())
    said = memory_of(TINY, config, target_bytes=7, length=32)
    assert (said.target, said.weights, said.optimizer) == (7, weights, gradients + held)


def test_activations_take_about_what_is_said() -> None:
    """Attention is the caller's, and keeps a mask and copies of keys on a CPU."""
    wide = replace(TINY, hidden_size=256, intermediate_size=768)
    model, length, anchors = tiny_model(wide), 64, 5
    batch = sequences(torch.arange(length)[None] % 50)
    places = torch.arange(10, 10 + anchors)[None]
    embed = nn.Embedding(wide.vocab_size, 256)
    features = torch.randn(1, length, wide.feature_size)

    def forward() -> torch.Tensor:
        context = model.context_kv(features, torch.arange(length))
        embedded = embed.requires_grad_(False)
        return block_hidden(model, embedded, batch, places, context, flex=False)

    real = saved_bytes(model, forward)
    config = TrainConfig(out="x", batch_size=1, anchors=anchors)
    said = memory_of(wide, config, target_bytes=0, length=length, dtype=torch.float32)
    assert 0.7 * real < said.activations < 1.3 * real


def test_a_target_of_27_billion_trains_on_eight_cards_of_80_gb() -> None:
    """Stored in 8 bits, with the optimizer shared; not in 16 bits, and not with a whole one."""
    config = TrainConfig(out="x")
    eight = memory_of(LARGE, config, target_bytes=27 * 10**9, length=384, world=8)
    assert 50e9 < eight.total < 72e9, "room for the allocator and the target's own activations"
    assert memory_of(LARGE, config, target_bytes=54 * 10**9, length=384, world=8).total > 80e9
    alone = memory_of(LARGE, config, target_bytes=27 * 10**9, length=384)
    assert alone.optimizer > 7 * eight.optimizer
    assert eight.total - eight.optimizer + alone.optimizer > 80e9


def test_a_sharded_drafter_leaves_room_beside_a_target_in_16_bits() -> None:
    """Parts by hand; and what eight cards of 80 GB hold with four forwards a step."""
    config = TrainConfig(out="x", accumulation=4, loss_rows=2048, shard=True)
    sizes: dict[str, Any] = {"target_bytes": 54 * 10**9, "length": 384, "world": 8}
    divided = memory_of(LARGE, config, **sizes)
    whole = memory_of(LARGE, replace(config, shard=False), **sizes)
    layer = 2 * 5120 * 5120 + 3 * 5120 * 17_408
    rest = 5 * (2 * 5120 * 1024 + 2 * 5120 + 2 * 128) + 2 * 5120
    assert whole.weights == 4 * (5 * layer + 5 * 5120 * 5120 + rest)
    assert divided.weights == 4 * rest + 10 * layer
    shared = divided.optimizer - 16 * (5 * layer + 5 * 5120 * 5120) // 8
    assert 16 * rest / 8 <= shared < 2 * 16 * rest / 8
    assert (divided.activations, divided.logits) == (whole.activations, whole.logits)
    assert divided.total < 68e9 < 71e9 < whole.total, "room for the allocator"
    alone = replace(config, batch_size=12)
    assert memory_of(LARGE, alone, target_bytes=0, length=384) == memory_of(
        LARGE, replace(alone, shard=False), target_bytes=0, length=384
    ), "one process has all"


def test_it_is_said_in_a_line() -> None:
    said = str(memory_of(TINY, TrainConfig(out="x"), target_bytes=10**9, length=32))
    assert said.startswith("about 1.") and "target 1.0" in said
