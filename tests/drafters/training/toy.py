"""A toy target on disk, whose answers a drafter can learn in seconds, and prompts for it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from drafters.training.config import TrainConfig
from tests.helpers.tiny_configs import CONFIGS

VOCAB = 64
MASK = VOCAB - 1  # the only special token without a part of its own
SPECIAL = ["<bos>", "<eos>", "<pad>", "<unk>"]
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 3, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def write_target(
    folder: Path, *, family: Literal["llama", "deepseek_v3", "qwen3_5"] = "llama"
) -> Path:
    """A model of 6 layers that continues almost every word with a fixed one, and never says a
    special token.

    A DeepSeek-V3 has latent attention and experts; a Qwen3.5 has recurrent layers, and 4 in all.
    """
    torch.manual_seed(0)
    words = {
        word: i
        for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(4, MASK)), "<reserved>"])
    }
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([*SPECIAL, "<reserved>"])
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=raw, **names).save_pretrained(folder)
    values: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.05,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    heads: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
    configs: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: LlamaConfig(**values, **heads),
        "deepseek_v3": lambda: DeepseekV3Config(**values, **LATENT),
        "qwen3_5": lambda: CONFIGS["qwen3_5"](**values | heads | {"num_hidden_layers": 4}),
    }
    model = AutoModelForCausalLM.from_config(configs[family]())
    with torch.no_grad():
        model.lm_head.weight[[0, 1, 2, 3, MASK]] = 0
    model.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int = 300, seed: int = 0) -> Path:
    """Lines of 2 to 7 random words."""
    source = random.Random(seed)
    lines = (
        " ".join(f"w{source.randrange(4, MASK)}" for _ in range(source.randrange(2, 8)))
        for _ in range(count)
    )
    path.write_text("\n".join(lines))
    return path


def toy_config(folder: Path, **changes: Any) -> TrainConfig:
    """A run in `folder / "run"`; the target and the prompts are made on first use."""
    if not (folder / "target").exists():
        write_target(folder / "target")
        write_prompts(folder / "prompts.txt")
    values: dict[str, Any] = {
        "out": str(folder / "run"),
        "model": str(folder / "target"),
        "device": "cpu",
        "dtype": "float32",
        "prompts": (str(folder / "prompts.txt"),),
        "max_tokens": 48,
        "heldout": 8,
        "heldout_temperature": 0.05,  # at 1 it says nearly anything, the mask included
        "shard_size": 100,
        "layers": 2,
        "block_size": 8,
        "batch_size": 16,
        "anchors": 6,
        "max_steps": 60,
        "lr": 0.005,
        "bucket": 16,
        "log_every": 10,
    }
    return TrainConfig(**values | changes)


def as_flags(config: TrainConfig) -> list[str]:
    """The command line of a configuration."""
    default = TrainConfig()
    flags = []
    for name in TrainConfig.__dataclass_fields__:
        value = getattr(config, name)
        if value != getattr(default, name):
            flags += [
                "--" + name.replace("_", "-"),
                *(map(str, value) if isinstance(value, tuple) else [str(value)]),
            ]
    return flags
