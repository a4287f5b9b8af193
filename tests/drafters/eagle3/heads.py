"""Random EAGLE-3 heads for a tiny Llama, in both layouts, and one in plain torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.checkpoint import write_folder
from drafters.eagle3.checkpoint import tensor_shapes
from drafters.eagle3.config import parse_config
from drafters.eagle3.drafter import eagle3_drafter
from drafters.sequential.drafter import SequentialDrafter
from specdec.model.core import Verifier
from tests.helpers.tiny_configs import VOCAB

HIDDEN, TARGET_LAYERS = 32, 4

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
SGLANG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **LLAMA,
    "draft_vocab_size": 40,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": None, "architectures": []},
    },
    "transformer_layer_config": LLAMA,
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def head_tensors(
    raw: Mapping[str, Any], extra: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """Random weights, norms around 1, a map to every second token; `extra` shapes."""
    generator = torch.Generator().manual_seed(1)
    config, tensors = parse_config(raw), {}
    for name, shape in {**tensor_shapes(config), **(extra or {})}.items():
        random = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * random if "norm" in name else 0.3 * random
    if config.draft_vocab_size is not None:
        # draft token i is target token 2 * i
        tensors["d2t"] = torch.arange(config.draft_vocab_size)
    return tensors


def random_eagle3(verifier: Verifier, k: int = 4, **changes: Any) -> SequentialDrafter:
    """A head for any tiny target, in speculators' layout with `changes`; it drafts k tokens."""
    raw = {
        **SPECULATORS,
        "target_hidden_size": verifier.hidden_size,
        "embed_requires_grad": True,
        **changes,
    }
    drafter = eagle3_drafter(parse_config(raw), head_tensors(raw), verifier)
    drafter.max_draft_tokens = k
    return drafter


def write_head(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> Path:
    """A checkpoint in a new folder; in sglang's layout the layer is called as there."""
    tensors = dict(tensors or head_tensors(raw))
    if "speculators_config" not in raw:
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()
        }
    if "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        tensors["t2d"] = torch.zeros(raw.get("vocab_size", VOCAB), dtype=torch.bool).index_fill_(
            0, ids, True
        )
    write_folder(path, raw, tensors)
    return path


def paper_logits(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    table: Tensor,
    text: list[int],
    taps: Tensor,
    drafts: list[int],
) -> Tensor:
    """Logits [k, V'] of `drafts` after `text`, by EAGLE-3's formulas with a Llama layer, each from
    all pairs anew.

    The pair of position i has the features of i and the token of i + 1. The layer is given [norm of
    the embedding, norm of the feature]; the feature goes by it. What it gives is the feature of the
    pair after it.

    Args:
        raw: config in sglang's layout.
        tensors: of the head, by their names in `write_head`'s argument.
        table: input embeddings [V, H].
        text: all tokens up to the anchor.
        taps: [len(text) - 1, 3 * H], the target's features of all before it.
        drafts: k tokens.
    """
    w = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    dim = raw["head_dim"]
    heads = raw["num_attention_heads"]
    groups = raw["num_attention_heads"] // raw["num_key_value_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x
            * (x.pow(2).mean(-1, keepdim=True) + raw["rms_norm_eps"]).rsqrt()
            * w[f"{name}.weight"]
        )

    def turned(x: Tensor) -> Tensor:
        """Halves of each head as the parts of complex numbers, which their position turns."""
        angles = torch.arange(len(x))[:, None] * raw["rope_theta"] ** (
            -torch.arange(dim // 2) / (dim // 2)
        )
        numbers = (
            torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.cat([numbers.real, numbers.imag], dim=-1)

    features, tokens, found = taps @ w["fc.weight"].T, [*text[1:], *drafts], []
    for draft in range(len(drafts)):
        pairs = len(text) - 1 + draft
        given = torch.cat(
            [norm(table[tokens[:pairs]], "input_layernorm"), norm(features, "hidden_norm")], dim=-1
        )
        query, key, value = (
            (given @ w[f"self_attn.{name}_proj.weight"].T)
            .view(pairs, -1, dim)
            .repeat_interleave(groups if name != "q" else 1, dim=1)
            for name in "qkv"
        )
        scores = torch.einsum("qhd,khd->hqk", turned(query), turned(key)) / dim**0.5
        seen = torch.ones(pairs, pairs, dtype=torch.bool).tril()
        attended = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value
        ).reshape(pairs, heads * dim)
        hidden = features + attended @ w["self_attn.o_proj.weight"].T
        normed = norm(hidden, "post_attention_layernorm")
        gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
        hidden = hidden + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        features = torch.cat([features, hidden[-1:]])
        found.append(norm(hidden[-1], "norm") @ w["lm_head.weight"].T)
    return torch.stack(found)
