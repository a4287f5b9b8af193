"""A drafter's `config.json` in both layouts."""

from typing import Any

F, S = "full_attention", "sliding_attention"


def zlab(
    remove: tuple[str, ...] = (), own: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A z-lab config.json of three layers, changed at the top or in its dflash_config."""
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 2, 4], **(own or {})},
        "num_target_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 61,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
    } | changes
    return {key: value for key, value in raw.items() if key not in remove}


def speculators(
    algorithm: str = "dflash",
    tokens: int | None = 7,
    layers: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A speculators config.json of the same drafter."""
    section = zlab(remove=("architectures", "block_size", "dflash_config", "num_target_layers")) | (
        layers or {}
    )
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": section,
        "block_size": 8,
        "mask_token_id": 60,
        "draft_vocab_size": 61,
        "aux_hidden_state_layer_ids": [2, 3, 5],
        **changes,
    }
