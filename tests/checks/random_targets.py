"""Targets with random weights, of the shapes that are served most."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verifiers.config.families import describe
from verifiers.decoder import DecoderVerifier
from verifiers.weights.weights import Weights

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 128256,
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936,
    },
    "SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152,
    },
}  # fmt: skip


def random_verifier(shape: dict[str, Any], backend: Any) -> Any:
    """A `DecoderVerifier` with random weights of that shape, made on the backend's device."""
    device = backend.spec.device
    tied = shape["model_type"] == "llama"
    config: Any = SimpleNamespace(
        **shape,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
    sizes = {
        f"self_attn.{name}_proj": (out, hidden)
        for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    sizes |= {
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
    }
    sizes |= {"mlp.down_proj": (hidden, inner)}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {} if tied else {"self_attn.q_norm": dim, "self_attn.k_norm": dim}

    def matrix(out: int, inputs: int) -> Tensor:
        return torch.empty(out, inputs, dtype=torch.bfloat16, device=device).normal_(
            std=inputs**-0.5
        )

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16, device=device)

    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden),
        "model.norm.weight": ones(hidden),
    }
    tensors |= {} if tied else {"lm_head.weight": matrix(config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        tensors |= {f"{layer}{name}.weight": matrix(*size) for name, size in sizes.items()}
        tensors |= {f"{layer}{name}.weight": ones(width) for name, width in norms.items()}
    description = describe(config)
    assert description is not None
    return DecoderVerifier(
        config, description, Weights(dict(tensors)), name=config.model_type, backend=backend
    )
