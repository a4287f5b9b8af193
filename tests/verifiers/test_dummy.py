"""Targets with random weights, made from a config alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.base.config import EngineConfig
from specdec.base.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from specdec.engine.engine import SpecEngine
from specdec.layers.packed.weight import PackedWeight
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import random_prompts
from verifiers.config.shape import expert_counts
from verifiers.dummy import (
    dummy_verifier,
    experts_met,
    quantized_weights,
    random_model,
    read_config,
)
from verifiers.weights.quantize import WAYS

CPU = torch.device("cpu")
ALL = CONFIGS | LATENT_CONFIGS


def decode(verifier: Any, prompts: list[list[int]], count: int = 3) -> list[list[int]]:
    """Output tokens of every prompt."""
    engine = SpecEngine(
        verifier,
        None,
        EngineConfig(num_draft_tokens=None, max_num_seqs=len(prompts), max_model_len=64),
    )
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        for prompt in prompts
    ]
    finish(engine)
    assert all(request.error is None for request in requests)  # NaN in the logits would be one
    return [request.output_token_ids for request in requests]


def tiny(name: str, seed: int = 0) -> Any:
    """A verifier of a tiny shape."""
    return dummy_verifier(
        random_model(ALL[name](), CPU, torch.float32, seed=seed), name=name, block_size=4
    )


@pytest.mark.parametrize(
    "name", ["llama", "gpt_oss", "gemma4_shared", "deepseek_v32", "zamba2_adapted", "nemotron_h"]
)
def test_random_weights_decode(name: str) -> None:
    """One family of each kind; that numbers are finite is seen below of all."""
    outputs = decode(tiny(name), random_prompts(2, longest=20))
    assert [len(tokens) for tokens in outputs] == [3, 3]


def test_the_seed_makes_the_weights() -> None:
    prompts = random_prompts(2)
    outputs = [decode(tiny("llama", seed), prompts, 8) for seed in (0, 0, 1)]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("name", ALL)
def test_weights_have_a_sensible_scale_and_their_own_type(name: str) -> None:
    """Catches a tensor that no initialization reaches, and inverse frequencies or a router's bias
    rounded to bfloat16.
    """
    config = ALL[name]()
    model = random_model(config, CPU, torch.bfloat16)
    for key, tensor in model.state_dict().items():
        wide = {"olmo_hybrid": "A_log", "ernie4_5_moe": "mlp.gate.weight"}.get(name, "expert_bias")
        if key.endswith(("e_score_correction_bias", "expert_bias", wide)):
            assert tensor.dtype == (
                torch.bfloat16 if name in ("laguna", "kimi_linear") else torch.float32
            ), key
            continue
        assert tensor.dtype == torch.bfloat16, key
        assert tensor.isfinite().all(), key
        told = tensor.ndim > 1 and tensor.numel() > 40  # few numbers tell nothing of their scale
        if (
            told
            and "bias" not in key
            and not (name == "nemotron_h" and key.endswith("out_proj.weight"))
        ):
            # one family's embeddings have twice
            assert 0.7 < float(tensor.float().std()) / config.initializer_range < 2.5, key
    for key, tensor in model.named_buffers():
        if key.endswith(("inv_freq", "e_score_correction_bias")) and name != "kimi_linear":
            assert tensor.dtype == torch.float32, key
        if key.endswith("inv_freq"):
            proportional = name.startswith("gemma4") and key.endswith(
                ("full_attention_inv_freq", "original_inv_freq")
            )
            assert 0 < float(tensor[tensor != 0].min()) <= float(tensor.max()) <= 1, key
            assert proportional or (tensor != 0).all(), key
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == config.tie_word_embeddings


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_experts_met_are_counted_per_layer(name: str) -> None:
    """Catches rows of the context that are counted, a layer without experts that counts, and hooks
    that stay.
    """
    config = ALL[name]()
    experts, top_k = expert_counts(config) or (0, 0)
    model = random_model(config, CPU, torch.float32)
    assert experts_met(model, 1) == top_k
    met = experts_met(model, 2, context=3)
    assert met is not None
    assert top_k <= met <= min(experts, 2 * top_k)
    assert decode(dummy_verifier(model, name=name, block_size=4), random_prompts(1)) == decode(
        tiny(name), random_prompts(1)
    )
    level = random_model(config, CPU, torch.float32)
    with torch.no_grad():
        for key, tensor in level.named_parameters():
            if key.endswith(("gate.weight", "router.weight")):
                tensor.zero_()
    assert experts_met(level, 4) == top_k  # all rows take the same
    for name in ("llama", "llama4"):  # no experts, and experts that are given their rows alone
        assert experts_met(random_model(CONFIGS[name](), CPU, torch.float32), 2) is None


@pytest.mark.parametrize(("way", "bits", "error"), [("fp8", 8, 0.04), ("int4", 4, 0.2)])
def test_quantized_numbers_are_near(way: str, bits: int, error: float) -> None:
    """The largest of each group is kept, and the last group may be shorter."""
    weight = torch.randn(
        6, 300, generator=torch.Generator().manual_seed(0)
    ).bfloat16() * torch.tensor([[1.0]] * 5 + [[0.0]])
    packed = WAYS[way](weight)
    assert (
        packed.codes.numel() * packed.codes.itemsize == 6 * 300 * bits // 8
        and packed.scale.shape == (6, 3)
    )
    numbers = packed.dequantized(torch.float32)
    assert (numbers - weight).norm() < error * weight.norm() and numbers[5].eq(0).all()
    for ours, given in zip(
        numbers.split(128, dim=1), weight.float().split(128, dim=1), strict=True
    ):
        torch.testing.assert_close(ours.abs().amax(1), given.abs().amax(1), rtol=0.04, atol=0)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("llama", way) for way in WAYS),
        *((name, "fp8") for name in ("gpt_oss", "qwen3_moe", "qwen3_next")),
        *((name, "int4") for name in ("llama4", "qwen3_5", "deepseek_v32")),
    ],
)
def test_quantized_layers_are_those_of_their_numbers(name: str, way: str) -> None:
    """Catches an expert that lies the wrong way round, weights that stay behind, and a head that is
    packed.
    """
    model, twin = (random_model(ALL[name](), CPU, torch.float32) for _ in range(2))
    weights = quantized_weights(model, way).tensors
    packed = {key: weight for key, weight in weights.items() if isinstance(weight, PackedWeight)}
    assert packed and all(key.startswith("model.layers.") for key in packed)
    plain = [
        key
        for key, weight in weights.items()
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and "norm" not in key
    ]
    assert {key.split(".")[-2] for key in plain if key.startswith("model.layers.")} <= {
        *("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "weights_proj"),
        *("experts", "self_attn"),  # biases and sinks
    }
    for key, parameter in twin.named_parameters():
        if key in packed:
            numbers = packed[key].dequantized()
            parameter.data = (
                numbers.mT.contiguous()
                if name in ("gpt_oss", "llama4") and parameter.ndim == 3
                else numbers
            )
    assert all(
        parameter.numel() == 0 for key, parameter in model.named_parameters() if key in packed
    )
    prompts = random_prompts(2)
    found = dummy_verifier(
        random_model(ALL[name](), CPU, torch.float32), name=name, block_size=4, quantize=way
    )
    outputs = [
        decode(one, prompts, 8)
        for one in (found, dummy_verifier(twin, name=name, block_size=4), tiny(name))
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_what_cannot_be_quantized_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(CONFIGS["llama"](), CPU, torch.float32)
    with pytest.raises(
        InvalidInputError,
        match="random weights cannot be 'fp4'; choose fp8, int4, or bfloat16 for plain numbers",
    ):
        dummy_verifier(model, name="llama", quantize="fp4")
    monkeypatch.setattr("verifiers.dummy.description_of", lambda model: None)
    with pytest.raises(
        InvalidInputError,
        match="runs through transformers' modules, which take plain numbers; leave out weights",
    ):
        dummy_verifier(model, name="llama", quantize="fp8")


def test_making_one_leaves_the_random_numbers_of_the_process_alone() -> None:
    torch.manual_seed(12345)
    state = torch.get_rng_state()
    random_model(CONFIGS["llama"](), CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    CONFIGS["gemma3"]().to_json_file(file)
    for path in (file, tmp_path):
        config = read_config(path)
        assert (config.model_type, config.hidden_size, config.layer_types) == (
            "gemma3_text",
            32,
            CONFIGS["gemma3"]().layer_types,
        )


@pytest.mark.parametrize(
    ("changes", "error", "fragments"),
    [
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            InvalidInputError,
            ["quantized", "remove quantization_config"],
        ),
        ({"model_type": "mamba"}, UnsupportedModelError, ["'mamba'", "recurrent state"]),
        ({"model_type": "no-such-model"}, CheckpointError, ["no-such-model", "config.json"]),
        ({"hidden_size": "wide"}, CheckpointError, ["cannot read", "hidden_size"]),
    ],
)
def test_a_config_that_makes_no_target_is_refused(
    changes: dict[str, Any], error: type[Exception], fragments: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["llama"]().to_dict() | changes))
    with pytest.raises(error) as raised:
        read_config(tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    assert all(fragment in message for fragment in fragments), message


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="; give a config"):
        read_config(tmp_path / "none.json")
