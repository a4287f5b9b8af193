"""How the work of an 8-bit prefill is dealt to compute units: the lists that AITER's kernels
follow, computed on the host.

The rows of a prompt form tiles of 256. A tile sees the keys up to its last row, in units of 128;
the units of all tiles, one behind the other, are dealt in equal shares to the compute units that
serve a head. A tile that a share ends in is split:

    tiles     |  0  |     1     |  2  |        3        |
    shares    |      0       |      1       |     2     |
    works     | 0   | 1      | 1| 2   | 3   | 3         |        1 and 3 are split

A split tile leaves partial results, which are merged. AITER plans the same lists; from 0.1.20 on it
copies host tensors through the device's queue for that, and the host waits until the queue is
empty.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

QUERY_TILE, KEY_TILE = 256, 128
"""Rows of a tile and keys of a unit, the only sizes the kernel has."""

Numbers = NDArray[np.int32]
Integers = NDArray[np.int64]


class Schedule(NamedTuple):
    """The lists of a forward."""

    work_indptr: Numbers  # [num_units + 1], first work of each compute unit
    # [works, 8]: prompt, first row of its partial result or -1, rows, keys, keys behind them, heads
    work_info_set: Numbers
    reduce_indptr: Numbers  # [split tiles + 1], first part of each
    reduce_final_map: Numbers  # [split tiles, 2], their rows
    reduce_partial_map: Numbers  # [parts], first row of each partial result


class _Tiles(NamedTuple):
    """Tiles in the order in which they are dealt, all int64 [tiles]."""

    prompt: Integers
    first_row: Integers  # among all packed rows
    last_row: Integers
    end: Integers  # of their units on the line of all units
    num_units: Integers


class _Works(NamedTuple):
    """The works for one head."""

    info: Integers  # [works, 7], the heads left out
    share: Integers  # [works], who computes them
    split: NDArray[np.bool_]  # [works], whether they leave a partial result


def schedule(lengths: Sequence[int], num_heads: int, num_units: int) -> Schedule:
    """Deals causal prompts to compute units.

    Args:
        lengths: tokens of each prompt, all of them rows.
        num_heads: heads, each with keys of its own.
        num_units: compute units of the device.
    """
    num_clusters = gcd(num_heads, num_units)  # compute units that serve the same heads
    works = _works(np.array(lengths, dtype=np.int64), num_units // num_clusters)
    heads = np.arange(num_heads).reshape(num_clusters, -1)  # of each cluster
    width, count = heads.shape[1], len(works.info)
    # A compute unit takes its share for one head, then for the next.
    order = np.argsort(np.tile(works.share, width), kind="stable")
    info = np.empty((num_clusters, width * count, 8), dtype=np.int32)
    info[..., :7] = works.info[order % count]
    head = heads[:, order // count]
    info[..., 7] = (head + 1) << 16 | head
    per_share = np.bincount(works.share, minlength=num_units // num_clusters) * width

    parts = works.info[works.split]
    rows, firsts, counts = np.unique(parts[:, 2], return_index=True, return_counts=True)
    return Schedule(
        work_indptr=_starts(np.tile(per_share, num_clusters)),
        work_info_set=info.reshape(-1, 8),
        reduce_indptr=_starts(counts),
        reduce_final_map=np.stack([rows, parts[firsts, 3]], 1).astype(np.int32),
        reduce_partial_map=parts[np.argsort(parts[:, 2], kind="stable"), 1].astype(np.int32),
    )


def _works(lengths: Integers, num_shares: int) -> _Works:
    """The line of units, cut where a tile or a share ends."""
    tiles = _tiles(lengths)
    average, rest = divmod(int(tiles.end[-1]), num_shares)
    shares = np.arange(1, num_shares + 1)
    share_ends = shares * average + np.minimum(shares, rest)
    ends = np.union1d(tiles.end, share_ends)
    begins = np.concatenate([[0], ends[:-1]])
    tile = np.searchsorted(tiles.end, begins, side="right")
    tile_begin = (tiles.end - tiles.num_units)[tile]
    completes = ends == tiles.end[tile]
    split = ~completes | (begins > tile_begin)

    prompt = tiles.prompt[tile]
    first_key = (np.cumsum(lengths) - lengths)[prompt]
    key_end = np.minimum((ends - tile_begin) * KEY_TILE, lengths[prompt])
    columns = (
        prompt, np.where(split, (np.cumsum(split) - 1) * QUERY_TILE, -1), tiles.first_row[tile],
        tiles.last_row[tile], first_key + (begins - tile_begin) * KEY_TILE, first_key + key_end,
        np.where(completes, 0, lengths[prompt] - key_end),
    )  # fmt: skip
    return _Works(np.stack(columns, 1), np.searchsorted(share_ends, begins, side="right"), split)


def _tiles(lengths: Integers) -> _Tiles:
    """Tiles of every prompt, taken from its head and its tail in turn, so that short and long ones
    alternate.
    """
    counts = -(-lengths // QUERY_TILE)
    prompt = np.repeat(np.arange(len(lengths)), counts)
    turn = np.arange(len(prompt)) - (np.cumsum(counts) - counts)[prompt]
    place = np.where(turn % 2 == 0, turn // 2, counts[prompt] - 1 - turn // 2)
    # of the rows, and of the keys that the last of them sees
    end = np.minimum((place + 1) * QUERY_TILE, lengths[prompt])
    num_units = -(-end // KEY_TILE)
    first = (np.cumsum(lengths) - lengths)[prompt]
    return _Tiles(prompt, first + place * QUERY_TILE, first + end, np.cumsum(num_units), num_units)


def _starts(counts: Integers) -> Numbers:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
