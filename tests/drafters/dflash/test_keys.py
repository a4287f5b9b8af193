"""Keys of DFlash configs: whatever a value is, it is read or refused in one line."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from drafters.fit import fit_of
from tests.drafters.dflash.test_layout import KINDS_OF_DRAFTERS, YARN, F, S, couple, speculators, zlab
from tests.drafters.dflash.test_variants import CONFIGS
from tests.drafters.eagle3.test_checkpoint import TargetShape

TARGET = TargetShape("tiny", 32, 6, 61)
VALUES: list[Any] = [None, 0, -1, 1, 2**40, 0.5, float("nan"), "10000", [], [1], [{}], {}, {"a": 1}, True, False]
ROPE = YARN | {
    "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0, "truncate": True, "mscale": 1.0,
    "mscale_all_dim": 1.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 3], "rope_dim": 8,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING = {"layer_types": [S, S, F], "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}
TOP = SLIDING | {
    "attention_bias": False, "attention_sink_bias": False, "coupling": couple(), "draft_vocab_size": 61, "fc_norm": False,
    "final_logit_softcapping": None, "input_embedding_scale": 1.0, "is_causal": False, "is_neox_style": True, "logit_scale": 1.0,
    "rope_is_neox_style": True, "target_hidden_size": 32, "use_cache": True, "verifier_architectures": ["A"],
    "verifier_name_or_path": "a/b",
}  # fmt: skip
OWN = {
    "attention_mode": "gqa", "attention_value_scale": 1.0, "causal": False, "causal_head": False, "conv_group_size": 4,
    "conv_kernel_size": 2, "output_multiplier": 1.0, "partial_rotary_factor": 1.0, "projector_type": "dflash",
    "sample_from_anchor": False, "swa_window_size": 4, "tied_tables": False, "use_swa": False,
}  # fmt: skip
MARKOV = {
    "markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "dspark_draft_topk": 4, "dspark_bonus_anchor": False, "dspark_fixup_head_type": "markov", "dspark_markov_rank": 4,
    "shift_label": True,
}  # fmt: skip
LATENT = zlab(
    architectures=["K3DSparkModel"], q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    rope_interleave=True, target_num_hidden_layers=6, markov_rank=4,
)  # fmt: skip

PLACES: list[tuple[Mapping[str, Any], tuple[str | int, ...]]] = [
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


def changed(raw: Mapping[str, Any], place: tuple[str | int, ...], key: str, value: object) -> dict[str, Any]:
    """The config with one value changed."""
    found = inner = deepcopy(dict(raw))
    for part in place:
        inner = inner[part]  # type: ignore[index]
    inner[key] = value
    return found


@pytest.mark.parametrize(("raw", "place"), PLACES, ids=[f"{number} {place}" for number, (_, place) in enumerate(PLACES)])
def test_every_key_with_every_kind_of_value(raw: Mapping[str, Any], place: tuple[str | int, ...]) -> None:
    """Nothing raises, as `specdec doctor` reads them, and nothing takes two lines."""
    inner: Any = raw
    for part in place:
        inner = inner[part]
    assert fit_of(raw, TARGET).problems == ()
    for key in (*inner, "rope_theta", "partial_rotary_factor"):
        for value in VALUES:
            problems = fit_of(changed(raw, place, key, value), TARGET).problems
            assert all(problem and "\n" not in problem for problem in problems), (key, value)
