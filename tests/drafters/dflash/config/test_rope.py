"""RoPE of DFlash drafters: its forms, the part of a head that is turned, and how."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.layout import parse_config
from drafters.dflash.model import DFlashModel
from specdec.base.errors import CheckpointError
from specdec.layers.rotary.rotary import Angles, Rope, rotate
from tests.drafters.dflash.config.test_layout import KINDS_OF_DRAFTERS, F, S, zlab
from tests.drafters.tiny import TINY

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {
        "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "yarn with a stated amplitude": {
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def rope_of(config: DFlashConfig) -> Rope:
    """How a drafter rotates."""
    return DFlashModel(config).rope


@pytest.mark.parametrize("name", ROPES)
def test_rope_forms(name: str) -> None:
    """Both forms of the RoPE keys give the angles that Transformers gives for them."""
    rope_type, values = name.split()[0], ROPES[name]
    old = {"rope_theta": 1e4, "rope_scaling": {"type": rope_type, **values} if values else None}
    new: dict[str, Any] = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **values}}
    mixed = {"rope_theta": None, "rope_scaling": new["rope_parameters"]}
    configs = [
        parse_config(zlab(remove=("rope_theta", "rope_scaling")) | form)
        for form in (old, new, mixed)
    ]
    assert configs[0].rope_parameters == configs[1].rope_parameters == configs[2].rope_parameters
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=16, max_position_embeddings=512, **new))
    positions = torch.tensor([0, 1, 77, 400])
    cos, sin = theirs(torch.zeros(1), positions[None])
    our_cos, our_sin = Angles.of(positions, rope_of(configs[0]), torch.float32).doubled
    torch.testing.assert_close(our_cos[:, 0], cos[0])
    torch.testing.assert_close(our_sin[:, 0, 8:], sin[0, :, 8:])
    torch.testing.assert_close(our_sin[:, 0, :8], -sin[0, :, :8])


def test_yarn_amplitude_ignores_mscale() -> None:
    """With mscale and mscale_all_dim of 1 the ratio of the target would be 1; the drafter was
    trained with the plain amplitude.
    """
    values = {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
    }
    config = replace(TINY, rope_parameters=values | {"mscale": 1.0, "mscale_all_dim": 1.0})
    rope = rope_of(config)
    assert rope.amplitude == pytest.approx(1 + 0.1 * math.log(64))
    torch.testing.assert_close(
        rope.frequencies, rope_of(replace(TINY, rope_parameters=values)).frequencies
    )


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
COPIES: dict[str, dict[str, Any]] = {
    "top": {"partial_rotary_factor": 0.25},
    "rope_parameters": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}},
    "rope_scaling": {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}},
    "both": {
        "partial_rotary_factor": 0.25,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25},
    },
    "each kind": {"rope_parameters": {F: DEFAULT | {"partial_rotary_factor": 0.25}, S: DEFAULT}},
    "yarn": {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
    "M-RoPE": {
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "partial_rotary_factor": 0.5,
    },
}


def with_copied(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """A drafter of this kind whose layers' part of config.json says so too."""
    raw = KINDS_OF_DRAFTERS[kind]
    layers = "transformer_layer_config"
    return raw | ({layers: raw[layers] | values} if layers in raw else values)


@pytest.mark.parametrize("place", COPIES)
@pytest.mark.parametrize("kind", KINDS_OF_DRAFTERS)
def test_a_copied_partial_factor_turns_the_whole_head(kind: str, place: str) -> None:
    """What Qwen3's module does, on which these are trained: the whole head."""
    config = parse_config(with_copied(kind, COPIES[place]))
    base = (
        YARN
        if place == "yarn"
        else {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    )
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=16, max_position_embeddings=512, rope_parameters=base)
    )
    torch.testing.assert_close(rope_of(config).frequencies, theirs.inv_freq)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", KINDS_OF_DRAFTERS)
def test_the_trained_width_counts(kind: str, place: str) -> None:
    """SGLang calls `rope_dim` so; it holds beside any factor, and through our own files."""
    raw = with_copied(
        kind,
        {
            place: {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "rope_dim": 8,
            }
        },
    )
    config = parse_config(raw)
    rope = rope_of(config)
    assert rope.frequencies.numel() == 4
    torch.testing.assert_close(rope.frequencies, 1e4 ** (-torch.arange(0, 8, 2) / 8))
    if kind == "DFlash":
        again = parse_config(config_json(config, "z-lab", dtype="float32"))
        assert rope_of(again).frequencies.numel() == 4


@pytest.mark.parametrize("width", range(2, 45, 2))
def test_the_trained_width_is_not_rounded_down(width: int) -> None:
    """30 / 44 * 44 is less than 30 in floating point."""
    config = parse_config(
        zlab(head_dim=44, rope_scaling={"rope_type": "default", "rope_dim": width})
    )
    again = parse_config(config_json(config, "z-lab", dtype="float32"))
    assert [rope_of(read).frequencies.numel() for read in (config, again)] == [width // 2] * 2


@pytest.mark.parametrize(
    "raw",
    [
        zlab(own={"partial_rotary_factor": 0.5}),
        zlab(own={"attention_value_scale": 0.7}, partial_rotary_factor=0.5),
        zlab(architectures=["DFlashLagunaForCausalLM"],
             rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}),
        zlab(
            architectures=["Gemma4DSparkModel"], global_head_dim=16, hidden_act=None,
            rope_parameters={F: DEFAULT | {"rope_type": "proportional",
                                           "partial_rotary_factor": 0.5}, S: DEFAULT},
        ),
    ],
    ids=["dflash_config", "MiMo", "Laguna", "Gemma 4"],
)  # fmt: skip
def test_layers_that_turn_a_part(raw: dict[str, Any]) -> None:
    assert parse_config(raw).rope_parameters["partial_rotary_factor"] == 0.5


def test_rope_without_its_values() -> None:
    """A RoPE type that lacks a value names it."""
    config = replace(TINY, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match=r"'llama3'.* are not complete and valid .*factor"):
        rope_of(config)


def test_rotation_of_halves() -> None:
    """Rotating by an angle turns each pair (x[i], x[i + D/2]) by it."""
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    angle = torch.tensor([0.3, 0.3])
    cos, sin = torch.cat([angle.cos()] * 2), torch.cat([-angle.sin(), angle.sin()])
    expected = [math.cos(0.3), -2 * math.sin(0.3), math.sin(0.3), 2 * math.cos(0.3)]
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0], torch.tensor(expected))
