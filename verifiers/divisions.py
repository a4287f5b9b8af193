"""Among how many ranks a target can be divided, and what each has of it, told from its config."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from specdec.attention.selector import refusals
from specdec.base.config import DEFAULT_BLOCK_SIZE
from specdec.base.errors import UnsupportedModelError
from specdec.parallel.group import Group
from verifiers.config.families import describe
from verifiers.config.shape import backend_spec
from verifiers.config.wrappers import shapes_of
from verifiers.formats.method import format_of
from verifiers.sizes import packed_names
from verifiers.weights.shards import Shard, sharded

RANKS = (2, 3, 4, 5, 6, 7, 8, 16)
"""GPUs that a machine may have."""


def divisions(
    config: Any,
    quantization: Mapping[str, Any] | None,
    weights: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    packed: bool,
) -> dict[int, int]:
    """Bytes of a rank's weights, by the number of ranks, one included, that divide the target.

    Args:
        config: of the text model, which our own layers run.
        quantization: how the file has its weights; None for plain numbers.
        weights: bytes of all of them in memory.
        device, dtype: where they would run, and in which type.
        packed: quantized weights stay as they are.
    """
    shapes = shapes_of(config)
    whole = sum(map(prod, shapes.values()))
    form = format_of(quantization) if packed and quantization is not None else None
    narrow = set() if form is None or form.group is None else set(packed_names(shapes, form))
    found = {1: weights}
    for count in RANKS:
        shard = _shard(config, count)
        if shard is None:
            continue
        local, block_size = sharded(config, shard.group), DEFAULT_BLOCK_SIZE
        spec = backend_spec(local, device=device, dtype=dtype, block_size=block_size)
        if all(refusals(spec).values()):
            continue
        try:
            for name in narrow:
                shard.check_groups(name, shapes[name], (form and form.group) or 1)
            own = sum(prod(shard.shape(name, shape)) for name, shape in shapes.items())
        except UnsupportedModelError:
            continue
        found[count] = weights * own // whole
    return found


def _shard(config: Any, count: int) -> Shard | None:
    group = Group(rank=0, size=count, device_group=None, host_group=None)
    try:
        description = describe(sharded(config, group))
        return None if description is None else Shard(config, description, group, name="")
    except UnsupportedModelError:
        return None
