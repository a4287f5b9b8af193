"""What a recurrent layer keeps per request instead of keys and values per token: a state, and the
inputs of its last rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor


class StateCache(NamedTuple):
    """Cache of one recurrent layer, one row per slot of a request. Rejected rows leave no trace in
    it, and nothing is copied back.

    The state of a slot has taken in its first `lengths` tokens. The inputs of tokens that came
    after those, and of as many before as a convolution looks back to, lie in a ring by their
    positions, like keys and values in a paged cache: rows that were rejected are overwritten by
    those that the next step puts at the same positions. What was accepted is taken in when the next
    step begins (replay, as in TensorRT-LLM and vLLM's ReplaySSM), so a step reads and writes a
    state once however many drafts it has. A sequence begins with nothing whatever lies in its slot.
    """

    state: Tensor  # float32 [num_slots, heads, key_dim, value_dim]
    inputs: Tensor  # [num_slots, columns, width]; position p lies in column p % columns
    lengths: Tensor  # int64 [num_slots]; one tensor for all layers


def copy_states(caches: Iterable[object], sources: Tensor, targets: Tensor) -> None:
    """Copies rows int64 [n] of all state caches among `caches` to other rows."""
    states = [cache for cache in caches if isinstance(cache, StateCache)]
    for tensor in chain.from_iterable((cache.state, cache.inputs) for cache in states):
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))
    if states:
        lengths = states[0].lengths
        lengths.index_copy_(0, targets, lengths.index_select(0, sources))


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """What one recurrent layer stores per request.

    Attributes:
        width: numbers of a row's inputs: convolved channels, then gates.
        taps: rows that the convolution sees, its own included.
        heads, key_dim, value_dim: shape of the state; no heads for a layer that only convolves.
        dtype: of the inputs.
    """

    width: int
    taps: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """See `LayerSpec.bytes_per_token`."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state, its inputs left out."""
        return self.heads * self.key_dim * self.value_dim * torch.float32.itemsize

    def columns(self, max_rows: int) -> int:
        """Columns of the ring: what a step may have to take in with what its convolution looks back
        to, and its own rows beside that.
        """
        return self.taps - 1 + 2 * max_rows

    def bytes_per_slot(self, max_rows: int) -> int:
        """Bytes of one request whose steps have at most so many rows.

        >>> StateLayerSpec(8256, 4, 32, 128, 128, torch.bfloat16).bytes_per_slot(8)
        2410880
        """
        return self.state_bytes + self.columns(max_rows) * self.width * self.dtype.itemsize

    def allocate_slots(self, max_rows: int, lengths: Tensor) -> StateCache:
        """The layer's cache; `lengths` int64 [num_slots] are those of all layers."""
        num_slots, device = len(lengths), lengths.device
        sizes = num_slots, self.heads, self.key_dim, self.value_dim
        state = torch.zeros(sizes, dtype=torch.float32, device=device)
        columns = self.columns(max_rows)
        inputs = torch.zeros(num_slots, columns, self.width, dtype=self.dtype, device=device)
        return StateCache(state, inputs, lengths)
