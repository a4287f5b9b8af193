"""Draft trees on made-up requests, as the parents of their drafts: the one in row `i` continues row
`parents[i - 1]`.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, TreeRows

Parents = Sequence[int]


def random_trees(num_reqs: int, drafts: int, seed: int = 0) -> list[Parents]:
    """Of any shape; the second is a star, and the third a chain."""
    draw = random.Random(seed)
    trees: list[Parents] = [
        [draw.randint(max(0, i - 4), i) for i in range(drafts)] for _ in range(num_reqs)
    ]
    trees[1:3] = [[0] * drafts, range(drafts)]
    return trees[:num_reqs]


def path_to(parents: Parents, row: int) -> list[int]:
    """Rows from the anchor to `row`."""
    return [*path_to(parents, parents[row - 1]), row] if row else [0]


def with_trees(metadata: AttentionMetadata, trees: Sequence[Parents]) -> AttentionMetadata:
    """The same for rows that hang together so."""
    paths = [path_to(parents, row) for parents in trees for row in range(len(parents) + 1)]
    words = [sum(1 << (row - 1) for row in path[1:]) for path in paths]
    signed = torch.tensor([word - (word >> 63 << 64) for word in words])
    depths = torch.tensor([len(path) - 1 for path in paths])
    device = metadata.seq_lens.device
    return replace(
        metadata, visibility="ancestors", tree=TreeRows(signed.to(device), depths.to(device))
    )


class Sight(NamedTuple):
    """What the rows of one request see of its keys, both [rows, length]."""

    hidden: Tensor  # bool
    ahead: Tensor  # int64, positions from the row to the key


def sight_of(parents: Parents, length: int) -> Sight:
    """Key by key, for a request of `length` tokens, its rows included."""
    rows = len(parents) + 1
    context = length - rows
    paths = [path_to(parents, row) for row in range(rows)]
    hidden = torch.ones(rows, length, dtype=torch.bool)
    ahead = torch.zeros(rows, length, dtype=torch.int64)
    for row, path in enumerate(paths):
        position = context + len(path) - 1
        hidden[row, :context] = False
        hidden[row, [context + other for other in path]] = False
        for key in range(length):
            ahead[row, key] = (
                key if key < context else context + len(paths[key - context]) - 1
            ) - position
    return Sight(hidden, ahead)
