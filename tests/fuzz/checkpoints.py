"""Folders of strangers: configs, indexes, headers, cards."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter

from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.dflash.config.config_json import config_json
from drafters.fit import fit_of
from specdec.base.config import CacheConfig, EngineConfig
from specdec.session.decoder import SpecDecoder
from tests.evals.tiny import save_tiny
from tests.fuzz.draw import changed, damaged, damaged_json
from tests.fuzz.kind import Check, Kind, attempt, line
from tests.fuzz.notation import meant, written
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash
from verifiers.needs import read_needs

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
ENGINE = EngineConfig(max_num_seqs=1, num_draft_tokens=2, cache=CacheConfig(memory_bytes=2**20))
ENTRIES = [
    "num_hidden_layers", "layer_types", "sliding_window", "quantization_config", "text_config",
]  # fmt: skip
ENTRIES += ["rope_parameters", "rope_scaling", "auto_map", "eos_token_id", "head_dim", "vocab_size"]
ENTRIES += [
    "num_kv_shared_layers",
    "num_attention_heads_per_layer",
    "attn_implementation",
    "license",
]
OTHERS = [
    "qwen3", "gemma3", "gpt_oss", "qwen3_moe", "mimo_v2_flash", "llama4", "phi3_long",
    "deepseek_v32",
]  # fmt: skip
BESIDE: dict[str, Any] = {
    "generation_config.json": {"eos_token_id": 2, "temperature": 0.7, "min_new_tokens": 1},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
    "model.safetensors.index.json": {
        "metadata": {"total_size": 9},
        "weight_map": {"a": "model.safetensors"},
    },
}
TARGET = SimpleNamespace(name="t", hidden_size=32, num_layers=4, vocab_size=97, predicts=False)


@cache
def entries_of(name: str) -> dict[str, Any]:
    """A sound config."""
    return dict(json.loads(json.dumps((CONFIGS | LATENT_CONFIGS)[name]().to_dict(), default=str)))


@cache
def sound() -> Any:
    """A target and its drafter."""
    verifier = paged_verifier(plain_model("llama"))
    return random_dflash(verifier, causal=(False, True, True))


def target(draw: Random) -> dict[str, Any]:
    """Files by their names."""
    if draw.random() < 0.25:
        name = draw.choice(list(BESIDE))
        return {name: changed(draw, BESIDE[name], ["eos_token_id", "chat_template", "pad_token"])}
    config = changed(draw, entries_of(draw.choice([*OTHERS, *["llama"] * 8])), ENTRIES)
    return {"config.json": damaged_json(draw, config) if draw.random() < 0.05 else config}


def drafter(draw: Random) -> dict[str, Any]:
    """The same of a DFlash drafter, or its card."""
    if draw.random() < 0.1:
        card = changed(draw, {"license": "mit", "base_model": ["a/b"]}, ["license_name", "tags"])
        return {"README.md": {"$raw": f"---\n{written(card)}\n---\n"}}
    config = config_json(sound().config, "z-lab", dtype="float32")
    names = [
        *ENTRIES, "block_size", "dflash_config", "mask_token_id", "target_layer_ids",
        "architectures",
    ]  # fmt: skip
    return {"config.json": changed(draw, config, names)}


def safetensors(draw: Random) -> dict[str, Any]:
    """A header: its text, how long it says it is, and the bytes behind it."""
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    other = {"dtype": "I64", "shape": [1], "data_offsets": [24, 32]}
    header: Any = {
        "__metadata__": {"format": "pt"},
        "model.norm.weight": entry,
        "lm_head.weight": other,
    }
    if draw.random() < 0.8:
        header = changed(
            draw, header, ["model.embed_tokens.weight", "dtype", "shape", "data_offsets"]
        )
    if draw.random() < 0.3:
        header = damaged_json(draw, header)
    off = draw.choice([0, 0, 0, 1, -1, 8, -(2**40), 2**31, 2**62])
    return {"header": header, "off": off, "bytes": draw.choice([32, 32, 0, 31, 40])}


def gguf(draw: Random) -> str:
    """A damaged file, its bytes in hexadecimal."""
    return damaged(draw, _sound_gguf()).hex()


@cache
def _sound_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_block_count(4)
        writer.add_context_length(512)
        writer.add_token_list(["a", "b"])
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


class _Folder:
    """A sound checkpoint, of which files are replaced for a moment."""

    def __init__(self, folder: Path) -> None:
        logging.getLogger("transformers").setLevel(logging.CRITICAL)
        self.sound, self.folder = folder / "sound", folder / "strange"
        self.sound.mkdir()

    def filled(self, files: Mapping[str, Any]) -> Path:
        """A copy with other files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.sound, self.folder)
        for name, content in files.items():
            text = written(content)
            (self.folder / name).write_text(text, encoding="utf-8", errors="replace")
        return self.folder


def _decodes(folder: Path) -> None:
    """Whatever stands there, doctor, loading and a few tokens end in a result or in a line."""
    cpu: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    attempt(lambda: read_needs(str(folder), **cpu, gpu_bytes=10**9))
    decoder = attempt(lambda: SpecDecoder.from_pretrained(folder, engine=ENGINE, **CPU))
    if decoder is not None:
        result = attempt(lambda: decoder.generate("abc", max_tokens=3))
        line(result.error or "fine") if result is not None else None
        decoder.close()


def start_targets(folder: Path) -> Check:
    """Files of a target."""
    place = _Folder(folder)
    save_tiny(place.sound)
    return lambda files: _decodes(place.filled(files))


def start_drafters(folder: Path) -> Check:
    """Files of a drafter, beside a sound target."""
    place, model = _Folder(folder), folder / "target"
    made = sound()
    write_checkpoint(place.sound, made.config, made.model.state_dict())
    model.mkdir()
    save_tiny(model)

    def check(files: Mapping[str, Any]) -> None:
        raw = meant(files.get("config.json", {}))
        for problem in fit_of(raw, TARGET).problems if isinstance(raw, dict) else ():
            line(problem)
        filled = place.filled(files)
        decoder = attempt(
            lambda: SpecDecoder.from_pretrained(model, drafter=filled, engine=ENGINE, **CPU)
        )
        if decoder is not None:
            attempt(lambda: decoder.generate("abc", max_tokens=3))
            decoder.close()

    return check


def start_safetensors(folder: Path) -> Check:
    """The weights of a target."""
    place = _Folder(folder)
    save_tiny(place.sound)

    def check(one: Mapping[str, Any]) -> None:
        header = written(one["header"]).encode(errors="replace")
        length = struct.pack("<Q", (len(header) + one["off"]) % 2**64)
        path = place.filled({}) / "model.safetensors"
        path.write_bytes(length + header + bytes(one["bytes"]))
        _decodes(path.parent)

    return check


def start_gguf(folder: Path) -> Check:
    """The weights of a target in a GGUF file."""
    place = _Folder(folder)
    save_tiny(place.sound)
    (place.sound / "model.safetensors").unlink()

    def check(one: str) -> None:
        path = place.filled({}) / "m.gguf"
        path.write_bytes(bytes.fromhex(one))
        _decodes(path.parent)
        cpu: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
        attempt(lambda: read_needs(str(path), **cpu, gpu_bytes=10**9))  # by itself

    return check


KINDS = {
    "targets": Kind(target, start_targets, 15),
    "drafters": Kind(drafter, start_drafters, 12),
    "safetensors": Kind(safetensors, start_safetensors, 10),
    "gguf": Kind(gguf, start_gguf, 10),
}
