"""Where an output stands in the text that was predicted for it, after whatever edit; every shape is
known beforehand and the host never waits.

The output's last tokens are looked for around the place where it was last. A match of m tokens may
lie up to 4**m tokens away, for more of them agree by chance the further one looks: what is right
after an edit is most often near, and what is far away has to agree for longer. A place counts as
the output's own once a draft from there was right.
"""

from typing import NamedTuple

import torch
from torch import Tensor

COMPARED = 16
"""Tokens of an output's end that are compared."""
BACK, WINDOW = 1024, 4096
"""Tokens before the last place from which on is looked, and how many."""
BEFORE = -2
"""In an end that is shorter than what is compared; equal to nothing."""


class Alignment(NamedTuple):
    """Where outputs go on in their predictions.

    Attributes:
        places: int64 [num_reqs], of the next token; the last known place where nothing matches.
        lengths: int64 [num_reqs], tokens of the match; 0 where nothing matches.
    """

    places: Tensor
    lengths: Tensor


def align(rows: Tensor, places: Tensor, ends: Tensor) -> Alignment:
    """Finds the ends of outputs in their predictions.

    Args:
        rows: int32 [num_reqs, width], `COMPARED` tokens of the prompt's end, the prediction, and
            `drafters.suffix.matches.NOTHING` to the end.
        places: int64 [num_reqs], where the outputs were last: of the token expected next.
        ends: int64 [num_reqs, COMPARED], the last tokens of the outputs, the latest last.

    >>> row = torch.tensor([[0] * 16 + [5, 6, 7, 8, 9, 6, 7, -1]])
    >>> align(row, torch.tensor([17]), torch.tensor([[BEFORE] * 14 + [7, 8]]))  # 6 was left out
    Alignment(places=tensor([20]), lengths=tensor([2]))
    """
    most = rows.shape[1] - COMPARED
    first = (places - BACK).clamp(max=rows.shape[1] - WINDOW).clamp(min=COMPARED - 1)
    offsets = torch.arange(1 - COMPARED, min(WINDOW, most + 1), device=rows.device)
    window = rows.gather(1, (first[:, None] + offsets).clamp(max=rows.shape[1] - 1)).long()
    width = window.shape[1] - COMPARED + 1
    matched = window[:, COMPARED - 1 :] == ends[:, -1:]
    lengths = matched.float()
    for back in range(1, COMPARED):
        start = COMPARED - 1 - back
        matched = matched & (window[:, start : start + width] == ends[:, start : start + 1])
        lengths += matched
    away = first[:, None] + torch.arange(1, width + 1, device=rows.device) - places[:, None]
    # What lies behind counts as half a token further than what lies as far ahead: none are equal.
    steps = torch.where(away >= 0, away.float(), 0.5 - away)
    found = (lengths - 0.5 * (1 + steps).log2()).max(dim=1)
    reached = found.values > 0
    run_lengths = torch.where(reached, lengths.gather(1, found.indices[:, None])[:, 0], 0.0).long()
    return Alignment(torch.where(reached, first + found.indices + 1, places), run_lengths)


def following(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """int64 [num_reqs, count], what the predictions have from `places` int64 [num_reqs] on;
    less than 0 past their ends.

    >>> following(torch.tensor([[4, 5, 6, -1]]), torch.tensor([1]), 3)
    tensor([[ 5,  6, -1]])
    """
    steps = torch.arange(count, device=rows.device)
    cells = (places[:, None] + steps).clamp(max=rows.shape[1] - 1)
    return rows.gather(1, cells).long()


def agreed(expected: Tensor, token_ids: Tensor, counts: Tensor) -> Tensor:
    """int64 [num_reqs], tokens that outputs begin with as `expected`.

    Args:
        expected, token_ids: int64 [num_reqs, n].
        counts: int64 [num_reqs], tokens that count, the first ones.

    >>> agreed(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7]]), torch.tensor([2]))
    tensor([2])
    """
    steps = torch.arange(token_ids.shape[1], device=token_ids.device)
    fits = (expected == token_ids) & (steps < counts[:, None])
    return fits.long().cumprod(dim=1).sum(dim=1)
