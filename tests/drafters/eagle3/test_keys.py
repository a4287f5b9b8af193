"""Keys of EAGLE-3 configs: whatever a value is, it is read or refused in one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from drafters.algorithms import algorithm_of
from drafters.convert import convert
from drafters.eagle3.checkpoint import read_checkpoint, tensor_shapes
from drafters.eagle3.config import parse_config
from drafters.fit import fit_of
from specdec.base.errors import CheckpointError
from specdec.cli.main import main
from specdec.layers.rotary.rotary import Rope
from tests.drafters.any_value import Place, check_any_value
from tests.drafters.eagle3.heads import LLAMA, SGLANG, SPECULATORS, head_tensors, write_head
from tests.drafters.eagle3.test_checkpoint import TargetShape
from tests.helpers.tiny_models import plain_model, tiny_tokenizer

TARGET = TargetShape("tiny", 32, 8, 97)
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0, "truncate": True, "mscale": 1.0,
    "mscale_all_dim": 1.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 3], "rope_dim": 12,
}  # fmt: skip
OWN = {
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "fc_norm": False, "norm_before_fc": False,
    "norm_before_residual": False, "norm_output": False, "num_aux_hidden_states": 3,
    "parallel_draft_step": 1, "use_aux_hidden_state": True, "use_aux_norm": False,
}  # fmt: skip
QWEN3 = {
    **SGLANG, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "attention_bias": False,
    "layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True,
    "max_window_layers": 1, "target_layer_ids": [1, 2, 3], "target_hidden_size": 32,
    "embed_requires_grad": True, "bias": False, "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
LATENT = {
    **SGLANG, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
    "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "rope_interleave": True,
}  # fmt: skip
PARALLEL = {
    **SPECULATORS, "speculators_model_type": "peagle", "mask_token_id": 3, "num_depths": 8,
    "down_sample_ratio": 0.5, "down_sample_ratio_min": 0.1,
}  # fmt: skip

PLACES: list[tuple[Mapping[str, Any], Place]] = [
    ({**SGLANG, "eagle_config": OWN}, ()),
    ({**SGLANG, "eagle_config": OWN}, ("eagle_config",)),
    ({**SGLANG, "rope_scaling": ROPE}, ("rope_scaling",)),
    (QWEN3, ()),
    (LATENT, ()),
    (PARALLEL, ()),
    (PARALLEL, ("transformer_layer_config",)),
    (PARALLEL, ("speculators_config",)),
    (PARALLEL, ("speculators_config", "verifier")),
    (PARALLEL, ("speculators_config", "proposal_methods", 0)),
]


@pytest.mark.parametrize(("raw", "place"), PLACES)
def test_every_key_with_every_kind_of_value(raw: Mapping[str, Any], place: Place) -> None:
    check_any_value(raw, place, TARGET)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 0}, "rope_theta is 0; it must be a positive number"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; it must be a positive number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be above 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must lie in [1"),
        ({"use_gemma_norm": True}, "use_gemma_norm True is not supported"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style False is not supported"),
        ({"made_up_key": 1}, "config.json says made_up_key, which this loader does not know"),
        ({"rope_scaling": {**ROPE, "twist": 2}}, "rope_scaling says twist, which this loader"),
        ({"rope_scaling": {**ROPE, "rope_dim": 7}}, "rope_dim is 7; it must be even, from 2 to 12"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": ROPE},
         "rope_type is 'default' in rope_parameters and 'yarn' in rope_scaling; take the wrong"),
        ({"rope_parameters": {"full_attention": ROPE}}, "one set of RoPE parameters for all"
                                                        " layers"),
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5, but 3 layers are tapped"),
        ({"architectures": [["x"]]}, "architectures is [['x']]; it must be a list of names"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    """Values that would draft badly, and keys that might."""
    assert said in fit_of({**SGLANG, **changes}, TARGET).problems[0]


def test_rope_may_be_said_twice() -> None:
    """Transformers 4 and 5 have other words; positions on axes are those of text."""
    older = {name: value for name, value in ROPE.items() if name != "rope_type"}
    for kind, other in (("yarn", "yarn"), ("mrope", "default")):
        both = {"rope_parameters": {**ROPE, "rope_type": other}}
        both["rope_scaling"] = {**older, "type": kind}
        found = parse_config({**SGLANG, **both}).layers.rope_parameters
        assert found["rope_type"] == other and found["factor"] == 4


@pytest.mark.parametrize(
    "key",
    [
        "use_cache", "mlp_bias", "tie_word_embeddings", "hidden_act", "max_position_embeddings",
        "rope_theta", "head_dim",
    ],
)  # fmt: skip
def test_null_says_nothing(key: str) -> None:
    """The config is that of a file without the key."""
    without = {name: value for name, value in SGLANG.items() if name != key}
    found, expected = parse_config({**SGLANG, key: None}), parse_config(without)
    assert found.layers.to_dict() == expected.layers.to_dict() and tensor_shapes(
        found
    ) == tensor_shapes(expected)


@pytest.mark.parametrize("command", ["generate", "doctor", "convert"])
@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({"use_cache": None, "mlp_bias": None, "rms_norm_eps": 1}, True),
        ({"num_key_value_heads": 0}, False),
        ({"rope_theta": "10000"}, False),
    ],
)  # fmt: skip
def test_commands(
    command: str,
    changes: dict[str, Any],
    sound: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each goes on, or says one line and ends with an error."""
    target, head = tmp_path / "target", write_head(tmp_path / "head", SGLANG)
    plain_model("llama").save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    (head / "config.json").write_text(json.dumps({**SGLANG, **changes}))
    pair = ["--model", str(target), "--drafter", str(head)]
    on_cpu = ["--device", "cpu", "--dtype", "float32"]
    arguments = {
        "generate": ["generate", "ab", *pair, *on_cpu, "--max-tokens", "2"],
        "doctor": ["doctor", *pair],
        "convert": ["convert", str(head), str(tmp_path / "made"), "--to", "speculators"],
    }[command]
    status, captured = main(arguments), capsys.readouterr()
    if command == "doctor":
        assert f"would run     {'yes' if sound else 'no'}" in captured.out
    else:
        assert (status == 0) == sound
        lines = [line for line in captured.err.splitlines() if line.startswith("specdec: ")]
        assert sound or ([key in lines[0] for key in changes] == [True] and len(lines) == 1)
    assert "Traceback" not in captured.err + captured.out


ROTARY: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
}


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("copied", ["rope_parameters", "rope_scaling", "top level", "rotary_pct"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_copied_partial_factor(kind: str, copied: str, nested: bool) -> None:
    """The angles are those of the trainers' modules, which turn whole heads."""
    layers = {**LLAMA, "model_type": kind}
    factor: dict[str, Any] = {
        "top level": {"partial_rotary_factor": 0.25},
        "rotary_pct": {"rotary_pct": 0.25},
    }.get(
        copied, {copied: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    )
    shape = {**layers, **factor}
    names = ["Qwen3Eagle3Model"] if kind == "qwen3" else SGLANG["architectures"]
    config = parse_config(
        {**SPECULATORS, "transformer_layer_config": shape}
        if nested
        else {**SGLANG, **shape, "architectures": names}
    )
    config_class, module = ROTARY[kind]
    rope = Rope.of(
        config.layers.rope_parameters, config.layers.head_dim, config.layers.max_position_embeddings
    )
    assert rope.rotated == LLAMA["head_dim"]
    assert torch.equal(rope.frequencies, module(config_class(**shape)).inv_freq)


def test_a_trained_width_of_rope(tmp_path: Path) -> None:
    """What engines call `rope_dim` was turned, whatever factor stands by; other layouts keep it."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_dim": 8}
    write_head(tmp_path / "a", {**SGLANG, "rope_parameters": rope})
    convert(tmp_path / "a", tmp_path / "b", "speculators")
    convert(tmp_path / "b", tmp_path / "c", "sglang")
    for folder in "abc":
        layers = read_checkpoint(tmp_path / folder)[0].layers
        assert Rope.of(layers.rope_parameters, layers.head_dim, 512).rotated == 8


NAMES = {
    "Eagle3LlamaForCausalLM": "llama", "Eagle3MiniMaxM2ForCausalLM": "llama",
    "LlamaEagle3DraftModel": "llama", "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV3ForCausalLM": "deepseek_v3", "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama", "LlamaForCausalLMPeagle": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
}  # fmt: skip
"""Names of published heads and of engines' classes, and the layers that vLLM builds for them."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "minimax_m2"])
def test_a_class_decides_what_layers_are_like(name: str, model_type: str) -> None:
    """Configs that are copies of the target's call themselves like the target."""
    base = LATENT if "Deepseek" in name else SGLANG
    parallel = "eagle" in name and "peagle" in name.lower()
    mask = {"pard_token": 3} if parallel or name == "PEagleDraftModel" else {}
    raw = {**base, **mask, "architectures": [name], "model_type": model_type}
    config = parse_config(raw)
    assert config.layers.model_type == NAMES[name]
    assert algorithm_of(raw) == (
        "peagle" if mask else "eagle3"
    ) and config.mask_token_id == mask.get("pard_token")


def test_a_head_that_drafts_in_parallel_under_another_name(tmp_path: Path) -> None:
    """Exports for vLLM name EAGLE-3's class, and the mask, whose features may be a row."""
    raw = {**SGLANG, "ptd_token_id": 5, "parallel_drafting": True}
    assert algorithm_of(raw) == "peagle" and parse_config(raw).mask_token_id == 5
    tensors = head_tensors(raw)
    flat = {**tensors, "mask_hidden": tensors["mask_hidden"].flatten(0, 1)}
    _, found = read_checkpoint(write_head(tmp_path / "head", raw, flat))
    assert torch.equal(found["mask_hidden"], tensors["mask_hidden"])
    with pytest.raises(
        CheckpointError, match="lacks mask_token_id, which a head that drafts in parallel has"
    ):
        parse_config({**SGLANG, "architectures": ["PEagleDraftModel"]})


def test_the_first_names_of_the_norms_of_taps(tmp_path: Path) -> None:
    """SGLang's flag and tensors of what is `fc_norm` since."""
    raw = {**SGLANG, "use_aux_norm": True}
    tensors = head_tensors(raw)
    former = dict(zip(("low", "mid", "high"), range(3), strict=True))
    old = {f"aux_norm_{tap}.weight": tensors[f"fc_norm.{i}.weight"] for tap, i in former.items()}
    kept = {name: tensor for name, tensor in tensors.items() if "fc_norm" not in name}
    config, found = read_checkpoint(write_head(tmp_path / "head", raw, {**kept, **old}))
    assert config.fc_norm and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_what_eagle_config_may_repeat() -> None:
    """Exports for vLLM say twice what its older versions look for inside."""
    ids = "eagle_aux_hidden_state_layer_ids"
    said = {
        "norm_before_fc": True,
        "target_hidden_size": 32,
        "num_aux_hidden_states": 3,
        ids: [2, 21, 39],
    }
    config = parse_config({**SGLANG, **said, "eagle_config": said})
    assert config.norm_before_fc and config.taps(42) == (1, 20, 38)


def test_dense_layers_of_llama_4() -> None:
    """`intermediate_size` is that of experts there, which no head has."""
    raw = {
        **SGLANG,
        "model_type": "llama4_text",
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
    }
    assert parse_config(raw).layers.intermediate_size == 48
