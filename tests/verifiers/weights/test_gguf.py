"""GGUF files: numbers, names and the order of rows, against what package `gguf` writes."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from tests.helpers.tiny_models import plain_model
from verifiers.weights.checkpoint import read_weights
from verifiers.weights.gguf import gguf_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""From transformers' names to llama.cpp's."""


def write(path: Path, model: Any, kind: Any, *, leave_out: str = "", architecture: str = "llama") -> dict[str, Tensor]:
    """Writes a Llama as llama.cpp has it, and returns the numbers of the file by transformers' names."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    numbers = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        layer = module.split(".")[2] if ".layers." in module else None
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.rpartition(".")[2])
        tensor = parameter.detach()
        if heads:  # neighbors are rotated against each other
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        target = NAMES[module if layer is None else module.split(".", 3)[3]]
        target = f"{target}.weight" if layer is None else f"blk.{layer}.{target}.weight"
        stored = array = tensor.contiguous().numpy()
        quantized = kind is not None and array.ndim == 2 and array.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        if quantized:
            stored = gguf.quants.quantize(array, kind)
            array = gguf.quants.dequantize(stored, kind)
        if target != leave_out:
            writer.add_tensor(target, stored, raw_dtype=kind if quantized else None)
        found = torch.from_numpy(array.copy())
        numbers[name] = found.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else found
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def read(path: Path, config: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return dict(read_weights(path, config, device=torch.device("cpu"), dtype=dtype, as_stored=True))


@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_0", "Q5_1"])
def test_numbers_names_and_rows(kind: str | None, tmp_path: Path) -> None:
    """From the file itself and from its folder; in narrower types, too."""
    model: Any = plain_model("llama")
    path = tmp_path / "model.gguf"
    numbers = write(path, model, kind and getattr(gguf.GGMLQuantizationType, kind))
    for place, dtype in ((path, torch.float32), (tmp_path, torch.float32), (path, torch.bfloat16)):
        found = read(place, model.config, dtype)
        assert found.keys() == numbers.keys()
        assert all(found[name].equal(tensor.to(dtype)) for name, tensor in numbers.items())
    changed = [name for name, tensor in numbers.items() if not tensor.equal(model.state_dict()[name])]
    assert bool(changed) == (kind is not None)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A tensor that is missing, an architecture that transformers does not know, and several files."""
    model: Any = plain_model("llama")
    path = tmp_path / "model.gguf"
    write(path, model, None, leave_out="blk.2.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"'model.gguf' lacks 1 tensors, the first being 'model.layers.2.mlp.up_proj.weight'"):
        read(path, model.config)
    write(path, model, None, architecture="mamba9")
    with pytest.raises(
        CheckpointError, match=r"transformers does not read 'model.gguf' \(.*mamba9.*\); take the safetensors files"
    ):
        read(path, model.config)
    write(tmp_path / "other.gguf", model, None)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files; name one of them, such as '.*model.gguf'"):
        gguf_file(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert gguf_file(tmp_path) is None


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the file is opened."""
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("verifiers.weights.gguf.find_spec", lambda name: None)
    with pytest.raises(
        CheckpointError, match=r"'model.gguf' needs package gguf, which is not installed; run: python -m pip install gguf"
    ):
        read(tmp_path, plain_model("llama").config)
