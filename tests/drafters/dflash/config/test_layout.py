"""What a `config.json` means: alignment, taps, windows, causality, RoPE."""

from dataclasses import replace
from typing import Any

import pytest

from drafters.dflash.config.layout import parse_config
from specdec.base.errors import CheckpointError
from tests.drafters.dflash.config.layouts import F, S, speculators, zlab
from tests.drafters.tiny import TINY


def test_both_layouts_mean_the_same() -> None:
    """Taps are one apart between the layouts; everything else agrees."""
    assert parse_config(zlab()) == TINY
    named = replace(
        TINY,
        num_target_layers=None,
        verifier_name="some/target",
        verifier_architectures=("Qwen3ForCausalLM",),
    )
    assert parse_config(speculators(target_embedding_scale=True)) == named


@pytest.mark.parametrize("section", ["top", "own"])
def test_values_are_found_in_either_place(section: str) -> None:
    """Older checkpoints have drafter values on top, newer ones in dflash_config, which wins."""
    values: dict[str, Any] = {
        "block_size": 5,
        "output_multiplier": 2.0,
        "final_logit_softcapping": 30.0,
        "input_embedding_scale": 1.0,
    }
    raw = zlab(**values) if section == "top" else zlab(block_size=99, own=values)
    config = parse_config(raw)
    assert (config.block_size, config.output_multiplier, config.final_logit_softcapping) == (
        5,
        2.0,
        30.0,
    )
    assert config.input_embedding_scale == 1.0
    assert parse_config(zlab()).input_embedding_scale is None, (
        "a missing scale differs from a scale of 1"
    )


SELECTOR: dict[str, Any] = {"selector_rank": 4, "selector_top_k": 4}


SCALES: list[tuple[dict[str, Any], float | None]] = [
    (zlab(), None),
    (zlab(input_embedding_scale=2.0), 2.0),
    (speculators(), 1.0),
    (speculators(layers={"input_embedding_scale": 2.0}), 2.0),
    (speculators(target_embedding_scale=True), None),
    (speculators(target_embedding_scale=True, input_embedding_scale=2.0), 2.0),
    (speculators(target_embedding_scale=False), 1.0),
    (speculators("dflash2", **SELECTOR), 1.0),
    (speculators("dspark", tokens=8, markov_rank=4), 1.0),
    (zlab(architectures=["DFlash2DraftModel"], own=SELECTOR), 1.0),
    (zlab(architectures=["DFlash2DraftModel"], own=SELECTOR, target_embedding_scale=True), None),
    (zlab(architectures=["DSparkDraftModel"], markov_rank=4), 1.0),
    (zlab(architectures=["Qwen3DSparkModel"], markov_rank=4), 1.0),
    (zlab(architectures=["DominoDraftModel"], own={"emb_dim": 4, "gru_hidden_dim": 4}), 1.0),
]


@pytest.mark.parametrize(("raw", "scale"), SCALES)
def test_scale_of_embeddings(raw: dict[str, Any], scale: float | None) -> None:
    """What nobody states is what that kind of file's trainer does; None is the target's own."""
    assert parse_config(raw).input_embedding_scale == scale


KINDS_OF_DRAFTERS: dict[str, dict[str, Any]] = {
    "DFlash": zlab(),
    "DSpark": zlab(architectures=["Qwen3DSparkModel"], markov_rank=4),
    "SpecForge's DSpark": zlab(
        architectures=["DSparkDraftModel"], own={"projector_type": "dspark", "markov_rank": 4}
    ),
    "DFlash 2": zlab(architectures=["DFlash2DraftModel"], own=SELECTOR),
    "Domino": zlab(architectures=["DominoDraftModel"], own={"emb_dim": 4, "gru_hidden_dim": 4}),
    "DFlare": zlab(architectures=["DFlareDraftModel"]),
    "speculators": speculators(),
    "speculators DSpark": speculators("dspark", tokens=8, markov_rank=4),
}


ALIGNMENTS: list[tuple[str, dict[str, Any], bool, int]] = [
    ("z-lab", zlab(), False, 7),
    ("z-lab stated", zlab(own={"sample_from_anchor": True}), True, 8),
    ("projector of dspark without a Markov head", zlab(own={"projector_type": "dspark"}), False, 7),
    (
        "ModelOpt's DSpark",
        zlab(own={"projector_type": "dspark", "shift_label": True, "markov_rank": 4}), True, 8,
    ),
    ("DeepSpec's DSpark", zlab(architectures=["Qwen3DSparkModel"], markov_rank=4), True, 8),
    (
        "SpecForge's DSpark",
        zlab(
            architectures=["DSparkDraftModel"], own={"projector_type": "dspark", "markov_rank": 4}
        ),
        True,
        8,
    ),
    (
        "vLLM's key",
        zlab(architectures=["Qwen3DSparkModel"], markov_rank=4, dspark_bonus_anchor=True), False, 7,
    ),
    ("shifted labels", zlab(own={"shift_label": True}), True, 8),
    (
        "DFlash 2",
        zlab(architectures=["DFlash2DraftModel"], own={"selector_rank": 4, "selector_top_k": 8}),
        False,
        7,
    ),
    ("speculators dspark", speculators("dspark", tokens=8, markov_rank=4), True, 8),
    (
        "speculators dspark stated", speculators("dspark", markov_rank=4, sample_from_anchor=False),
        False, 7,
    ),
    ("z-lab next-token family", zlab(architectures=["Qwen3DSparkModel"], markov_rank=0), True, 8),
    ("speculators", speculators(), False, 7),
    ("speculators stated", speculators(tokens=8, sample_from_anchor=True), True, 8),
    (
        "speculators dspark without a Markov head", speculators("dspark", tokens=8, markov_rank=0),
        True, 8,
    ),
    ("speculators without a count", speculators(tokens=None), False, 7),
    ("speculators, fewer recommended", speculators(tokens=3), False, 7),
    (
        "speculators stated, one less recommended", speculators(tokens=7, sample_from_anchor=True),
        True, 8,
    ),
    ("speculators dspark, unstated", speculators("dspark", tokens=7, markov_rank=4), False, 7),
    (
        "speculators dspark, unstated, fewer recommended",
        speculators("dspark", tokens=3, markov_rank=4), False, 7,
    ),
    (
        "speculators dspark, nothing stated", speculators("dspark", tokens=None, markov_rank=4),
        False, 7,
    ),
    (
        "Nemotron 3.5's keys",
        zlab(
            architectures=["Qwen3DSparkModel"],
            dspark_markov_rank=4,
            dspark_fixup_head_type="markov",
            dspark_bonus_anchor=True,
            own={"sample_from_anchor": False},
        ),
        False,
        7,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "sample_from_anchor", "most"),
    [case[1:] for case in ALIGNMENTS],
    ids=[case[0] for case in ALIGNMENTS],
)
def test_alignment(raw: dict[str, Any], sample_from_anchor: bool, most: int) -> None:
    """Whether the anchor row predicts, and hence how many drafts a block gives."""
    config = parse_config(raw)
    assert config.sample_from_anchor is sample_from_anchor
    assert config.max_draft_tokens == most


KINDS: list[tuple[str, dict[str, Any], list[int | None], list[bool]]] = [
    ("nothing said", zlab(), [None] * 3, [False] * 3),
    ("by type", zlab(layer_types=[S, S, F], sliding_window=9), [9, 9, None], [True, True, False]),
    ("null is_causal", zlab(layer_types=[S, S, F], sliding_window=9, is_causal=None), [9, 9, None],
     [True, True, False]),
    ("is_causal false", zlab(layer_types=[S, S, F], sliding_window=9, is_causal=False),
     [9, 9, None], [False] * 3),
    ("is_causal true", zlab(layer_types=[S, S, F], sliding_window=9, is_causal=True), [9, 9, None],
     [True] * 3),
    ("own is_causal", zlab(layer_types=[S] * 3, sliding_window=9, own={"is_causal": False}),
     [9] * 3, [False] * 3),
    ("own causal", zlab(layer_types=[S] * 3, sliding_window=9, own={"causal": False}), [9] * 3,
     [False] * 3),
    ("top level first", zlab(is_causal=True, own={"is_causal": False, "causal": False}), [None] * 3,
     [True] * 3),
    ("is_causal before causal", zlab(own={"is_causal": True, "causal": False}), [None] * 3,
     [True] * 3),
    ("forced window", zlab(own={"use_swa": True, "swa_window_size": 5}, layer_types=[F] * 3),
     [5] * 3, [False] * 3),
    ("types before a forced window",
     zlab(own={"use_swa": True, "swa_window_size": 5}, layer_types=[S, F, F]),
     [5, None, None], [True, False, False]),
    ("queries are causal", zlab(dflash_query_causal=True), [None] * 3, [True] * 3),
    ("causal at the top", zlab(causal=True), [None] * 3, [True] * 3),
    ("forced window alone", zlab(own={"use_swa": True, "swa_window_size": 5}), [5] * 3,
     [False] * 3),
    ("jetspec", zlab(own={"causal_head": True}), [None] * 3, [True] * 3),
    ("jetspec, sliding", zlab(own={"causal_head": True}, layer_types=[S, F, F], sliding_window=9),
     [9, None, None], [True] * 3),
    ("causal_head false", zlab(own={"causal_head": False}, layer_types=[S] * 3, sliding_window=9),
     [9] * 3, [False] * 3),
    ("is_causal before causal_head", zlab(is_causal=False, own={"causal_head": True}), [None] * 3,
     [False] * 3),
    ("window disabled", zlab(use_sliding_window=False, sliding_window=9, max_window_layers=1),
     [None] * 3, [False] * 3),
    ("window from a layer on", zlab(use_sliding_window=True, sliding_window=9, max_window_layers=2),
     [None, None, 9], [False, False, True]),
    ("explicit types win", zlab(use_sliding_window=True, sliding_window=9, max_window_layers=3,
                                layer_types=[S, F, F]),
     [9, None, None], [True, False, False]),
    ("speculators, unstated", speculators(layers={"layer_types": [S, F, F], "sliding_window": 9}),
     [9, None, None], [False] * 3),
    ("speculators 0.5", speculators(layers={"layer_types": [S, F, F], "sliding_window": 9},
                                    max_window_layers=3),
     [9, None, None], [False] * 3),
    ("speculators causal", speculators(layers={"layer_types": [S, F, F], "sliding_window": 9},
                                       sliding_window_non_causal=False),
     [9, None, None], [True, False, False]),
    ("speculators DFlash 2",
     speculators("dflash2", layers={"layer_types": [S, S, F], "sliding_window": 9}, selector_rank=4,
                 selector_top_k=4),
     [9, 9, None], [False] * 3),
    ("speculators non-causal",
     speculators(layers={"layer_types": [S, F, F], "sliding_window": 9},
                 sliding_window_non_causal=True),
     [9, None, None], [False] * 3),
    ("speculators is_causal moved",
     speculators(layers={"layer_types": [S, F, F], "sliding_window": 9, "is_causal": False}),
     [9, None, None], [False] * 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "windows", "causal"), [case[1:] for case in KINDS], ids=[case[0] for case in KINDS]
)
def test_windows_and_causality(
    raw: dict[str, Any], windows: list[int | None], causal: list[bool]
) -> None:
    """The resolution table; a wrong entry lowers acceptance without any error."""
    config = parse_config(raw)
    assert list(config.windows) == windows
    assert list(config.causal) == causal


def test_block_of_model_opt(caplog: pytest.LogCaptureFixture) -> None:
    """Its DFlash leaves the size to SGLang, which takes 16; others have to state theirs."""
    raw = zlab(
        remove=("block_size",),
        has_embed_tokens=True,
        has_lm_head=False,
        num_aux_layers=3,
        pard_token=60,
    )
    assert parse_config(raw).block_size == 16
    assert caplog.messages == [
        "config.json lacks block_size: 16 is taken, as engines do for such drafters"
    ]
    assert parse_config(raw | {"block_size": 8}).block_size == 8


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DFlareDraftModel"])
def test_angelslim_calls_its_classes_after_the_model(name: str) -> None:
    raw = zlab(architectures=[name])
    assert parse_config(raw | {"architectures": [f"Qwen{name}"]}) == parse_config(raw)


def test_layers_of_the_target_in_torchspec() -> None:
    """Its usual key counts taps, and its block is an option of training, 16 where none is given."""
    raw = zlab(remove=("block_size",), num_target_layers=3, target_num_hidden_layers=6)
    config = parse_config(raw | {"model_type": "dflash"})
    assert (config.num_target_layers, config.block_size) == (6, 16)


@pytest.mark.parametrize("kind", ["DFlash 2", "DSpark", "SpecForge's DSpark", "Domino", "DFlare"])
def test_taps_are_guessed_for_plain_dflash_alone(kind: str) -> None:
    raw = KINDS_OF_DRAFTERS[kind]
    raw = raw | {
        "dflash_config": {
            "mask_token_id": 60,
            **{n: v for n, v in raw["dflash_config"].items() if "layer_ids" not in n},
        }
    }
    with pytest.raises(CheckpointError, match="lacks target_layer_ids, the target's layers"):
        parse_config(raw)


def test_guessed_taps_are_said(caplog: pytest.LogCaptureFixture) -> None:
    parse_config(zlab(dflash_config={"mask_token_id": 60}))
    assert caplog.messages == [
        "config.json lacks target_layer_ids: layers [1, 2, 3] are taken, by z-lab's rule"
    ]
    caplog.clear()
    parse_config(zlab())
    assert not caplog.messages


def test_default_taps() -> None:
    """Without a list: the middle layer for one, else from layer 1 to the third last."""
    raw = zlab(num_target_layers=36, num_hidden_layers=5)
    del raw["dflash_config"]["target_layer_ids"]
    assert parse_config(raw).target_layer_ids == (1, 9, 17, 25, 33)
    assert parse_config(raw | {"num_hidden_layers": 1}).target_layer_ids == (18,)
    assert parse_config(
        raw | {"num_target_layers": 61, "num_hidden_layers": 6}
    ).target_layer_ids == (1, 12, 24, 35, 47, 58)
