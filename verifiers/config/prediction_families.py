"""Where checkpoints keep layers for multi-token prediction, and what kind of layers these are.

Sources: transformers' `MtpModel`, and `gemma4_assistant` for the assistants; vllm-project/vllm
`*_mtp.py` and sgl-project/sglang `*_nextn.py` for Qwen, Nemotron, MiMo and Hy3;
PaddlePaddle/FastDeploy `ernie4_5_mtp.py`; vllm-project/speculators for its layout.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from verifiers.config.names import RENAMED, RENAMED_IN, UNUSED

Kinds = Callable[[Any], Sequence[str]]


def _full(config: Any) -> Sequence[str]:
    return ("full_attention",)


def _sliding(config: Any) -> Sequence[str]:
    return getattr(config, "mtp_layer_types", None) or ("sliding_attention",)


def _blocks(config: Any) -> Sequence[str]:
    return config.mtp_layers_block_type or ("full_attention", "moe")


class PredictionFamily(NamedTuple):
    """Layers of one depth.

    Attributes:
        names: expressions for names in files, once these are like those of a text model, and what
            they become: `embedding_norm`, `hidden_norm`, `projection`, `norm`, and `model.layers.0`
            and so on. `{layers}` stands for the number of the target's layers. The first that
            matches counts. Without a `norm` it is the target's.
        kinds: of the layers, as `layer_types` of a config, from the target's.
        feed_forward: of each layer, as `mlp_layer_types`, where the config has such.
    """

    names: Sequence[tuple[str, str]]
    kinds: Kinds = _full
    feed_forward: str = "sparse"

    @property
    def has_norm(self) -> bool:
        """Whether a norm of its own follows the layers."""
        return any(replacement == "norm." for _, replacement in self.names)


_QWEN = (
    (r"^(?:model\.)?mtp\.fc\.", "projection."),
    (r"^(?:model\.)?mtp\.pre_fc_norm_embedding\.", "embedding_norm."),
    (r"^(?:model\.)?mtp\.pre_fc_norm_hidden\.", "hidden_norm."),
    (r"^(?:model\.)?mtp\.norm\.", "norm."),
    (r"^(?:model\.)?mtp\.layers\.0\.", "model.layers.0."),
)
_APPENDED = (
    (r"^model\.layers\.{layers}\.enorm\.", "embedding_norm."),
    (r"^model\.layers\.{layers}\.hnorm\.", "hidden_norm."),
    (r"^model\.layers\.{layers}\.eh_proj\.", "projection."),
    (r"^model\.layers\.{layers}\.(?:shared_head\.norm|final_layernorm)\.", "norm."),
    # Copies of the target's embeddings and head lie there, too.
    (r"^model\.layers\.{layers}\.(?!embed_tokens\.|shared_head\.)", "model.layers.0."),
)
_ERNIE = (
    (r"^model\.mtp_emb_norm\.0\.", "embedding_norm."),
    (r"^model\.mtp_hidden_norm\.0\.", "hidden_norm."),
    (r"^model\.mtp_linear_proj\.0\.", "projection."),
    (r"^model\.mtp_block\.0\.", "model.layers.0."),
)
_MIMO = (
    (r"^model\.mtp\.layers\.0\.enorm\.", "embedding_norm."),
    (r"^model\.mtp\.layers\.0\.hnorm\.", "hidden_norm."),
    (r"^model\.mtp\.layers\.0\.eh_proj\.", "projection."),
    (r"^model\.mtp\.layers\.0\.final_layernorm\.", "norm."),
    (r"^model\.mtp\.layers\.0\.pre_mlp_layernorm\.", "model.layers.0.post_attention_layernorm."),
    (r"^model\.mtp\.layers\.0\.", "model.layers.0."),
)
_NEMOTRON = (
    (r"^(?:model\.)?mtp\.layers\.\d+\.enorm\.", "embedding_norm."),
    (r"^(?:model\.)?mtp\.layers\.\d+\.hnorm\.", "hidden_norm."),
    (r"^(?:model\.)?mtp\.layers\.\d+\.eh_proj\.", "projection."),
    (r"^(?:model\.)?mtp\.layers\.\d+\.final_layernorm\.", "norm."),
    (r"^(?:model\.)?mtp\.layers\.", "model.layers."),
)

DEEPSEEK = PredictionFamily(_APPENDED)
QWEN = PredictionFamily(_QWEN)

FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "ernie4_5_moe": PredictionFamily(_ERNIE, feed_forward="dense"),
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "hy_v3": DEEPSEEK,
    "mellum": PredictionFamily(_QWEN, _sliding),
    "mimo_v2_flash": PredictionFamily(_MIMO, _sliding, feed_forward="dense"),
    "nemotron_h": PredictionFamily(_NEMOTRON, _blocks),
    "qwen3_5_moe_text": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_next": QWEN,
}
"""By the model type of the target, which has them in its own files."""

SPECULATORS = PredictionFamily(
    (
        (r"^(?:model\.)?mtp_layers\.0\.input_proj\.", "projection."),
        (r"^(?:model\.)?mtp_layers\.0\.token_layernorm\.", "embedding_norm."),
        (r"^(?:model\.)?mtp_layers\.0\.hidden_layernorm\.", "hidden_norm."),
        (r"^(?:model\.)?mtp_layers\.0\.final_layernorm\.", "norm."),
        (r"^(?:model\.)?mtp_layers\.0\.", "model.layers.0."),
    )
)
"""In a checkpoint of their own, in the layout of speculators."""

ASSISTANT = PredictionFamily(
    (
        (r"^pre_projection\.", "projection."),
        (r"^post_projection\.", "back."),
        (r"^masked_embedding\.", "masked_embedding."),
        (r"^(?:lm_head|model\.embed_tokens)\.", "head."),
        (r"^model\.norm\.", "norm."),
        (r"^model\.layers\.", "model.layers."),
    )
)
"""Gemma 4's assistants, which are checkpoints of their own."""


def prediction_name(name: str, config: Any, family: PredictionFamily) -> str | None:
    """What a tensor of a file is called here; None for one that belongs elsewhere.

    Args:
        name: in the file.
        config: the target's.
        family: see `PredictionFamily`.
    """
    if UNUSED.search(name):
        return None
    for expression, replacement in (*RENAMED, *RENAMED_IN.get(config.model_type, ())):
        name = expression.sub(replacement, name, count=1)
    for pattern, replacement in family.names:
        found = re.match(pattern.replace("{layers}", str(config.num_hidden_layers)), name)
        if found:
            return replacement + name[found.end() :]
    return None


def predicts(config: Any, names: Collection[str] = ()) -> bool:
    """Whether a target has such layers in its own checkpoint.

    Args:
        config: the target's.
        names: of all tensors in its files; without any, the config's word is taken.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or not names:
        stated = (
            getattr(config, name, None)
            for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
        )
        return family is not None and any(stated)
    return any(prediction_name(name, config, family) is not None for name in names)
