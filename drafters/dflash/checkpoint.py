"""Checkpoints of DFlash drafters on disk: `config.json` and safetensors in either public layout."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.dflash.config import DFlashConfig, require
from drafters.dflash.layout import Layout, config_json, parse_config
from specdec.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FUSED = ("qkv_proj", "gate_up_proj", "g_proj", "aux_hidden_norms")


def read_checkpoint(path: str | Path) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Reads a drafter from a folder, or from the hub when `path` is an `owner/name` and no such folder exists.

    Returns:
        The configuration, and tensors on the CPU in the type of the file under their z-lab names: 11 per layer (15 with biases),
        `fc.weight`, `hidden_norm.weight`, `norm.weight`; and where the checkpoint brings its own `embed_tokens.weight`,
        `lm_head.weight` and `d2t` int64 [draft_vocab_size], with `target_id = draft_id + d2t[draft_id]`.

    Raises:
        CheckpointError: nothing there, damaged or incomplete files, another kind of drafter.
    """
    folder = _find_folder(path)
    try:
        require(not (folder / "mask_embedding.pt").exists(), "a separate mask_embedding.pt is not supported yet")
        config = parse_config(_read_json(folder / "config.json"))
        tensors = _rename(_read_tensors(folder))
        if config.draft_vocab_size is None:
            offsets = tensors.pop("d2t", None)
            require(offsets is None or not offsets.any(), "d2t reorders a full vocabulary, which is not supported")
        _check_tensors(config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"drafter {str(path)!r}: {error}") from error.__cause__
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
    path = Path(path)
    _check_tensors(config, tensors)
    dtype = dtype or tensors["fc.weight"].dtype
    text = json.dumps(config_json(config, layout, dtype=str(dtype).removeprefix("torch.")), indent=2) + "\n"
    stored = {name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous() for name, t in tensors.items()}
    if "d2t" in stored:
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, target_ids(stored["d2t"]), True)
    require(not path.exists() or (path.is_dir() and not any(path.iterdir())), f"{str(path)!r} exists already; choose a new folder")
    unfinished = path.parent / f".{path.name}.{os.getpid()}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        (unfinished / "config.json").write_text(text)
        save_file(stored, unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {str(path)!r}: {_one_line(error)}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def target_ids(d2t: Tensor) -> Tensor:
    """Target token of every draft token, int64 [draft_vocab_size], from the offsets `d2t`."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()


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
    if config.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkvo"}
    shapes = {f"layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    shapes |= {"fc.weight": (hidden, config.feature_size), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if config.draft_vocab_size is not None:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
    return shapes


def _find_folder(path: str | Path) -> Path:
    """The local folder, downloading it only when `path` can be nothing but a name on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_NAME.fullmatch(str(path)):
        raise CheckpointError(
            f"drafter {str(path)!r} is not a folder; give the folder that holds config.json and model.safetensors"
        )
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "mask_embedding.pt"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"drafter {str(path)!r} is neither a local folder nor to be had from the hub ({_one_line(error)});"
            " check the name and the connection, or give a local folder"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    require(file.is_file(), f"{file.name} is missing; a checkpoint folder holds it beside the safetensors")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file.name} is not valid JSON ({_one_line(error)}); download or write it again") from error
    require(isinstance(content, dict), f"{file.name} holds no JSON object")
    return dict(content)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that its index names."""
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        index = folder / "model.safetensors.index.json"
        require(index.is_file(), "model.safetensors is missing; other weight formats are not read")
        weight_map = _read_json(index).get("weight_map")
        valid = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
        require(valid, f"{index.name} has no weight_map of file names")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
    tensors: dict[str, Tensor] = {}
    for name in names:
        require((folder / name).is_file(), f"{name} is missing; the index names it")
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} is damaged or cut short ({_one_line(error)}); download it again") from error
    return tensors


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as in the z-lab layout, without what belongs to the target or can be computed."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if not name.startswith("verifier_") and name != "t2d" and not name.endswith("rotary_emb.inv_freq"):
            renamed[name] = tensor
    return renamed


def _check_tensors(config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """Complete, of the right shapes, nothing unknown, and a vocabulary map that maps into the vocabulary."""
    needed = tensor_shapes(config)
    fused = [name for name in tensors if any(part in name.split(".") for part in _FUSED)]
    require(not fused, f"tensor {fused[0] if fused else ''} belongs to a fused or gated layer, which is not supported yet")
    missing = [name for name in needed if name not in tensors]
    others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
    require(not missing, f"tensor {missing[0] if missing else ''}{others} missing; config.json asks for {len(needed)} tensors")
    vocabulary = (config.vocab_size, config.hidden_size)
    allowed = {"embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary} | needed
    unknown = [name for name in tensors if name not in allowed]
    require(not unknown, f"tensor {unknown[0] if unknown else ''} is no part of a DFlash drafter ({len(unknown)} such tensors)")
    for name, tensor in tensors.items():
        found, expected = tuple(tensor.shape), allowed[name]
        require(found == expected, f"tensor {name} has shape {list(found)}, config.json asks for {list(expected)}")
        require(name == "d2t" or tensor.is_floating_point(), f"tensor {name} is {tensor.dtype}; quantised weights are not read")
    if config.draft_vocab_size is not None:
        targets = target_ids(tensors["d2t"])
        inside = bool(((targets >= 0) & (targets < config.vocab_size)).all()) and targets.unique().numel() == targets.numel()
        require(inside, f"d2t does not map {config.draft_vocab_size} draft tokens to distinct tokens below {config.vocab_size}")


def _one_line(error: Exception) -> str:
    """The first sentence or so of a library's message."""
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."
