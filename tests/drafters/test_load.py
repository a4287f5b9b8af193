"""Which algorithm a `config.json` names, who loads it, and what a drafter may be named by."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.algorithms import algorithm_of
from drafters.convert import convert
from drafters.dflash.drafter import DFlashDrafter
from drafters.fit import read_fit
from drafters.load import load_drafter
from drafters.ngram import NGramDrafter, load_ngram
from specdec.base import registry
from specdec.base.errors import CheckpointError, InvalidInputError, SpecDecError
from specdec.base.registry import register_drafter
from specdec.model.core import Verifier
from specdec.session.drafter_choice import find_drafter
from tests.drafters.eagle3.heads import LLAMA
from tests.drafters.tiny import FakeVerifier, tiny_target, write_tiny_dflash
from tests.helpers.tiny_models import paged_verifier, plain_model

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("raw", "algorithm"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"dflash_config": {"mask_token_id": 1}}, "dflash"),
        ({"architectures": ["QwenDFlashDraftModel"]}, "dflash"),
        ({"architectures": ["QwenDFlareDraftModel"]}, "dflash"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 256}},
            "dflash2",
        ),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
            "domino",
        ),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dflash"}},
            "dflash",
        ),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "dspark"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"markov_rank": 8}}, "dspark"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}},
            "dflash",
        ),
        (
            {
                "architectures": ["DFlashDraftModel"],
                "dflash_config": {"projector_type": "dspark", "markov_rank": 8},
            },
            "dspark",
        ),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {}}, "eagle3"),
        ({"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1]}, "eagle3"),
        ({"speculators_config": {"algorithm": "peagle"}}, "peagle"),
        ({"speculators_config": {"algorithm": "mtp"}}, "mtp"),
        ({"medusa_num_heads": 4}, "medusa"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "draft-model"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "draft-model"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "mtp"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 0}, "peagle"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "peagle"),
        ({"architectures": ["Qwen3XPressModel"], "dflash_config": {}}, "xpress"),
        ({"architectures": ["XPressSpeculator"], "speculators_model_type": "xpress"}, "xpress"),
    ],
)
def test_algorithm(raw: dict[str, Any], algorithm: str) -> None:
    """In every program's words for it."""
    assert algorithm_of(raw) == algorithm


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"architectures": ["MiniMaxXPressModel"]}, "'MiniMaxXPressModel' (XPress on layers"),
        ({"architectures": ["DSpineDraftModel"]}, "'DSpineDraftModel' (DSpine"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspine"}},
            "'dspine' (DSpine",
        ),
        (
            {"architectures": ["DFlash2BeamDraftModel"]},
            "'DFlash2BeamDraftModel' (DFlash on layers of its own",
        ),
        (
            {"architectures": ["MiniMaxDFlash2DraftModel"]},
            "'MiniMaxDFlash2DraftModel' (DFlash on layers of its own",
        ),
        (
            {"architectures": ["Qwen35DSparkModel"]},
            "'Qwen35DSparkModel' (DSpark on layers of its own",
        ),
        (
            {"architectures": ["DSparkMiniMaxDraftModel"]},
            "'DSparkMiniMaxDraftModel' (DSpark on layers of its own",
        ),
        (
            {"architectures": ["Qwen3OmniDSparkModel"]},
            "'Qwen3OmniDSparkModel' (DSpark on layers of its own",
        ),
        (
            {"architectures": ["MuseSparkDSparkModel"]},
            "'MuseSparkDSparkModel' (DSpark on layers of its own",
        ),
        ({"architectures": ["OtherDSparkModel"], "markov_rank": 0}, "'OtherDSparkModel' (DSpark"),
        (
            {"architectures": ["DFlashOtherForCausalLM"]},
            "'DFlashOtherForCausalLM' (DFlash on layers of its own",
        ),
        (
            {"architectures": ["OtherForCausalLMEagle3"]},
            "'OtherForCausalLMEagle3' (EAGLE-3 on layers of its own",
        ),
        ({"medusa_num_heads": 4}, "'medusa' (Medusa"),
        ({"architectures": ["Qwen3NextMTP"]}, "'Qwen3NextMTP' (multi-token prediction"),
        (
            {"architectures": ["OtherAssistantForCausalLM"]},
            "'OtherAssistantForCausalLM' (a head that reads its target's own",
        ),
        ({"architectures": ["Other"]}, "'Other' is not supported yet"),
        ({"hidden_size": 3}, "names no architecture"),
    ],
)
def test_an_algorithm_that_is_not_supported_is_named(
    raw: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """What it is and the way out, in one line that names the folder, before any tensor is read."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path, verifier=FakeVerifier())
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_registered_algorithm_loads_its_checkpoints(tmp_path: Path, monkeypatch: Patch) -> None:
    """The config.json decides, and the loader gets the folder and the target."""
    monkeypatch.setattr(registry, "DRAFTERS", dict(registry.DRAFTERS))
    monkeypatch.setattr("drafters.load.DRAFTERS", registry.DRAFTERS)
    seen: list[Any] = []

    def load(path: Path, *, verifier: Verifier) -> NGramDrafter:
        seen.extend([path, verifier])
        return NGramDrafter()

    register_drafter("eagle4", load)
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle4"}')
    verifier = FakeVerifier()
    assert isinstance(load_drafter(tmp_path, verifier=verifier), NGramDrafter)
    assert seen == [tmp_path, verifier]


@pytest.mark.parametrize("name", ["ngram", "auto", "none", "a/b", "a:b", ""])
def test_a_name_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(InvalidInputError, match="choose"):
        register_drafter(name, load_ngram)
    assert registry.DRAFTERS.get(name) is not load_ngram


READY = NGramDrafter(max_draft_tokens=3)


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (lambda folder: None, type(None)),
        (lambda folder: "none", type(None)),
        (lambda folder: "auto", NGramDrafter),
        (lambda folder: "ngram", NGramDrafter),
        (lambda folder: folder, DFlashDrafter),
        (lambda folder: str(folder), DFlashDrafter),
        (lambda folder: load_ngram, NGramDrafter),
        (lambda folder: "drafters.ngram:load_ngram", NGramDrafter),
        (lambda folder: READY, NGramDrafter),
    ],
    ids=["None", "none", "auto", "name", "Path", "folder", "function", "module:function", "ready"],
)
def test_what_names_a_drafter(choice: Callable[[Path], Any], kind: type, tmp_path: Path) -> None:
    folder = write_tiny_dflash(tmp_path / "drafter")
    found = find_drafter(choice(folder))(FakeVerifier())
    assert type(found) is kind
    assert (found is READY) == (choice(folder) is READY)


def test_a_folder_without_a_slash(tmp_path: Path, monkeypatch: Patch) -> None:
    """A folder beside the user, which a Path and a string both name."""
    write_tiny_dflash(tmp_path / "drafter")
    monkeypatch.chdir(tmp_path)
    for choice in (Path("drafter"), "drafter"):
        assert isinstance(find_drafter(choice)(FakeVerifier()), DFlashDrafter)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (3, "drafter is a int; give a name, a path, a function"),
        (object(), "drafter is a object; give"),
        ("ngramm", "unknown drafter 'ngramm' (known: auto, ngram"),
        (
            "no.such.module:load",
            "'no.such.module:load' cannot be imported: there is no module 'no'",
        ),
        ("drafters.ngram:nothing", "'drafters.ngram:nothing' cannot be imported"),
        (":load", "':load' names nothing that can be imported; write module:function"),
        ("drafters.ngram:NGramDrafter", "loads no drafter: too many positional arguments"),
        ("drafters.ngram:__doc__", "loads no drafter: it is no function; give a function"),
        (lambda verifier: None, "loads no drafter: multiple values for argument 'verifier'"),
        ("http://host/x", "names nothing that can be imported"),
    ],
)
def test_a_wrong_drafter_is_refused_before_a_target_is_loaded(choice: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_drafter(choice)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loader_that_makes_no_drafter() -> None:
    with pytest.raises(InvalidInputError, match="made a int, which has no bind"):
        find_drafter(
            lambda path, *, verifier: 3  # type: ignore[arg-type, return-value]
        )(FakeVerifier())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="is not a folder"):
        find_drafter(tmp_path / "nowhere")(FakeVerifier())


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "names", [["LlamaForCausalLM"], ["LlamaForCausalLMEagle3"], ["Unheard"], None]
)
def test_heads_of_eagle_and_eagle_2_are_refused_by_name(
    names: list[str] | None, form: str, tmp_path: Path
) -> None:
    """Their tensors tell, whatever their config names: by every command."""
    shapes = {
        "fc.weight": (32, 64),
        "embed_tokens.weight": (97, 32),
        "layers.0.self_attn.q_proj.weight": (48, 32),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA, "architectures": names, "bias": True})
    )
    if form.endswith("bin"):
        torch.save(tensors, tmp_path / form)
    else:
        save_file(tensors, tmp_path / form)
    target = FakeVerifier(tiny_target())
    with pytest.raises(CheckpointError, match=r"^drafter .*: this is a head of EAGLE or EAGLE-2"):
        load_drafter(tmp_path, verifier=target)
    with pytest.raises(CheckpointError, match="this is a head of EAGLE or EAGLE-2"):
        convert(tmp_path, tmp_path / "made", "sglang")
    assert read_fit(str(tmp_path), target).problems[0].startswith("this is a head of EAGLE")


def test_a_draft_model_without_a_tokenizer(tmp_path: Path) -> None:
    """It is no target that lacks it."""
    plain_model("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer of draft model"):
        load_drafter(tmp_path, verifier=paged_verifier(plain_model("llama")))
