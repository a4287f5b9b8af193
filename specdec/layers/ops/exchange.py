"""Sums over ranks within the norms that follow them: whether a group's GPUs can, and rightly."""

import torch
from torch import Tensor

from specdec.parallel.collectives import all_reduce
from specdec.parallel.consent import made_by_all
from specdec.parallel.group import Group
from specdec.parallel.shared_rows import SharedRows

MAX_TRIES = 10_000_000
"""Looks of the check at another rank's flag, some ten seconds of them: what does not work is not to
hang.
"""


def shared_rows(
    group: Group | None, width: int, device: torch.device, dtype: torch.dtype
) -> SharedRows | None:
    """Memory for the sums of a group's rows, once all ranks have agreed with the reference; None
    where there is none. All layers of a width have one, since their sums come one after another.

    Where small sums in one kernel do not work, this does not either; a line of the log has said so.

    Args:
        group: which all of its ranks ask for, in the same order.
        width: H, of a row.
    """
    if group is None or group.one_shot is None:
        return None
    kind = width, dtype
    if kind not in group.rows:
        group.rows[kind] = _made(group, width, device, dtype)
    rows: SharedRows | None = group.rows[kind]
    return rows


def _made(group: Group, width: int, device: torch.device, dtype: torch.dtype) -> SharedRows | None:
    return made_by_all(
        lambda: SharedRows(group.rank, group.size, group.device_group, device, width, dtype),
        lambda rows: _is_right(rows, group, device),
        group.least,
        "ranks add up in a kernel before each norm, not in it",
    )


def _is_right(rows: SharedRows, group: Group, device: torch.device) -> bool:
    """Whether sums of many rows and of one, a few times in turn, have the bits of those that
    another kernel adds up.
    """
    from specdec.kernels.triton_norm import add_rms_norm  # it imports Triton

    generator = torch.Generator(device).manual_seed(group.rank)
    weight = torch.linspace(0.5, 1.5, rows.width, device=device).to(rows.dtype)

    def both(part: Tensor, max_tries: int) -> list[tuple[Tensor, Tensor]]:
        residual = torch.zeros_like(part)
        summed = all_reduce(part.clone(), group)
        with_ranks = add_rms_norm(part, residual, weight, 1e-5, ranks=rows, max_tries=max_tries)
        return list(zip(with_ranks, add_rms_norm(summed, residual, weight, 1e-5), strict=True))

    both(torch.zeros(1, rows.width, device=device, dtype=rows.dtype), 0)
    torch.cuda.synchronize(device)
    # All ranks compile the kernels, one longer than another, before any waits for the others.
    group.least(0)
    pairs = []
    for count in (8, 1, 3, 1, 8):
        part = torch.randn(count, rows.width, device=device, generator=generator).to(rows.dtype)
        # all of them, since the other ranks go through them all as well
        pairs += both(part, MAX_TRIES)
    return all(torch.equal(one, other) for one, other in pairs)
