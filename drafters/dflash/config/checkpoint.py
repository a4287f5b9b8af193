"""Checkpoints of DFlash drafters on disk: `config.json` and weights in either public layout."""

from collections.abc import Mapping
from pathlib import Path

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
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.heads import head_names, written_names
from drafters.dflash.config.layout import Layout, parse_config
from drafters.dflash.config.names import zlab_names
from drafters.dflash.model import DFlashModel
from drafters.dflash.tied import TIED
from drafters.keys import require
from drafters.vocabulary import check_map, drafted, without_full_map
from specdec.base.checkpoint.tensor_files import read_pickle
from specdec.base.errors import CheckpointError
from specdec.device.meta import shapes_alone

_MASK = "mask_embedding.pt"


def read_checkpoint(path: str | Path) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Reads a drafter from a folder, or from the hub where there is no such folder.

    Returns:
        The configuration, and tensors on the CPU in the type of the file under their z-lab names:
        11 per layer (15 with biases), `fc.weight`, `hidden_norm.weight`, `norm.weight`; those of
        other layers and of a head; and where the checkpoint brings its own `embed_tokens.weight`,
        `lm_head.weight`, `mask_embedding` [H] and `d2t` int64 [draft_vocab_size], with
        `target_id = draft_id + d2t[draft_id]`.

    Raises:
        CheckpointError: nothing there, damaged or incomplete files, another kind of drafter.
    """
    folder = find_folder(path)
    with naming(path):
        raw = read_json(folder / CONFIG)
        config = parse_config(raw)
        own = head_names(own_tensors(plain_tensors(folder, raw, read_tensors(folder))))
        tensors = zlab_names(own, config)
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
    over: bool = False,
) -> None:
    """Writes a drafter as a new folder that appears whole or not at all.

    Args:
        path: folder to make: new or empty, or with a checkpoint to be written `over`.
        config: what goes to `config.json`.
        tensors: as `read_checkpoint` returns them.
        layout: "z-lab" or "speculators".
        dtype: floating-point type on disk; None keeps that of `fc.weight`.

    Raises:
        CheckpointError: incomplete tensors, what the layout cannot express, a taken path.
        CapacityError, InvalidInputError: it cannot be written.
    """
    plain = "mask_embedding" not in tensors
    require(plain, f"a drafter with its own {_MASK} can be read, but not written")
    _check_tensors(config, tensors)
    dtype = dtype or tensors["fc.weight"].dtype
    stored = {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in tensors.items()
    }
    if "d2t" in stored:
        stored["t2d"] = drafted(stored["d2t"], config.vocab_size)
    content = config_json(config, layout, dtype=str(dtype).removeprefix("torch."))
    write_folder(Path(path), content, written_names(stored, layout), over=over)


def _mask_embedding(file: Path, config: DFlashConfig) -> Tensor:
    """The row [H] in place of the embedding of the mask token: alone, or in a dictionary."""
    content = read_pickle(file)
    if isinstance(content, Mapping):
        token = content.get("mask_token_id", config.mask_token_id)
        what = f"{file.name} is of token {token}, mask_token_id is {config.mask_token_id}"
        require(token == config.mask_token_id, what)
        found = (content[name] for name in ("embedding", "mask_embedding") if name in content)
        content = next(found, None)
    right = (
        isinstance(content, Tensor)
        and content.is_floating_point()
        and content.numel() == config.hidden_size
    )
    require(right, f"{file.name} holds no row of {config.hidden_size} numbers; download it again")
    assert isinstance(content, Tensor)
    finite = bool(content.isfinite().all())
    require(finite, f"{file.name} holds NaN or infinite values; download it again")
    return content.reshape(-1)


def tensor_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` must hold, as the module's.

    Raises:
        CheckpointError: sizes beyond what a tensor can have.
    """
    try:
        with shapes_alone():
            state = DFlashModel(config).state_dict()
    except RuntimeError as error:  # torch counts bytes in 64 bits
        what = "config.json asks for larger tensors than there can be"
        raise CheckpointError(f"{what}; download it again") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if config.tied_tables:
        shapes |= {name: (shapes[name][1], config.hidden_size) for name in TIED if name in shapes}
    return shapes


def _check_tensors(config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """What `config` asks for, and a vocabulary map that maps into the vocabulary."""
    vocabulary = (config.vocab_size, config.hidden_size)
    optional = {
        "embed_tokens.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "mask_embedding": (config.hidden_size,),
    }
    check_tensors(tensors, tensor_shapes(config), optional, kind="DFlash")
    if config.draft_vocab_size is not None:
        check_map(tensors, config.vocab_size)
