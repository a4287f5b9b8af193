"""Checkpoints of EAGLE-3 heads on disk."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from drafters.attention import LatentSizes
from drafters.checkpoint import (
    CONFIG,
    check_tensors,
    find_folder,
    naming,
    own_tensors,
    plain_tensors,
    read_json,
    read_tensors,
)
from drafters.eagle3.config import Eagle3Config, parse_config
from drafters.vocabulary import check_map, without_full_map

_FORMER_NAMES = {
    f"aux_norm_{tap}.weight": f"fc_norm.{i}.weight" for i, tap in enumerate(("low", "mid", "high"))
}
"""What SGLang called the norms of taps at first."""


def read_checkpoint(path: str | Path) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Reads a head from a folder, or from the hub where there is no such folder.

    Returns:
        The configuration, and tensors on the CPU in the type of the file: those of `tensor_shapes`,
        and where the checkpoint brings its own `embed_tokens.weight` and `lm_head.weight`. Of
        sglang's names `midlayer` is `layers.0`.

    Raises:
        CheckpointError: nothing there, damaged or incomplete files, another kind of drafter.
    """
    folder = find_folder(path)
    with naming(path):
        raw = read_json(folder / CONFIG)
        config = parse_config(raw)
        tensors = own_tensors(plain_tensors(folder, raw, read_tensors(folder)))
        if config.draft_vocab_size is None:
            tensors = without_full_map(tensors)
        tensors = {_FORMER_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
        if config.mask_token_id is not None and "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        for index in range(
            1, len(config.windows)
        ):  # sglang calls the norm before a further layer's attention so
            name = f"layers.{index}.input_layernorm.weight"
            if name not in tensors and f"layers.{index}.hidden_norm.weight" in tensors:
                tensors[name] = tensors.pop(f"layers.{index}.hidden_norm.weight")
        _check(config, tensors)
    return config, tensors


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` must hold."""
    layers = config.layers
    hidden, inner, head_dim = layers.hidden_size, layers.intermediate_size, layers.head_dim
    query = layers.num_attention_heads * head_dim
    kv = layers.num_key_value_heads * head_dim
    taps = config.num_taps
    joined = (hidden, taps * config.tap_width)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": joined, "norm.weight": (hidden,)}
    for index in range(layers.num_hidden_layers):
        given = hidden if index else 2 * hidden
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, given),
            "self_attn.k_proj.weight": (kv, given),
            "self_attn.v_proj.weight": (kv, given),
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.latent is not None:
            layer = {name: shape for name, shape in layer.items() if "self_attn" not in name}
            layer |= _latent_shapes(config, config.latent, given)
        if config.gemma is not None:
            layer |= {
                f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")
            }
            layer["layer_scalar"] = (1,)
            if config.gemma.keys_as_values:
                del layer["self_attn.v_proj.weight"]
        if index == 0:
            layer["hidden_norm.weight"] = (hidden,)
        if config.has_head_norms:
            layer |= {
                "self_attn.q_norm.weight": (head_dim,),
                "self_attn.k_norm.weight": (head_dim,),
            }
        if layers.attention_bias:
            layer |= {
                f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1]
                for name in "qkvo"
            }
        if getattr(layers, "mlp_bias", False):
            layer |= {
                f"mlp.{name}_proj.bias": layer[f"mlp.{name}_proj.weight"][:1]
                for name in ("gate", "up", "down")
            }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps * config.tap_width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (config.tap_width,) for index in range(taps)}
    if config.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, taps * config.tap_width)
    if config.draft_vocab_size is not None:
        head = (config.draft_vocab_size, hidden)
        shapes |= {"lm_head.weight": head, "d2t": (config.draft_vocab_size,)}
    if config.own_embeddings:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    return shapes


def _latent_shapes(
    config: Eagle3Config, sizes: LatentSizes, given: int
) -> dict[str, tuple[int, ...]]:
    """Tensors of latent attention to an input of `given` numbers."""
    heads, hidden = config.layers.num_attention_heads, config.layers.hidden_size
    query = heads * (sizes.nope + sizes.rope)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (sizes.rank + sizes.rope, given),
        "kv_a_layernorm.weight": (sizes.rank,),
        "kv_b_proj.weight": (heads * (sizes.nope + sizes.value), sizes.rank),
        "o_proj.weight": (hidden, heads * sizes.value),
    }
    if sizes.query_rank is None:
        shapes["q_proj.weight"] = (query, given)
    else:
        shapes |= {
            "q_a_proj.weight": (sizes.query_rank, given),
            "q_a_layernorm.weight": (sizes.query_rank,),
            "q_b_proj.weight": (query, sizes.query_rank),
        }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _check(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> None:
    """What `config` asks for, and a vocabulary map that maps into the vocabulary."""
    vocabulary = (config.vocab_size, config.layers.hidden_size)
    optional = {"embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    check_tensors(tensors, tensor_shapes(config), optional, kind="EAGLE-3")
    if config.draft_vocab_size is not None:
        check_map(tensors, config.vocab_size)
