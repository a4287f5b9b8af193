"""Log-probabilities of tokens under the target's unprocessed logits, with the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.sampling.trees.candidates import highest_columns

Top = dict[int, float]
"""Log-probabilities by token, the likeliest first; the position's own stands last if not among."""

ROWS = 128
"""Whose logits are held in float32 at once: of a prompt there are many."""


class Logprobs(NamedTuple):
    """What a caller may ask about some tokens; a row's values differ from the same number.

    Attributes:
        values: float32 [..., n], of the tokens themselves.
        top_ids: int64 [..., n, m], the likeliest tokens of the rows that chose them, in falling
            order, of equal ones the first.
        top_values: float32 [..., n, m], theirs.
    """

    values: Tensor
    top_ids: Tensor
    top_values: Tensor

    def along(self, path: Tensor) -> Logprobs:
        """Log-probabilities of the rows `path` int64 [num_reqs, depth + 1] of [num_reqs, k + 1]."""
        places = path[..., None].expand(-1, -1, self.top_ids.shape[-1])
        tops = (of.gather(1, places) for of in (self.top_ids, self.top_values))
        return Logprobs(self.values.gather(1, path), *tops)

    def packed(self) -> Tensor:
        """int64 [..., n * (1 + 2 * m)]: of each token the value, then the likeliest tokens, then
        their values, which are the bits of float64, so that one tensor carries all.
        """
        both = torch.cat([self.values[..., None], self.top_values], dim=-1)
        values = both.double().view(torch.int64)
        return torch.cat([values[..., :1], self.top_ids, values[..., 1:]], dim=-1).flatten(-2)


def logprobs_of(logits: Tensor, token_ids: Tensor, top: int) -> Logprobs:
    """Log-probabilities of tokens.

    Args:
        logits: [..., n, V], of the rows that choose them.
        token_ids: int64 [..., n].
        top: how many of the likeliest come along.
    """
    rows = zip(logits.flatten(0, -2).split(ROWS), token_ids.flatten().split(ROWS), strict=True)
    parts = [_of_rows(*some, top) for some in rows]
    values, top_ids, top_values = (torch.cat(some) for some in zip(*parts, strict=True))
    shape = token_ids.shape
    return Logprobs(values.view(shape), top_ids.view(*shape, -1), top_values.view(*shape, -1))


def _of_rows(logits: Tensor, token_ids: Tensor, top: int) -> Logprobs:
    """The same of [n, V] and [n]."""
    scores = logits.float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    values = (scores.gather(-1, token_ids[:, None]) - total).squeeze(-1)
    some = min(top, scores.shape[-1])
    best = highest_columns(scores, some) if top else token_ids[:, None][:, :0]
    # nobody may ask for more than there are, but numbers of columns are powers of two
    missing = (0, top - some)
    return Logprobs(values, F.pad(best, missing), F.pad(scores.gather(-1, best) - total, missing))


def num_packed(top: int) -> int:
    """Columns of a token in `Logprobs.packed`."""
    return 1 + 2 * top


class Unpacked(Sequence[tuple[float, Sequence[int], Sequence[float]]]):
    """What `Logprobs.packed` holds, token by token: log-probability, likeliest tokens, and theirs.

    Args:
        table: int64, on the host, `columns` for each token.
        columns: see `num_packed`.
    """

    def __init__(self, table: Tensor, columns: int) -> None:
        rows, self._top = table.reshape(-1, columns), columns // 2
        self._top_ids = rows[:, 1 : 1 + self._top].flatten().tolist()
        values = torch.cat([rows[:, :1], rows[:, 1 + self._top :]], dim=1).view(torch.float64)
        self._values, self._length = values.flatten().tolist(), len(rows)

    def __len__(self) -> int:
        """Tokens."""
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """The log-probability of token number `index`."""
        if index >= self._length:
            raise IndexError(index)
        top, start = self._top, index * (1 + self._top)
        return (
            self._values[start],
            self._top_ids[index * top : index * top + top],
            self._values[start + 1 : start + 1 + top],
        )


def top_of(
    token: int, value: float, top_ids: Sequence[int], top_values: Sequence[float], count: int
) -> Top:
    """The `count` likeliest tokens and the position's own, with log-probabilities.

    >>> top_of(5, -3.0, [7, 8, 5], [-0.5, -1.0, -3.0], 2)
    {7: -0.5, 8: -1.0, 5: -3.0}
    """
    return {**dict(zip(top_ids[:count], top_values[:count], strict=True)), token: value}
