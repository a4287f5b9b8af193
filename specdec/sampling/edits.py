"""What a request adds to a few tokens' logits: a bias, and -inf where the output must go on.

They belong to positions: every row of a block is changed as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.device.host import to_device
from specdec.sampling.params import MAX_EDITS, SamplingParams

_NEVER = 2**62  # a position that no output reaches


def num_edits(params: SamplingParams) -> int:
    """Tokens whose logits a request changes; `stop_token_ids` are by then all its ends."""
    return len(params.logit_bias) + (len(params.stop_token_ids) if params.min_tokens else 0)


@dataclass(slots=True)
class Edits:
    """What is added to which logits, and until when. Unused entries add nothing to token 0.

    Attributes:
        token_ids: int64 [num_reqs, n].
        ends: int64 [num_reqs, n], the position from which on an entry no longer counts.
        values: float32 [num_reqs, n].
    """

    token_ids: Tensor
    ends: Tensor
    values: Tensor

    @classmethod
    def none(cls, num_rows: int, device: torch.device) -> Edits:
        """Rows of requests that change nothing."""
        zeros = torch.zeros(2, num_rows, MAX_EDITS, dtype=torch.int64, device=device)
        return cls(zeros[0], zeros[1], torch.zeros_like(zeros[0], dtype=torch.float32))

    def put(
        self,
        slots: Tensor,
        params: Sequence[SamplingParams],
        firsts: Sequence[int],
    ) -> None:
        """Overwrites the rows `slots` int64 [m]; the requests' outputs begin at `firsts`."""
        rows = [_entries(each, first) for each, first in zip(params, firsts, strict=True)]
        width = max(map(len, rows))
        self.ends.index_fill_(0, slots, 0)
        if not width:
            return
        padded = [row + [(0, 0, 0.0)] * (width - len(row)) for row in rows]
        integers = [[entry[:2] for entry in row] for row in padded]
        numbers = [[entry[2] for entry in row] for row in padded]
        token_ids, ends = to_device(integers, torch.int64, slots.device).unbind(-1)
        values = to_device(numbers, torch.float32, slots.device)
        self.token_ids[:, :width].index_copy_(0, slots, token_ids)
        self.ends[:, :width].index_copy_(0, slots, ends)
        self.values[:, :width].index_copy_(0, slots, values)

    def select(self, slots: Tensor, count: int) -> Edits:
        """The first `count` entries of the rows `slots` int64 [m]; only device operations."""
        return Edits(
            *(x[:, :count].index_select(0, slots) for x in (self.token_ids, self.ends, self.values))
        )

    def apply(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Adds to rows [num_reqs, w, V] that choose tokens for `positions` int64 [num_reqs, w].

        A token may be named twice, by a bias and by what must not be: minus infinity anyway.

        Returns:
            float32 [num_reqs, w, V], a tensor of its own.
        """
        counts = positions[..., None] < self.ends[:, None, :]
        added = torch.where(counts, self.values[:, None, :], 0.0)
        return logits.float().scatter_add(-1, self.token_ids[:, None, :].expand_as(added), added)


def _entries(params: SamplingParams, first: int) -> list[tuple[int, int, float]]:
    """Token, end and number of everything that a request changes."""
    barred = params.stop_token_ids if params.min_tokens else ()
    bias = [(token, _NEVER, value) for token, value in params.logit_bias]
    end = min(first + (params.min_tokens or 0), _NEVER)
    return bias + [(token, end, float("-inf")) for token in barred]
