"""Keys of DFlash configs: whatever a value is, it is read or refused in one line."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from drafters.dflash.config.layout import parse_config
from specdec.base.errors import CheckpointError
from tests.drafters.any_value import Place, check_any_value
from tests.drafters.dflash.config.layouts import F, S, speculators, zlab
from tests.drafters.dflash.config.test_layout import KINDS_OF_DRAFTERS
from tests.drafters.dflash.config.test_layout_limits import couple
from tests.drafters.dflash.config.test_rope import YARN
from tests.drafters.dflash.test_variants import CONFIGS
from tests.drafters.eagle3.test_checkpoint import TargetShape

TARGET = TargetShape("tiny", 32, 6, 61)
ROPE = YARN | {
    "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0, "truncate": True, "mscale": 1.0,
    "mscale_all_dim": 1.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 3], "rope_dim": 8,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING: dict[str, Any] = {
    "layer_types": [S, S, F],
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
TOP: dict[str, Any] = SLIDING | {
    "attention_bias": False, "attention_sink_bias": False, "coupling": couple(),
    "draft_vocab_size": 61, "fc_norm": False, "final_logit_softcapping": None,
    "input_embedding_scale": 1.0, "is_causal": False, "is_neox_style": True, "logit_scale": 1.0,
    "rope_is_neox_style": True, "target_hidden_size": 32, "use_cache": True,
    "verifier_architectures": ["A"], "verifier_name_or_path": "a/b",
}  # fmt: skip
OWN: dict[str, Any] = {
    "attention_mode": "gqa", "attention_value_scale": 1.0, "causal": False, "causal_head": False,
    "conv_group_size": 4, "conv_kernel_size": 2, "output_multiplier": 1.0,
    "partial_rotary_factor": 1.0, "projector_type": "dflash", "sample_from_anchor": False,
    "swa_window_size": 4, "tied_tables": False, "use_swa": False,
}  # fmt: skip
MARKOV: dict[str, Any] = {
    "markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "dspark_draft_topk": 4, "dspark_bonus_anchor": False,
    "dspark_fixup_head_type": "markov", "dspark_markov_rank": 4, "shift_label": True,
}  # fmt: skip
LATENT = zlab(
    architectures=["K3DSparkModel"], q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, rope_interleave=True, target_num_hidden_layers=6,
    markov_rank=4,
)  # fmt: skip

PLACES: list[tuple[Mapping[str, Any], Place]] = [
    (zlab(**TOP, own=OWN), ()),
    (zlab(**TOP, own=OWN), ("dflash_config",)),
    (zlab(rope_scaling=ROPE), ("rope_scaling",)),
    (zlab(rope_parameters=LLAMA3), ("rope_parameters",)),
    (zlab(rope_parameters={F: ROPE, S: {}}), ("rope_parameters",)),
    (zlab(rope_parameters={F: ROPE, S: {}}), ("rope_parameters", F)),
    (zlab(architectures=["Qwen3DSparkModel"], **MARKOV), ()),
    (KINDS_OF_DRAFTERS["DFlash 2"], ("dflash_config",)),
    (KINDS_OF_DRAFTERS["Domino"], ("dflash_config",)),
    (LATENT, ()),
    (CONFIGS["laguna"], ()),
    (CONFIGS["gemma"], ()),
    (CONFIGS["dflare"], ("dflare_config",)),
    (speculators("dspark", tokens=8, **MARKOV), ()),
    (speculators(layers=SLIDING | {"rope_parameters": ROPE}), ("transformer_layer_config",)),
    (speculators(), ("speculators_config",)),
    (speculators(), ("speculators_config", "verifier")),
    (speculators(), ("speculators_config", "proposal_methods", 0)),
]


@pytest.mark.parametrize(
    ("raw", "place"), PLACES, ids=[f"{number} {place}" for number, (_, place) in enumerate(PLACES)]
)
def test_every_key_with_every_kind_of_value(raw: Mapping[str, Any], place: Place) -> None:
    check_any_value(raw, place, TARGET)


FOREIGN: list[tuple[str, Any]] = [
    ("made_up", 1),
    ("made_up", False),
    ("enable_qwen35_gated_q_proj", True),
    ("hidden_act", "gelu"),
    ("use_aux_norm", True),
    ("use_gemma_norm", True),
]
"""Keys and values that would change the maths, or might."""


@pytest.mark.parametrize(("key", "value"), FOREIGN)
@pytest.mark.parametrize(
    "place", ["flat", "dflash_config", "speculators", "transformer_layer_config"]
)
def test_foreign_keys_are_refused_wherever_they_stand(key: str, value: Any, place: str) -> None:
    raw = {
        "flat": zlab(**{key: value}),
        "dflash_config": zlab(own={key: value}),
        "speculators": speculators(**{key: value}),
        "transformer_layer_config": speculators(layers={key: value}),
    }[place]
    with pytest.raises(CheckpointError, match=rf"(says|with) {key}\b"):
        parse_config(raw)


@pytest.mark.parametrize("layer", [{}, {"rope_theta": 1e4}], ids=["one set", "a set for each kind"])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling", "swa_rope_parameters"])
def test_foreign_rope_parameters_are_refused(name: str, layer: dict[str, Any]) -> None:
    twisted: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "twist": 2}
    raw = zlab() | {name: {F: twisted, S: layer} if layer else twisted}
    with pytest.raises(CheckpointError, match=rf"{name}.* says twist, which"):
        parse_config(raw)


@pytest.mark.parametrize(("name", "value"), [("factor", 2.0), ("rope_type", "linear")])
@pytest.mark.parametrize("nested", [False, True])
def test_rope_that_is_said_twice_must_agree(name: str, value: object, nested: bool) -> None:
    rope: dict[str, Any] = {"rope_parameters": ROPE, "rope_scaling": {**ROPE, name: value}}
    raw = speculators(layers=rope) if nested else zlab(**rope)
    with pytest.raises(
        CheckpointError, match=rf"{name} is .* in rope_parameters and .* in rope_sc"
    ):
        parse_config(raw)


COPIED: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"attn_output_gate": True, "full_attention_interval": 4, "linear_num_key_heads": 16,
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
                "language_model_only": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                                    "mrope_interleaved": True, "mrope_section": [1]}},
    "experts": {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 8,
                "num_experts": 4,
                "norm_topk_prob": True, "n_routed_experts": 4, "scoring_func": "sigmoid",
                "topk_method": "noaux_tc", "ep_size": 1},
    "Gemma": {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
              "sliding_window_pattern": 6},
    "Granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                "attention_multiplier": 0.01},
    "Transformers": {"_name_or_path": "a/b", "_attn_implementation_autoset": True,
                     "auto_map": {"AutoModel": "dflash.D"},
                     "transformers_version": "5.1.0", "torch_dtype": "bfloat16", "use_cache": True,
                     "initializer_range": 0.02, "attention_dropout": 0.0, "temperature": 1.0,
                     "torchscript": False, "id2label": {"0": "LABEL_0"}},
    "AngelSlim": {"modal_type": "VLM", "attention_backend": "flex_attention"},
    "HunYuan": {"class_num": 0, "dense_list": [2048, 0], "im_end_id": 5, "im_newline_id": 11,
                "im_start_id": 4, "mask_init_id": 12, "pool_type": "last", "text_end_id": 7,
                "text_start_id": 6, "use_qk_norm": True},
    "Qwen2.5": {"use_mrope": False},
    "nothing asked for": {"made_up": None, "use_gemma_norm": False, "hidden_act": "swish"},
}  # fmt: skip
"""What copies of a target's config carry along."""


@pytest.mark.parametrize("name", COPIED)
def test_copied_keys_change_nothing(name: str) -> None:
    copied = COPIED[name]
    rope: dict[str, Any] = copied.get("rope_parameters", {"rope_type": "default"})
    for raw in (zlab(**copied), speculators(layers=copied, target_embedding_scale=True)):
        config = parse_config(raw)
        plain = parse_config(zlab(rope_theta=rope.get("rope_theta", 1e6)))
        kept = {
            key: value
            for key, value in config.rope_parameters.items()
            if not key.startswith("mrope")
        }
        found = replace(
            config,
            rope_parameters=kept,
            num_target_layers=6,
            verifier_name=None,
            verifier_architectures=(),
        )
        assert found == plain
