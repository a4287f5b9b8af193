"""Weights read from files without transformers' modules: its names, its types and its bits, and the
same logits.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from specdec.attention.selector import select_backend
from specdec.base.errors import CheckpointError
from specdec.model.core import Verifier
from tests.helpers import tiny_composites
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts
from tests.verifiers.test_hf import BLOCK, PackedRun
from verifiers.config.families import FAMILIES, describe
from verifiers.config.names import name_of
from verifiers.config.places import place_of
from verifiers.config.shape import backend_spec
from verifiers.config.wrappers import class_facts, text_config
from verifiers.decoder import DecoderVerifier
from verifiers.formats.format import Stored
from verifiers.formats.method import quantization_of
from verifiers.weights.checkpoint import read_weights
from verifiers.weights.weights import COMPUTED, Weights

CPU = torch.device("cpu")


def read(
    folder: Path, config: Any, dtype: torch.dtype = torch.float32, *, as_stored: bool = True
) -> dict[str, Stored]:
    return read_weights(folder, config, device=CPU, dtype=dtype, as_stored=as_stored)


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of the model has to hold."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in own.items() if not name.endswith(COMPUTED)}


def verifier_of(weights: dict[str, Stored], config: Any) -> Verifier:
    """The verifier that these weights make."""
    description = describe(config)
    backend = select_backend(
        "torch_ref", backend_spec(config, device=CPU, dtype=torch.float32, block_size=BLOCK)
    )
    assert description is not None
    return DecoderVerifier(config, description, Weights(weights), name="x", backend=backend)


def logits(verifier: Verifier) -> Tensor:
    sequences = random_prompts(2, seed=3)
    return torch.cat(
        PackedRun(verifier, sequences).forward([(i, 0, len(s)) for i, s in enumerate(sequences)])
    )


def change_tensors(
    folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


@pytest.mark.parametrize("name", [*CONFIGS, *LATENT_CONFIGS])
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Every family, in several files, in types that are narrower than theirs, of which some tensors
    are kept out: of float16 all that are of bfloat16, and more.
    """
    model = plain_model(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    own = parameters(model)
    facts = class_facts(model.config)
    for dtype in (torch.bfloat16, torch.float16) if facts.wide or facts.wider else (torch.float16,):
        types = {
            key: tensor.dtype
            for key, tensor in parameters(
                type(model).from_pretrained(tmp_path, dtype=dtype)
            ).items()
        }
        found = read(tmp_path, model.config, dtype)
        assert found.keys() == own.keys()
        for key, tensor in found.items():
            assert isinstance(tensor, Tensor) and tensor.dtype == types[key], key
            assert tensor.equal(own[key].to(types[key])), key


@pytest.mark.parametrize(
    "name",
    ["llama_tied", "mixtral", "gpt_oss", "gemma3", "glm_moe_dsa"],
)
def test_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = plain_model(name)
    model.save_pretrained(tmp_path)
    assert logits(verifier_of(read(tmp_path, model.config), model.config)).equal(
        logits(paged_verifier(model, BLOCK))
    )


@pytest.mark.parametrize(
    "name",
    [
        "gemma3", "mistral3", "mistral3_tied", "llava", "internvl", "kimi_k25", "qwen3_5",
        "qwen3_5_moe",
    ],
)  # fmt: skip
def test_a_composite_gives_its_text_part(name: str, tmp_path: Path) -> None:
    """Without the tower and its prefix; the tied head is left out."""
    model: Any = tiny_composites.composite(name)
    tiny_composites.save(model, tmp_path)
    config = text_config(model.config)
    text = {
        f"model.{key}": tensor for key, tensor in parameters(model.model.language_model).items()
    }
    found = read(tmp_path, config)
    assert (
        found.keys() - text.keys() == (set() if config.tie_word_embeddings else {"lm_head.weight"})
        and not text.keys() - found.keys()
    )
    for key, tensor in text.items():
        weight = found[key]
        assert isinstance(weight, Tensor) and weight.equal(tensor)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "model.language_model.layers.0.input_layernorm.weight",
            "model.layers.0.input_layernorm.weight",
        ),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"),
        (
            "model.layers.1.block_sparse_moe.experts.7.w2.weight",
            "model.layers.1.mlp.experts.7.down_proj.weight",
        ),
        ("model.layers.1.self_attn.k_proj.k_scale", None),
        ("model.layers.1.self_attn.q_proj.input_scale", None),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", None),
        ("model.layers.3.post_mlp_layernorm.weight", "model.layers.3.post_mlp_layernorm.weight"),
        ("model.layers.4.mlp.gate.weight", None),  # the layer that drafts
        # nobody knows what that is
        ("model.layers.5.mlp.gate.weight", "model.layers.5.mlp.gate.weight"),
        *(
            (f"{prefix}.x.weight", None)
            for prefix in ("mtp", "model.visual", "vision_tower", "model.vision_tower")
        ),
        *(
            (f"{prefix}.x.weight", None)
            for prefix in (
                "multi_modal_projector",
                "model.audio_tower",
                "visual",
                "model.embed_vision",
            )
        ),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    config = LATENT_CONFIGS["deepseek_v3"]()
    config.num_nextn_predict_layers = 1
    assert name_of(name, config) == expected


def test_a_norm_lies_elsewhere_in_one_family() -> None:
    name = "model.layers.3.post_mlp_layernorm.weight"
    assert name_of(name, LATENT_CONFIGS["axk1"]()) == "model.layers.3.mlp.post_mlp_layernorm.weight"


def test_layers_that_transformers_leaves_out_are_left_out() -> None:
    """Of a config that does not count those that draft."""
    config = LATENT_CONFIGS["deepseek_v3"]()
    config.num_hidden_layers, config.num_nextn_predict_layers = 61, None
    assert name_of("model.layers.61.norm.weight", config, [r"model\.layers\.61.*"]) is None
    assert name_of("model.layers.61.norm.weight", config, []) is not None


@pytest.mark.parametrize(
    "model_type", [name for name, family in sorted(FAMILIES.items()) if family.describe]
)
def test_no_conversion_of_transformers_is_unknown(model_type: str) -> None:
    """A release may convert names of a family in a new way, which ours would have to follow."""
    known = {
        ".block_sparse_moe.": ".mlp.",
        ".experts.*.w1.weight": ".experts.gate_up_proj",
        ".experts.*.w2.weight": ".experts.down_proj",
        "mlp.experts.*.gate_proj.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.*.down_proj.weight": "mlp.experts.down_proj",
        "post_mlp_layernorm": "mlp.post_mlp_layernorm",
        r"block_sparse_moe\.input_linear\.weight": "block_sparse_moe.experts.gate_up_proj",
        r"block_sparse_moe\.output_linear\.weight": "block_sparse_moe.experts.down_proj",
        r"block_sparse_moe\.router\.layer\.weight": "block_sparse_moe.router.weight",
        "feed_forward.experts.*.w1.weight": "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.*.w2.weight": "feed_forward.experts.down_proj",
        "backbone.": "model.",
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert.": "mlp.shared_experts.",
        "mlp.moe_statics.e_score_correction_bias": "mlp.gate.moe_statics.e_score_correction_bias",
        r"mlp\.router\.gate\.weight": "mlp.gate.weight",
        r"mlp\.expert_bias": "mlp.e_score_correction_bias",
        r"mlp\.shared_mlp\.": "mlp.shared_experts.",
        "mixer.experts.*.up_proj.weight": "mixer.experts.up_proj",
        "mixer.experts.*.down_proj.weight": "mixer.experts.down_proj",
        "self_attn.attention_sink_bias": "self_attn.sinks",
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
        "linear_attn.q_conv1d.weight": "linear_attn.conv1d.weight",
        r"self_attn\.f_a_proj\.": "self_attn.forget_gate.f_a_proj.",
        r"self_attn\.f_b_proj\.": "self_attn.forget_gate.f_b_proj.",
        r"self_attn\.dt_bias": "self_attn.forget_gate.dt_bias",
        r"self_attn\.A_log": "self_attn.forget_gate.A_log",
        "self_attn.q_conv1d.weight": "self_attn.conv1d.weight",
        r"\.block_sparse_moe\.": ".mlp.",
        r"\.experts.*.w1.weight": ".experts.gate_up_proj",
        r"\.experts.*.w2.weight": ".experts.down_proj",
    }
    second = {
        "mlp.experts.*.gate_proj.weight": ["mlp.experts.*.up_proj.weight"],
        ".experts.*.w1.weight": [".experts.*.w3.weight"],
        "feed_forward.experts.*.w1.weight": ["feed_forward.experts.*.w3.weight"],
        "linear_attn.q_conv1d.weight": [
            "linear_attn.k_conv1d.weight",
            "linear_attn.v_conv1d.weight",
        ],
        "self_attn.q_conv1d.weight": ["self_attn.k_conv1d.weight", "self_attn.v_conv1d.weight"],
        r"\.experts.*.w1.weight": [r"\.experts.*.w3.weight"],
    }
    for conversion in get_checkpoint_conversion_mapping(model_type) or []:
        if type(conversion).__name__ == "PrefixChange":
            assert conversion.prefix_to_remove == "language_model"
            continue
        assert known.get(conversion.source_patterns[0]) == conversion.target_patterns[0]
        assert conversion.source_patterns[1:] == second.get(conversion.source_patterns[0], [])


def test_places() -> None:
    """What of merged experts is a part of them, and what is a tensor of its own."""
    assert place_of("mlp.experts.gate_up_proj") == ("mlp.experts.gate_up_proj", "weight")
    assert place_of("mlp.experts.gate_up_proj_scale_inv") == (
        "mlp.experts.gate_up_proj",
        "weight_scale_inv",
    )
    assert place_of("mlp.experts.gate_up_proj_bias") == ("mlp.experts.gate_up_proj_bias", None)
    assert place_of("mlp.gate.e_score_correction_bias") == (
        "mlp.gate.e_score_correction_bias",
        None,
    )
    assert place_of("self_attn.q_proj.bias") == ("self_attn.q_proj.bias", None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    model = plain_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"1 of the files that model\S+index.json tells of are missing, the first being"
        rf" '{lost.name}'",
    ):
        read(tmp_path, model.config)
    lost.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(
        CheckpointError, match=rf"'{lost.name}' is damaged \(.*\); fetch the whole checkpoint again"
    ):
        read(tmp_path, model.config)


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    """It names what a file does not hold, leads elsewhere, or is no index."""
    model = plain_model("llama")
    model.save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.more.weight": "model.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"'model\.safetensors' does not hold 'model\.more\.weight'"
    ):
        read(tmp_path, model.config)
    for text in (
        "{}",
        "[",
        json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}),
    ):
        index.write_text(text)
        with pytest.raises(
            CheckpointError,
            match=r"(does not name a file beside it for each tensor|is not valid JSON)",
        ):
            read(tmp_path, model.config)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"there are no weights: neither safetensors files nor pytorch_model\.bin",
    ):
        read(tmp_path, CONFIGS["llama"]())


@pytest.mark.parametrize("lost", ["2.up_proj", "3.gate_proj", "1.down_proj", "3."])
def test_a_missing_expert_is_named(lost: str, tmp_path: Path) -> None:
    model = plain_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    change_tensors(
        tmp_path,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if f"1.mlp.experts.{lost}" not in name
        },
    )
    first = "3.gate_proj" if lost == "3." else lost
    with pytest.raises(
        CheckpointError,
        match=f"there is no model.layers.1.mlp.experts.{first}; fetch the whole checkpoint again",
    ):
        read(tmp_path, model.config)


def test_more_experts_than_the_config_says(tmp_path: Path) -> None:
    model = plain_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    model.config.num_experts = 3
    with pytest.raises(
        CheckpointError,
        match=r"model.layers.0.mlp.experts has an expert 3, but the config says 3; fetch",
    ):
        read(tmp_path, model.config)


def test_a_head_that_the_config_alone_calls_tied(tmp_path: Path) -> None:
    """The class of Nemotron-H ties nothing, and has another name for its embeddings."""
    model = plain_model("nemotron_h", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    found, table = read(tmp_path, model.config), model.get_input_embeddings().weight
    for name, tensor in (("lm_head", model.lm_head.weight), ("model.embeddings", table)):
        assert torch.equal(cast("Tensor", found[f"{name}.weight"]), tensor)


def test_a_head_that_is_tied(tmp_path: Path) -> None:
    """It is left out where it equals the embeddings, taken for them where they are missing, and
    kept where it differs.
    """
    model = plain_model("llama_tied")
    model.save_pretrained(tmp_path)
    table = model.get_input_embeddings().weight.detach()
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    change_tensors(tmp_path, lambda tensors: {**tensors, head: table})
    assert head not in read(tmp_path, model.config)
    change_tensors(tmp_path, lambda tensors: {**tensors, head: table + 1})
    assert set(read(tmp_path, model.config)) > {head, embedding}
    change_tensors(
        tmp_path,
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != embedding},
    )
    found = read(tmp_path, model.config)
    assert head not in found and isinstance(found[embedding], Tensor)
    model.config.tie_word_embeddings = False
    change_tensors(
        tmp_path,
        lambda tensors: {embedding: table, **{n: t for n, t in tensors.items() if n != head}},
    )
    with pytest.raises(
        CheckpointError, match=r"there is no 'lm_head\.weight' and it is not tied to the embeddings"
    ):
        read(tmp_path, model.config)


def test_a_method_that_is_not_read_is_named(tmp_path: Path) -> None:
    """Before any weight is read: there is none here."""
    config: Any = CONFIGS["llama"]()
    config.quantization_config = {"quant_method": "hqq"}
    with pytest.raises(
        CheckpointError,
        match=r"quantized with 'hqq' are not read, but auto-round, .* and GGUF are; take such",
    ):
        read(tmp_path, config)


def test_where_the_quantization_is_stated(tmp_path: Path) -> None:
    """In the config at hand, the outer or the inner one of the file, or a file of its own."""
    config: Any = CONFIGS["llama"]()
    assert quantization_of(tmp_path, config) is None
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8"}})
    )
    assert quantization_of(tmp_path, config) == {"quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    )
    assert quantization_of(tmp_path, config) == {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "awq"}})
    )
    assert quantization_of(tmp_path, config) == {"quant_method": "awq"}
    config.quantization_config = {"quant_method": "gptq"}
    assert quantization_of(tmp_path, config) == {"quant_method": "gptq"}
