"""What a start keeps of a target for the next: the same model, without Transformers' classes."""

import copy
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import verifiers
from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.mtp.load import load_mtp
from specdec.base import files
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.cli.main import main
from specdec.model.core import Verifier
from tests.drafters.mtp.test_oracles import TEXT, ours
from tests.helpers import tiny_composites
from tests.helpers.gguf_files import characters, write_gguf
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.tiny_predictions import CASES, reference, write_target
from tests.specdec.cli.fake_decoder import python
from tests.verifiers.test_hf import BLOCK
from tests.verifiers.weights.test_checkpoint import logits
from verifiers.config import recalled
from verifiers.config.wrappers import class_facts, shapes_of, wide_names
from verifiers.entries import PlainConfig, layer_windows
from verifiers.load import load_verifier

HEAVY = (
    "accelerate", "scipy", "sklearn", "sympy", "torch._dynamo", "torch._inductor",
    "torch.distributed.tensor", "torchvision", "transformers.conversion_mapping",
    "transformers.modeling_utils", "triton",
)  # fmt: skip
"""What Transformers' model code imports, and of itself."""

CLASSES = r"^transformers\.models\.(?!auto\.)\w+\.(configuration|modeling)_"


def load(folder: Path, **options: Any) -> tuple[Any, PreTrainedTokenizerBase]:
    return load_verifier(
        folder, device=torch.device("cpu"), dtype=torch.float32, block_size=BLOCK, **options
    )


def saved(name: str, folder: Path) -> Path:
    plain_model(name).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def is_recalled(folder: Path, **options: Any) -> bool:
    """Whether a load knew the target, and did without its class."""
    return isinstance(load(folder, **options)[0].config, PlainConfig)


def facts(verifier: Verifier) -> list[Any]:
    """What a verifier says of itself."""
    names = (
        "context", "length_rule", "max_model_len", "kv_specs", "windows", "vocab_size",
        "routed_experts", "eos_token_ids", "media_token_ids", "embedding_scale", "final_softcap",
    )  # fmt: skip
    return [getattr(verifier, name) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *LATENT_CONFIGS])
def test_every_family_is_the_same(name: str, tmp_path: Path) -> None:
    """To the bit, and in types in which some tensors are float32."""
    saved(name, tmp_path)
    (first, tokenizer), (second, known) = load(tmp_path), load(tmp_path)
    assert isinstance(second.config, PlainConfig) and not isinstance(first.config, PlainConfig)
    assert torch.equal(logits(first), logits(second))
    assert facts(first) == facts(second)
    configs = first.config, second.config
    for read in (shapes_of, class_facts, layer_windows):
        assert read(configs[0]) == read(configs[1])
    for dtype in (torch.bfloat16, torch.float16):
        assert wide_names(configs[0], dtype) == wide_names(configs[1], dtype)
    assert type(tokenizer) is type(known)
    assert configs[0].to_dict() == configs[1].to_dict()
    copies = [copy.deepcopy(config) for config in configs]
    assert type(copies[0]) is type(copies[1]) and shapes_of(copies[0]) == shapes_of(copies[1])
    assert tokenizer("ab c").input_ids == known("ab c").input_ids


@pytest.mark.parametrize("name", ["gemma3", "kimi_k25", "qwen3_5_moe"])
def test_so_is_the_text_part_of_a_composite(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_composites.save(tiny_composites.composite(name), tmp_path)
    with caplog.at_level(logging.WARNING):
        first, second = load(tmp_path)[0], load(tmp_path)[0]
    assert isinstance(second.config, PlainConfig)
    assert torch.equal(logits(first), logits(second)) and facts(first) == facts(second)
    said = [line for line in caplog.messages if "is taken as a text model" in line]
    assert len(said) == 2 and said[0] == said[1]


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("name", [*CASES])
def test_layers_for_prediction_are_found_again(name: str, tmp_path: Path) -> None:
    """Their shapes are those of a config that has been changed."""
    write_target(tmp_path, reference(name), CASES[name][0])
    first, second = load(tmp_path)[0], load(tmp_path)[0]
    assert isinstance(second.config, PlainConfig)
    hidden = torch.randn(len(TEXT) - 1, first.hidden_size)
    drafted = [ours(load_mtp(verifier=verifier), hidden) for verifier in (first, second)]
    assert torch.equal(*drafted)


CHANGES: dict[str, Callable[[Path], object]] = {
    "its config": lambda folder: change(folder / "config.json", rms_norm_eps=1e-3),
    "its tokenizer": lambda folder: change(folder / "tokenizer_config.json", unk_token="<pad>"),
    "a file more": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_checkpoint_is_looked_at_anew(what: str, tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    assert [is_recalled(tmp_path) for _ in range(2)] == [False, True]
    CHANGES[what](tmp_path)
    assert [is_recalled(tmp_path) for _ in range(2)] == [False, True]


def test_other_code_looks_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record that outlives a change of what reads configs, as in a checkout."""
    saved("qwen3", tmp_path)
    assert [is_recalled(tmp_path) for _ in range(2)] == [False, True]
    monkeypatch.setattr(recalled, "_of_code", lambda: [(1, 1)])
    assert [is_recalled(tmp_path) for _ in range(2)] == [False, True]
    monkeypatch.undo()
    files = recalled._of_code()
    assert len(files) == len(list(Path(verifiers.__file__).parent.rglob("*.py"))) > 50


def test_what_a_type_knows_nothing_of_stays_unread(tmp_path: Path) -> None:
    change(saved("llama", tmp_path) / "config.json", sliding_window=3)
    first, second = load(tmp_path)[0], load(tmp_path)[0]
    assert isinstance(second.config, PlainConfig)
    assert set(first.windows) == {None} and set(second.windows) == {None}


def test_what_is_no_record_is_made_again(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    load(tmp_path)
    (kept,) = (recalled.cache_folder() / "configs").iterdir()
    whole = kept.read_text()
    for text in ("", whole[:-20], "[]", "{}", json.dumps(json.loads(whole) | {"media": 3})):
        kept.write_text(text)
        assert [is_recalled(tmp_path) for _ in range(2)] == [False, True]
    assert kept.read_text() == whole


def test_nothing_needs_a_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise InvalidInputError("there is no such home")

    saved("qwen3", tmp_path)
    for place in (nowhere, lambda: tmp_path / "config.json"):
        monkeypatch.setattr(recalled, "cache_folder", place)
        assert not is_recalled(tmp_path) and not is_recalled(tmp_path)


def test_the_oldest_records_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalled, "MOST", 2)
    saved("qwen3", tmp_path)
    for epsilon in (1e-3, 1e-4, 1e-5):
        change(tmp_path / "config.json", rms_norm_eps=epsilon)
        assert not is_recalled(tmp_path)
    assert len(list((recalled.cache_folder() / "configs").iterdir())) == 2
    assert is_recalled(tmp_path)


def test_transformers_modules_are_asked_for_by_name(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    load(tmp_path)
    assert is_recalled(tmp_path) and not is_recalled(tmp_path, fuse=False)


def test_a_refused_target_is_refused_again(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(SpecDecError, match="no weights"):
            load(tmp_path)


STARTS = """
import os, re, sys
from specdec.cli.main import main
for start in {starts!r}:
    if "--model" not in start:
        os.environ["SPECDEC_CACHE"] = {own!r}  # the embedded model is where it was
    if code := main(start):
        sys.exit(code)
    heavy = [name for name in sys.modules if name in {heavy!r} or re.search({classes!r}, name)]
    if heavy:
        sys.exit(f"{{start}}: {{', '.join(heavy)}}")
"""


@pytest.mark.slow
def test_a_start_does_not_import_model_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To import it takes longer than the rest of a start, though our own layers run the model:
    the embedded one, that of a folder whose RoPE is stretched, one with a drafter, a GGUF file.
    """
    own, given = os.environ.get("SPECDEC_CACHE", ""), ["generate", "a", "--max-tokens", "2"]
    with monkeypatch.context() as before:
        before.setattr(recalled, "cache_folder", files.cache_folder)
        assert main(given) == 0  # the embedded model is known from here on
    capsys.readouterr()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recalled, "cache_folder", lambda: tmp_path / "cache")
    drafter = random_dflash(paged_verifier(plain_model("qwen3")), causal=(False, True, True))
    write_checkpoint(tmp_path / "drafter", drafter.config, drafter.model.state_dict())
    write_gguf(tmp_path / "m.gguf", plain_model("qwen2"), "qwen2", tokenizer=characters())
    latent, qwen = (saved(name, tmp_path / name) for name in ("deepseek_v3", "qwen3"))
    starts = [
        [*given, "--model", str(latent)],
        [*given, "--model", str(qwen), "--drafter", str(tmp_path / "drafter")],
        [*given, "--model", str(tmp_path / "m.gguf")],
    ]
    assert [main(start) for start in starts] == [0, 0, 0]
    first = capsys.readouterr().out
    program = STARTS.format(starts=[*starts, given], own=own, heavy=HEAVY, classes=CLASSES)
    known = python(program, env={**os.environ})
    assert known.returncode == 0, known.stderr
    assert known.stdout.startswith(first) and len(known.stdout) > len(first)
