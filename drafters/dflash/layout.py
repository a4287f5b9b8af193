"""`config.json` of a DFlash drafter in the two public layouts, z-lab's and speculators'."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from drafters.dflash.config import DFlashConfig, require

Layout = Literal["z-lab", "speculators"]
T = TypeVar("T")

# Architectures of the z-lab layout and what the rest of the world calls them.
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}

# Keys of close relatives that would change the maths, with the values under which they do not.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "hidden_act": ("silu",),
    "is_neox_style": (True,),
    "markov_rank": (0,),
    "projector_type": ("dflash", "dspark"),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
}


def parse_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """Reads the content of `config.json` in either layout.

    Raises:
        CheckpointError: another kind of drafter, or a missing, malformed or contradictory value.
    """
    keys = _Keys(raw)
    algorithm = _algorithm(keys)
    layer_count = keys.required("num_hidden_layers")
    windows, causal = _layer_kinds(keys, layer_count)
    hidden_size, heads, vocab_size = keys.required("hidden_size"), keys.required("num_attention_heads"), keys.required("vocab_size")
    draft_vocab_size = keys.integer("draft_vocab_size")
    verifier = _mapping(_mapping(raw, "speculators_config"), "verifier")
    config = DFlashConfig(
        block_size=keys.required("block_size"),
        mask_token_id=keys.required("mask_token_id"),
        target_layer_ids=_target_layer_ids(keys, layer_count),
        windows=windows,
        causal=causal,
        hidden_size=hidden_size,
        intermediate_size=keys.required("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=keys.required("num_key_value_heads"),
        head_dim=_or(keys.integer("head_dim"), hidden_size // max(heads, 1)),
        vocab_size=vocab_size,
        rope_parameters=_rope_parameters(keys),
        max_position_embeddings=keys.required("max_position_embeddings"),
        rms_norm_eps=_or(keys.number("rms_norm_eps"), 1e-6),
        attention_bias=_or(keys.flag("attention_bias"), False),
        sample_from_anchor=_or(keys.flag("sample_from_anchor"), algorithm == "dspark"),
        input_embedding_scale=keys.number("input_embedding_scale"),
        output_multiplier=_or(keys.number("output_multiplier"), _or(keys.number("logit_scale"), 1.0)),
        final_logit_softcapping=keys.number("final_logit_softcapping") or None,
        draft_vocab_size=None if draft_vocab_size == vocab_size else draft_vocab_size,
        num_target_layers=keys.integer("num_target_layers"),
        target_hidden_size=keys.integer("target_hidden_size"),
        verifier_name=verifier.get("name_or_path") or keys.find("verifier_name_or_path"),
        verifier_architectures=tuple(verifier.get("architectures") or keys.find("verifier_architectures") or ()),
    )
    _check_alignment(raw, config)
    return config


def config_json(config: DFlashConfig, layout: Layout, *, dtype: str) -> dict[str, Any]:
    """The content of `config.json` for tensors of type `dtype`, such as "bfloat16".

    Raises:
        CheckpointError: the layout cannot express this drafter.
    """
    return _to_zlab(config, dtype) if layout == "z-lab" else _to_speculators(config, dtype)


class _Keys:
    """Values of `config.json`: the drafter's own section first, then the top level, then the section of layer shapes."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.dflash_config = _mapping(raw, "dflash_config")
        self.layers = _mapping(raw, "transformer_layer_config")

    def find(self, name: str) -> Any:
        """The value, or None; a JSON null says nothing."""
        places = (self.dflash_config, self.raw, self.layers)
        return next((place[name] for place in places if place.get(name) is not None), None)

    def integer(self, name: str) -> int | None:
        """An integer, or None."""
        return self._typed(name, int, "an integer")

    def required(self, name: str) -> int:
        """An integer that must be there."""
        value = self.integer(name)
        require(value is not None, f"config.json lacks {name}")
        assert value is not None
        return value

    def number(self, name: str) -> float | None:
        """A number, or None."""
        return self._typed(name, (int, float), "a number")

    def flag(self, name: str) -> bool | None:
        """True, false or None."""
        return self._typed(name, bool, "true or false")

    def _typed(self, name: str, kind: type | tuple[type, ...], noun: str) -> Any:
        value = self.find(name)
        # JSON's true is an int to Python, never to the person who wrote it.
        right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        require(value is None or right, f"{name} is {value!r}; it must be {noun}")
        return value


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _mapping(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name) or {}
    require(isinstance(value, Mapping), f"{name} is {value!r}; it must be an object")
    return value


def _algorithm(keys: _Keys) -> str:
    """Which drafter this is; "dspark" is served only without its Markov head, where it is DFlash in next-token alignment."""
    raw = keys.raw
    name = raw.get("speculators_model_type") or _mapping(raw, "speculators_config").get("algorithm")
    if name is None:
        architectures = raw.get("architectures") or (["DFlashDraftModel"] if keys.dflash_config else [])
        require(bool(architectures), "config.json names no architecture; a DFlash drafter says DFlashDraftModel")
        name = _ARCHITECTURES.get(architectures[0], architectures[0])
    if name == "dflash" and keys.find("selector_rank") is not None:
        name = "dflash2"
    require(name in ("dflash", "dspark"), f"drafter algorithm {name!r} is not supported yet; this loader reads DFlash")
    for key, plain in _PLAIN_VALUES.items():
        value = keys.find(key)
        require(value is None or value in plain, f"{name} with {key} {value!r} is not supported yet; supported: {plain[0]!r}")
    return str(name)


def _target_layer_ids(keys: _Keys, layer_count: int) -> tuple[int, ...]:
    """Tapped layers, 0-based.

    The speculators layout counts the embedding output as 0. Without a list, one draft layer taps the middle of the target and
    more of them tap evenly spaced layers from the second to the third last.
    """
    ids, shift = keys.find("target_layer_ids"), 0
    if ids is None:
        ids, shift = keys.find("aux_hidden_state_layer_ids"), 1
    if ids is None:
        num_target_layers = _or(keys.integer("num_target_layers"), 0)
        require(num_target_layers > 0, "config.json lacks target_layer_ids, and num_target_layers to derive them from")
        if layer_count == 1:
            return (num_target_layers // 2,)
        return tuple(round(1 + i * (num_target_layers - 4) / (layer_count - 1)) for i in range(layer_count))
    valid = isinstance(ids, list) and all(isinstance(i, int) for i in ids)
    require(valid, f"target layer ids are {ids!r}; they must be a list of integers")
    return tuple(i - shift for i in ids)


def _layer_kinds(keys: _Keys, layer_count: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of every layer.

    A stated `is_causal` holds for all layers. Otherwise full layers are bidirectional inside the block, and sliding layers are
    causal unless `sliding_window_non_causal` says that they are not.
    """
    stated_window = keys.find("swa_window_size") or keys.find("sliding_window")
    kinds = keys.find("layer_types")
    if keys.flag("use_swa"):
        kinds = ["sliding_attention"] * layer_count
    elif kinds is None:
        first = _or(keys.integer("max_window_layers"), layer_count) if keys.flag("use_sliding_window") else layer_count
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layer_count)]
    elif keys.flag("use_sliding_window") is False:
        stated_window = None
    require(
        isinstance(kinds, list) and len(kinds) == layer_count and all(k in ("full_attention", "sliding_attention") for k in kinds),
        f"layer_types is {kinds!r}; it must name full_attention or sliding_attention for each of {layer_count} layers",
    )
    sliding = [kind == "sliding_attention" for kind in kinds]
    require(
        not any(sliding) or (isinstance(stated_window, int) and stated_window >= 1),
        f"layer {sliding.index(True) if any(sliding) else 0} is sliding_attention but config.json enables no window;"
        " set sliding_window, and use_sliding_window to true",
    )
    places = (
        (keys.raw, "is_causal"),
        (keys.layers, "is_causal"),
        (keys.dflash_config, "is_causal"),
        (keys.dflash_config, "causal"),
    )
    stated = next((place[name] for place, name in places if place.get(name) is not None), None)
    require(stated is None or isinstance(stated, bool), f"is_causal is {stated!r}; it must be true or false")
    non_causal = _or(keys.flag("sliding_window_non_causal"), False)
    causal = tuple(stated if stated is not None else is_sliding and not non_causal for is_sliding in sliding)
    return tuple(stated_window if is_sliding else None for is_sliding in sliding), causal


def _rope_parameters(keys: _Keys) -> dict[str, Any]:
    """RoPE in the Transformers 5 form, from that form or from `rope_theta` and `rope_scaling`."""
    stated = keys.find("rope_parameters") or keys.find("rope_scaling") or {}
    flat = isinstance(stated, Mapping) and not any(isinstance(value, Mapping) for value in stated.values())
    require(flat, f"RoPE parameters are {stated!r}; one set for all layers is supported")
    parameters = {name: value for name, value in stated.items() if name != "type" and value is not None}
    parameters.setdefault("rope_type", stated.get("type", "default"))
    parameters.setdefault("rope_theta", keys.find("rope_theta"))
    theta = parameters["rope_theta"]
    require(isinstance(theta, (int, float)) and theta > 0, f"rope_theta is {theta!r}; config.json must give RoPE's base frequency")
    return parameters


def _check_alignment(raw: Mapping[str, Any], config: DFlashConfig) -> None:
    """The speculators layout states the number of drafts beside the values that determine it; they must agree."""
    methods = _mapping(raw, "speculators_config").get("proposal_methods") or []
    require(isinstance(methods, list), f"proposal_methods is {methods!r}; it must be a list")
    for method in methods:
        stated = method.get("speculative_tokens") if isinstance(method, Mapping) else None
        require(
            stated is None or stated == config.max_draft_tokens,
            f"speculative_tokens is {stated}, but block_size {config.block_size} with sample_from_anchor"
            f" {str(config.sample_from_anchor).lower()} gives {config.max_draft_tokens}; correct the wrong one in config.json",
        )


def _layer_section(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """What both layouts say about the draft layers: a Qwen3 configuration and the rarer values of the drafter."""
    windows = {window for window in config.windows if window is not None}
    require(len(windows) <= 1, f"layers have windows of {sorted(windows)}; config.json can name one for all of them")
    section: dict[str, Any] = {
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
        "max_window_layers": config.windows.index(max(windows)) if windows else config.num_hidden_layers,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": dict(config.rope_parameters),
    }
    optional = {
        # What Transformers 4 reads; it agrees with rope_parameters.
        "rope_scaling": dict(config.rope_parameters) if config.rope_parameters["rope_type"] != "default" else None,
        "num_target_layers": config.num_target_layers,
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier if config.output_multiplier != 1 else None,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return section | {name: value for name, value in optional.items() if value is not None}


def _to_zlab(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    require(config.num_target_layers is not None, "num_target_layers is unknown; the z-lab layout needs the target's layer count")
    by_kind = all(causal == (window is not None) for window, causal in zip(config.windows, config.causal, strict=True))
    require(by_kind or len(set(config.causal)) == 1, f"causality {config.causal} by layer has no key in the z-lab layout")
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if config.sample_from_anchor:
        own["sample_from_anchor"] = True
    result = {"architectures": ["DFlashDraftModel"], **_layer_section(config, dtype), "block_size": config.block_size}
    optional = {
        "is_causal": None if by_kind else config.causal[0],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "verifier_name_or_path": config.verifier_name,
        "verifier_architectures": list(config.verifier_architectures) or None,
    }
    return result | {name: value for name, value in optional.items() if value is not None} | {"dflash_config": own}


def _to_speculators(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    sliding = {causal for window, causal in zip(config.windows, config.causal, strict=True) if window is not None}
    full = {causal for window, causal in zip(config.windows, config.causal, strict=True) if window is None}
    require(True not in full and len(sliding) <= 1, f"causality {config.causal} by layer has no key in the speculators layout")
    require(
        config.num_target_layers is None or config.num_target_layers - 1 not in config.target_layer_ids,
        f"tap {(config.num_target_layers or 0) - 1} is the target's last layer, which the speculators layout cannot name",
    )
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.max_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": config.verifier_name, "architectures": list(config.verifier_architectures)}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "transformer_layer_config": _layer_section(config, dtype),
        "dtype": dtype,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": sliding == {False},
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
    }
