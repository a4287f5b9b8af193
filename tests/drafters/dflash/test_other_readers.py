"""What other engines make of an exported drafter: windows and causality of its layers by their
rules, written down once more.

The rules were read in vLLM 0.23 (`v1/spec_decode/dflash.py`), vLLM 0.33 (`models/qwen3_dflash.py`
and `configs/speculators/algos.py`) and SGLang 0.5.23 (`models/dflash.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.convert import convert
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json, misreading
from drafters.dflash.config.layout import Layout, parse_config
from drafters.dspark.markov import MarkovConfig
from drafters.xpress.refiner import XPressConfig
from specdec.base.errors import CheckpointError
from tests.drafters.tiny import TINY, write_tiny_dflash

Layers = list[tuple[int | None, bool]]
"""Window and causality of each layer."""


def vllm_0_33(raw: Mapping[str, Any]) -> Layers:
    """A stated causality holds for all layers; else sliding layers are causal."""
    own = dict(raw.get("dflash_config") or {})
    if "speculators_model_type" in raw:
        own["causal"] = not raw.get("sliding_window_non_causal", True)
        raw = raw["transformer_layer_config"]
    kinds, stated = raw["layer_types"], raw.get("is_causal", own.get("causal"))
    windows = [
        own.get("swa_window_size", raw.get("sliding_window"))
        if kind == "sliding_attention"
        else None
        for kind in kinds
    ]
    return [
        (window, kind == "sliding_attention" if stated is None else stated)
        for window, kind in zip(windows, kinds, strict=True)
    ]


def vllm_0_23(raw: Mapping[str, Any]) -> Layers:
    """No window is read, and no causality but that of `dflash_config`."""
    layers = raw.get("transformer_layer_config", raw)["num_hidden_layers"]
    return [(None, (raw.get("dflash_config") or {}).get("causal", False))] * layers


def sglang(raw: Mapping[str, Any]) -> Layers:
    """z-lab's layout alone: its list of architectures has none of speculators'."""
    if raw["architectures"] != ["DFlashDraftModel"]:
        return []
    kinds, stated = raw["layer_types"], raw.get("is_causal")
    slides = [kind == "sliding_attention" for kind in kinds]
    return [
        (raw["sliding_window"] if sliding else None, sliding if stated is None else stated)
        for sliding in slides
    ]


READERS: dict[str, Callable[[Mapping[str, Any]], Layers]] = {
    "vllm 0.33": vllm_0_33,
    "vllm 0.23": vllm_0_23,
    "sglang": sglang,
}

CASES: dict[str, tuple[DFlashConfig, set[str], set[str]]] = {
    "full": (TINY, {"vllm 0.33", "vllm 0.23", "sglang"}, {"vllm 0.33", "vllm 0.23"}),
    "full, causal": (
        replace(TINY, causal=(True,) * 3),
        {"vllm 0.33", "vllm 0.23", "sglang"},
        set(),
    ),
    "sliding, causal": (
        replace(TINY, windows=(9,) * 3, causal=(True,) * 3),
        {"vllm 0.33", "sglang"},
        {"vllm 0.33"},
    ),
    "sliding": (replace(TINY, windows=(9,) * 3), {"vllm 0.33", "sglang"}, {"vllm 0.33"}),
    "mixed, causal": (
        replace(TINY, windows=(9, 9, None), causal=(True, True, False)),
        {"vllm 0.33", "sglang"},
        set(),
    ),
    "mixed": (replace(TINY, windows=(9, 9, None)), {"vllm 0.33", "sglang"}, {"vllm 0.33"}),
}
"""A drafter, who reads it rightly in z-lab's layout, and who in that of speculators."""


@pytest.mark.parametrize("name", CASES)
def test_who_reads_what_rightly(name: str) -> None:
    config, zlab, speculators = CASES[name]
    meant = list(zip(config.windows, config.causal, strict=True))
    raw = config_json(config, "z-lab", dtype="float32")
    assert {reader for reader, read in READERS.items() if read(raw) == meant} == zlab
    try:
        raw = config_json(config, "speculators", dtype="float32")
    except CheckpointError:
        assert name == "full, causal"  # for which it has no words
        return
    assert {reader for reader, read in READERS.items() if read(raw) == meant} == speculators
    # It is said of what vLLM's present release misreads, and of nothing else.
    assert (misreading(config, "speculators") is None) is ("vllm 0.33" in speculators)
    assert misreading(config, "z-lab") is None


def vllm_head(raw: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Rank of a Markov head, mask token, and whether rows predict the token after their own, as
    vLLM 0.33 finds them.

    Its `configs/speculators/algos.py` puts them at the top; there its `models/qwen3_dspark.py` and
    its speculator look for them.
    """
    own = raw.get("dflash_config") or {}
    from_anchor = raw.get("sample_from_anchor", "speculators_model_type" not in raw)
    return raw["markov_rank"], own["mask_token_id"] if own else raw["mask_token_id"], from_anchor


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_vllm_finds_the_head(layout: Layout, from_anchor: bool) -> None:
    """Catches a rank that only our loader finds, and rows of the next position."""
    config = replace(TINY, head=MarkovConfig(rank=4), sample_from_anchor=from_anchor)
    raw = config_json(config, layout, dtype="float32")
    assert vllm_head(raw) == (4, config.mask_token_id, from_anchor)
    if layout == "z-lab":
        # by which it knows the kind
        assert raw["architectures"] == ["DSparkDraftModel"] and raw["model_type"] == "qwen3"
    assert parse_config(raw).head == config.head


def test_vllm_finds_a_refiner() -> None:
    """By the class, and the sizes where its pull request 54448 looks for them."""
    config = replace(TINY, head=XPressConfig(6, 3, 4))
    raw = config_json(config, "z-lab", dtype="float32")
    sizes = "xpress_rank", "xpress_mlp_hidden", "xpress_num_passes", "xpress_block_size"
    assert [raw[name] for name in sizes] == [6, 18, 4, config.block_size]
    assert raw["architectures"] == ["Qwen3XPressModel"] and raw["sample_from_anchor"] is False
    assert parse_config(raw) == config


def test_no_value_of_the_flag_serves_mixed_layers() -> None:
    """Which is why such drafters are to be given to vLLM in z-lab's layout."""
    config = CASES["mixed, causal"][0]
    raw = config_json(config, "speculators", dtype="float32")
    meant = list(zip(config.windows, config.causal, strict=True))
    without = {key: value for key, value in raw.items() if key != "sliding_window_non_causal"}
    said = [raw | {"sliding_window_non_causal": flag} for flag in (True, False)] + [without]
    assert all(vllm_0_33(one) != meant for one in said)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_converting_says_who_misreads_it(layout: Layout, tmp_path: Path) -> None:
    source = write_tiny_dflash(tmp_path / "a", CASES["mixed, causal"][0])
    note = convert(source, tmp_path / "b", layout)
    assert ("give it the layout of z-lab" in (note or "")) is (layout == "speculators")
