"""Which layers heads read: what engines take for ids of public checkpoints, and what is said."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from drafters.convert import convert
from drafters.eagle3.checkpoint import read_checkpoint
from drafters.eagle3.config import parse_config
from drafters.load import load_drafter
from specdec.base.errors import CheckpointError
from tests.checks.public_drafters import rows
from tests.drafters.eagle3.heads import SGLANG, SPECULATORS, write_head
from tests.helpers.tiny_models import paged_verifier, plain_model

IDS = "eagle_aux_hidden_state_layer_ids"
OWN, TOP, DEEPSPEC = "eagle_config", "top level", "target_layer_ids"

NAMED = [
    # What SGLang takes: for targets of the DeepSeek kind the ids as they are unless the first is 1,
    # else one more; the output of layer i is the input of layer i + 1.
    ("nvidia/Qwen3-30B-A3B", 48, OWN, [1, 23, 44], (1, 23, 44)),
    ("nvidia/Llama-3.3-70B-Instruct", 80, OWN, [1, 39, 76], (1, 39, 76)),
    ("nvidia/gpt-oss-120b-Eagle3-long-context", 36, OWN, [1, 17, 32], (1, 17, 32)),
    ("lightseekorg/kimi-k2.5-eagle3-mla", 61, OWN, [2, 30, 58], (1, 29, 57)),
    # What SGLang and llama.cpp take: of 36 layers the last input is the output of the last layer.
    ("nvidia/gpt-oss-120b-Eagle3-v3", 36, OWN, [24, 30, 36], (23, 29, 35)),
    # TokenSpeed takes them as completed layers, counted from 1.
    ("lightseekorg, Kimi-K3", 93, OWN, [2, 46, 90], (1, 45, 89)),
    # vLLM adds one before it counts inputs.
    ("deepseek-ai/eagle3_qwen3_4b", 36, DEEPSPEC, [1, 9, 17, 25, 33], (1, 9, 17, 25, 33)),
    # What vLLM takes of speculators' layout: inputs of layers.
    ("speculators' own default", 94, TOP, [2, 47, 91], (1, 46, 90)),
    ("speculators, other layers", 36, TOP, [3, 11, 27], (2, 10, 26)),
    # The ids of lmsys' head of the same target, copied by a converter from `eagle_config`.
    ("nm-testing/Qwen3-235B-A22B-EAGLE3-converted-speculators-lmsys", 94, TOP, [1, 46, 90],
     (1, 46, 90)),
    # Not the usual layers: nothing says that they were copied.
    ("speculators, from the first layer", 94, TOP, [1, 47, 91], (0, 46, 90)),
    ("SpecForge, from the first layer", 32, OWN, [0, 5, 11], (0, 5, 11)),
    ("none named", 61, TOP, None, (1, 29, 57)),
]  # fmt: skip


def with_ids(place: str, ids: object) -> dict[str, Any]:
    """A head that names layers in one place."""
    return {
        OWN: {**SGLANG, OWN: {IDS: ids}},
        TOP: {**SPECULATORS, IDS: ids},
        DEEPSPEC: {**SGLANG, DEEPSPEC: ids},
    }[place]


@pytest.mark.parametrize(
    ("name", "layers", "place", "ids", "expected"), NAMED, ids=[case[0] for case in NAMED]
)
def test_named_checkpoints(
    name: str, layers: int, place: str, ids: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert parse_config(with_ids(place, ids)).taps(layers) == expected


def test_public_heads_tap_the_usual_layers() -> None:
    """All of the list that name three are trained on these, however they count them."""
    found = [
        row for row in rows() if row.family == "EAGLE-3" and (row.config.get(OWN) or {}).get(IDS)
    ]
    assert len(found) == 13
    for row in found:
        usual = 1, row.target_layers // 2 - 1, row.target_layers - 4
        assert parse_config(row.config).taps(row.target_layers) == usual, row.target


def test_lists_in_several_places() -> None:
    """They may count differently, and have to mean the same layers."""
    both = {**with_ids(OWN, [1, 23, 44]), IDS: [2, 24, 45]}
    assert parse_config(both).taps(48) == (1, 23, 44)
    assert parse_config({**with_ids(OWN, [4, 8]), DEEPSPEC: [4, 8]}).taps(48) == (4, 8)
    layers = {**SPECULATORS["transformer_layer_config"], IDS: [3, 11, 27]}
    within = {**with_ids(TOP, None), "transformer_layer_config": layers}
    assert parse_config(within).taps(48) == (2, 10, 26)
    with pytest.raises(
        CheckpointError,
        match=r"eagle_aux_hidden_state_layer_ids \[1, 23, 44\] and another list, \[3, 24, 45\]",
    ):
        parse_config({**both, IDS: [3, 24, 45]})


@pytest.mark.parametrize(("ids", "level"), [([1, 2, 3], logging.INFO), (None, logging.WARNING)])
def test_it_is_said_which_layers_are_tapped(
    ids: list[int] | None, level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line; where they are assumed it is a warning."""
    path = write_head(tmp_path / "head", {**SPECULATORS, IDS: ids})
    with caplog.at_level(logging.INFO, logger="drafters"):
        drafter = load_drafter(path, verifier=paged_verifier(plain_model("llama")))
    (record,) = [record for record in caplog.records if record.name == "drafters.eagle3.drafter"]
    assert (
        record.levelno == level
        and ", ".join(map(str, drafter.aux_layer_ids)) in record.getMessage()
    )


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_target_too_small_for_the_usual_layers(layers: int, tmp_path: Path) -> None:
    """One line; with layers of its own the head runs there."""
    verifier = paged_verifier(plain_model("llama", num_hidden_layers=layers))
    with pytest.raises(CheckpointError, match=f"a target of at least 4 layers, not {layers}"):
        load_drafter(write_head(tmp_path / "usual", SGLANG), verifier=verifier)
    stated = {**SGLANG, OWN: {IDS: [0, 0, layers - 1]}}
    assert load_drafter(write_head(tmp_path / "own", stated), verifier=verifier).aux_layer_ids == (
        0,
        0,
        layers - 1,
    )


@pytest.mark.parametrize("ids", [[0, 5, 11], [5, 17, 29], [1, 5, 11]])
def test_ids_keep_their_meaning_in_another_layout(ids: list[int], tmp_path: Path) -> None:
    """Also those that would count otherwise in `eagle_config` alone, where SGLang looks."""
    convert(write_head(tmp_path / "a", with_ids(DEEPSPEC, ids)), tmp_path / "b", "sglang")
    assert json.loads((tmp_path / "b" / "config.json").read_text())[OWN][IDS] == ids
    convert(tmp_path / "b", tmp_path / "c", "speculators")
    for folder in ("b", "c"):
        assert read_checkpoint(tmp_path / folder)[0].taps(94) == tuple(ids)


def test_ids_that_only_the_target_settles(tmp_path: Path) -> None:
    """Converting asks for it."""
    source, target = write_head(tmp_path / "a", with_ids(TOP, [1, 46, 90])), tmp_path / "target"
    with pytest.raises(
        CheckpointError,
        match=r"\[1, 46, 90\] may count the embeddings or not; name the target with --model",
    ):
        convert(source, tmp_path / "b", "sglang")
    target.mkdir()
    for layers, expected in ((94, [1, 46, 90]), (95, [0, 45, 89])):
        (target / "config.json").write_text(
            json.dumps({"text_config": {"num_hidden_layers": layers}})
        )
        made = tmp_path / str(layers)
        convert(source, made, "sglang", target=str(target))
        assert json.loads((made / "config.json").read_text())[DEEPSPEC] == expected
