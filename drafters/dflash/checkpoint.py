"""Checkpoints of DFlash drafters on disk: `config.json` and safetensors in either public layout."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from drafters.checkpoint import (
    CONFIG,
    check_tensors,
    find_folder,
    naming,
    own_tensors,
    plain_tensors,
    read_json,
    read_tensors,
    write_folder,
)
from drafters.dflash.config import DFlashConfig, LatentSizes
from drafters.dflash.config_json import config_json
from drafters.dflash.heads import head_names
from drafters.dflash.layout import Layout, parse_config
from drafters.dflash.names import zlab_names
from drafters.dflash.tied import TIED
from drafters.keys import require
from drafters.vocabulary import check_map, drafted, without_full_map
from specdec.errors import CheckpointError

_MASK = "mask_embedding.pt"


def read_checkpoint(path: str | Path) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Reads a drafter from a folder, or from the hub when `path` is an `owner/name` and no such folder exists.

    Returns:
        The configuration, and tensors on the CPU in the type of the file under their z-lab names: 11 per layer (15 with biases),
        `fc.weight`, `hidden_norm.weight`, `norm.weight`; those of other layers and of a head; and where the checkpoint brings its
        own `embed_tokens.weight`, `lm_head.weight`, `mask_embedding` [H] and `d2t` int64 [draft_vocab_size], with
        `target_id = draft_id + d2t[draft_id]`.

    Raises:
        CheckpointError: nothing there, damaged or incomplete files, another kind of drafter.
    """
    folder = find_folder(path)
    with naming(path):
        raw = read_json(folder / CONFIG)
        config = parse_config(raw)
        tensors = zlab_names(head_names(own_tensors(plain_tensors(folder, raw, read_tensors(folder)))), config)
        if (folder / _MASK).exists():
            tensors["mask_embedding"] = _mask_embedding(folder / _MASK, config)
        if config.draft_vocab_size is None:
            tensors = without_full_map(tensors)
        _check_tensors(config, tensors)
    return config, tensors


def write_checkpoint(
    path: str | Path,
    config: DFlashConfig,
    tensors: Mapping[str, Tensor],
    *,
    layout: Layout = "z-lab",
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a drafter as a new folder that appears whole or not at all.

    Args:
        path: folder to make; it must not exist yet, or be empty.
        config: what goes to `config.json`.
        tensors: as `read_checkpoint` returns them.
        layout: "z-lab" or "speculators".
        dtype: floating-point type on disk; None keeps that of `fc.weight`.

    Raises:
        CheckpointError: incomplete tensors, a configuration that the layout cannot express, a taken path, or a failed write.
    """
    require("mask_embedding" not in tensors, f"a drafter with its own {_MASK} can be read, but not written")
    _check_tensors(config, tensors)
    dtype = dtype or tensors["fc.weight"].dtype
    stored = {name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous() for name, t in tensors.items()}
    if "d2t" in stored:
        stored["t2d"] = drafted(stored["d2t"], config.vocab_size)
    write_folder(Path(path), config_json(config, layout, dtype=str(dtype).removeprefix("torch.")), stored)


def _mask_embedding(file: Path, config: DFlashConfig) -> Tensor:
    """The row [H] that a drafter has in place of the target's embedding of the mask token: alone, or named in a dictionary.

    Raises:
        CheckpointError: another kind of content, or the row of another token.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{file.name} is damaged ({' '.join(str(error).split())[:120]}); download it again") from error
    if isinstance(content, Mapping):
        token = content.get("mask_token_id", config.mask_token_id)
        require(token == config.mask_token_id, f"{file.name} is of token {token}, mask_token_id is {config.mask_token_id}")
        content = next((content[name] for name in ("embedding", "mask_embedding") if name in content), None)
    right = isinstance(content, Tensor) and content.is_floating_point() and content.numel() == config.hidden_size
    require(right, f"{file.name} holds no row of {config.hidden_size} numbers; download it again")
    assert isinstance(content, Tensor)
    return content.reshape(-1)


def tensor_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` must hold."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.latent is not None:
        layer = {name: shape for name, shape in layer.items() if not name.startswith("self_attn.")}
        layer |= {f"self_attn.{name}.weight": shape for name, shape in _latent_shapes(config, config.latent).items()}
    if config.keys_as_values:
        del layer["self_attn.v_proj.weight"]
    if config.gemma:
        layer |= {f"{where}_feedforward_layernorm.weight": (hidden,) for where in ("pre", "post")} | {"layer_scalar": (1,)}
    if config.attention_sinks:
        layer["self_attn.attention_sink_bias"] = (config.num_attention_heads,)
    if config.attention_gate is not None:
        gates = query if config.attention_gate == "per-element" else config.num_attention_heads
        layer["self_attn.g_proj.weight"] = (gates, hidden)
    if config.mixes_taps:
        layer |= {f"self_attn.{name}_proj_target.weight": (kv, hidden) for name in "kv"}
    if config.attention_bias:
        with_bias = [name for name in layer if name.startswith("self_attn.") and "_proj" in name and "g_proj" not in name]
        layer |= {name.removesuffix("weight") + "bias": layer[name][:1] for name in with_bias}
    if config.conv_kernel_size is not None and config.conv_group_size is not None:
        taps, groups = config.conv_kernel_size, hidden // config.conv_group_size
        for name in ("attention_conv", "mlp_conv"):
            layer |= {f"{name}.base_kernel": (2, taps, hidden), f"{name}.kernel_projection.weight": (2 * taps * groups, hidden)}
    shapes = {f"layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if config.mixes_taps:
        shapes["layer_fusion_weights"] = (config.num_hidden_layers, len(config.target_layer_ids))
    else:
        shapes["fc.weight"] = (hidden, config.feature_size)
    if config.tap_norms:
        shapes |= {f"aux_hidden_norms.{i}.weight": (config.tap_width,) for i in range(len(config.target_layer_ids))}
    if config.draft_vocab_size is not None:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
    if config.head is not None:
        with torch.device("meta"):
            modules = config.head.modules(config.head_sizes)
        states = {f"{name}.{part}": tensor for name, module in modules.items() for part, tensor in module.state_dict().items()}
        shapes |= {name: tuple(tensor.shape) for name, tensor in states.items()}
        if config.tied_tables:
            shapes |= {name: (shapes[name][1], hidden) for name in TIED if name in shapes}
    return shapes


def _latent_shapes(config: DFlashConfig, sizes: LatentSizes) -> dict[str, tuple[int, ...]]:
    """Of latent attention, by module."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (query, hidden)}
    if sizes.query_rank is not None:
        shapes = {
            "q_a_proj": (sizes.query_rank, hidden),
            "q_a_layernorm": (sizes.query_rank,),
            "q_b_proj": (query, sizes.query_rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa": (sizes.rank + sizes.rope, hidden),
        "kv_a_layernorm": (sizes.rank,),
        "kv_b_proj": (heads * (sizes.nope + sizes.value), sizes.rank),
        "o_proj": (hidden, heads * sizes.value),
    }


def _check_tensors(config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """What `config` asks for, and a vocabulary map that maps into the vocabulary."""
    vocabulary = (config.vocab_size, config.hidden_size)
    optional = {"embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary, "mask_embedding": (config.hidden_size,)}
    check_tensors(tensors, tensor_shapes(config), optional, kind="DFlash")
    if config.draft_vocab_size is not None:
        check_map(tensors, config.vocab_size)
