"""What the logits of tiny models do not tell of families whose layers keep states."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from specdec.kv_cache import KVLayerSpec, StateLayerSpec
from specdec.layers.experts.router import route
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model
from verifiers.config.families import describe
from verifiers.config.shape import layer_caches
from verifiers.config.states import attends, is_recurrent


def test_scores_of_lfm2_that_are_small() -> None:
    """They are divided by a sum that is never 0."""
    config: Any = CONFIGS["lfm2_moe"]()
    description = describe(config)
    assert description is not None and description.routing is not None
    torch.manual_seed(0)
    module, hidden, bias = (
        Lfm2MoeTopKRouter(config),
        torch.rand(5, config.hidden_size),
        torch.randn(config.num_experts),
    )
    module.weight.data = torch.randn_like(module.weight) / 8 - 0.8
    _, plain, ids = module(hidden, bias)
    weights, chosen = route(hidden @ module.weight.t(), description.routing, bias)
    assert chosen.sort().values.equal(ids.sort().values)
    with Float64():
        _, exact, _ = module.double()(hidden.double(), bias.double())
    assert_as_exact(weights.sort().values, plain.sort().values, exact.sort().values)
    assert float(exact.detach().sum(-1).min()) < 0.99 * config.routed_scaling_factor, (
        "the epsilon counts"
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("nemotron_h", "s-ks-s"),
        ("falcon_h1", "bbbb"),
        ("lfm2", "skss"),
        ("bamba", "skss"),
        ("zamba2", "sbbsbb"),
        ("llama", "kkkk"),
    ],
)
def test_what_layers_keep(name: str, kinds: str) -> None:
    """States, keys and values, both or nothing; a layer's caches lie one after the other."""
    verifier = paged_verifier(plain_model(name))
    config = CONFIGS[name]()
    stored: dict[str, list[type]] = {
        "s": [StateLayerSpec],
        "k": [KVLayerSpec],
        "b": [KVLayerSpec, StateLayerSpec],
        "-": [],
    }
    assert [type(spec) for spec in verifier.kv_specs] == [
        kind for letter in kinds for kind in stored[letter]
    ]
    places = layer_caches(config)
    assert [len(own) for own in places] == [len(stored[letter]) for letter in kinds]
    assert [place for own in places for place in own] == list(range(len(verifier.kv_specs)))
    assert [
        (attends(config, layer), is_recurrent(config, layer)) for layer in range(len(kinds))
    ] == [(letter in "kb", letter in "sb") for letter in kinds]


def test_dropped_layers_keep_nothing() -> None:
    """Catches caches that belong to other layers once the last ones are gone."""
    verifier: Any = paged_verifier(plain_model("falcon_h1"))
    verifier.keep_layers(2)
    assert len(verifier.kv_specs) == 4 and len(verifier.windows) >= 4


def test_weights_that_are_renamed_and_scaled() -> None:
    """In this order, within a layer, and only where there are such."""
    from verifiers.weights.weights import Weights

    weights = Weights(
        {
            "model.layers.0.mixer.q_proj.weight": torch.ones(2, 3),
            "model.norm_f.weight": torch.ones(3),
        }
    )
    weights.rename([(r"\.mixer\.(?=q)", ".a."), (r"\.a\.", ".b."), (r"norm_f\.", "norm.")])
    layer = weights.under("model.layers.0.")
    layer.scale([("b.q_proj.weight", torch.tensor([[2.0], [3.0]])), ("b.q_proj.bias", 5.0)])
    assert layer.tensor("b.q_proj.weight").tolist() == [[2.0] * 3, [3.0] * 3]
    assert list(weights.tensors) == ["model.norm.weight"]


def test_released_configs_are_read() -> None:
    """Patterns of letters, and kinds of layers under their older names."""
    config = AutoConfig.for_model(
        "nemotron_h", hybrid_override_pattern="ME*-M", num_hidden_layers=5
    )
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
    assert config.layer_types == kinds and describe(config) is not None
