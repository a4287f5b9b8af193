"""A DFlash drafter of any shape with random weights: it takes as long as a trained one."""

from pathlib import Path
from typing import Any

import torch

from drafters.checkpoint import read_json
from drafters.dflash.config.config import DFlashConfig, entry_of
from drafters.dflash.config.layout import parse_config
from drafters.dflash.drafter import DFlashDrafter
from drafters.dflash.model import DFlashModel
from specdec.model.core import Verifier

LAYERS = 5
BLOCK = 16


def dummy_config(target: Any, path: Path | None = None) -> DFlashConfig:
    """The drafter of a config.json; without one, 5 layers of the target's widths and blocks of 16.

    Args:
        target: the target's config, an object with the names of Transformers.
        path: of a DFlash drafter's config.json, in either public layout.

    Raises:
        CheckpointError: the file describes no such drafter.
    """
    if path is not None:
        return parse_config(read_json(path))
    layers, heads = target.num_hidden_layers, entry_of(target, "num_attention_heads")
    taps = range(1, layers - 1, max(1, layers // LAYERS))[:LAYERS]
    return DFlashConfig(
        block_size=BLOCK,
        mask_token_id=1,
        target_layer_ids=tuple(taps) or (0,),
        windows=(None,) * LAYERS,
        causal=(False,) * LAYERS,
        hidden_size=target.hidden_size,
        intermediate_size=entry_of(target, "intermediate_size") or 3 * target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=entry_of(target, "num_key_value_heads") or heads,
        head_dim=entry_of(target, "head_dim") or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40960,
        num_target_layers=layers,
    )


def dummy_drafter(
    config: DFlashConfig, verifier: Verifier, *, divides: bool | None = None
) -> DFlashDrafter:
    """The drafter on the target's device, with the same weights on every rank; for `divides` see
    `DFlashDrafter`.

    Raises:
        CheckpointError: it does not fit the target.
        InvalidInputError: the ranks do not divide it.
    """
    device = verifier.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = DFlashModel(config)
    return DFlashDrafter(model, verifier, divides=divides)
