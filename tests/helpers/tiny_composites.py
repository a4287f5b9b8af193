"""Tiny random multimodal models with a tower of one layer,
saved under the names of public files.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.helpers.tiny_configs import COMMON, LATENT_MOE, MOE, PLAIN, WINDOW, WINDOWED
from tests.helpers.tiny_models import tiny_tokenizer

IMAGE, VIDEO = 90, 91
"""Tokens that stand for pictures."""

_STATES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_QWEN_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2},
    **{"out_hidden_size": 32, "num_position_embeddings": 16},
}
_PICTURES = {"image_token_id": IMAGE, "video_token_id": VIDEO}


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": list(sizes),
            **more,
        }
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**COMMON, **WINDOWED, "query_pre_attn_scalar": 16},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
    "gemma4": {
        "text_config": {**COMMON, **WINDOWED, "hidden_size_per_layer_input": 0},
        "vision_config": _TOWER,
        **_PICTURES,
    },
    "mistral3": {
        "text_config": {**COMMON, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": IMAGE,
    },
    "mistral3_latent": {
        "text_config": {
            **LATENT_MOE,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "model_type": "mistral4",
        },
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": IMAGE,
    },
    "mistral3_tied": {
        "text_config": {**COMMON, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": IMAGE,
        "tie_word_embeddings": True,
    },
    "llama4": {
        "text_config": {
            **COMMON,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "floor_scale": 5,
        },
        "vision_config": {
            **_TOWER,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": IMAGE,
    },
    "llava": {
        "text_config": {**COMMON, "model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": IMAGE,
    },
    "internvl": {
        "text_config": {**PLAIN, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": IMAGE,
    },
    "kimi_k25": {
        "text_config": {**LATENT_MOE, "first_k_dense_replace": 1, "model_type": "kimi_k2"},
        "vision_config": _TOWER,
        **_PICTURES,
    },
    "qwen2_vl": {
        "text_config": {**PLAIN, **_sections(1, 1, 2)},
        "vision_config": {
            "embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 1,
        },
        **_PICTURES,
    },
    "qwen2_5_vl": {
        "text_config": {**PLAIN, **_sections(1, 1, 2)},
        "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]},
        **_PICTURES,
    },
    "qwen3_vl": {
        "text_config": {**COMMON, **_sections(2, 3, 3)},
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
        **_PICTURES,
    },
    "qwen3_vl_moe": {
        "text_config": {**COMMON, **MOE, **_sections(2, 3, 3)},
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
        **_PICTURES,
    },
    "glm4v": {
        "text_config": {**PLAIN, **_sections(1, 1, 2)},
        "vision_config": {**_QWEN_TOWER, "image_size": 28},
        **_PICTURES,
    },
    "glm4v_moe": {
        "text_config": {
            **COMMON,
            **_sections(1, 1, 2, partial_rotary_factor=0.5),
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
        "vision_config": {**_QWEN_TOWER, "image_size": 28},
        **_PICTURES,
    },
    "muse_glimmer": {
        "text_config": {**COMMON, **WINDOWED},
        "vision_config": _QWEN_TOWER,
        **_PICTURES,
    },
    "qwen3_5": {"text_config": {**COMMON, **_STATES}, "vision_config": _QWEN_TOWER, **_PICTURES},
    "qwen3_5_moe": {
        "text_config": {**COMMON, **_STATES, **MOE, "shared_expert_intermediate_size": 20},
        "vision_config": _QWEN_TOWER,
        **_PICTURES,
    },
}  # fmt: skip
"""One per composite, the part before an underscore and a word being no model type of its own."""


def type_of(name: str) -> str:
    """The model type of a composite by its name."""
    return name.removesuffix("_tied").removesuffix("_latent")


Rename = Callable[[str], str]


def composite(name: str, **changes: Any) -> PreTrainedModel:
    """The whole model, in float32, with every number of it random."""
    torch.manual_seed(0)
    entries = {"tie_word_embeddings": False, **CONFIGS[name], **changes}
    config = AutoConfig.for_model(type_of(name), **entries)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, rename: Rename = str) -> None:
    """Writes model and tokenizer, with the tensors under other names where `rename` says so."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    # The names of its tower's layers, under which transformers saves those of Kimi's text as well.
    change_tensors(
        folder,
        lambda name: rename(
            name.replace("language_model.model.blocks.", "language_model.model.layers.")
        ),
    )


def change_tensors(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Gives tensors of a saved model other names; None drops one."""
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {
        new: tensor for name, tensor in load_file(path).items() if (new := rename(name)) is not None
    }
    save_file(tensors, path, metadata={"format": "pt"})
