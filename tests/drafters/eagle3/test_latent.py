"""Latent heads beside a target that has it, against transformers' own attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from drafters.eagle3.config import parse_config
from drafters.eagle3.drafter import eagle3_drafter
from specdec.base.errors import BackendError, CheckpointError
from tests.drafters.eagle3.heads import head_tensors
from tests.drafters.sequential.toy import check_drafts, noted_run
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts

HIDDEN = 32
KIMI: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CASES: dict[str, dict[str, Any]] = {
    "compressed": {},
    "plain queries": {"q_lora_rank": None},
    "yarn": {"rope_scaling": YARN},
}


def plain_layer(raw: dict[str, Any], tensors: dict[str, Tensor], table: Tensor) -> Any:
    """The head's layer over a whole text: [T, 2, H], normed and the stream itself."""
    layers = DeepseekV3Config(
        **{
            name: value
            for name, value in raw.items()
            if name not in ("architectures", "eagle_config")
        }
    )
    layers._attn_implementation = "eager"
    attention, rotary = DeepseekV3Attention(layers, 0).eval(), DeepseekV3RotaryEmbedding(layers)
    weights = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    for (
        name,
        part,
    ) in attention.named_children():  # of the first projections the input is twice as wide
        weight = weights[f"self_attn.{name}.weight"]
        if isinstance(part, nn.Linear):
            setattr(attention, name, nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        getattr(attention, name).weight = nn.Parameter(weight)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], raw["rms_norm_eps"])

    def plain(token_ids: Tensor, features: Tensor) -> Tensor:
        given = torch.cat(
            [norm(table[token_ids], "input_layernorm"), norm(features, "hidden_norm")], dim=-1
        )[None]
        count = len(token_ids)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turned = rotary(given, torch.arange(count)[None])
        stream = features + attention(given, position_embeddings=turned, attention_mask=mask)[0][0]
        normed = norm(stream, "post_attention_layernorm")
        gate, up = (normed @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        stream = stream + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
        return torch.stack([norm(stream, "norm"), stream], dim=1)

    return plain


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_transformers_attention(name: str) -> None:
    """In a running engine; catches a scale, a rotation, a norm or a cached row."""
    model, raw = plain_model("deepseek_v3"), {**KIMI, **CASES[name]}
    verifier, tensors = paged_verifier(model), head_tensors(raw)
    drafter = eagle3_drafter(parse_config(raw), dict(tensors), verifier)
    network: Any = drafter.network
    network.plain = plain_layer(raw, tensors, model.get_input_embeddings().weight)
    _, _, noted = noted_run(verifier, drafter, random_prompts(3), num_draft_tokens=4)
    check_drafts(model, network, noted[::2], least=10)


def test_refusals() -> None:
    """A target with other attention, and biases."""
    with pytest.raises(
        BackendError,
        match="this drafter has latent attention, and the target's backend 'torch_ref' serves"
        " other",
    ):
        eagle3_drafter(parse_config(KIMI), head_tensors(KIMI), paged_verifier(plain_model("llama")))
    with pytest.raises(CheckpointError, match="attention_bias is true"):
        parse_config({**KIMI, "attention_bias": True})
