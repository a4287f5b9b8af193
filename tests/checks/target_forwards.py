"""Whole forwards of targets with random weights, of the shapes that are served most."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kv_cache import PagedKVCache, blocks_for
from specdec.model.batch import ForwardInput
from tests.helpers.card import BLOCK, DEVICE, failures, metadata, microseconds
from verifiers.config.families import describe
from verifiers.decoder import DecoderVerifier
from verifiers.weights.weights import Weights

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
}


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


def check_forward(name: str, bytes_per_us: float) -> None:
    """Lines for whole verify forwards, captured, with both backends; logits of the two are
    compared.
    """
    shape = SHAPES[name]
    heads = (shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])
    spec = AttentionSpec(DEVICE, torch.bfloat16, *heads, BLOCK)
    expected: dict[tuple[int, int], Tensor] = {}
    for backend in (TorchRefBackend(spec), TritonFaBackend(spec)):
        torch.manual_seed(0)
        verifier = random_verifier(shape, backend)
        weights = [
            part.weight
            for layer in verifier._layers
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        moved = 2 * sum(weight.numel() for weight in [*weights, verifier._head.weight])
        for case in ((1, 1024), (8, 1024), (16, 1024), (16, 32768)):
            if case[1] > 1024 and backend.name == "torch_ref":
                continue
            torch.manual_seed(1)
            logits, spent = timed_forward(verifier, *case)
            error = float("nan")
            if backend.name == "torch_ref":
                expected[case] = logits
            elif case in expected:
                error = float((logits - expected[case]).norm() / expected[case].norm())
                if not error < 0.1:  # differences in bfloat16 grow through the layers
                    failures.append(f"{name}, {case} rows and tokens: logits differ by {error:.1e}")
            keys = 4 * case[1] * heads[1] * heads[2] * shape["num_hidden_layers"]
            floor = (moved + keys) / bytes_per_us
            title = f"{name}, {case[0]} rows at {case[1]:,}, {backend.name}"
            print(
                f"{title:<46}{error:>10.1e}{spent / 1e3:>8.2f} ms, floor {floor / 1e3:.2f} ms",
                flush=True,
            )
        del verifier, weights
        torch.cuda.empty_cache()


def timed_forward(verifier: Any, width: int, length: int) -> tuple[Tensor, float]:
    """Logits float32 of `width` rows that end a context of `length` random tokens, and microseconds
    of the forward.
    """
    blocks = blocks_for(length, BLOCK) + 1
    cache = PagedKVCache(
        verifier.kv_specs, num_blocks=blocks, block_size=BLOCK, dtype=torch.bfloat16, device=DEVICE
    )
    for layer in cache.layers:
        for tensor in layer:
            tensor.normal_()
    token_ids = torch.randint(0, verifier.vocab_size, (width,), device=DEVICE)
    positions = torch.arange(length - width, length, device=DEVICE)
    rows = ForwardInput(
        token_ids, positions, metadata([length], [width], causal=True, prefill=False)
    )
    logits = verifier.forward(rows, cache.layers).logits.float()
    return logits, microseconds(lambda _: verifier.forward(rows, cache.layers), repeats=7)
