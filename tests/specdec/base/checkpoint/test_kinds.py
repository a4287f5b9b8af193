"""Checkpoints that are something else than what was asked for, as target and as drafter: one line
says what they are.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.convert import convert
from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.eagle3.checkpoint import read_checkpoint as read_head
from drafters.fit import read_fit
from drafters.load import load_drafter
from specdec import SpecDecoder
from specdec.base.errors import SpecDecError
from specdec.model.core import Verifier
from tests.drafters.eagle3.heads import SGLANG, SPECULATORS, write_head
from tests.drafters.tiny import TINY, write_tiny_dflash
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from verifiers.load import load_verifier
from verifiers.needs import read_needs

BASE = "owner/base"
SHAPE: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


def model(folder: Path, name: str = "llama") -> Path:
    plain_model(name).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> Verifier:
    verifier: Verifier = load_verifier(folder, **SHAPE)[0]
    return verifier


def entries(folder: Path, change: Mapping[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return folder


def repacked(folder: Path) -> Path:
    """The same weights, pickled."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def adapter(folder: Path) -> Path:
    """An adapter's files, beside whatever is there."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": BASE}))
    save_file({"lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    return folder


def test_pickled_drafters(tmp_path: Path) -> None:
    """Every algorithm's checkpoint reads as from safetensors, and other layouts are made of it."""
    dflash = replace(TINY, vocab_size=97)
    for folder, read in (
        (write_tiny_dflash(tmp_path / "dflash", dflash), read_checkpoint),
        (write_head(tmp_path / "sglang", SGLANG), read_head),
        (write_head(tmp_path / "speculators", SPECULATORS), read_head),
    ):
        config, tensors = read(folder)
        found, read_back = read(repacked(folder))
        assert found == config and all(
            torch.equal(read_back[name], tensor) for name, tensor in tensors.items()
        )
    convert(tmp_path / "dflash", tmp_path / "converted", "speculators")


def test_a_pickled_target_and_draft_model(tmp_path: Path) -> None:
    """On our own layers, which say nothing; a model of transformers' modules whose file has an odd
    name is found, too.
    """
    plain, target = load(model(tmp_path / "a")), tmp_path / "a"
    assert plain.vocab_size == load(repacked(target)).vocab_size
    decoder = SpecDecoder.from_pretrained(target, drafter=target, device="cpu", dtype="float32")
    result = decoder.generate([5, 6, 7], max_tokens=8, ignore_eos=True)
    assert sum(result.stats.num_accepted) > 0
    (target / "pytorch_model.bin").rename(target / "odd.bin")
    other, _ = load_verifier(target, fuse=False, **SHAPE)
    assert type(other).__name__ == "HFVerifier"


def with_config(folder: Path) -> Path:
    adapter(model(folder))
    (folder / "model.safetensors").unlink()
    return folder


def folder_of(*files: str) -> Callable[[Path], Path]:
    """Makes a folder of empty files."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        return folder

    return make


MLX = {
    "quantization": {"bits": 4, "group_size": 64},
    "quantization_config": {"bits": 4, "group_size": 64},
}
KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "adapter": (adapter, rf"is an adapter \(LoRA or the like\) and no model; merge it into {BASE}"),
    "adapter with a config": (
        with_config,
        rf"is an adapter \(LoRA or the like\) and no model; merge it into {BASE}",
    ),
    "MLX": (
        lambda p: entries(model(p), MLX),
        r"is quantized by MLX \(config\.json has quantization\), which is not read",
    ),
    "nothing": (
        folder_of(),
        r"has no config\.json; give a checkpoint in the layout of transformers",
    ),
    "GGUF": (folder_of("m.gguf"), r"cannot read 'm\.gguf' \(cannot mmap an empty file\)"),
    "GGUF file": (lambda p: folder_of("m.gguf")(p) / "m.gguf", r"cannot read 'm\.gguf' "),
    "GGUF files": (
        folder_of("a.gguf", "b.gguf"),
        r"holds 2 GGUF files; name one of them, such as '.*a\.gguf'",
    ),
    "no file": (
        lambda p: p / "m.gguf",
        r"is no file; check the path, or name one on the hub as owner/name:file\.gguf",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_checkpoint(kind: str, tmp_path: Path) -> None:
    """By target and by drafter, when loaded and when asked about beforehand."""
    make, said = KINDS[kind]
    target, folder = load(model(tmp_path / "target")), make(tmp_path / "other")
    asks: list[tuple[str, Callable[[], object]]] = [
        ("target", lambda: load_verifier(str(folder), **SHAPE)),
        ("drafter", lambda: load_drafter(str(folder), verifier=target)),
        ("target", lambda: read_needs(str(folder), **SHAPE, gpu_bytes=2**40)),
        ("drafter", lambda: read_fit(str(folder), target)),
    ]
    for what, ask in asks[:2] if kind == "adapter with a config" else asks:
        with pytest.raises(SpecDecError, match=said) as caught:
            ask()
        message = str(caught.value)
        calls = ("draft model", "drafter") if what == "drafter" else (what,)
        assert (
            message.startswith(tuple(f"{call} {str(folder)!r}" for call in calls))
            and "\n" not in message
        )


def test_an_adapter_beside_weights_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each checkpoint; the model is that of the weights, whoever reads them."""
    folder, head = (
        adapter(model(tmp_path / "target")),
        adapter(write_head(tmp_path / "head", SGLANG)),
    )
    target = load(folder)
    load_drafter(head, verifier=target)
    load_drafter(folder, verifier=target)
    for found in (folder, head):
        read_fit(str(found), target)
    load_verifier(folder, fuse=False, **SHAPE)
    said = [line for line in map(logging.LogRecord.getMessage, caplog.records) if "adapter" in line]
    assert [line.split(" has ")[0] for line in said] == [
        repr(str(one)) for one in (folder, head, folder, folder, head, folder)
    ]
    assert all("which is not applied; merge it into the weights" in line for line in said)


DRAFTERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "speculators": (
        lambda p: write_tiny_dflash(
            p, replace(TINY, verifier_name="some/target"), layout="speculators"
        ),
        r"\(dflash\); give it as --drafter, beside its target, some/target",
    ),
    "z-lab": (
        lambda p: write_tiny_dflash(p),
        r"\(dflash\); give it as --drafter, beside its target, which its card names",
    ),
    "sglang": (lambda p: write_head(p, SGLANG), r"\(eagle3\); give it as --drafter, beside"),
    "SafeAILab": (
        lambda p: entries(write_head(p, SGLANG), {"architectures": ["LlamaForCausalLM"]}),
        r"\(eagle3\); give it as",
    ),
    "EAGLE-3 of speculators": (
        lambda p: write_head(p, SPECULATORS),
        r"\(eagle3\); give it as --drafter",
    ),
    "unknown of speculators": (
        lambda p: entries(write_head(p, SPECULATORS), {"speculators_model_type": "new"}),
        r"\(new\); give it as",
    ),
}


@pytest.mark.parametrize("layout", DRAFTERS)
def test_a_drafter_as_target(layout: str, tmp_path: Path) -> None:
    """In every layout, where it is loaded and where it is asked about."""
    make, said = DRAFTERS[layout]
    folder = make(tmp_path / "drafter")
    asks: tuple[Callable[[], object], ...] = (
        lambda: load_verifier(str(folder), **SHAPE),
        lambda: read_needs(str(folder), **SHAPE, gpu_bytes=2**40),
    )
    for ask in asks:
        with pytest.raises(SpecDecError, match=f"is no target but a drafter {said}") as caught:
            ask()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_targets_are_no_drafters(name: str, tmp_path: Path) -> None:
    load(model(tmp_path / "target", name))


def test_a_draft_model_without_a_tokenizer(tmp_path: Path) -> None:
    """Is not called a target."""
    target, draft = model(tmp_path / "target"), tmp_path / "draft"
    plain_model("llama").save_pretrained(draft)
    with pytest.raises(SpecDecError, match=f"cannot read the tokenizer of draft model '{draft}'"):
        SpecDecoder.from_pretrained(target, drafter=draft, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.bfloat16"},
        {"torch_dtype": "torch.float16"},
        {"dtype": "auto"},
        {"torch_dtype": "auto"},
    ],
)
def test_names_of_types(change: dict[str, str], tmp_path: Path) -> None:
    """As some exporters write them, for a target and for a quantized drafter."""
    folder = entries(model(tmp_path / "target"), {"dtype": None} | change)
    assert load(folder).num_layers and read_needs(str(folder), **SHAPE, gpu_bytes=2**40).would_run
    entries(folder, change | {"dtype": "banana"})
    with pytest.raises(
        SpecDecError,
        match="dtype is 'banana', which is no type of numbers; write one such as bfloat16",
    ):
        load(folder)


def test_the_chat_template_of_a_processor(tmp_path: Path) -> None:
    """Where the tokenizer has none of its own."""
    folder = model(tmp_path / "target")
    template = folder / "chat_template.json"
    template.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert (
        load_verifier(folder, **SHAPE)[1].apply_chat_template([{"content": "ab"}], tokenize=False)
        == "ab!"
    )
    (folder / "chat_template.jinja").write_text("own")
    assert (
        load_verifier(folder, **SHAPE)[1].apply_chat_template([{"content": "ab"}], tokenize=False)
        == "own"
    )
    (folder / "chat_template.jinja").unlink()
    template.write_text("[")
    with pytest.raises(SpecDecError, match=r"chat_template\.json of target .* is not valid JSON"):
        load(folder)
