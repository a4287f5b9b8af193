"""Which models are accepted and refused, from the config alone; and that accepted ones do run
packed.
"""

import copy
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GraniteMoeHybridConfig,
    LagunaConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    RobertaConfig,
)

from specdec.attention.backend import AttentionMetadata
from specdec.base.errors import UnsupportedModelError
from specdec.kv_cache import PagedKVCache
from specdec.model.batch import ForwardInput
from tests.helpers.bounds import assert_as_exact, in_float64
from tests.helpers.tiny_composites import CONFIGS as COMPOSITES
from tests.helpers.tiny_composites import type_of
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier
from verifiers.config.families import FAMILIES
from verifiers.config.wrappers import text_config
from verifiers.support import check_supported, unsupported_reasons

BLOCK = 4
WINDOW = 5

ACCEPTED = [
    "afmoe", "arcee", "beam", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "hy_v3", "internlm3", "llama",
    "mellum", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder",
    "nanochat", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
]  # fmt: skip

REFUSED = {
    "bart": "encoder-decoder",
    "bert": "bidirectional",
    "bert-generation": "bidirectional",
    "bloom": "BloomForCausalLM does not go through transformers' attention interface",
    "dbrx": "nested configs (attn_config, ffn_config)",
    "axk2": "latent attention (kv_lora_rank 128) that gates what it returns, which is not available"
    " yet",
    "diffllama": "attends twice",
    "doge": "mask depends on the values",
    "falcon": "attention interface",
    "gemma3n_text": "15 of its layers use the keys and values of another layer",
    "gptj": "attention interface",
    "jamba": "recurrent state",
    "jetmoe": "several times",
    "bailing_hybrid": "latent attention (kv_lora_rank 512) that is not that of DeepSeek or GLM",
    "longcat_flash": "runs twice in each layer",
    "mamba": "recurrent state",
    "mamba2": "recurrent state",
    "minicpm3": "latent attention (kv_lora_rank 256) that rotates halves",
    "minimax": "layers of type linear_attention",
    "mpt": "attention interface",
    "nemotron": "do not pass the paged cache on",
    "recurrent_gemma": "recurrent state",
    "roberta": "bidirectional",
    "rwkv": "recurrent state",
    "stablelm": "attention interface",
    "t5": "encoder-decoder",
    "whisper": "encoder-decoder",
    "zamba": "recurrent state",
}

NESTED_ROPE = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
TWO_LENGTHS = {
    kind: LONGROPE | {"original_max_position_embeddings": length}
    for kind, length in (("full_attention", 1024), ("sliding_attention", 512))
}


class UnknownConfig(PreTrainedConfig):
    """Of a model whose code lies in its own repository."""

    model_type = "unknown_to_transformers"
    auto_map: ClassVar = {"AutoModelForCausalLM": "modeling.Model"}


VARIANTS_REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "narrow values": (
        Qwen3Config(head_dim=128, v_head_dim=64),
        "its keys have 128 numbers per head and its values 64",
    ),
    "wide values": (
        CONFIGS["mimo_v2_flash"](v_head_dim=24),
        "its keys have 16 numbers per head and its values 24",
    ),
    "capped scores": (
        Gemma3TextConfig(attn_logit_softcapping=50.0),
        "its scores are capped (attn_logit_softcapping)",
    ),
    "longrope in transformers' modules": (
        CohereConfig(rope_parameters=LONGROPE),
        "RoPE of type longrope",
    ),
    "longrope of two lengths": (
        Gemma3TextConfig(rope_parameters=TWO_LENGTHS),
        "at several lengths (512, 1024)",
    ),
    "bidirectional": (Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
    "not causal": (LlamaConfig(is_causal=False), "bidirectional"),
    "encoder used as decoder": (RobertaConfig(is_decoder=True), "bidirectional"),
    "epsilons differ": (
        Gemma4TextConfig(per_layer_config={0: {"rms_norm_eps": 1e-3, "head_dim": 64}}),
        "its layers differ in rms_norm_eps",
    ),
    "bidirectional Gemma 4": (Gemma4TextConfig(use_bidirectional_attention="all"), "bidirectional"),
    "no window": (
        Qwen3Config(num_hidden_layers=1, layer_types=["sliding_attention"]),
        "without a sliding_window",
    ),
    "chunks": (
        Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]),
        "layers of type chunked_attention",
    ),
    "no indexer to share": (
        GlmMoeDsaConfig(num_hidden_layers=2, indexer_types=["shared", "full"]),
        "its first layer has no indexer",
    ),
    "indexed attention elsewhere": (
        Qwen3Config(
            num_hidden_layers=1, layer_types=GlmMoeDsaConfig(num_hidden_layers=1).layer_types
        ),
        "it has layers of type",
    ),
    "another quantization": (
        LlamaConfig(quantization_config={"quant_method": "hqq"}),
        "weights quantized with 'hqq' are not read",
    ),
    "no output gate": (
        Qwen3_5TextConfig(attn_output_gate=False),
        "has no output gate (attn_output_gate false)",
    ),
    "another output gate": (
        Qwen3_5MoeTextConfig(output_gate_type="sigmoid"),
        "gated by sigmoid (output_gate_type)",
    ),
    "remote code": (UnknownConfig(), "code from its repository is never run"),
}

VARIANTS_ACCEPTED: dict[str, PreTrainedConfig] = {
    "head sizes differ": Gemma4TextConfig(),
    "keys and values of other layers": Gemma4TextConfig(
        num_hidden_layers=12, num_kv_shared_layers=6
    ),
    "heads differ": LagunaConfig(
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        num_attention_heads_per_layer=[48, 64],
    ),
    "yarn": LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    "longrope": Phi3Config(rope_parameters=LONGROPE),
    "dynamic rope": LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "dynamic rope in transformers' modules": CohereConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "dynamic rope in some layers": Gemma3TextConfig(rope_parameters=NESTED_ROPE),
    "linear rope": LlamaConfig(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "no window": MistralConfig(sliding_window=None),
    "swish is silu": Qwen3_5TextConfig(attn_output_gate=True, output_gate_type="swish"),
    "quantized": LlamaConfig(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "quantized latent attention": DeepseekV3Config(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "native class beside auto_map": LlamaConfig(
        auto_map={"AutoModelForCausalLM": "modeling.Model"}
    ),
}


def needs_type(model_type: str) -> None:
    """Skips a test of a type that this version of Transformers does not have."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")


def test_every_family_has_a_tiny_config() -> None:
    """Or is the text part of a tiny composite."""
    described = {name for name, family in FAMILIES.items() if family.describe}
    tried = {make().model_type for make in (CONFIGS | LATENT_CONFIGS).values()}
    texts = {text_config(AutoConfig.for_model(type_of(name))).model_type for name in COMPOSITES}
    assert {name for name in described - tried - texts if name in CONFIG_MAPPING} == set()


@pytest.mark.parametrize(
    "model_type",
    [*ACCEPTED, *(name for name, one in FAMILIES.items() if one.latent or one.recurrent)],
)
def test_accepted(model_type: str) -> None:
    needs_type(model_type)
    assert unsupported_reasons(AutoConfig.for_model(model_type)) == []


@pytest.mark.parametrize(
    "config",
    [
        NemotronHConfig(mlp_hidden_act="gelu"),
        NemotronHConfig(mamba_hidden_act="gelu"),
        GraniteMoeHybridConfig(hidden_act="gelu"),
        FalconH1Config(hidden_act="gelu"),
    ],
    ids=["nemotron", "nemotron_mamba", "granite", "falcon"],
)
def test_hybrids_with_other_activations_are_refused(config: PreTrainedConfig) -> None:
    """Feed-forward sublayers without gates, and convolutions, have one each."""
    assert unsupported_reasons(config)[0].startswith("it keeps a recurrent state")


@pytest.mark.parametrize(("model_type", "phrase"), REFUSED.items())
def test_refused(model_type: str, phrase: str) -> None:
    needs_type(model_type)
    assert phrase in "; ".join(unsupported_reasons(AutoConfig.for_model(model_type)))


@pytest.mark.parametrize("name", VARIANTS_REFUSED)
def test_variant_refused(name: str) -> None:
    """Fields that turn a supported architecture into one that is not."""
    config, phrase = VARIANTS_REFUSED[name]
    (reason,) = unsupported_reasons(config)
    assert phrase in reason


@pytest.mark.parametrize("name", VARIANTS_ACCEPTED)
def test_variant_accepted(name: str) -> None:
    """Fields that look like an obstacle and are none."""
    assert unsupported_reasons(VARIANTS_ACCEPTED[name]) == []


@pytest.mark.parametrize(
    "model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"]
)
def test_hybrids_are_accepted_where_our_own_layers_run_them(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a described family has in its layers needs nothing of transformers; without a
    description it all counts.
    """
    config = AutoConfig.for_model(model_type)
    assert unsupported_reasons(config) == []
    monkeypatch.setattr("verifiers.support.describe", lambda config: None)
    reasons = "; ".join(unsupported_reasons(config))
    assert (
        "recurrent state" in reasons
        and "attention interface" in reasons
        and "layers of type linear_attention" in reasons
    )


def test_a_state_in_a_family_without_one_is_refused() -> None:
    """A description says nothing of layers that its family does not have."""
    config = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    assert unsupported_reasons(config) == ["it has layers of type linear_attention"]


def test_the_error_names_the_model_its_type_and_every_reason() -> None:
    config = AutoConfig.for_model("jamba", kv_lora_rank=64)
    assert len(unsupported_reasons(config)) == 4
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported("some/model", config)
    message = str(caught.value)
    assert message.startswith("model 'some/model' of type 'jamba' is not supported: ")
    assert all(reason in message for reason in unsupported_reasons(config))
    assert "\n" not in message


def test_a_supported_model_passes() -> None:
    check_supported("some/model", LlamaConfig())


def tiny(model_type: str) -> PreTrainedConfig:
    """The architecture with few and small layers, of every kind of layer it knows."""
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": WINDOW, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    default = AutoConfig.for_model(model_type)
    known = {name: value for name, value in sizes.items() if hasattr(default, name)}
    if model_type == "gpt_bigcode":
        del known["num_key_value_heads"]  # follows from multi_query
    if getattr(default, "layer_types", None) is not None and hasattr(default, "sliding_window"):
        known["layer_types"] = ["sliding_attention", "full_attention"]
        if hasattr(default, "use_sliding_window"):
            known["use_sliding_window"] = True
    elif getattr(default, "layer_types", None) is not None:
        known["layer_types"] = ["full_attention"] * 2
    return AutoConfig.for_model(model_type, **known)


@pytest.mark.parametrize(
    "model_type", [one for one in ACCEPTED if one not in FAMILIES or not FAMILIES[one].describe]
)
def test_accepted_models_run_packed(model_type: str) -> None:
    """Two sequences in one forward give the logits of each alone: catches architectures accepted by
    mistake. Those of our own layers are in `test_hf`.
    """
    needs_type(model_type)
    torch.manual_seed(0)
    config = tiny(model_type)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    lengths = [11, 7]
    sequences = [torch.randint(3, 97, (length,)) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])
    verifier = paged_verifier(model, BLOCK)
    cache = PagedKVCache(
        verifier.kv_specs,
        num_blocks=6,
        block_size=BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 11, 18], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32),
        slot_mapping=torch.cat([torch.arange(4, 4 + 11), torch.arange(16, 16 + 7)]),
        num_reqs=2,
        num_tokens=18,
        max_query_len=11,
        max_seq_len=11,
        query_lens=lengths,
        seq_lens_host=lengths,
    )
    got = verifier.forward(
        ForwardInput(torch.cat(sequences), positions, metadata), cache.layers, (0, 1)
    )
    with torch.inference_mode():
        plain = torch.cat(
            [model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences]
        )
    exact = torch.cat(
        [
            in_float64(model, input_ids=sequence[None], use_cache=False).logits[0]
            for sequence in sequences
        ]
    )
    assert_as_exact(got.logits, plain, exact)
