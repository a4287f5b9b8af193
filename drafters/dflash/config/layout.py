"""Reading the `config.json` of a DFlash drafter, in any public layout."""

import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from drafters.algorithms import algorithm_of, unsupported
from drafters.dflash.config.config import DFlashConfig, default_taps
from drafters.dflash.config.families import Family, family_of
from drafters.dflash.config.heads import ALGORITHMS, HEAD_KEYS, parse_head, predicts_from_anchor
from drafters.dflash.config.rope import rope_parameters
from drafters.dflash.coupling import parse_coupling
from drafters.keys import (
    MAX_LAYERS,
    PLAIN_VALUES,
    Keys,
    check_known,
    check_plain,
    check_rope,
    require,
    section,
)
from specdec.base.errors import shown

logger = logging.getLogger(__name__)

Layout = Literal["z-lab", "speculators"]
T = TypeVar("T")

# Keys of close relatives that would change the maths, with the values under which they do not.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "dspark_fixup_head_type": ("markov",),
    "projector_type": ("dflash", "dflash2", "dspark", "domino"),
    "use_aux_hidden_state": (True,),
}

# What `dflash_config` may say besides; a key that nobody reads would lower acceptance without any
# error.
_OWN_KEYS = {
    "attention_sink_bias", "attention_value_scale", "aux_hidden_state_layer_ids", "block_size",
    "causal", "causal_head", "conv_group_size", "conv_kernel_size", "dflash_query_causal",
    "draft_vocab_size", "dspark_bonus_anchor", "fc_norm", "final_logit_softcapping",
    "input_embedding_scale", "is_causal", "is_neox_style", "layer_types", "logit_scale",
    "loss_decay_gamma", "mask_token_id", "num_anchors", "num_target_layers", "output_multiplier",
    "partial_rotary_factor", "rope_is_neox_style", "sample_from_anchor", "shift_label",
    "sliding_window", "sliding_window_non_causal", "speculative_tokens", "swa_window_size",
    "target_embedding_scale", "target_hidden_size", "target_layer_ids", "tied_tables",
    "use_sliding_window", "use_swa",
}  # fmt: skip

_BESIDE_LAYERS = {
    "max_window_layers", "coupling", "dflare_config", "dflash_config", "embed_requires_grad",
    "max_anchors",
}  # fmt: skip
"""What else a file of speculators may say."""

_OF_FLAT_FILES = {
    "coupling", "dflare_config", "dflash_config", "eagle_aux_hidden_state_layer_ids",
    "has_embed_tokens", "has_lm_head", "num_aux_layers", "pard_token", "rope_theta",
    "speculators_config", "swa_rope_parameters", "target_num_hidden_layers", "train_embed_tokens",
    "transformer_layer_config", "verifier_architectures", "verifier_name_or_path",
}  # fmt: skip
"""What else the top level of another file may say."""


def parse_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Reads the content of `config.json` in either layout.

    Raises:
        CheckpointError: another kind of drafter, or a missing, malformed or contradictory value.
    """
    algorithm = algorithm_of(raw)
    require(algorithm in ALGORITHMS, unsupported(algorithm))
    own, family = section(raw, "dflash_config") or section(raw, "dflare_config"), family_of(raw)
    keys = Keys([own, raw, section(raw, "transformer_layer_config"), family.defaults])
    _check_keys(raw, keys, own, family)
    layer_count = keys.required("num_hidden_layers")
    valid = 1 <= layer_count <= MAX_LAYERS
    require(valid, f"num_hidden_layers is {layer_count}; it must lie in [1, {MAX_LAYERS:,}]")
    # The first releases of speculators had no causal layers, and no key to say so.
    windows, causal = _layer_kinds(keys, layer_count, non_causal="speculators_model_type" in raw)
    keys_as_values = family.gemma and _or(keys.flag("attention_k_eq_v"), False)
    hidden_size = keys.required("hidden_size")
    heads = keys.required("num_attention_heads")
    vocab_size = keys.required("vocab_size")
    draft_vocab_size = keys.integer("draft_vocab_size")
    head_dim = _head_dim(keys, family, hidden_size // max(heads, 1))
    verifier = section(section(raw, "speculators_config"), "verifier")
    architectures = verifier.get("architectures") or keys.find("verifier_architectures") or []
    valid = isinstance(architectures, list)
    require(valid, f"the verifier's architectures are {architectures!r}; they must be a list")
    block_size, recommended = keys.required("block_size"), _recommended(raw, keys)
    if Keys(keys.places[:-1]).find("block_size") is None:
        text = "config.json lacks block_size: %d is taken, as engines do for such drafters"
        logger.warning(text, block_size)
    from_anchor = predicts_from_anchor(raw, algorithm, keys, all_rows=recommended == block_size)
    return DFlashConfig(
        block_size=block_size,
        mask_token_id=keys.required("mask_token_id"),
        target_layer_ids=_target_layer_ids(
            keys, layer_count, guesses=algorithm == "dflash" and family == Family()
        ),
        windows=windows,
        causal=causal,
        hidden_size=hidden_size,
        intermediate_size=keys.required("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=keys.required(
            "num_global_key_value_heads" if keys_as_values else "num_key_value_heads"
        ),
        head_dim=head_dim,
        vocab_size=vocab_size,
        rope_parameters=rope_parameters(keys, family, windows, head_dim),
        max_position_embeddings=keys.required("max_position_embeddings"),
        rms_norm_eps=_or(keys.number("rms_norm_eps"), 1e-6),
        attention_bias=_or(keys.flag("attention_bias"), False),
        sample_from_anchor=from_anchor,
        speculative_tokens=None if recommended == block_size - 1 + from_anchor else recommended,
        input_embedding_scale=_embedding_scale(raw, keys),
        output_multiplier=_or(
            keys.number("output_multiplier"), _or(keys.number("logit_scale"), 1.0)
        ),
        final_logit_softcapping=keys.number("final_logit_softcapping") or None,
        draft_vocab_size=None if draft_vocab_size == vocab_size else draft_vocab_size,
        num_target_layers=_target_layers(keys, family),
        target_hidden_size=keys.integer("target_hidden_size"),
        verifier_name=verifier.get("name_or_path") or keys.find("verifier_name_or_path"),
        verifier_architectures=tuple(architectures),
        conv_kernel_size=keys.integer("conv_kernel_size"),
        conv_group_size=keys.integer("conv_group_size"),
        interleaved=not family.latent
        and _or(_or(keys.flag("rope_is_neox_style"), keys.flag("is_neox_style")), True) is False,
        attention_sinks=_or(keys.flag("attention_sink_bias"), False),
        attention_value_scale=_or(keys.number("attention_value_scale"), 1.0),
        attention_gate=family.gate(keys),
        tap_norms=family.laguna or _or(keys.flag("fc_norm"), False),
        norms_context=family.laguna,
        mixes_taps=family.mixes_taps,
        gemma=family.gemma,
        keys_as_values=keys_as_values,
        latent=family.sizes(keys),
        head=parse_head(algorithm, keys),
        tied_tables=_or(keys.flag("tied_tables"), False),
        coupling=parse_coupling(raw.get("coupling")),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _embedding_scale(raw: Mapping[str, Any], keys: Keys) -> float | None:
    """Factor of raw embedding rows; None for the target's own, if our key says so.

    Where nothing is stated, speculators means 1, a plain table, and z-lab the target's own.
    """
    stated = Keys(keys.places[:-1]).number("input_embedding_scale")
    of_target = keys.flag("target_embedding_scale")
    if stated is not None or of_target:
        return stated
    scale = keys.number("input_embedding_scale")
    return _or(scale, 1.0 if "speculators_model_type" in raw else None)


def _head_dim(keys: Keys, family: Family, default: int) -> int:
    """Numbers of a query head."""
    if sizes := family.sizes(keys):
        return sizes.nope + sizes.rope
    return _or(keys.integer("global_head_dim" if family.gemma else "head_dim"), default)


def _check_keys(raw: Mapping[str, Any], keys: Keys, own: Mapping[str, Any], family: Family) -> None:
    """Refuses what might change the maths: keys that nobody reads, and values of relatives."""
    plain = PLAIN_VALUES | _PLAIN_VALUES | dict(family.plain_values)
    known = _OWN_KEYS | HEAD_KEYS | plain.keys()
    check_known(own, known, "dflash_config")
    of_speculators = "speculators_model_type" in raw
    allowed = known | (_BESIDE_LAYERS if of_speculators else _OF_FLAT_FILES)
    check_known(raw, allowed, "config.json", copies=not of_speculators)
    layers = section(raw, "transformer_layer_config")
    check_known(layers, known, "transformer_layer_config", copies=True)
    for place in (own, raw, layers):
        check_rope(place)
    check_plain(keys, plain, "DFlash")


def _target_layer_ids(keys: Keys, layer_count: int, *, guesses: bool) -> tuple[int, ...]:
    """Tapped layers, 0-based; the speculators layout counts the embedding output as 0.

    Where none are stated, z-lab's rule `guesses` those of its own drafters alone.
    """
    ids, shift = keys.find("target_layer_ids"), 0
    if ids is None:
        named = keys.find("aux_hidden_state_layer_ids")
        ids = _or(named, keys.find("eagle_aux_hidden_state_layer_ids"))
        shift = 1
    if ids is None:
        num_target_layers = _or(_target_layers(keys, Family()), 0)
        require(
            guesses,
            "config.json lacks target_layer_ids, the target's layers that it was trained on; add"
            " them",
        )
        require(
            num_target_layers > 0,
            "config.json lacks target_layer_ids, and num_target_layers to derive them from",
        )
        taps = default_taps(num_target_layers, layer_count)
        text = "config.json lacks target_layer_ids: layers %s are taken, by z-lab's rule"
        logger.warning(text, list(taps))
        return taps
    valid = isinstance(ids, list) and all(type(i) is int for i in ids)
    require(valid, f"target layer ids are {ids!r}; they must be a list of integers")
    return tuple(i - shift for i in ids)


def _target_layers(keys: Keys, family: Family) -> int | None:
    """Layers of the target. Where it is TorchSpec's or K3's key that counts them, the usual one
    counts taps.
    """
    stated = keys.integer("target_num_hidden_layers")
    return stated if stated is not None or family.latent else keys.integer("num_target_layers")


def _layer_kinds(
    keys: Keys, layer_count: int, *, non_causal: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of every layer.

    A stated `is_causal`, `causal` or JetSpec's `causal_head` holds for all layers. Otherwise full
    layers are bidirectional inside the block, and sliding layers are causal unless
    `sliding_window_non_causal` says that they are not. `use_swa` slides all layers where
    `layer_types` names none, and they are not causal for that. `non_causal` is the default.
    """
    stated_window = _or(keys.find("swa_window_size"), keys.find("sliding_window"))
    kinds = keys.find("layer_types")
    use_swa = _or(keys.flag("use_swa"), False)
    by_kind = isinstance(kinds, list) and "sliding_attention" in kinds
    if kinds is None and use_swa:
        kinds = ["full_attention"] * layer_count
    elif kinds is None:
        first = layer_count
        if keys.flag("use_sliding_window"):
            first = _or(keys.integer("max_window_layers"), layer_count)
        require(first >= 0, f"max_window_layers is {first}; it must be at least 0")
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layer_count)]
    elif keys.flag("use_sliding_window") is False and not use_swa:
        stated_window = None
    require(
        isinstance(kinds, list)
        and len(kinds) == layer_count
        and all(k in ("full_attention", "sliding_attention") for k in kinds),
        f"layer_types is {kinds!r}; it must name full_attention or sliding_attention for each of"
        f" {layer_count} layers",
    )
    by_type = [kind == "sliding_attention" for kind in kinds]
    sliding = [slides or (use_swa and not by_kind) for slides in by_type]
    require(
        not any(sliding) or (type(stated_window) is int and stated_window >= 1),
        f"layer {sliding.index(True) if any(sliding) else 0} is sliding_attention but config.json"
        f" enables no window: it is {shown(stated_window)}, and must be at least 1; set"
        " sliding_window, and use_sliding_window to true",
    )
    own, top, layers, defaults = keys.places
    outer, inner = Keys([top, layers, own, defaults]), Keys([own])
    flags = map(keys.flag, ("causal", "causal_head", "dflash_query_causal"))
    answers = (outer.flag("is_causal"), inner.flag("causal"), *flags)
    stated = next((answer for answer in answers if answer is not None), None)
    non_causal = _or(keys.flag("sliding_window_non_causal"), non_causal)
    causal = tuple(
        stated if stated is not None else slides and not non_causal for slides in by_type
    )
    return tuple(stated_window if is_sliding else None for is_sliding in sliding), causal


def _recommended(raw: Mapping[str, Any], keys: Keys) -> int | None:
    """How many tokens to draft, by speculators' key or our own; None where none says it."""
    methods = section(raw, "speculators_config").get("proposal_methods") or []
    valid = isinstance(methods, list) and all(isinstance(method, Mapping) for method in methods)
    require(valid, f"proposal_methods is {methods!r}; it must be a list of objects")
    return Keys([*methods, *keys.places]).integer("speculative_tokens")
