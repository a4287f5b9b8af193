"""Writing EAGLE-3 heads, in the layout of sglang and SpecForge or in that of speculators."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from drafters.algorithms import speculators_sections
from drafters.checkpoint import write_folder
from drafters.eagle3.config import Eagle3Config
from drafters.eagle3.taps import IDS, settled
from drafters.keys import require
from drafters.vocabulary import drafted

Layout = Literal["sglang", "speculators"]

_NOT_OF_LAYERS = {
    "_name_or_path", "architectures", "auto_map", "draft_vocab_size", "dtype", "eagle_config",
    "target_hidden_size", "torch_dtype", "transformers_version",
}  # fmt: skip
"""What a flat config.json says beside its layers."""


def write_checkpoint(
    path: Path,
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    layout: Layout,
    num_target_layers: int | None = None,
    *,
    over: bool = False,
) -> None:
    """Writes a head as a new folder that appears whole or not at all.

    Args:
        path: folder to make; it must not exist yet, or be empty.
        config, tensors: as `drafters.eagle3.checkpoint.read_checkpoint` returns them.
        layout: of names and config.json.
        num_target_layers: where it is known.
        over: an earlier one in that folder is replaced.

    Raises:
        CheckpointError: what the layout cannot express, a taken path, or a failed write.
    """
    reason = unwritable(config, layout)
    require(reason is None, str(reason))
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    stated = settled(config.stated_taps, num_target_layers)
    write = _to_sglang if layout == "sglang" else _to_speculators
    written = write(config, dtype, stated)
    stored = {_name(name, layout): tensor.contiguous() for name, tensor in tensors.items()}
    if config.draft_vocab_size is not None:
        stored["t2d"] = drafted(tensors["d2t"], config.vocab_size)
    write_folder(path, written, stored, over=over)


def unwritable(config: Eagle3Config, layout: Layout) -> str | None:
    """What of a head the layout cannot express; None for nothing."""
    of_sglang, layers = layout == "sglang", len(config.windows)
    reasons = {
        "a head with latent attention can be read, but not written": config.latent is not None,
        "a head with Gemma's layers can be read, but not written": config.gemma is not None,
        "a head that drafts in parallel (P-EAGLE) has no words in the sglang layout": of_sglang
        and config.mask_token_id is not None,
        "norms of queries and keys have no words in the sglang layout": of_sglang
        and config.has_head_norms,
        f"a head of {layers} layers has no words in the sglang layout": of_sglang and layers != 1,
        "a bias of fc has no words in the speculators layout": not of_sglang and config.fc_bias,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _name(name: str, layout: Layout) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if layout == "sglang" else name


def _layers(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """What both layouts say about layers, in the words of Transformers 5 and 4."""
    stated = {
        name: value for name, value in config.layers.to_dict().items() if name not in _NOT_OF_LAYERS
    }
    rope = dict(config.layers.rope_parameters)
    if (part := rope.get("partial_rotary_factor")) and rope["rope_type"] != "proportional":
        # without which the factor would be taken for the target's
        rope["rope_dim"] = int(part * config.layers.head_dim)
    scaling = rope if rope["rope_type"] != "default" else None
    return stated | {
        "dtype": dtype,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": scaling,
    }


def _flags(config: Eagle3Config) -> dict[str, bool]:
    """The norms of a head."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(config, name) for name in names}


def _to_sglang(config: Eagle3Config, dtype: str, stated: tuple[int, ...] | None) -> dict[str, Any]:
    flags = {name: True for name, value in _flags(config).items() if value}
    own: dict[str, Any] = {"use_aux_hidden_state": True, **flags}
    # SGLang reads the first, mostly as it is meant here; the second leaves no doubt.
    ids = {} if stated is None else {"target_layer_ids": list(stated)}
    if stated is not None:
        own[IDS] = list(stated)
    return {
        **_layers(config, dtype),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.tap_width,
        "embed_requires_grad": config.own_embeddings,
        "bias": config.fc_bias,
        "eagle_config": own,
        **ids,
    }


def _to_speculators(
    config: Eagle3Config, dtype: str, stated: tuple[int, ...] | None
) -> dict[str, Any]:
    kind = "eagle3" if config.mask_token_id is None else "peagle"
    return {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        **speculators_sections(kind, config.max_draft_tokens, config.verifier_name),
        "transformer_layer_config": _layers(config, dtype),
        "dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.tap_width,
        IDS: None if stated is None else [layer + 1 for layer in stated],
        "embed_requires_grad": config.own_embeddings,
        **_flags(config),
        **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
    }
