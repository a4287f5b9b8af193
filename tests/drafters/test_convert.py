"""`specdec convert`: round trips through every layout, and what a layout has no words for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.convert import convert
from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.layout import Layout
from drafters.eagle3.checkpoint import read_checkpoint as eagle3_checkpoint
from drafters.license import CARD
from drafters.shipped import shipped_drafter_path
from specdec.base.errors import CheckpointError
from specdec.cli.main import main
from tests.checks.public_drafters import Row, rows, shrunk, write
from tests.drafters.tiny import TARGET_LAYERS, TINY, write_tiny_dflash
from tests.evals.tiny import save_tiny
from tests.helpers.bounds import assert_as_exact
from verifiers.load import load_verifier

MIXED = replace(TINY, windows=(16, 16, None), causal=(True, True, False))
"""Causal sliding layers and a full one that is not, as z-lab's since Qwen3.5."""

CONFIGS = {
    "full layers": TINY,
    "mixed layers": MIXED,
    "mixed layers, non-causal": replace(MIXED, causal=(False,) * 3),
    "reduced vocabulary": replace(TINY, draft_vocab_size=20),
    "anchor predicts": replace(TINY, sample_from_anchor=True),
    "scales": replace(
        TINY, input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=30.0
    ),
    "raw embeddings": replace(TINY, input_embedding_scale=1.0),
    "yarn": replace(
        TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "tap of another width": replace(TINY, target_hidden_size=40),
}


def same(folder: Path, config: DFlashConfig, source: Path) -> None:
    """The drafter in `folder` is that in `source`."""
    found, tensors = read_checkpoint(folder)
    assert found == config
    original = read_checkpoint(source)[1]
    assert tensors.keys() == original.keys()
    assert all(torch.equal(tensors[name], original[name]) for name in tensors)


@pytest.mark.parametrize("first", ["z-lab", "speculators"])
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name: str, first: Layout, tmp_path: Path) -> None:
    """Nothing of a drafter is lost on the way through the other layout."""
    source = write_tiny_dflash(tmp_path / "a", CONFIGS[name], layout=first)
    second = "speculators" if first == "z-lab" else "z-lab"
    config = read_checkpoint(source)[0]
    convert(source, tmp_path / "b", second)
    same(tmp_path / "b", config, source)
    convert(tmp_path / "b", tmp_path / "c", first)
    same(tmp_path / "c", config, source)
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_mixed_layers_in_words_of_z_lab(tmp_path: Path) -> None:
    """Types and window, and no `is_causal` where the types say it."""
    convert(write_tiny_dflash(tmp_path / "a", MIXED, layout="speculators"), tmp_path / "b", "z-lab")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (written["sliding_window"], written["use_sliding_window"], "is_causal" in written) == (
        16,
        True,
        False,
    )
    assert written["dflash_config"]["target_layer_ids"] == [1, 2, 4]


LAYOUTS = (
    "z-lab", "z-lab, Qwen3.5 on", "speculators DFlash", "DeepSpec DFlash", "z-lab DFlash 2",
    "speculators DFlash 2", "DeepSpec DSpark", "SpecForge DSpark", "speculators DSpark", "Muse",
)  # fmt: skip
UNSAID = {
    "JetSpec": "no key in the speculators layout",
    "Domino": "the speculators layout has no domino",
    "Laguna": "can be read, but not written",
    "MiMo": "can be read, but not written",
    "ModelOpt": "last layer, which the speculators layout cannot name",
    "ModelOpt DSpark": "can be read, but not written",
    "DeepSpec DFlash, Gemma 4": "can be read, but not written",
}
"""What is said of those that the layout of speculators has no words for."""


def scaled_down(layout: str, folder: Path) -> tuple[Row, Path, str]:
    """The first public drafter of a layout, its folder, and one that stands for its target."""
    row = next(row for row in rows() if row.layout == layout)
    for name in ("a", "target"):
        (folder / name).mkdir()
    write(folder / "a", shrunk(row.config), row)
    (folder / "target" / "config.json").write_text(
        json.dumps({"num_hidden_layers": row.target_layers})
    )
    return row, folder / "a", str(folder / "target")


@pytest.mark.parametrize("layout", UNSAID)
def test_public_drafters_that_cannot_be_converted(layout: str, tmp_path: Path) -> None:
    _, source, target = scaled_down(layout, tmp_path)
    with pytest.raises(CheckpointError, match=UNSAID[layout]):
        convert(source, tmp_path / "b", "speculators", target=target)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_public_drafters(layout: str, tmp_path: Path) -> None:
    """Scaled down: through the speculators layout and back to z-lab's."""
    row, source, target = scaled_down(layout, tmp_path)
    convert(source, tmp_path / "b", "speculators", target=target)
    convert(tmp_path / "b", tmp_path / "c", "z-lab")
    config = read_checkpoint(source)[0]
    name = config.verifier_name or target
    same(
        tmp_path / "c",
        replace(config, num_target_layers=row.target_layers, verifier_name=name),
        source,
    )


def layers_of(config: Any) -> dict[str, Any]:
    """What an EAGLE-3 head's layers compute with."""
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps",
    )  # fmt: skip
    return {
        name: getattr(config.layers, name)
        for name in (*names, "rope_parameters", "attention_bias", "max_position_embeddings")
    }


EAGLES = (
    "SpecForge EAGLE-3",
    "ModelOpt EAGLE-3",
    "speculators EAGLE-3",
    "DeepSpec EAGLE-3",
    "speculators P-EAGLE",
)


@pytest.mark.parametrize("layout", EAGLES)
def test_eagle3(layout: str, tmp_path: Path) -> None:
    """Through the other layout and back; what sglang or z-lab has no words for is refused."""
    row = next(row for row in rows() if row.layout == layout)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", shrunk(row.config), row)
    with pytest.raises(CheckpointError, match="z-lab's layout has no words for EAGLE-3"):
        convert(tmp_path / "a", tmp_path / "b", "z-lab")
    convert(tmp_path / "a", tmp_path / "b", "speculators")
    ways = [tmp_path / "b"]
    if layout in ("DeepSpec EAGLE-3", "speculators P-EAGLE"):
        with pytest.raises(CheckpointError, match=r"ha(s|ve) no words"):
            convert(tmp_path / "b", tmp_path / "c", "sglang")
    else:
        convert(tmp_path / "b", tmp_path / "c", "sglang")
        ways.append(tmp_path / "c")
    config, tensors = eagle3_checkpoint(tmp_path / "a")
    for folder in ways:
        found, read = eagle3_checkpoint(folder)
        assert layers_of(found) == layers_of(config)
        assert replace(found, layers=config.layers, verifier_name=None) == replace(
            config, verifier_name=None
        )
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        (TINY, "sglang", "SGLang reads DFlash drafters in z-lab's layout"),
        (
            replace(TINY, causal=(True, True, True)),
            "speculators",
            "no key in the speculators layout",
        ),
        (
            replace(TINY, target_layer_ids=(1, 2, TARGET_LAYERS - 1)),
            "speculators",
            "last layer, which the speculators layout cannot",
        ),
        (replace(TINY, num_target_layers=None), "z-lab", "num_target_layers is unknown"),
    ],
)
def test_what_a_layout_cannot_say(
    config: DFlashConfig, layout: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and nothing is written."""
    written: Layout = "speculators" if layout == "z-lab" else "z-lab"
    source = write_tiny_dflash(tmp_path / "a", config, layout=written)
    assert main(["convert", str(source), str(tmp_path / "b"), "--to", layout]) != 0
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "b").exists()


def test_the_license_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_dflash(tmp_path / "a")
    (source / CARD).write_text("---\nlicense: cc-by-nc-nd-4.0\n---\n")
    assert main(["convert", str(source), str(tmp_path / "b"), "--to", "speculators"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"written to {tmp_path / 'b'} in the layout of speculators",
        "its license is cc-by-nc-nd-4.0: it forbids commercial use and changed copies",
    ]
    assert (tmp_path / "b" / CARD).read_text() == (source / CARD).read_text()


def test_another_target_is_refused(tmp_path: Path) -> None:
    source = write_tiny_dflash(tmp_path / "a")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": 9}})
    )
    with pytest.raises(CheckpointError, match=r"made for 6 target layers, and .* has 9"):
        convert(source, tmp_path / "b", "speculators", target=str(tmp_path / "target"))


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_tied_tables_are_written_whole(layout: str, tmp_path: Path) -> None:
    """Catches projections that others would take for tables, and another target's tables."""
    # by its name; nothing to say of readers or license
    assert convert("smollm2-dflash", tmp_path / "made", layout) is None
    source = shipped_drafter_path()
    (own, tied), (config, whole) = read_checkpoint(source), read_checkpoint(tmp_path / "made")
    assert config == replace(own, tied_tables=False)
    target, _ = load_verifier("embedded", device=torch.device("cpu"), dtype=torch.bfloat16)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        assert whole[name].shape == (config.vocab_size, tied[name].shape[0])
    rows, projection = target.embed(torch.arange(100)), tied["markov_head.markov_w1.weight"]
    assert_as_exact(
        whole["markov_head.markov_w1.weight"][:100],
        rows @ projection.T,
        rows.double() @ projection.double().T,
    )


def test_tied_tables_of_another_target_are_refused(tmp_path: Path) -> None:
    target = str(save_tiny(tmp_path / "tiny"))
    with pytest.raises(CheckpointError, match=r"hidden"):
        convert(shipped_drafter_path(), tmp_path / "made", "speculators", target=target)
    assert not (tmp_path / "made").exists()


def test_tied_tables_without_a_target_are_refused(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(shipped_drafter_path())
    write_checkpoint(tmp_path / "nameless", replace(config, verifier_name=None), tensors)
    with pytest.raises(CheckpointError, match="name it with --model"):
        convert(tmp_path / "nameless", tmp_path / "made", "speculators")
