"""Files of strangers: any value at any entry, as loading and `doctor` read it, in one line or with
the very same text.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.fit import read_fit
from drafters.load import load_drafter
from specdec import SpecDecoder
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CheckpointError, SpecDecError
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import SGLANG, SPECULATORS, write_head
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from verifiers import load, needs
from verifiers.load import load_verifier
from verifiers.needs import read_needs

CPU, FLOAT = torch.device("cpu"), torch.float32
ENGINE = EngineConfig(max_num_seqs=1, cache=CacheConfig(memory_bytes=2**20))
PROMPT = list(range(3, 23))
VALUES: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, math.nan, "x", [[2]], {"a": 1})

FILES: dict[str, tuple[str, ...]] = {
    "config.json": (
        "layer_types", "quantization_config", "text_config", "is_causal", "rope_scaling",
        "num_experts", "auto_map",
    ),
    "generation_config.json": (
        "temperature", "top_k", "repetition_penalty", "min_length", "suppress_tokens", "do_sample",
    ),
    "tokenizer_config.json": (
        "chat_template", "added_tokens_decoder", "auto_map", "model_max_length",
        "extra_special_tokens",
    ),
}  # fmt: skip
"""Of a target, with entries that they might have besides."""

TELLING = {"sliding_window", "rope_parameters.rope_theta", "repetition_penalty"}
"""Entries of which another sound value makes another text."""


def written(folder: Path, source: Path, file: str, content: Any) -> Path:
    """A checkpoint as in `source` with another file."""
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path)
    (folder / file).unlink(missing_ok=True)
    (folder / file).write_text(json.dumps(content))
    return folder


def changed(entries: dict[str, Any], *further: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """With every other value at each entry, at any depth; neighbors have the others."""
    for number, name in enumerate(dict.fromkeys((*entries, *further))):
        yield from ((name, {**entries, name: value}) for value in VALUES[number % 2 :: 2])
        if isinstance(entries.get(name), dict):
            yield from (
                (f"{name}.{inner}", {**entries, name: object_})
                for inner, object_ in changed(entries[name])
            )


def refused(error: SpecDecError) -> str:
    """What is said, which is one line that can be read."""
    assert "\n" not in str(error) and 20 < len(str(error)) < 900, error
    return str(error)


def answer(decoder: SpecDecoder) -> list[int]:
    result = decoder.generate(PROMPT, SamplingParams(max_tokens=4))
    return result.token_ids


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    plain_model("mistral").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path) -> tuple[Verifier, Any]:
    return load_verifier(str(folder), device=CPU, dtype=FLOAT)


@pytest.mark.parametrize("file", FILES)
def test_a_target(file: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, needs):
        # which takes a while, and has a test of its own
        monkeypatch.setattr(module, "blamed", lambda *_: "")
    monkeypatch.setattr(needs, "divisions", lambda *_, **__: {1: 1})
    expected, lines = answer(SpecDecoder(*loaded(target), None, ENGINE)), 0
    for name, entries in changed(json.loads((target / file).read_text()), *FILES[file]):
        folder, would_run = written(tmp_path / "changed", target, file, entries), True
        try:
            would_run = read_needs(str(folder), device=CPU, dtype=FLOAT, gpu_bytes=10**9).would_run
        except SpecDecError as error:
            would_run = not refused(error)
        try:
            found = answer(SpecDecoder(*loaded(folder), None, ENGINE))
        except SpecDecError as error:
            lines += len(refused(error)) > 0
            assert not would_run or file == "config.json", (
                f"{name}: doctor takes what loading refuses"
            )
        else:
            assert would_run, f"{name}: loading takes what doctor refuses"
            assert found == expected or name in TELLING, f"{name} {entries}"
    assert lines > 10, "so many cannot be read"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_small_tensors_of_a_target_are_finite(value: float, target: Path, tmp_path: Path) -> None:
    """As a bias that chooses experts, which would choose others without a word."""
    folder = written(
        tmp_path / "changed",
        target,
        "config.json",
        json.loads((target / "config.json").read_text()),
    )
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' holds NaN or infinite numbers"):
        loaded(folder)


@pytest.fixture(scope="module")
def verifier(target: Path) -> Verifier:
    return loaded(target)[0]


@pytest.mark.parametrize("kind", ["z-lab", "sglang", "speculators"])
def test_a_drafter(kind: str, target: Path, verifier: Verifier, tmp_path: Path) -> None:
    source, lines = tmp_path / "drafter", 0
    if kind == "z-lab":
        drafter = random_dflash(paged_verifier(plain_model("mistral")), causal=(False, True, True))
        write_checkpoint(source, drafter.config, drafter.model.state_dict())
    else:
        write_head(source, SGLANG if kind == "sglang" else SPECULATORS)
    shape = read_needs(str(target), device=CPU, dtype=FLOAT, gpu_bytes=10**9)
    expected = answer(SpecDecoder(verifier, tiny_tokenizer(), None, ENGINE))
    for name, entries in changed(
        json.loads((source / "config.json").read_text()), "rope_scaling", "layer_types", "license"
    ):
        folder = written(tmp_path / "changed", source, "config.json", entries)
        try:
            problems = read_fit(str(folder), shape).problems
        except SpecDecError as error:
            problems = (refused(error),)
        try:
            found = answer(
                SpecDecoder(
                    verifier, tiny_tokenizer(), load_drafter(folder, verifier=verifier), ENGINE
                )
            )
        except SpecDecError as error:
            lines += len(refused(error)) > 0
        else:
            assert not problems, f"{name}: loading takes what doctor refuses"
            assert found == expected, f"{name} {entries}"
    assert lines > 10, "so many cannot be read"
