"""RoPE's parameters from what a GGUF file says, and from frequencies that it holds as a tensor."""

import math

import numpy as np

from specdec.base.errors import CheckpointError
from verifiers.gguf.file import Entries, Facts

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How every Llama 3 stretches RoPE; a file has the frequencies' divisors instead."""


def rope(facts: Facts) -> Entries:
    """Parameters of RoPE, for all layers or for those with full attention."""
    found: Entries = {"rope_type": "default", "rope_theta": facts("rope.freq_base", 10000.0)}
    kind = facts("rope.scaling.type")
    factor = facts("rope.scaling.factor", facts("rope.scale_linear", 1.0))
    original = facts("rope.scaling.original_context_length")
    if facts.has("rope_freqs.weight"):
        return found | _divided(facts, numbers_of(facts, "rope_freqs.weight"))
    if facts.has("rope_factors_long.weight"):
        return found | {
            "rope_type": "longrope",
            "short_factor": numbers_of(facts, "rope_factors_short.weight"),
            "long_factor": numbers_of(facts, "rope_factors_long.weight"),
            "original_max_position_embeddings": original,
        }
    if kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor}
        found["original_max_position_embeddings"] = original
        named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        named["attention_factor"] = "yarn_attn_factor"
        more = {entry: facts(f"rope.scaling.{key}") for entry, key in named.items()}
        return found | {entry: value for entry, value in more.items() if value is not None}
    if factor not in (0, 1) and kind in (None, "linear"):
        return found | {"rope_type": "linear", "factor": factor}
    return found


def _divided(facts: Facts, divisors: list[float]) -> Entries:
    """RoPE whose frequencies are divided, one by one; Llama 3's has a name."""
    base, factor = facts("rope.freq_base", 10000.0), max(divisors)
    waves = 2 * math.pi * base ** (np.arange(len(divisors)) / len(divisors))
    ratio = LLAMA3["original_max_position_embeddings"] / waves
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = np.clip((ratio - low) / (high - low), 0, 1)
    if np.allclose(1 / ((1 - share) / factor + share), divisors, rtol=1e-5):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    named = {"short_factor": divisors, "long_factor": divisors}
    named["original_max_position_embeddings"] = facts.need("context_length")
    return {"rope_type": "longrope", "attention_factor": 1.0, **named}


def numbers_of(facts: Facts, name: str) -> list[float]:
    """The numbers of a small tensor in single precision.

    Raises:
        CheckpointError: it has another type.
    """
    stored = facts.files.stored(name)
    if stored.kind != 0:
        raise CheckpointError(f"{name!r} of {facts.name!r} is not of type F32; fetch it again")
    return [float(str(number)) for number in stored.blocks.reshape(-1).view(np.float32)]
