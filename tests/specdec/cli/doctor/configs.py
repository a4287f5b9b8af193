"""Config files of a target and a drafter, and the doctor's words about them."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main

GB = 10**9


QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip


DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def folder(
    path: Path, config: dict[str, Any], total_size: int | None = None, **changes: Any
) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    if total_size is not None:
        index = {"metadata": {"total_size": total_size}, "weight_map": {}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


def doctor(
    capsys: pytest.CaptureFixture[str], model: str, *options: str, status: int = 0
) -> dict[str, str]:
    """What it prints, by the word at the beginning of a line; further lines belong to the word
    above.
    """
    assert (
        main(
            [
                "doctor", "--device", "cpu", "--dtype", "bfloat16", "--gpu-memory", "192",
                "--model", model, *options,
            ]
        )
        == status
    )  # fmt: skip
    out = capsys.readouterr().out
    said: dict[str, str] = {}
    for line in out.splitlines():
        assert len(line) <= 132, line
        name = line[:14].strip()
        if name:
            said[name] = line[14:]
        else:
            last = next(reversed(said))
            said[last] += "\n" + line.strip()
    assert len(out.splitlines()) <= 20
    return said
