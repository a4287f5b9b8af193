"""Rows of requests that have unequal numbers of them, which only the device knows; see
`specdec.attention.backend.AttentionMetadata.ragged`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, TreeRows


class Owners(NamedTuple):
    """The request of each packed row, and its place in it; int64 [num_tokens]."""

    requests: Tensor
    places: Tensor  # where its keys lie in the sequence


class Padded(NamedTuple):
    """Rows as blocks of `max_query_len` for every request."""

    rows: Tensor  # int64 [num_reqs * max_query_len], packed rows; row 0 where there is none
    kept: Tensor  # int64 [num_tokens], where the packed rows lie among those
    tree: TreeRows | None


def owners_of(metadata: AttentionMetadata) -> Owners:
    """Whose the rows are."""
    ends = metadata.query_start_loc[1:].long()
    packed = torch.arange(metadata.num_tokens, device=ends.device)
    requests = torch.searchsorted(ends, packed, right=True)
    behind = (metadata.seq_lens - ends).index_select(0, requests)
    return Owners(requests, behind + packed)


def padded(metadata: AttentionMetadata) -> Padded:
    """The rows for what takes equally many of all requests."""
    width, starts = metadata.max_query_len, metadata.query_start_loc.long()
    requests = owners_of(metadata).requests
    packed = torch.arange(metadata.num_tokens, device=starts.device)
    places = torch.arange(width, device=starts.device)
    there = places < starts.diff()[:, None]
    rows = torch.where(there, starts[:-1, None] + places, 0).flatten()
    tree = metadata.tree and TreeRows(*(of_rows[rows] for of_rows in metadata.tree))
    return Padded(rows, requests * width + packed - starts.index_select(0, requests), tree)
