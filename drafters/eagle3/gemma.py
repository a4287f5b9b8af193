"""Layers of Gemma 4 in an EAGLE-3 head, as DeepSpec's `Gemma4Eagle3Model` has them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from drafters.keys import Keys, check_plain, require, section

ARCHITECTURE = "Gemma4Eagle3Model"

_PLAIN_VALUES = {
    "attention_bias": (False,),
    "enable_moe_block": (False,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
}
_AS_THEY_ARE = (
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "rms_norm_eps", "vocab_size", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


class Gemma(NamedTuple):
    """What of Gemma's layers no Llama has.

    Attributes:
        keys_as_values: values are the keys before their norm.
        softcap: of the logits; None where they have none.
    """

    keys_as_values: bool
    softcap: float | None


def read_gemma(shape: Mapping[str, Any]) -> tuple[Gemma, dict[str, Any]]:
    """What is Gemma's alone, and the sizes of the layers in the words of Llama's configs.

    Its layers are those that see everything, whose heads are called global.

    Raises:
        CheckpointError: a part of Gemma that such heads have not, or a malformed value.
    """
    keys = Keys([shape])
    check_plain(keys, _PLAIN_VALUES, "EAGLE-3 on Gemma's layers")
    kinds = shape.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    require(full, f"layer_types is {kinds!r}; on Gemma's layers all must be full_attention")
    same, softcap = keys.flag("attention_k_eq_v") or False, keys.number("final_logit_softcapping")
    valid = softcap is None or softcap > 0
    require(valid, f"final_logit_softcapping is {softcap}; it must be positive")
    rope = section(shape, "rope_parameters")
    said = {name: shape.get(name) for name in _AS_THEY_ARE}
    said["head_dim"] = keys.required("global_head_dim")
    stated = "num_global_key_value_heads" if same else "num_key_value_heads"
    said["num_key_value_heads"] = keys.required(stated)
    said["rope_parameters"] = section(rope, "full_attention") or rope
    return Gemma(same, softcap), {**said, "model_type": "llama"}
