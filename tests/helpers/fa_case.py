"""AITER's backends of ordinary heads on a pretended ROCm machine, and tiny targets on them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.backend import AttentionBackend
from specdec.model.core import Verifier
from tests.helpers.aiter_emulation import Machine
from tests.helpers.attention_case import Case, spec
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import paged_verifier

BACKENDS: dict[str, type[RocmAiterFaBackend]] = {
    "plain": RocmAiterFaBackend,
    "shuffle": RocmAiterFaShuffleBackend,
}


SHAPES: dict[str, tuple[list[int], list[int], bool]] = {
    "single": ([40, 1, 33, 16], [1, 1, 1, 1], True),
    "block": ([40, 5, 33, 21], [5, 5, 5, 5], True),
    "prefill": ([17, 1, 33], [17, 1, 33], False),
    "extend": ([40, 23, 33], [3, 2, 17], False),
    "mixed": ([40, 17, 35, 33, 50], [3, 17, 1, 33, 20], False),
}
"""Lengths, rows, and whether only the device knows them."""


def replace_head_dim(config: PreTrainedConfig, head_dim: int = 64) -> PreTrainedConfig:
    """The same with heads wide enough for the paged kernels."""
    config.head_dim, config.tie_word_embeddings = head_dim, False
    return config


def model_of(name: str, head_dim: int = 64) -> PreTrainedModel:
    """A tiny random model."""
    torch.manual_seed(0)
    config = replace_head_dim(CONFIGS[name](), head_dim)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    return model


def on(backend: type[AttentionBackend], model: PreTrainedModel, **changes: Any) -> Verifier:
    """The same target on another backend."""
    return paged_verifier(model, 16, backend=lambda asked: backend(replace(asked, **changes)))


def case_of(shape: str, *, causal: bool = True, **changes: Any) -> Case:
    """Requests of one shape of `SHAPES`."""
    lengths, widths, uniform = SHAPES[shape]
    return Case(spec(**changes), lengths, widths, uniform=uniform, causal=causal)


def spied(backend: RocmAiterFaBackend, name: str) -> list[dict[str, Any]]:
    """The arguments of every call of one of AITER's functions from now on."""
    seen: list[dict[str, Any]] = []
    ops = backend._setup.ops
    inner: Callable[..., Any] = getattr(ops, name)

    def spy(**arguments: Any) -> Any:
        seen.append(arguments)
        return inner(**arguments)

    backend._setup = replace(backend._setup, ops=replace(ops, **{name: spy}))
    return seen


def assert_right(case: Case, backend: RocmAiterFaBackend, **how: Any) -> None:
    """The backend's output is as exact as the definition."""
    case.check(case.attend(backend, **how), **how)


def added(machine: Machine) -> float:
    """What the paged kernels, if one was called, add to the denominator."""
    return 1e-6 if machine.names() & {"paged_attention_v1", "paged_attention_rocm"} else 0.0
