"""Writing the `config.json` of a DFlash drafter, in z-lab's layout or in that of speculators."""

from typing import Any

from drafters.algorithms import speculators_sections
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.heads import ARCHITECTURES
from drafters.dflash.config.layout import Layout
from drafters.keys import require


def config_json(config: DFlashConfig, layout: Layout, *, dtype: str) -> dict[str, Any]:
    """The content of `config.json` for tensors of type `dtype`, such as "bfloat16".

    Raises:
        CheckpointError: the layout cannot express this drafter.
    """
    peculiar = config.peculiarities
    require(
        not peculiar,
        f"a drafter with {' and '.join(peculiar)} can be read, but not written in the public"
        f" layouts",
    )
    written = _to_zlab(config, dtype) if layout == "z-lab" else _to_speculators(config, dtype)
    return written | ({} if config.coupling is None else {"coupling": config.coupling.json()})


def misreading(config: DFlashConfig, layout: Layout) -> str | None:
    """Readers that misread this layout, and which to give them; None where none is known."""
    if layout == "speculators" and len(set(config.causal)) > 1:
        return (
            "vLLM 0.33 reads one causality for all layers of this layout, and these differ; give"
            " it the layout of z-lab"
        )
    return None


def _layer_section(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """What both layouts say about layers: Qwen3's config and rarer values of the drafter."""
    windows = {window for window in config.windows if window is not None}
    what = f"layers have windows of {sorted(windows)}; config.json can name one for all of them"
    require(len(windows) <= 1, what)
    rope = dict(config.rope_parameters)
    if partial := rope.get("partial_rotary_factor"):
        # without which the factor would be taken for the target's
        rope["rope_dim"] = int(partial * config.head_dim)
    first_window = config.windows.index(max(windows)) if windows else config.num_hidden_layers
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
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
        "max_window_layers": first_window,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": rope,
    }
    optional = {
        # What Transformers 4 reads; it agrees with rope_parameters.
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "num_target_layers": config.num_target_layers,
        "input_embedding_scale": config.input_embedding_scale,
        # A key of our own: others take rows as they are, or know the target's scale without it.
        "target_embedding_scale": True if config.input_embedding_scale is None else None,
        "output_multiplier": config.output_multiplier if config.output_multiplier != 1 else None,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return section | {name: value for name, value in optional.items() if value is not None}


def _convolutions(config: DFlashConfig) -> dict[str, Any]:
    sizes = {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
    return sizes if config.convolves else {}


def _to_zlab(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    require(
        config.num_target_layers is not None,
        "num_target_layers is unknown; the z-lab layout needs the target's layer count (specdec"
        " convert --model)",
    )
    pairs = zip(config.windows, config.causal, strict=True)
    by_kind = all(causal == (window is not None) for window, causal in pairs)
    uniform = by_kind or len(set(config.causal)) == 1
    require(uniform, f"causality {config.causal} by layer has no key in the z-lab layout")
    own = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **_convolutions(config),
    }
    head = {} if config.head is None else config.head.json()
    if len(set(config.causal)) == 1:
        own["causal"] = config.causal[0]  # all that vLLM 0.23 reads; others need not guess
    if config.tied_tables:
        own["tied_tables"] = True
    if config.sample_from_anchor or head:
        own["sample_from_anchor"] = config.sample_from_anchor
    own |= head | ({"projector_type": "dspark"} if config.algorithm == "dspark" else {})
    architecture = ARCHITECTURES[config.algorithm]["z-lab"]
    layers = _layer_section(config, dtype)
    result = {"architectures": [architecture], **layers, "block_size": config.block_size}
    optional = {
        "is_causal": None if by_kind else config.causal[0],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "speculative_tokens": config.speculative_tokens,  # a key of our own
        "verifier_name_or_path": config.verifier_name,
        "verifier_architectures": list(config.verifier_architectures) or None,
    }
    top: dict[str, Any] = {}
    if config.algorithm in ("dspark", "xpress") and not config.tied_tables:
        # where vLLM 0.33 looks for a head
        top = head | {"sample_from_anchor": config.sample_from_anchor}
    if config.algorithm == "xpress":  # or vLLM takes it that a block has as many rows as it drafts
        top["xpress_block_size"] = config.block_size
    stated = result | {name: value for name, value in optional.items() if value is not None} | top
    return stated | {"dflash_config": own}


def _to_speculators(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    kinds = list(zip(config.windows, config.causal, strict=True))
    sliding = {causal for window, causal in kinds if window is not None}
    full = {causal for window, causal in kinds if window is None}
    uniform = True not in full and len(sliding) <= 1
    require(uniform, f"causality {config.causal} by layer has no key in the speculators layout")
    require(
        config.num_target_layers is None
        or config.num_target_layers - 1 not in config.target_layer_ids,
        f"tap {(config.num_target_layers or 0) - 1} is the target's last layer, which the"
        f" speculators layout cannot name",
    )
    require(
        not config.tied_tables,
        "tied tables have no key in the speculators layout; write the tables themselves",
    )
    architecture = ARCHITECTURES[config.algorithm].get("speculators")
    known = architecture is not None
    require(known, f"the speculators layout has no {config.algorithm}; write the z-lab layout")
    drafts = config.speculative_tokens or config.max_draft_tokens
    target = config.verifier_name, config.verifier_architectures
    return {
        "architectures": [architecture],
        **speculators_sections(config.algorithm, drafts, *target),
        "transformer_layer_config": _layer_section(config, dtype),
        "dtype": dtype,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        # Of a drafter without windows vLLM takes the answer for its full layers.
        "sliding_window_non_causal": True not in sliding,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_convolutions(config),
        **({} if config.head is None else config.head.json()),
    }
