"""What the ranks of a group exchange on their devices. Every function is called by all ranks, in
the same order.

Nothing here reads a value on the host, so a forward with them can be captured in a graph;
`all_agree` and `least` are for hosts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.parallel.group import Group
from specdec.parallel.ordered import gathered, sum_in_order


def all_reduce(x: Tensor, group: Group | None) -> Tensor:
    """The sum of every rank's `x` [...], of the same shape; all ranks get the same bits.

    `x` itself may be overwritten.
    """
    if group is None or not group.takes_part:
        return x
    if group.one_shot is not None and group.one_shot.takes(x):
        return group.one_shot(x)
    if group.ordered:
        return sum_in_order(x, group.size, group.device_group)
    dist.all_reduce(x, group=group.device_group)
    return x


def summed(part: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """[T, H] in that type: the sum over the ranks of [T, H], or of [parts, T, H], which are added
    up before they are rounded.
    """
    return all_reduce((part.sum(0) if part.ndim == 3 else part).to(dtype), group)


def gather_last(x: Tensor, group: Group | None, width: int) -> Tensor:
    """Every rank's `x` [..., w] side by side in the order of ranks, of which the first numbers
    [..., width].
    """
    if group is None:
        return x
    parts = (
        gathered(x, group.size, group.device_group).unbind(0)
        if group.takes_part
        else [x] * group.size
    )
    whole = torch.cat(parts, dim=-1)
    return whole if whole.shape[-1] == width else whole[..., :width].contiguous()


def broadcast(x: Tensor, group: Group | None) -> Tensor:
    """`x` [...] as rank 0 has it, written over every rank's own."""
    if group is not None and group.takes_part:
        dist.broadcast(x, group_src=0, group=group.device_group)
    return x


def all_agree(flag: bool, group: Group | None) -> bool:
    """Whether all ranks say so; the hosts exchange it."""
    if group is None:
        return flag
    return bool(least(int(flag), group))


def least(number: int, group: Group | None) -> int:
    """The smallest of all ranks' numbers; the hosts exchange it."""
    return number if group is None else group.least(number)
