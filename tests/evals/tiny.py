"""A tiny target on disk and in memory, and reports measured with it in a moment."""

import json
from pathlib import Path
from typing import Any

import torch

from evals.bench.bench import Bench
from evals.bench.config import BenchConfig
from evals.prompt_sets import Item, PromptSet
from specdec.base.config import EngineConfig
from specdec.session.decoder import SpecDecoder
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer

PROMPTS = PromptSet(
    "tiny",
    "made up",
    (
        Item("a", ("abcabcabcabc",)),
        Item("b", ("What is 2 + 2?", "And 3 + 3?")),
        Item("c", ("one two one two one two",)),
    ),
)
PROVENANCE: dict[str, Any] = {
    "command": "specdec bench",
    "started": "2026-01-01T00:00:00+00:00",
    "commit": None,
    "versions": {"specdec": "0", "torch": "0", "transformers": "0"},
    "device": "a device",
    "num_threads": 1,
    "dtype": "float32",
    "attention": "torch_ref",
    "target": {"name": "tiny & small", "revision": None, "sha256": {"model.safetensors": "0" * 64}},
    "drafters": {},
}
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_decoder() -> SpecDecoder:
    """A random Llama with one token per character and a chat template."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return SpecDecoder(
        paged_verifier(plain_model("llama")),
        tokenizer,
        None,
        EngineConfig(num_draft_tokens=None, max_num_seqs=2, max_model_len=512),
    )


def save_tiny(folder: Path) -> Path:
    """The same as a folder that transformers can load."""
    plain_model("llama").save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def tiny_report(**options: Any) -> dict[str, Any]:
    """A complete bench report over two temperatures and two concurrencies."""
    settings: dict[str, Any] = {
        "sets": (PROMPTS,),
        "num_draft_tokens": (2, 4),
        "temperatures": (0.0, 1.0),
        "concurrencies": (1, 2),
        "max_tokens": 12,
        "repeats": 2,
    }
    *_, report = Bench(tiny_decoder(), BenchConfig(**settings | options)).run(PROVENANCE)
    return report


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
