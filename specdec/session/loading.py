"""A target as a `LoadConfig` describes it, read by this process alone or in parts by several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specdec.base.config import LoadConfig
from specdec.base.registry import VERIFIERS, resolve
from specdec.device.device import cache_dtype, resolve_device, resolve_dtype
from specdec.model.core import Verifier
from specdec.parallel.executor import Executor, current
from specdec.parallel.group import Group
from specdec.parallel.plain import on_ranks
from specdec.parallel.processes.launch import device_of_rank, open_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Loaded = tuple[Verifier, PreTrainedTokenizerBase]


@contextmanager
def load_target(
    target: str | Path, load: LoadConfig, where: torch.device
) -> Iterator[tuple[Verifier, PreTrainedTokenizerBase, Executor | None]]:
    """Gives a target, its tokenizer, and its ranks; an error within lets go of them.

    Args:
        target: see `SpecDecoder.from_pretrained`.
        where: what `load.device` stands for in a process alone.
    """
    if load.tensor_parallel is None or load.tensor_parallel == 1:
        yield *_load(target, load, where), None
        return
    ranks = open_ranks(load.tensor_parallel, where)
    ranks.hold()
    try:
        yield *ranks.run(_load_part, target, load), ranks
    except BaseException:
        ranks.let_go()
        raise


@on_ranks
def _load_part(target: str | Path, load: LoadConfig) -> Loaded:
    """This rank's part."""
    ranks = current()
    assert ranks is not None, "ranks have met before"
    where = device_of_rank(resolve_device(load.device), ranks.group.rank, ranks.group.size)
    verifier, tokenizer = _load(target, load, where, ranks.group)
    return ranks.keep(verifier), ranks.keep(tokenizer)


def _load(
    target: str | Path, load: LoadConfig, where: torch.device, group: Group | None = None
) -> Loaded:
    load_verifier = resolve(VERIFIERS, "hf", "verifier")
    dtype = load.dtype if load.weights == "as-stored" else load.weights
    loaded: Loaded = load_verifier(
        target,
        device=where,
        dtype=None if dtype == "auto" else resolve_dtype(dtype, where),
        attention=load.attention,
        block_size=load.block_size,
        cache_dtype=cache_dtype(load.kv_dtype, where),
        fp8_prefill=load.prefill_dtype == "auto",
        as_stored=load.weights == "as-stored",
        group=group,
        generation_config=load.generation_config,
    )
    return loaded
