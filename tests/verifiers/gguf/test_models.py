"""Models of every architecture from files as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MiniMaxM2Config,
    PreTrainedConfig,
    Starcoder2Config,
)
from transformers.utils import logging as transformers_logging

from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS, SHORT_LEN, VOCAB, WINDOW
from tests.helpers.tiny_models import plain_model
from verifiers.config.families import ARCHITECTURES
from verifiers.config.gguf import config_of
from verifiers.config.wrappers import config_of as made
from verifiers.config.wrappers import shapes_of
from verifiers.gguf.file import Facts, GgufFiles
from verifiers.weights.gguf import read_gguf

CPU = torch.device("cpu")

ALTERNATING = [True, False, True, False]
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
EIGHT = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24}
GROUPS = {"expert_group_count": 2, "expert_group_used_count": 1}
STATES = {
    "full_attention_interval": 4,
    "rope.dimension_sections": [2, 0, 0, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
    "rope.dimension_count": 4,
}
MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": CONFIGS["bamba"]().mamba_n_groups,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
HYBRID = {
    "attention.head_count_kv": [0, 2, 0, 0],
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.7,
    "logit_scale": 2.5,
    "rope.scaling.finetuned": False,
}
GEMMA4 = {
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 8.0,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": ALTERNATING,
    "attention.key_length": 24,
    "attention.key_length_swa": 16,
}
LATENT = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 16, "attention.key_length": 24,
    "attention.value_length": 16, "attention.key_length_mla": 20, "attention.value_length_mla": 10,
    "rope.dimension_count": 8,
}  # fmt: skip
MIXED = {**EIGHT, **GROUPS, **LATENT, "leading_dense_block_count": 1, "expert_shared_count": 1}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}


class Case(NamedTuple):
    """A file.

    Attributes:
        model: name of a tiny model.
        architecture: in llama.cpp.
        facts: what the converter says beside what it says of all.
        changes: to the tiny config: what no file can say, or llama.cpp takes for granted.
    """

    model: str
    architecture: str
    facts: Mapping[str, Any] = MappingProxyType({})
    changes: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "deepseek_v2": Case(
        "deepseek_v2", "deepseek2", {**MIXED, **GROUPS}, {"topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        "deepseek2",
        {
            **MIXED,
            **YARN,
            "attention.q_lora_rank": 24,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "rope.scaling.yarn_log_multiplier": 0.07,
        },
        {
            "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 0.7,  # of which a file has one
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "dots1": Case(
        "dots1",
        "dots1",
        {
            **EIGHT,
            **GROUPS,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
        },
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "ernie4_5": Case("ernie4_5", "ernie4_5"),
    "ernie4_5_moe": Case("ernie4_5_moe", "ernie4_5-moe", {**EXPERTS, "expert_shared_count": 1}),
    "gemma": Case("gemma", "gemma", {}, {"tie_word_embeddings": True}),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {
            "attention.sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
        {"tie_word_embeddings": True},
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3",
        {
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": ALTERNATING,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "gemma4": Case("gemma4", "gemma4", {**GEMMA4, "attention.head_count_kv": [2, 1, 2, 1]}),
    "gemma4_moe": Case(
        "gemma4_moe", "gemma4", {**GEMMA4, **EXPERTS, "attention.head_count_kv": [2, 1, 2, 1]}
    ),
    "gemma4_shared": Case(
        "gemma4_shared",
        "gemma4",
        {
            **GEMMA4,
            "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 3,
            "embedding_length_per_layer_input": 12,
            "feed_forward_length": [48] * 3 + [96] * 3,
        },
    ),
    "glm_moe_dsa": Case(
        "glm_moe_dsa",
        "glm-dsa",
        {
            **MIXED,
            "attention.q_lora_rank": 24,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 12,
            "attention.indexer.top_k": 8,
        },
    ),
    "glm4": Case("glm4", "glm4", {"rope.dimension_count": 8}),
    "glm4_moe": Case(
        "glm4_moe",
        "glm4moe",
        {
            **EIGHT,
            **GROUPS,
            "rope.dimension_count": 8,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "block_count": 5,
            "nextn_predict_layers": 1,
        },
        {"num_nextn_predict_layers": 0},
    ),
    "gpt_oss": Case(
        "gpt_oss",
        "gpt-oss",
        {
            **EXPERTS,
            **YARN,
            "expert_feed_forward_length": 48,
            "attention.sliding_window": WINDOW,
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
    ),
    "granite": Case(
        "granite",
        "granite",
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 2.5},
    ),
    "bamba": Case(
        "bamba",
        "granitehybrid",
        {**MAMBA, "ssm.conv_kernel": 3, "attention.head_count_kv": [0, 2, 0, 0]},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            }
        },
    ),
    "granite_hybrid": Case(
        "granite_hybrid",
        "granitehybrid",
        {**MAMBA, **HYBRID, "expert_shared_feed_forward_length": 40},
        {"position_embedding_type": None, "max_position_embeddings": 2**20},
    ),
    "granite_hybrid_moe": Case(
        "granite_hybrid_moe",
        "granitehybrid",
        {**MAMBA, **HYBRID, **EXPERTS, "expert_shared_feed_forward_length": 40},
        {"max_position_embeddings": 2**20},
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 0]},
        {"conv_bias": False},
    ),
    "lfm2_moe": Case(
        "lfm2_moe",
        "lfm2moe",
        {
            **EXPERTS,
            "shortconv.l_cache": 4,
            "attention.head_count_kv": [0, 2, 0, 0],
            "leading_dense_block_count": 1,
        },
        {"routed_scaling_factor": 1.0},
    ),
    "llama": Case("llama", "llama", {"rope.dimension_count": 16}),
    "llama4": Case(
        "llama4",
        "llama4",
        {
            **EXPERTS,
            "expert_feed_forward_length": 48,
            "feed_forward_length": 40,
            "interleave_moe_layer_step": 2,
        },
        {
            "attn_scale": 0.1,
            "floor_scale": 8192,
            "attention_chunk_size": 8192,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        },
    ),
    "llama_tied": Case("llama_tied", "llama"),
    "ministral3": Case(
        "ministral3",
        "mistral3",
        {
            **YARN,
            "rope.scaling.original_context_length": 7,
            "rope.scaling.yarn_log_multiplier": 0.7,
            "attention.temperature_scale": 0.8,
        },
    ),
    "mixtral": Case("mixtral", "llama", EXPERTS),
    "olmo2": Case("olmo2", "olmo2"),
    "olmo3": Case(
        "olmo3",
        "olmo2",
        {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": ALTERNATING},
    ),
    "olmoe": Case("olmoe", "olmoe", EXPERTS, {"norm_topk_prob": False}),
    "phi3": Case(
        "phi3_long",
        "phi3",
        {"rope.dimension_count": 4, "rope.scaling.original_context_length": SHORT_LEN},
    ),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2_moe": Case(
        "qwen2_moe",
        "qwen2moe",
        {**EXPERTS, "expert_feed_forward_length": None},
        {"mlp_only_layers": []},
    ),
    "qwen2_vl": Case("qwen2", "qwen2vl", {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen3": Case("qwen3", "qwen3"),
    "qwen3_5": Case("qwen3_5", "qwen35", STATES),
    "qwen3_5_moe": Case("qwen3_5_moe", "qwen35moe", {**STATES, **EXPERTS}),
    "qwen3_moe": Case("qwen3_moe", "qwen3moe", EXPERTS, {"norm_topk_prob": True}),
    "qwen3_next": Case("qwen3_next", "qwen3next", {**STATES, **EXPERTS}),
    "qwen3_vl": Case("qwen3", "qwen3vl", {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen3_vl_moe": Case("qwen3_moe", "qwen3vlmoe", EXPERTS, {"norm_topk_prob": True}),
    "seed_oss": Case("seed_oss", "seed_oss"),
    "smollm3": Case("smollm3", "smollm3", {}, {"no_rope_layers": [1, 1, 1, 0]}),
    "youtu": Case("youtu", "deepseek2", {**LATENT, "attention.q_lora_rank": 24, "expert_count": 0}),
}

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

OTHERWISE = {
    "architectures", "transformers_version", "dtype", "initializer_range", "use_cache",
    "pad_token_id",
}  # fmt: skip
OTHERWISE |= {"embedding_initializer_range", "pretraining_tp", "_name_or_path"}
"""Entries that say nothing of what a model computes."""

ROUNDED = ("norm.weight", "A_log")
"""What the converter adds to, or takes the power of, and the reader undoes: in float32."""


def written(case: Case, path: Path, **options: Any) -> Any:
    """The model of a case, written to a file."""
    model = plain_model(case.model, **case.changes)
    facts = dict(case.facts)
    rope = model.config.rope_parameters
    if case.model == "phi3_long":
        options["extra"] = {
            f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"])
            for length in ("short", "long")
        }
    if case.architecture == "gemma4":
        options["extra"] = {"rope_freqs.weight": torch.tensor([1.0] * 3 + [1e30] * 9)}
    write_gguf(path, model, case.architecture, facts, **options)
    return model


def read(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """The config of a file and its weights."""
    files = GgufFiles(path)
    config = made(config_of(Facts(files)))
    return config, read_gguf(files, config, shapes_of(config), device=CPU, dtype=dtype)


def different(one: Any, other: Any) -> dict[str, Any]:
    """Entries in which configs differ that both have."""
    first, second = one.to_dict(), other.to_dict()
    both = (first.keys() & second.keys()) - OTHERWISE
    return {key: (first[key], second[key]) for key in both if first[key] != second[key]}


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_what_was_converted(name: str, tmp_path: Path) -> None:
    """Config and weights; also those of tiny sizes that differ from every default."""
    model = written(CASES[name], tmp_path / "m.gguf")
    config, weights = read(tmp_path / "m.gguf")
    if name in (
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "phi3",
        "qwen2",
        "qwen2_moe",
    ):
        rope = config.rope_parameters
        config.rope_parameters = {key: rope[key] for key in rope if "mrope" not in key}
    # no file says the rows that Mamba-2 takes in at once, on which nothing depends
    assert different(model.config, config).keys() <= {"head_dim", "mamba_chunk_size"}
    state = model.state_dict()
    for key, weight in weights.items():
        if key.endswith(ROUNDED):
            torch.testing.assert_close(weight, state[key], rtol=0, atol=2**-22)
        else:
            assert weight.equal(state[key]), key
    lost = state.keys() - weights.keys()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert all(key.endswith("inv_freq") for key in lost - tied)


OTHERS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "minimax-m2": (
        MiniMaxM2Config(
            **{**SMALL, "intermediate_size": 24},
            head_dim=16,
            rotary_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        {**EXPERTS, "rope.dimension_count": 8},
    ),
    "gpt2": (
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48),
        {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 48},
    ),
    "starcoder2": (Starcoder2Config(**SMALL, sliding_window=None), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_no_tiny_config(name: str, tmp_path: Path) -> None:
    """They run through Transformers' modules."""
    given, facts = OTHERS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    write_gguf(tmp_path / "m.gguf", model, name, facts)
    config, weights = read(tmp_path / "m.gguf")
    found = different(given, config)
    assert {key: both for key, both in found.items() if not key.endswith("token_id")} == {}
    state = model.state_dict()
    assert weights and all(weight.equal(state[key]) for key, weight in weights.items())


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} | OTHERS.keys() == ARCHITECTURES.keys()
    assert {case.model for case in CASES.values()} <= (CONFIGS | LATENT_CONFIGS).keys()


LIKE_TRANSFORMERS = (
    "llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "lfm2", "qwen3_5",
)  # fmt: skip


@pytest.mark.parametrize("name", LIKE_TRANSFORMERS)
def test_weights_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Which reads the file with our config: it does not take all sizes from a file."""
    written(
        CASES[name],
        tmp_path / "m.gguf",
        kinds={"ffn_up.weight": "F16", "attn_output.weight": "F16"},
    )
    transformers_logging.set_verbosity_error()
    config, weights = read(tmp_path / "m.gguf")
    options: Any = {"gguf_file": "m.gguf", "config": config, "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).state_dict()
    assert weights and all(weight.equal(theirs[key]) for key, weight in weights.items())
