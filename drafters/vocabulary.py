"""A reduced vocabulary of drafts: the map from its tokens to the target's."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from drafters.keys import require

logger = logging.getLogger(__name__)


def target_ids(d2t: Tensor) -> Tensor:
    """Target token of every draft token, int64 [draft_vocab_size], from the offsets `d2t`."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()


def drafted(d2t: Tensor, vocab_size: int) -> Tensor:
    """bool [vocab_size], the target's tokens that can be drafted: `t2d` of checkpoints."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, target_ids(d2t), True)


def check_marks(d2t: Tensor, t2d: Tensor) -> None:
    """Whether a map leads to the tokens that `t2d` [vocab_size] marks; says where it does not.

    Raises:
        CheckpointError: it holds these tokens themselves in place of offsets.
    """
    marked = t2d.flatten().nonzero().flatten()
    if marked.equal(target_ids(d2t.flatten()).sort().values):
        return
    require(
        not marked.equal(d2t.flatten().long().sort().values),
        "d2t holds the target's tokens themselves, as t2d marks them; it must hold what they lie"
        " above 0, 1, 2, ..., so subtract these",
    )
    logger.warning(
        "the drafter's d2t leads to other tokens than its t2d marks; d2t is taken, and drafts will"
        " rarely be accepted if that is the wrong one"
    )


def without_full_map(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A full vocabulary's tensors, without the map that they may bring, which changes nothing.

    Raises:
        CheckpointError: the map reorders tokens.
    """
    offsets = tensors.get("d2t")
    valid = offsets is None or not offsets.any()
    require(valid, "d2t reorders a full vocabulary, which is not supported")
    return {name: tensor for name, tensor in tensors.items() if name != "d2t"}


def check_map(tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """Refuses a `d2t` that does not lead to tokens of the target, each to another, or that is no
    integers: floats are rounded, by who wrote them or where they are cast like weights.

    Raises:
        CheckpointError: it does not.
    """
    offsets = tensors["d2t"]
    valid = offsets.dtype in (torch.int16, torch.int32, torch.int64)
    require(valid, f"tensor d2t is {offsets.dtype}; it must hold integers that reach all tokens")
    targets = target_ids(offsets)
    within = bool(((targets >= 0) & (targets < vocab_size)).all())
    inside = within and targets.unique().numel() == targets.numel()
    what = f"d2t does not map {len(targets)} draft tokens to distinct tokens below {vocab_size}"
    require(inside, what)
