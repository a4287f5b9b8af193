"""Names of tensors: from those that the files of published checkpoints have to those that
transformers gives its parameters.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from verifiers.config.families import family_of
from verifiers.config.places import UNUSED
from verifiers.family import Prediction

DROPPED = re.compile(
    r"^(model\.)?(visual|vision_\w+|audio_\w+|embed_vision|embed_audio|multi_modal_projector"
    r"|multimodal_projector|mm_projector|mtp|mtp_\w+)\."
    r"|^(talker|code2wav|token2wav)\.|rotary_emb\.inv_freq$"
)
"""Towers of composites, layers that draft, and what is computed from the config."""

TEXT_PART = (
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model."),
    (r"^(model\.)?language_model\.lm_head", "lm_head"),
)
"""Names of the text part in files of composites, old and new."""

RENAMED = (
    *TEXT_PART,
    (r"^thinker\.(?=model\.|lm_head)", ""),
    (r"^(?=(embed_tokens|layers|norm)\.)", "model."),  # saved without a head
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(?<=\.experts\.)(\d+)\.w1\.", r"\1.gate_proj."),
    (r"(?<=\.experts\.)(\d+)\.w3\.", r"\1.up_proj."),
    (r"(?<=\.experts\.)(\d+)\.w2\.", r"\1.down_proj."),
)
"""In this order."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def name_of(name: str, config: Any, ignored: Sequence[str] = ()) -> str | None:
    """What transformers calls a tensor of a file; None for one that the text model lacks.

    Args:
        name: in the file.
        ignored: expressions for further names that it lacks, beyond its last layer.
    """
    if DROPPED.search(name) or UNUSED.search(name):
        return None
    name = _renamed(name, config)
    layer = LAYER.match(name)
    if layer and (beyond := int(layer[1]) - config.num_hidden_layers) >= 0:
        drafting = beyond < (getattr(config, "num_nextn_predict_layers", None) or 0)
        if drafting or any(re.search(expression, name) for expression in ignored):
            return None
    return name


def _renamed(name: str, config: Any) -> str:
    for expression, replacement in (*RENAMED, *family_of(config).renamed):
        name = re.sub(expression, replacement, name, count=1)
    return name


def prediction_name(name: str, config: Any, layers: Prediction) -> str | None:
    """What a tensor of a target's file is called here; None for one that belongs to other layers
    than those that are looked for.
    """
    if UNUSED.search(name):
        return None
    name = _renamed(name, config)
    for pattern, replacement in layers.names:
        found = re.match(pattern.replace("{layers}", str(config.num_hidden_layers)), name)
        if found:
            return replacement + name[found.end() :]
    return None


def predicts(config: Any, names: Collection[str] = ()) -> bool:
    """Whether a target has such layers in its own checkpoint.

    Args:
        names: of all tensors in its files; without any, the config's word is taken.
    """
    layers = family_of(config).prediction
    if layers is None or not names:
        counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
        stated = (getattr(config, name, None) for name in counts)
        return layers is not None and any(stated)
    return any(prediction_name(name, config, layers) is not None for name in names)
