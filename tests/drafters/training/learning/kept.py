"""Served requests of a toy target, a drafter that has learned nothing, and a round with both."""

import json
from pathlib import Path
from typing import Any

from drafters.dflash.config.checkpoint import write_checkpoint
from drafters.dflash.tied import checkpoint_names
from drafters.training.config import TrainConfig
from drafters.training.shape import dflash_drafter
from specdec import EngineConfig, SpecDecoder
from tests.drafters.training.toy import toy_config

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "batch_size": 16, "anchors": 6, "bucket": 16, "heldout": 24,
    "max_steps": 40, "lr": 0.005, "loss": "dpace", "replay": 0.5,
}  # fmt: skip


def write_untrained(folder: Path, name: str = "untrained", **changes: Any) -> Path:
    """A drafter for the toy target in `folder`, with random weights."""
    config = toy_config(folder, **changes)
    decoder = SpecDecoder.from_pretrained(config.model, drafter=None, device="cpu")
    model = dflash_drafter(config, decoder.verifier, decoder.tokenizer)
    tensors = {own: model.state_dict()[key] for own, key in checkpoint_names(model).items()}
    write_checkpoint(folder / name, model.config, tensors)
    return folder / name


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    return [[4 + (seed + 7 * i) % 59, 4 + (seed + 11 * i) % 53, 4 + i % 47] for i in range(count)]


def write_kept(folder: Path, count: int, temperature: float = 0.0) -> Path:
    """As a server keeps them, the answers of the toy target in `folder`."""
    decoder = SpecDecoder.from_pretrained(
        folder / "target", drafter=None, device="cpu", engine=EngineConfig(max_num_seqs=32)
    )
    asked = prompts(count)
    answers = decoder.generate(asked, max_tokens=32, temperature=temperature, seed=3)
    kept = folder / f"kept-{temperature:g}"
    kept.mkdir()
    lines = [
        json.dumps(
            {
                "prompt_ids": prompt,
                "answer_ids": answer.token_ids,
                "temperature": temperature,
                "seed": 3,
            }
        )
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    (kept / "requests-00000000.jsonl").write_text("\n".join(lines) + "\n")
    return kept


def round_config(folder: Path, init: Path, kept: Path, **changes: Any) -> TrainConfig:
    about = {"out": str(folder / "round"), "init": str(init), "answers_from": (str(kept),)}
    return toy_config(folder, **{**OPTIONS, "prompts": (), **about, **changes})
