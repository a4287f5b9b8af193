"""One rank's part of a DFlash drafter: which slices of its tensors, and when a division pays.

Layers are divided as a target's are: attention by heads, feed-forward sublayers by the numbers
between their two products. The projection of the taps and an own output head are divided by their
outputs. All else is the same on every rank: norms, convolutions, and the heads that correct drafts.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.model import DFlashModel
from specdec.base.errors import InvalidInputError
from specdec.base.registry import PARTS, resolve
from specdec.layers.linear import Linear
from specdec.layers.sharded import GatheredLinear
from specdec.parallel.group import Group

logger = logging.getLogger(__name__)

BANDWIDTH = 3e12
"""Bytes per second that a GPU of a group is taken to read."""

EXCHANGE_SECONDS = 7e-6
"""How long the ranks are taken to exchange the rows of a step once."""

_CALLED = {
    "k_proj_target": "k_proj",
    "v_proj_target": "v_proj",
    "attention_sink_bias": "sinks",
    "fc.weight": "mlp.up_proj.weight",  # by outputs
}
"""What a target calls a tensor that is divided alike."""


def pays(whole: int, own: int, exchanges: int) -> bool:
    """Whether a step is faster with a part of the weights on each rank.

    Args:
        whole: bytes that every rank reads otherwise.
        own: bytes that one rank reads of them when they are divided.
        exchanges: sums over the ranks, and rows put side by side, that this takes.

    >>> pays(400 * 10**6, 100 * 10**6, 10), pays(200 * 10**6, 50 * 10**6, 10)
    (True, False)
    """
    return (whole - own) / BANDWIDTH > exchanges * EXCHANGE_SECONDS


def undivided(config: DFlashConfig, ranks: int) -> str | None:
    """What of a drafter so many ranks do not divide, in words; None where they divide all. Several
    may have the same key and value head.
    """
    keys = config.num_attention_heads if config.latent else config.num_key_value_heads
    counts = {
        "attention heads": config.num_attention_heads,
        "key and value heads": ranks if ranks % keys == 0 else keys,
        "numbers between the products of feed-forward sublayers": config.intermediate_size,
    }
    found = (f"{count} {what}" for what, count in counts.items() if count % ranks)
    return next(found, None)


def divide(
    model: DFlashModel, group: Group | None, dtype: torch.dtype, wanted: bool | None
) -> Group | None:
    """Leaves this rank's part of a drafter in its model, in place, with a config of so many heads.

    Args:
        model: whole.
        group: the target's ranks.
        dtype: in which weights are read.
        wanted: divides it, or leaves it whole; None chooses what is faster, and leaves whole what
            the ranks do not divide.

    Returns:
        The group, or None where the model stays whole.

    Raises:
        InvalidInputError: a division is wanted, and the ranks do not divide the drafter.
    """
    config = model.config
    if group is None or wanted is False:
        return None
    reason = undivided(config, group.size)
    if reason is not None:
        if wanted:
            what = f"the drafter has {reason}, which {group.size} ranks do not divide"
            raise InvalidInputError(f"{what}; leave it whole")
        return None
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads if config.latent is None else heads
    shard = resolve(PARTS, "shard", "part")(group, name="drafter", heads=heads, kv_heads=kv_heads)
    layers = [name for name, _ in model.named_parameters() if name.startswith("layers.")]
    if not (wanted or _pays(model, shard, layers, 2 * len(model.layers), dtype)):
        return None
    others = {"fc.weight": model.fc, "lm_head.weight": model.lm_head}
    for name, module in others.items():
        even = name != "fc.weight" or config.hidden_size % group.size == 0
        if module is not None and even and (wanted or _pays(model, shard, [name], 1, dtype)):
            layers.append(name)
    _keep_part(model, shard, layers)
    model.config = replace(
        config,
        num_attention_heads=heads // group.size,
        num_key_value_heads=max(kv_heads // group.size, 1),
        intermediate_size=config.intermediate_size // group.size,
    )
    logger.info("%d ranks have parts of the drafter", group.size)
    return group


def gathered(part: Linear, group: Group | None, width: int) -> Linear:
    """A projection to `width` numbers, of which `part` may have a rank's."""
    if group is None or part.out_features == width:
        return part
    return GatheredLinear(part, group, width)


def _pays(
    model: DFlashModel, shard: Any, names: list[str], exchanges: int, dtype: torch.dtype
) -> bool:
    shapes: Mapping[str, Tensor] = dict(model.named_parameters())
    whole = sum(shapes[name].numel() for name in names)
    own = sum(prod(shard.shape(_called(name), shapes[name].shape)) for name in names)
    return pays(whole * dtype.itemsize, own * dtype.itemsize, exchanges)


@torch.no_grad()
def _keep_part(model: DFlashModel, shard: Any, names: list[str]) -> None:
    tensors = dict(model.named_parameters())
    for name in names:
        tensors[name].data = shard.part(_called(name), tensors[name].data)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _called(name: str) -> str:
    for ours, theirs in _CALLED.items():
        name = name.replace(ours, theirs)
    return name
