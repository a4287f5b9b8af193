"""Rows of the paged caches: what one token has in a layer, and where a token of an accepted path
has to go.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec.kv_cache.state import StateCache

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def rows_of(caches: Iterable[object]) -> list[Tensor]:
    """Every tensor of paged caches once, as bytes: uint8 [num_slots, bytes of a token].

    A token's bytes must lie at its slot, so the shuffled layout and an indexer's keys that a
    backend lays out in its own way do not qualify, and recurrent layers have no rows at all.
    """
    tensors: dict[int, Tensor] = {}  # a layer that reads another's cache has that very one
    for cache in caches:
        assert isinstance(cache, tuple) and not isinstance(cache, StateCache), (
            "a recurrent layer has no rows that could be moved"
        )
        tensors |= {tensor.data_ptr(): tensor for tensor in cache if tensor.numel()}
    return [
        tensor.view(torch.uint8).view(tensor.shape[0] * tensor.shape[1], -1)
        for tensor in tensors.values()
    ]


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The memory of rows in fewer tensors: those of `rows_of` that follow each other at equal
    distances are one.

    Returns:
        [n, num_slots, words], in the largest words that fit.
    """
    runs: list[list[Tensor]] = []
    for tensor in tensors:
        if not (runs and _continues(runs[-1], tensor)):
            runs.append([])
        runs[-1].append(tensor)
    return [
        _in_words(
            torch.as_strided(run[0], (len(run), *run[0].shape), (_distance(run), *run[0].stride()))
        )
        for run in runs
    ]


def _continues(run: Sequence[Tensor], tensor: Tensor) -> bool:
    """Whether `tensor` lies in the same memory, as far behind the last of a run as that one behind
    the one before.
    """
    last = run[-1]
    if (
        tensor.shape != last.shape
        or tensor.untyped_storage().data_ptr() != last.untyped_storage().data_ptr()
    ):
        return False
    apart = tensor.data_ptr() - last.data_ptr()
    return apart == _distance(run) if len(run) > 1 else apart > 0


def _distance(run: Sequence[Tensor]) -> int:
    """Bytes between two of a run."""
    return run[1].data_ptr() - run[0].data_ptr() if len(run) > 1 else 0


def _in_words(rows: Tensor) -> Tensor:
    """uint8 [n, num_slots, bytes] in words of up to 8 bytes; one by one bytes take four times as
    long.
    """
    sizes = (rows.shape[-1], rows.stride(0), rows.storage_offset())
    largest = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))
    return rows.view(largest)


def move_rows(tensors: Iterable[Tensor], slots: Tensor, path: Tensor) -> None:
    """Moves the rows of each request's path to where those of a chain lie; reads before it writes.

    Args:
        tensors: of `side_by_side`.
        slots: int64 [num_reqs, N + 1], where the rows of the block lie.
        path: int64 [num_reqs, D + 1], the row to put in the place of row d, as
            `specdec.sampling.trees.trees.walk` returns it: 0, then ascending, then d itself.
    """
    sources, targets = slots.gather(1, path)[:, 1:].flatten(), slots[:, 1 : path.shape[1]].flatten()
    for tensor in tensors:
        tensor.index_copy_(1, targets, tensor.index_select(1, sources))
