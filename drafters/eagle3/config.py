"""`config.json` of EAGLE-3 heads, in the layouts of sglang (and SpecForge) and speculators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import DeepseekV3Config, Qwen3Config

from drafters.algorithms import MASKS, algorithm_of, architecture_of
from drafters.attention import LatentSizes
from drafters.eagle3.gemma import ARCHITECTURE, Gemma, read_gemma
from drafters.eagle3.layers import Layers, read_layers, windows
from drafters.eagle3.taps import StatedTaps, stated_taps, taps
from drafters.keys import PLAIN_VALUES, Keys, check_known, check_plain, check_rope, require, section
from drafters.sequential.drafter import USUAL_DRAFTS

MAX_DRAFTS = 64
"""More than any head is trained for."""

_USUAL_TAPS = 3

# Keys of relatives that would change the maths, with the values under which they do not.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    **{key: plain for key, plain in PLAIN_VALUES.items() if key != "use_aux_norm"},
    "attention_sink_bias": (False,),
    "eagle_type": ("eagle3",),
    "is_causal": (True,),
    "is_neox_style": (True,),
    "logit_scale": (1,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "rope_is_neox_style": (True,),
    "swa_rope_parameters": (None,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}

# What `eagle_config` may say besides; a key that nobody reads would lower acceptance without any
# error.
_OWN_KEYS = {
    "bias", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "embed_requires_grad",
    "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "num_aux_hidden_states",
    "num_aux_layers", "parallel_draft_heads_num_layers", "target_hidden_size", "use_aux_norm",
}  # fmt: skip

_BESIDE_LAYERS = {
    "down_sample_ratio", "down_sample_ratio_min", "eagle_config", "num_depths", *MASKS,
}  # fmt: skip
"""What else a file of speculators may say; three keys are of P-EAGLE's training."""

_OF_FLAT_FILES = {
    "draft_num_hidden_layers", "num_target_layers", "parallel_drafting", "speculators_config",
    "step_loss_decay", "target_layer_ids", "ttt_length",
}  # fmt: skip
"""What else another file may say."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Everything to run an EAGLE-3 head (arXiv 2503.01840), or a parallel one (P-EAGLE).

    Attributes:
        layers: what the decoder layers are like, a config of Llama, Qwen3, or DeepSeek-V3 without
            experts; for Gemma's of Llama.
        vocab_size: of the target.
        draft_vocab_size: of a reduced vocabulary with a head of its own, or None.
        stated_taps: tapped decoder layers of the target, as far as `config.json` says.
        tap_width: hidden width of the target.
        windows: per layer, the sliding window or None for full attention.
        norm_before_residual: the residual stream begins with the normed features.
        norm_before_fc: all taps side by side are normed before their projection.
        fc_norm: each tap is normed by itself before that.
        norm_output: the features of drafted tokens are normed (EAGLE-3.1).
        own_embeddings: embeddings were trained, so the checkpoint has to bring them.
        fc_bias: the projection of the taps has a bias.
        mask_token_id: of a head that drafts all tokens in one forward; else None.
        max_draft_tokens: largest number of drafts.
        verifier_name: the target it was trained for, when stated.
        gemma: what layers of Gemma 4 have besides; None for others.
    """

    layers: Layers
    vocab_size: int
    draft_vocab_size: int | None
    stated_taps: StatedTaps
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
    gemma: Gemma | None = None

    @property
    def num_taps(self) -> int:
        """Tapped layers."""
        return len(self.stated_taps.layers or ()) or _USUAL_TAPS

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normed."""
        return isinstance(self.layers, Qwen3Config) or self.gemma is not None

    @property
    def latent(self) -> LatentSizes | None:
        """Sizes of latent attention (arXiv 2405.04434); None without it."""
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
        """Tapped layers of a target of so many, 0-based; see `drafters.eagle3.taps`."""
        return taps(self.stated_taps, num_target_layers)


def parse_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """Reads the content of `config.json` in either layout.

    Raises:
        CheckpointError: unsupported layers, or a missing, malformed or contradictory value.
    """
    parallel = algorithm_of(raw) == "peagle"
    own, shape = section(raw, "eagle_config"), section(raw, "transformer_layer_config") or raw
    keys = Keys([own, raw, shape])
    _check_keys(raw, keys, own)
    architecture, gemma = architecture_of(raw), None
    if architecture == ARCHITECTURE:
        (gemma, shape), architecture = read_gemma(shape), None
    layers = read_layers(shape, architecture)
    draft_vocab_size = keys.integer("draft_vocab_size")
    reduced = draft_vocab_size is not None and draft_vocab_size != layers.vocab_size
    require(
        not reduced or 1 <= (draft_vocab_size or 0) < layers.vocab_size,
        f"draft_vocab_size is {draft_vocab_size}; it must be at least 1 and at most vocab_size"
        f" {layers.vocab_size}",
    )
    config = Eagle3Config(
        layers=layers,
        vocab_size=layers.vocab_size,
        draft_vocab_size=draft_vocab_size if reduced else None,
        stated_taps=stated_taps(raw, own),
        tap_width=_or(keys.integer("target_hidden_size"), layers.hidden_size),
        windows=windows(layers),
        norm_before_residual=keys.flag("norm_before_residual") or False,
        norm_before_fc=keys.flag("norm_before_fc") or False,
        fc_norm=keys.flag("fc_norm") or keys.flag("use_aux_norm") or False,
        norm_output=keys.flag("norm_output") or False,
        own_embeddings=keys.flag("embed_requires_grad") or False,
        fc_bias=keys.flag("bias") or False,
        mask_token_id=_mask(keys, layers.vocab_size) if parallel else None,
        max_draft_tokens=_max_drafts(raw, parallel=parallel),
        verifier_name=_verifier_name(raw),
        gemma=gemma,
    )
    valid = config.tap_width >= 1
    require(valid, f"target_hidden_size is {config.tap_width}; it must be at least 1")
    for name in ("num_aux_hidden_states", "num_aux_layers"):
        count = _or(keys.integer(name), config.num_taps)
        require(
            count == config.num_taps,
            f"{name} is {count}, but {config.num_taps} layers are tapped; correct the wrong one",
        )
    valid = not (config.norm_before_fc and config.fc_norm)
    require(valid, "norm_before_fc and fc_norm exclude each other; one must be false")
    return config


def _check_keys(raw: Mapping[str, Any], keys: Keys, own: Mapping[str, Any]) -> None:
    """Refuses what might change the maths: keys that nobody reads, and values of relatives."""
    known = _OWN_KEYS | _PLAIN_VALUES.keys()
    check_known(own, known, "eagle_config")
    flat = "speculators_model_type" not in raw
    allowed = known | _BESIDE_LAYERS | (_OF_FLAT_FILES if flat else set())
    check_known(raw, allowed, "config.json", copies=flat)
    layers = section(raw, "transformer_layer_config")
    check_known(layers, known, "transformer_layer_config", copies=True)
    for place in (raw, layers):
        check_rope(place)
    check_plain(keys, _PLAIN_VALUES, "EAGLE-3")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _mask(keys: Keys, vocab_size: int) -> int:
    mask = next((keys.integer(name) for name in MASKS if keys.find(name) is not None), None)
    given = mask is not None
    require(given, "config.json lacks mask_token_id, which a head that drafts in parallel has")
    assert mask is not None
    require(0 <= mask < vocab_size, f"mask_token_id {mask} lies outside {vocab_size} embeddings")
    return mask


def _verifier_name(raw: Mapping[str, Any]) -> str | None:
    name = section(section(raw, "speculators_config"), "verifier").get("name_or_path")
    valid = name is None or isinstance(name, str)
    require(valid, f"the verifier's name_or_path is {name!r}; it must be a string")
    return name


def _max_drafts(raw: Mapping[str, Any], *, parallel: bool) -> int:
    """What the checkpoint names; of a head that goes token by token at least as many as usual."""
    methods = section(raw, "speculators_config").get("proposal_methods") or []
    require(isinstance(methods, list), f"proposal_methods is {methods!r}; it must be a list")
    stated = [
        Keys([method]).integer("speculative_tokens") or 0
        for method in methods
        if isinstance(method, Mapping)
    ]
    most = max(stated, default=0)
    valid = 0 <= most <= MAX_DRAFTS
    require(valid, f"speculative_tokens is {most}; it must be at most {MAX_DRAFTS}")
    # What checkpoints name is a recommendation, which no forward depends on.
    return most if parallel and most else max(most, USUAL_DRAFTS)
