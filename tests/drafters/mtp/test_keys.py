"""Keys of multi-token prediction's and draft models' checkpoints: a value, or one line."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drafters.convert import convert
from drafters.fit import fit_of, read_fit
from drafters.load import load_drafter
from specdec.base.errors import SpecDecError
from specdec.model.core import Verifier
from tests.drafters.mtp.test_assistants import case
from tests.drafters.mtp.test_oracles import write_speculators
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from tests.helpers.tiny_predictions import SPECULATORS, reference, write_target
from verifiers.load import load_verifier

VALUES: list[Any] = [None, -1, 2**40, "x", [1]]


def made(kind: str, folder: Path) -> tuple[Verifier, Path, str | None]:
    """A target, a drafter's folder for it, and the part of its config with the layers."""
    if kind == "assistant":
        return case("gemma4", folder)[2], folder / "assistant", "text_config"
    if kind == "draft model":
        for name in ("target", "draft"):
            plain_model("llama").save_pretrained(folder / name)
            tiny_tokenizer().save_pretrained(folder / name)
    else:
        ref = reference("qwen3")
        write_target(folder / "target", ref, SPECULATORS, own=False)
        write_speculators(folder / "draft", ref)
    verifier, _ = load_verifier(
        folder / "target", device=torch.device("cpu"), dtype=torch.float32, block_size=4
    )
    return verifier, folder / "draft", None if kind == "draft model" else "transformer_layer_config"


@pytest.mark.parametrize("kind", ["assistant", "speculators", "draft model"])
def test_every_key_with_every_kind_of_value(kind: str, tmp_path: Path) -> None:
    """In loading, in `specdec doctor` and in `specdec convert`."""
    verifier, folder, place = made(kind, tmp_path)
    names = ("name", "hidden_size", "num_layers", "vocab_size")
    target: Any = SimpleNamespace(**{name: getattr(verifier, name) for name in names})
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    ways = (
        lambda: load_drafter(folder, verifier=verifier),
        lambda: read_fit(str(folder), target),
        lambda: convert(folder, tmp_path / "made", "sglang"),
    )
    loaded = 0
    for key in raw if place is None else raw[place]:
        for value in VALUES:
            changed = deepcopy(raw)
            (changed if place is None else changed[place])[key] = value
            config.write_text(json.dumps(changed))
            for way in ways:
                try:
                    loaded += way() is not None
                except SpecDecError as error:
                    assert "\n" not in str(error), (key, value)
    assert loaded > 50


@pytest.mark.parametrize("kind", ["assistant", "speculators"])
def test_doctor_tells_what_loading_refuses(kind: str, tmp_path: Path) -> None:
    """Layers for a target of another width or vocabulary, from their config alone."""
    verifier, folder, place = made(kind, tmp_path)
    names = ("name", "hidden_size", "num_layers", "vocab_size")
    sizes = {name: getattr(verifier, name) for name in names}
    fit = read_fit(str(folder), cast(Any, SimpleNamespace(**sizes)))
    assert fit.problems == () and fit.taps == (verifier.num_layers - 1,)
    assert place is not None
    for name in ("vocab_size", "hidden_size")[: 1 if kind == "assistant" else 2]:
        raw = json.loads((folder / "config.json").read_text())
        raw[place][name] = 64
        (problem, *_) = fit_of(raw, cast(Any, SimpleNamespace(**sizes))).problems
        assert problem == f"it was made for a target whose {name} is 64, not {sizes[name]}"
