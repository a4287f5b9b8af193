"""Checkpoints of EAGLE-3 heads: what is read, and what is refused by name."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from drafters.checkpoint import write_folder
from drafters.eagle3.checkpoint import read_checkpoint, tensor_shapes
from drafters.eagle3.config import parse_config
from drafters.fit import fit_of
from drafters.load import load_drafter
from specdec.base.errors import CheckpointError
from tests.drafters.eagle3.heads import (
    LLAMA,
    SGLANG,
    SPECULATORS,
    head_tensors,
    random_eagle3,
    write_head,
)
from tests.helpers.tiny_models import paged_verifier, plain_model


class TargetShape(NamedTuple):
    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    predicts: bool = False


QWEN3_8B: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_scaling": None, "rope_theta": 1000000,
    },
}  # fmt: skip


def test_a_public_config() -> None:
    """One of RedHatAI's: default taps, a reduced vocabulary, RoPE in the older form."""
    config = parse_config(QWEN3_8B)
    assert (
        config.taps(36) == (1, 17, 32)
        and config.norm_before_residual
        and config.max_draft_tokens == 7
    )
    assert config.layers.rope_parameters["rope_theta"] == 1000000
    shapes = tensor_shapes(config)
    assert shapes["fc.weight"] == (4096, 3 * 4096) and shapes["lm_head.weight"] == (32000, 4096)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (1024, 8192)


def test_whether_a_head_fits_is_told_from_its_config() -> None:
    """Before a weight is fetched."""
    fit = fit_of(QWEN3_8B, TargetShape("Qwen3-8B", 4096, 36, 151936))
    assert (fit.algorithm, fit.drafts, fit.taps, fit.problems) == ("eagle3", 7, (1, 17, 32), ())
    attention, mlp = (4096 + 2 * 1024) * 8192 + 4096 * 4096, 3 * 4096 * 12288
    assert fit.numbers == 4096 * 3 * 4096 + attention + mlp + 32000 * 4096 + 4 * 4096 + 32000
    misfit = fit_of(QWEN3_8B, TargetShape("Qwen3-4B", 2560, 36, 151936))
    assert "its fc.weight takes 12288 features, not 3 taps of 2560" in misfit.problems[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step 4"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm True"),
        (
            {"eagle_config": {"new_trick": 1}},
            "eagle_config says new_trick, which this loader does not know",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2]}},
            "the embeddings cannot be tapped",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2"}}, "must be a list of integers"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
            "it taps layer 4 of a target whose last layer is 3",
        ),
        (
            {"model_type": "gpt2", "architectures": ["LlamaForCausalLM"]},
            "layers of type 'gpt2' are not supported in an EAGLE-3 head",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "RoPE type 'dynamic' is not supported",
        ),
        ({"num_key_value_heads": 3}, "the first must be a multiple"),
        (
            {"num_attention_heads": 6, "head_dim": None},
            "hidden_size 32 is no multiple of num_attention_heads 6, and config.json lacks",
        ),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"draft_vocab_size": 98}, "it must be at least 1 and at most vocab_size 97"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"norm_output": 1}, "norm_output is 1; it must be true or false"),
        ({"layer_types": ["sliding_attention"]}, "enables no window"),
        (
            {"layer_types": ["chunked_attention"]},
            "it must name full_attention or sliding_attention",
        ),
    ],
)
def test_a_config_that_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """In one line that names the value."""
    path = write_head(tmp_path / "head", {**SGLANG, **changes}, head_tensors(SGLANG))
    with pytest.raises(CheckpointError) as caught:
        load_drafter(path, verifier=paged_verifier(plain_model("llama")))
    assert said in str(caught.value) and "\n" not in str(caught.value)


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"fc.weight": None}, "tensor fc.weight is missing"),
    (
        {"fc.weight": torch.zeros(32, 64)},
        "tensor fc.weight has shape [32, 64], config.json asks for [32, 96]",
    ),
    (
        {"layers.0.self_attn.q_norm.weight": torch.ones(12)},
        "q_norm.weight is no part of an EAGLE-3 drafter",
    ),
    (
        {"d2t": torch.full((40,), 90)},
        "d2t does not map 40 draft tokens to distinct tokens below 97",
    ),
    (
        {
            "d2t": torch.arange(40) * 2,
            "t2d": (torch.arange(97) % 2 == 0) & (torch.arange(97) < 80),
        },
        "d2t holds the target's tokens themselves, as t2d marks them",
    ),
    ({"d2t": torch.arange(40.0)}, "tensor d2t is torch.float32; it must hold integers"),
    ({"d2t": torch.arange(40, dtype=torch.bfloat16)}, "tensor d2t is torch.bfloat16; it must"),
    (
        {"lm_head.weight": torch.zeros(40, 32, dtype=torch.int8)},
        "tensor lm_head.weight is torch.int8",
    ),
]


@pytest.mark.parametrize(("changes", "said"), TENSORS, ids=[said for _, said in TENSORS])
def test_tensors_that_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Missing ones, others than the config asks for, and an impossible vocabulary map."""
    tensors = {
        name: tensor
        for name, tensor in {**head_tensors(SGLANG), **changes}.items()
        if tensor is not None
    }
    path = tmp_path / "head"
    write_folder(path, SGLANG, tensors)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("marked", [40, 39])
def test_a_map_that_leads_elsewhere_is_said(
    marked: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the target's tokens those that drafts can be are marked, too."""
    marks = torch.zeros(97, dtype=torch.bool).index_fill_(0, 2 * torch.arange(marked), True)
    write_folder(tmp_path / "head", SGLANG, head_tensors(SGLANG) | {"t2d": marks})
    read_checkpoint(tmp_path / "head")
    assert ("leads to other tokens than its t2d marks" in caplog.text) == (marked != 40)


def test_a_head_of_another_target(tmp_path: Path) -> None:
    """Width and vocabulary; embeddings of its own let a head be narrower."""
    verifier = paged_verifier(plain_model("llama"))
    wide = {**SGLANG, "hidden_size": 24, "target_hidden_size": 32}
    with pytest.raises(
        CheckpointError, match="its hidden size 24 cannot share embeddings of width 32"
    ):
        load_drafter(write_head(tmp_path / "narrow", wide), verifier=verifier)
    assert (
        random_eagle3(
            verifier, transformer_layer_config={**LLAMA, "hidden_size": 24}
        ).network.feature_size
        == 24
    )
    other = {**SPECULATORS, "transformer_layer_config": {**LLAMA, "vocab_size": 98}}
    with pytest.raises(CheckpointError, match="its vocabulary has 98 tokens, the target's 97"):
        load_drafter(write_head(tmp_path / "other", other), verifier=verifier)


def test_sglangs_names_of_further_layers(tmp_path: Path) -> None:
    """The norm before attention is `hidden_norm`; only the first layer has another too."""
    raw = {**SGLANG, "num_hidden_layers": 2}
    tensors = head_tensors(raw)
    renamed = {
        name.replace("layers.1.input_layernorm", "layers.1.hidden_norm"): tensor
        for name, tensor in tensors.items()
    }
    _, found = read_checkpoint(write_head(tmp_path / "head", raw, renamed))
    assert found.keys() == tensors.keys()
    assert torch.equal(
        found["layers.1.input_layernorm.weight"], tensors["layers.1.input_layernorm.weight"]
    )


def test_a_mask_is_of_a_parallel_head_alone() -> None:
    """It drafts at most what it was trained for; a mask outside the vocabulary is refused."""
    raw = {**SPECULATORS, "speculators_model_type": "peagle", "mask_token_id": 3}
    config = parse_config(raw)
    assert config.mask_token_id == 3 and config.max_draft_tokens == 3
    assert parse_config({**SPECULATORS, "mask_token_id": 3}).mask_token_id is None
    with pytest.raises(CheckpointError, match="mask_token_id 97 lies outside 97 embeddings"):
        parse_config({**raw, "mask_token_id": 97})
    with pytest.raises(CheckpointError, match=r"config\.json lacks mask_token_id"):
        parse_config({**raw, "mask_token_id": None})
