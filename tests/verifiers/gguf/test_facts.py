"""What files have to say of a model, and what is taken where they do not."""

from pathlib import Path
from typing import Any

import pytest

from specdec.base.errors import CheckpointError
from tests.verifiers.gguf.test_models import CASES, Case, written
from verifiers.config.gguf import config_of
from verifiers.gguf.file import Facts, GgufFiles


def said(case: Case, path: Path, **facts: Any) -> dict[str, Any]:
    """The config of a case's file with other facts; None leaves one out."""
    written(case._replace(facts={**case.facts, **facts}), path)
    return config_of(Facts(GgufFiles(path)))


@pytest.mark.parametrize("name", CASES)
def test_key_heads_are_as_many_as_heads_where_a_file_does_not_say(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    if isinstance(case.facts.get("attention.head_count_kv", 0), list):
        return  # other kinds of layers have none
    found = said(case, tmp_path / "m.gguf", **{"attention.head_count_kv": None})
    assert found["num_key_value_heads"] == found["num_attention_heads"]


@pytest.mark.parametrize(
    ("experts", "groups"), [(8, (1, 1)), (64, (1, 1)), (160, (8, 3)), (256, (8, 4)), (384, (1, 1))]
)
def test_groups_of_experts_that_older_files_do_not_say(
    experts: int, groups: tuple[int, int], tmp_path: Path
) -> None:
    """Moonlight and Kimi K2 have none, DeepSeek's own models have; DeepSeek-V2's method follows."""
    nothing = {"expert_group_count": None, "expert_group_used_count": None, "expert_count": experts}
    nothing["expert_weights_scale"] = None
    for name in ("deepseek_v2", "deepseek_v3"):
        found = said(CASES[name], tmp_path / "m.gguf", **nothing)
        assert (found["n_group"], found["topk_group"]) == groups
        assert found["routed_scaling_factor"] == 1
        method = "group_limited_greedy" if groups[0] > 1 else "greedy"
        assert found.get("topk_method", method) == method
    found = said(CASES["glm_moe_dsa"], tmp_path / "m.gguf", **nothing)
    assert (found["n_group"], found["topk_group"]) == (1, 1)


@pytest.mark.parametrize("name", CASES)
def test_what_a_file_has_to_say(name: str, tmp_path: Path) -> None:
    """Sizes for which no other value would do."""
    keys = ["context_length", "embedding_length", "attention.head_count"]
    keys += ["attention.layer_norm_rms_epsilon"]
    keys += ["expert_used_count"] * (CASES[name].facts.get("expert_count", 0) > 0)
    for key in keys:
        with pytest.raises(CheckpointError, match=rf"does not say [\w-]+\.{key}; fetch it again"):
            said(CASES[name], tmp_path / "m.gguf", **{key: None})
