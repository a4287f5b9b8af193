"""Convolutions over few rows between two gates, in plain torch: the oracle of our kernel."""

import torch
from torch import Tensor

from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.recurrence import (
    RecurrentRows,
    convolved,
    keep_inputs,
    packed_rows,
    window_of,
)


def convolve(
    joined: Tensor, kernel: Tensor, bias: Tensor | None, cache: StateCache, rows: RecurrentRows
) -> Tensor:
    """`after * convolution(before * value)`, as in LFM2 (arXiv 2511.23404); the cache is updated.

    Args:
        joined: [T, 3 * H], before, after and value of the rows.
        kernel: [H, taps], the last tap is the row itself.
        bias: [H], or None.
        cache: of the layer, which has no state.

    Returns:
        [T, H].
    """
    before, after, value = joined.chunk(3, dim=-1)
    given, none = before * value, torch.zeros_like(rows.starts)
    window = window_of(given, kernel.shape[1], cache.inputs, rows._replace(max_pending=0), none)
    mixed = convolved(window, kernel, bias, rows.max_rows)
    keep_inputs(given, cache.inputs, rows)
    return after * packed_rows(mixed, rows, none, len(joined))
