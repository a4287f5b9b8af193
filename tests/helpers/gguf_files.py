"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.helpers.tiny_configs import VOCAB

COMMON = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_epsilon": "norm_epsilon",
}  # fmt: skip
ROTATES_NEIGHBORS = {"granite", "granitehybrid", "llama", "mistral3", "smollm3"}
ADDS_ONE = {"gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next"}

Facts = Mapping[str, Any]


def facts_of(config: Any) -> dict[str, Any]:
    """What the converter says of every model; others add to it."""
    entries = config.to_dict()  # attributes that layers differ in cannot be read
    named = {**{entry: entry for entry in COMMON.values()}, **type(config).attribute_map}
    stated = {key: entries.get(named[entry]) for key, entry in COMMON.items()}
    epsilon = getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None)
    stated["attention.layer_norm_rms_epsilon"] = epsilon
    rope = entries.get("rope_parameters") or {}
    stated["rope.freq_base"] = rope.get("full_attention", rope).get("rope_theta")
    return {key: value for key, value in stated.items() if value is not None}


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    facts: Facts = {},  # noqa: B006
    *,
    kinds: Mapping[str, str] = {},
    leave_out: Sequence[str] = (),
    tokenizer: Facts | None = None,
    extra: Mapping[str, Tensor] = {},
    general: Facts = {},  # noqa: B006
) -> dict[str, Tensor]:
    """Writes a model, and returns the numbers that are in the file by llama.cpp's names.

    Args:
        path: of the file.
        model: of Transformers, in float32.
        architecture: its name in llama.cpp.
        facts: keys of the architecture beside those of `facts_of`; None leaves one out.
        kinds: types by what a tensor's name ends with; others are F32.
        leave_out: names of tensors.
        tokenizer: its keys; None for a character for each token.
        extra: further tensors.
        general: keys that all architectures have.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in general.items():
        add(writer, f"general.{key}", value)
    for key, value in {**facts_of(model.config), **facts}.items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in (characters() if tokenizer is None else tokenizer).items():
        add(writer, f"tokenizer.{key}", value)
    found = {}
    made = (pair for pair in as_converted(model, architecture) if pair[0] not in leave_out)
    for name, tensor in (*made, *extra.items()):
        array, kind = tensor.contiguous().numpy(), None
        named = next((kinds[end] for end in kinds if name.endswith(end)), None)
        if named is not None and array.ndim > 1:
            kind = gguf.GGMLQuantizationType[named]
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, array, raw_dtype=kind)
        numbers = array if kind is None else gguf.quants.dequantize(array, kind)
        found[name] = torch.from_numpy(np.array(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def add(writer: Any, key: str, value: Any) -> None:
    """One entry, of the type that the converter gives such values."""
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def characters() -> dict[str, Any]:
    """The tokenizer of tiny models: bytes of text as tokens, behind three special ones."""
    letters = [chr(number) for number in range(33, 127)]
    tokens = ["<pad>", "<s>", "</s>", "\u0120", *letters][:VOCAB]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3)],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.padding_token_id": 0,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}!",
    }


def as_converted(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model as the converter makes them, with their names."""
    config, state = model.config, model.state_dict()
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = config.num_hidden_layers
    named = gguf.get_tensor_name_map(numbers[architecture], layers)
    for name, tensor in state.items():
        if name.endswith("inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        block = f"blk.{layer[1]}." if layer else ""
        special = _special(name, tensor.float(), config, architecture)
        if special is not None:
            yield from ((block + part, changed) for part, changed in special.items())
            continue
        source = named.get_name(name, try_suffixes=(".weight", ".bias"))
        assert source is not None, name
        ended = source.endswith((".weight", ".bias"))
        yield (
            source if ended else f"{source}.weight",
            _changed(name, tensor.float(), config, architecture),
        )


def _changed(name: str, tensor: Tensor, config: Any, architecture: str) -> Tensor:
    if (found := re.search(r"\.([qk])_proj\.", name)) and architecture in ROTATES_NEIGHBORS:
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    own_norm = name.endswith("norm.weight") and "linear_attn" not in name
    return tensor + 1 if own_norm and architecture in ADDS_ONE else tensor


def _special(name: str, tensor: Tensor, config: Any, architecture: str) -> dict[str, Tensor] | None:
    """Tensors that become others, by what their names end with."""
    turned = architecture in ("gpt-oss", "llama4") and tensor.ndim == 3
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        whole, ending = (
            tensor.transpose(1, 2) if turned else tensor,
            "bias" if "bias" in name else "weight",
        )
        in_turns = architecture == "gpt-oss"
        gate, up = (whole[:, ::2], whole[:, 1::2]) if in_turns else whole.chunk(2, dim=1)
        return {f"ffn_gate_exps.{ending}": gate, f"ffn_up_exps.{ending}": up}
    if name.endswith(("experts.down_proj", "experts.down_proj_bias")):
        ending = "bias" if "bias" in name else "weight"
        return {f"ffn_down_exps.{ending}": tensor.transpose(1, 2) if turned else tensor}
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        return {"exp_probs_b.bias": tensor}
    if name.endswith("kv_b_proj.weight"):
        parts = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = parts.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}
    if name.endswith("shared_expert_gate.weight"):
        return {"ffn_gate_inp_shexp.weight": tensor}
    if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) and architecture == "gpt2":
        ends = {
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        }
        return {f"{ends['.'.join(name.split('.')[-3:-1])]}.weight": tensor.T}
    if name.endswith("conv.conv.weight"):
        return {"shortconv.conv.weight": tensor.squeeze(1)}
    if name.endswith("router.scale"):
        return {"ffn_gate_inp.scale": tensor}
    if name.endswith("per_expert_scale"):
        return {"ffn_down_exps.scale": tensor}
    if name.endswith("block_sparse_moe.router.weight"):
        return {"ffn_gate_inp.weight": tensor}
    if "shared_mlp." in name:
        end = "_shexp.weight" if config.num_local_experts else ".weight"
        if "output" in name:
            return {f"ffn_down{end}": tensor}
        gate, up = tensor.chunk(2)
        return {f"ffn_gate{end}": gate, f"ffn_up{end}": up}
    if ".mamba." in name:
        return _of_mamba(name.rpartition(".mamba.")[2], tensor, config)
    part = name.rpartition("linear_attn.")[2]
    return None if part == name else _of_states(part, tensor, config, architecture)


def _of_mamba(part: str, tensor: Tensor, config: Any) -> dict[str, Tensor] | None:
    """Tensors of Mamba-2's layers."""
    changed = {
        "A_log": ("ssm_a", lambda: -tensor.exp().unsqueeze(1)),
        "D": ("ssm_d", lambda: tensor.unsqueeze(1)),
        "dt_bias": ("ssm_dt.bias", lambda: tensor),
        "conv1d.weight": ("ssm_conv1d.weight", lambda: tensor.squeeze(1)),
        "norm.weight": (
            "ssm_norm.weight",
            lambda: tensor.unflatten(0, (config.mamba_n_groups, -1)),
        ),
    }
    if part not in changed:
        return None
    name, make = changed[part]
    return {name: make()}


Parts = dict[str, Tensor] | None


def _of_states(part: str, tensor: Tensor, config: Any, architecture: str) -> Parts:
    """Tensors of Qwen's recurrent layers; value heads are sorted by their place in a group."""
    heads, key_dim, value_dim = (
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    shared, keys = config.linear_num_value_heads // heads, 2 * heads * key_dim

    def sort(values: Tensor, width: int) -> Tensor:
        if architecture == "qwen3next":
            return values
        return values.unflatten(0, (heads, shared, width)).transpose(0, 1).flatten(0, 2)

    match part:
        case "A_log":
            return {"ssm_a": sort(-tensor.exp(), 1)}
        case "dt_bias":
            return {"ssm_dt.bias": sort(tensor, 1)}
        case "conv1d.weight" | "in_proj_qkv.weight":
            rows = tensor.squeeze(1)
            target = "ssm_conv1d.weight" if "conv" in part else "attn_qkv.weight"
            return {target: torch.cat([rows[:keys], sort(rows[keys:], value_dim)])}
        case "in_proj_z.weight":
            return {"attn_gate.weight": sort(tensor, value_dim)}
        case "in_proj_a.weight" | "in_proj_b.weight":
            return {f"ssm_{'alpha' if '_a' in part else 'beta'}.weight": sort(tensor, 1)}
        case "out_proj.weight":
            return {"ssm_out.weight": sort(tensor.T, value_dim).T}
        case "in_proj_qkvz.weight":
            widths = [key_dim, key_dim, shared * value_dim, shared * value_dim]
            parts = tensor.unflatten(0, (heads, -1)).split(widths, dim=1)
            *qkv, gate = (one.flatten(0, 1) for one in parts)
            return {"attn_qkv.weight": torch.cat(qkv), "attn_gate.weight": gate}
    return None
