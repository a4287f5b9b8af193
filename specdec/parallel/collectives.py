"""What the ranks of a group exchange on their devices. Every function is called by all ranks, in the same order."""

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.parallel.group import Group

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


def all_reduce(x: Tensor, group: Group | None) -> Tensor:
    """The sum of every rank's `x` [...], of the same shape; all ranks get the same bits.

    `x` itself may be overwritten.
    """
    if group is None:
        return x
    if group.ordered:
        return _in_order(x, group)
    dist.all_reduce(x, group=group.device_group)
    return x


def gather_last(x: Tensor, group: Group | None, width: int) -> Tensor:
    """Every rank's `x` [..., w] side by side in the order of ranks, of which the first numbers [..., width]."""
    if group is None:
        return x
    parts = _gathered(x, group)
    whole = torch.cat(parts.unbind(0), dim=-1)
    return whole if whole.shape[-1] == width else whole[..., :width].contiguous()


def broadcast(x: Tensor, group: Group | None) -> Tensor:
    """`x` [...] as rank 0 has it, written over every rank's own."""
    if group is not None:
        dist.broadcast(x, group_src=0, group=group.device_group)
    return x


def all_agree(flag: bool, group: Group | None) -> bool:
    """Whether all ranks say so; the hosts exchange it."""
    if group is None:
        return flag
    return bool(least(int(flag), group))


def least(number: int, group: Group | None) -> int:
    """The smallest of all ranks' numbers; the hosts exchange it."""
    if group is None:
        return number
    said = torch.tensor(number)
    dist.all_reduce(said, dist.ReduceOp.MIN, group=group.host_group)
    return int(said)


def _in_order(x: Tensor, group: Group) -> Tensor:
    """The sum with rank 0's first, each step rounded to the type of `x`."""
    first, *others = _gathered(x, group).unbind(0)
    total = first.clone()
    for other in others:
        total += other
    return total


def _gathered(x: Tensor, group: Group) -> Tensor:
    """[size, ...] of every rank's `x`."""
    parts = x.new_empty(group.size * x.numel())  # flat, as gloo wants it
    _all_gather(parts, x.contiguous().view(-1), group=group.device_group)
    return parts.view(group.size, *x.shape)
