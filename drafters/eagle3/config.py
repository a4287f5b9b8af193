"""`config.json` of EAGLE-3 heads, in the layout of sglang and SpecForge and in that of speculators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from drafters.algorithms import algorithm_of
from drafters.attention import LatentSizes
from drafters.keys import Keys, check_known, require, section
from drafters.sequential.drafter import USUAL_DRAFTS
from specdec.errors import one_line
from specdec.layers.rotary import STATIC_ROPE_TYPES

MOST_DRAFTS = 64
"""More than any head is trained for."""

Layers: TypeAlias = LlamaConfig | Qwen3Config | DeepseekV3Config
"""What a head's layers may be like."""

_LAYERS: dict[str, type[Layers]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "deepseek_v3": DeepseekV3Config,
    "kimi_k2": DeepseekV3Config,
}
_USUAL_TAPS = 3

# Keys of relatives that would change the maths, with the values under which they do not.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "eagle_type": ("eagle3",),
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "logit_scale": (1,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}

# What `eagle_config` may say besides; a key that nobody reads would lower acceptance without any error.
_OWN_KEYS = {
    "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output",
    "parallel_draft_heads_num_layers",
}  # fmt: skip

_BESIDE_LAYERS = {"bias", "draft_vocab_size", "eagle_config", "embed_requires_grad", "mask_token_id", "target_hidden_size"}
"""What else a file of speculators may say."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Everything needed to run an EAGLE-3 head (arXiv 2503.01840), or one that drafts in parallel (P-EAGLE).

    Attributes:
        layers: what the decoder layers are like, a config of Llama, Qwen3, or DeepSeek-V3 without experts.
        vocab_size: of the target.
        draft_vocab_size: of a reduced vocabulary with a head of its own, or None.
        stated_taps: tapped decoder layers of the target, 0-based; None where it depends on their number.
        tap_width: hidden width of the target.
        windows: per layer, the sliding window or None for full attention.
        norm_before_residual: the residual stream begins with the normed features.
        norm_before_fc: all taps side by side are normed before their projection.
        fc_norm: each tap is normed by itself before that.
        norm_output: the features of drafted tokens are normed (EAGLE-3.1).
        own_embeddings: embeddings were trained, so the checkpoint has to bring them.
        fc_bias: the projection of the taps has a bias.
        mask_token_id: of a head that drafts all tokens in one forward; None where it takes a forward for each.
        max_draft_tokens: largest number of drafts.
        verifier_name: the target it was trained for, when stated.
    """

    layers: Layers
    vocab_size: int
    draft_vocab_size: int | None
    stated_taps: tuple[int, ...] | None
    tap_width: int
    windows: tuple[int | None, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    fc_bias: bool = False
    mask_token_id: int | None = None
    max_draft_tokens: int = USUAL_DRAFTS
    verifier_name: str | None = None

    @property
    def num_taps(self) -> int:
        """Tapped layers."""
        return _USUAL_TAPS if self.stated_taps is None else len(self.stated_taps)

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normed."""
        return isinstance(self.layers, Qwen3Config)

    @property
    def latent(self) -> LatentSizes | None:
        """Of latent attention (arXiv 2405.04434); None without it."""
        layers = self.layers
        if not isinstance(layers, DeepseekV3Config):
            return None
        return LatentSizes(
            query_rank=layers.q_lora_rank,
            rank=layers.kv_lora_rank,
            nope=layers.qk_nope_head_dim,
            rope=layers.qk_rope_head_dim,
            value=layers.v_head_dim,
            interleaved=getattr(layers, "rope_interleave", True),
        )

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """Tapped layers of a target of so many, 0-based: those stated, or a low, a middle and a high one."""
        return default_taps(num_target_layers) if self.stated_taps is None else self.stated_taps


def default_taps(num_target_layers: int) -> tuple[int, ...]:
    """Layers, 0-based, whose outputs a head reads that names none: entries 2, T // 2 and T - 3 of Transformers' hidden states, the
    first of which are the embeddings.

    >>> default_taps(32)
    (1, 15, 28)
    """
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


def parse_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """Reads the content of `config.json` in either layout.

    Raises:
        CheckpointError: layers that are not supported, or a missing, malformed or contradictory value.
    """
    parallel = algorithm_of(raw) == "peagle"
    own, shape = section(raw, "eagle_config"), section(raw, "transformer_layer_config") or raw
    keys = Keys([own, raw, shape])
    _check_keys(raw, keys, own)
    layers = _layers(shape)
    draft_vocab_size = keys.integer("draft_vocab_size")
    reduced = draft_vocab_size is not None and draft_vocab_size != layers.vocab_size
    require(
        not reduced or 1 <= (draft_vocab_size or 0) < layers.vocab_size,
        f"draft_vocab_size is {draft_vocab_size}; it must be at most vocab_size {layers.vocab_size}",
    )
    config = Eagle3Config(
        layers=layers,
        vocab_size=layers.vocab_size,
        draft_vocab_size=draft_vocab_size if reduced else None,
        stated_taps=_stated_taps(raw, own),
        tap_width=keys.integer("target_hidden_size") or layers.hidden_size,
        windows=_windows(layers),
        norm_before_residual=keys.flag("norm_before_residual") or False,
        norm_before_fc=keys.flag("norm_before_fc") or False,
        fc_norm=keys.flag("fc_norm") or False,
        norm_output=keys.flag("norm_output") or False,
        own_embeddings=keys.flag("embed_requires_grad") or False,
        fc_bias=keys.flag("bias") or False,
        mask_token_id=_mask(keys, layers.vocab_size) if parallel else None,
        max_draft_tokens=_most_drafts(raw, parallel=parallel),
        verifier_name=section(section(raw, "speculators_config"), "verifier").get("name_or_path"),
    )
    require(not (config.norm_before_fc and config.fc_norm), "norm_before_fc and fc_norm exclude each other; one must be false")
    return config


def _check_keys(raw: Mapping[str, Any], keys: Keys, own: Mapping[str, Any]) -> None:
    """Refuses what would change the maths: keys of `eagle_config`, or in the layout of speculators beside the layers, that are not
    known, and values of relatives.
    """
    known = _OWN_KEYS | _PLAIN_VALUES.keys()
    check_known(own, known, "eagle_config")
    if "speculators_model_type" in raw:
        check_known(raw, known | _BESIDE_LAYERS, "config.json")
    for key, plain in _PLAIN_VALUES.items():
        value = keys.find(key)
        require(value is None or value in plain, f"EAGLE-3 with {key} {value!r} is not supported yet; supported: {plain[0]!r}")


def _layers(shape: Mapping[str, Any]) -> Layers:
    """What the layers are like, read by Transformers, which knows every way of writing RoPE's parameters."""
    kind = shape.get("model_type")
    require(kind in _LAYERS, f"layers of type {kind!r} are not supported in an EAGLE-3 head; supported: {', '.join(_LAYERS)}")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    for name in sizes:
        value = Keys([shape]).required(name)
        require(1 <= value < 2**31, f"{name} is {value}; it must be positive and below 2**31")
    try:
        layers = _LAYERS[str(kind)](**shape)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        require(False, f"the layers' part of config.json is not valid ({one_line(error)}); correct it")
    require(
        layers.num_attention_heads % layers.num_key_value_heads == 0 and layers.head_dim % 2 == 0,
        f"{layers.num_attention_heads} query heads on {layers.num_key_value_heads} key heads of {layers.head_dim}:"
        " the first must be a multiple of the second, the third even",
    )
    biased = isinstance(layers, DeepseekV3Config) and layers.attention_bias
    require(not biased, "attention_bias is true, which latent attention is not supported with; it must be false")
    rope_type = layers.rope_parameters.get("rope_type")
    if rope_type == "mrope":  # positions of text are the same on all its axes
        rope_type = layers.rope_parameters["rope_type"] = "default"
    supported = ", ".join(STATIC_ROPE_TYPES)
    require(rope_type in STATIC_ROPE_TYPES, f"RoPE type {rope_type!r} is not supported in a drafter; supported: {supported}")
    return layers


def _stated_taps(raw: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Tapped layers, 0-based. Within `eagle_config`, and as `target_layer_ids`, they are counted so; at the top level, as
    speculators and vLLM have them, the embeddings are 0.
    """
    places = [
        (own, "eagle_aux_hidden_state_layer_ids", 0),
        (raw, "target_layer_ids", 0),
        (raw, "eagle_aux_hidden_state_layer_ids", 1),
    ]
    ids, shift = next(((place[name], shift) for place, name, shift in places if place.get(name) is not None), (None, 0))
    if ids is None:
        return None
    valid = isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
    require(valid, f"target layer ids are {ids!r}; they must be a list of integers")
    taps = tuple(i - shift for i in ids)
    require(min(taps) >= 0, f"target layer ids are {ids}; the embeddings cannot be tapped, only outputs of layers")
    return taps


def _windows(layers: Layers) -> tuple[int | None, ...]:
    kinds: Sequence[str] = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    known = len(kinds) == layers.num_hidden_layers and set(kinds) <= {"full_attention", "sliding_attention"}
    require(known, f"layer_types is {kinds!r}; it must name full_attention or sliding_attention for each layer")
    window = getattr(layers, "sliding_window", None)
    stated = "sliding_attention" not in kinds or (type(window) is int and window >= 1)
    require(stated, "a layer is sliding_attention but config.json enables no window; set sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mask(keys: Keys, vocab_size: int) -> int:
    mask = keys.required("mask_token_id")
    require(0 <= mask < vocab_size, f"mask_token_id {mask} lies outside {vocab_size} embeddings")
    return mask


def _most_drafts(raw: Mapping[str, Any], *, parallel: bool) -> int:
    """What the checkpoint names; of a head that goes token by token at least as many as usual."""
    methods = section(raw, "speculators_config").get("proposal_methods") or []
    require(isinstance(methods, list), f"proposal_methods is {methods!r}; it must be a list")
    stated = [Keys([method]).integer("speculative_tokens") or 0 for method in methods if isinstance(method, Mapping)]
    most = max(stated, default=0)
    require(0 <= most <= MOST_DRAFTS, f"speculative_tokens is {most}; it must be at most {MOST_DRAFTS}")
    # What checkpoints name is a recommendation, which no forward depends on.
    return most if parallel and most else max(most, USUAL_DRAFTS)
