"""Rows of the paged caches: what one token has in a layer, and where a token of an accepted path has to go."""

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.kv_cache.state import StateCache


def rows_of(caches: Iterable[object]) -> list[Tensor]:
    """Every tensor of paged caches once, as bytes: uint8 [num_slots, bytes of a token].

    A token's bytes must lie at its slot, so the shuffled layout and an indexer's keys that a backend lays out in its own way do not
    qualify, and recurrent layers have no rows at all.
    """
    tensors: dict[int, Tensor] = {}  # a layer that reads another's cache has that very one
    for cache in caches:
        assert isinstance(cache, tuple) and not isinstance(cache, StateCache), "a recurrent layer has no rows that could be moved"
        tensors |= {tensor.data_ptr(): tensor for tensor in cache if tensor.numel()}
    return [tensor.view(torch.uint8).view(tensor.shape[0] * tensor.shape[1], -1) for tensor in tensors.values()]


def move_rows(tensors: Iterable[Tensor], slots: Tensor, path: Tensor) -> None:
    """Moves the rows of each request's path to where those of a chain lie; all are read before any is written.

    Args:
        tensors: of `rows_of`.
        slots: int64 [num_reqs, N + 1], where the rows of the block lie.
        path: int64 [num_reqs, D + 1], the row to put in the place of row d, as `specdec.sampling.trees.walk` returns it: 0, then
            ascending, then d itself.
    """
    sources, targets = slots.gather(1, path)[:, 1:].flatten(), slots[:, 1 : path.shape[1]].flatten()
    for tensor in tensors:
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))
