"""Short sequences side by side in rows of a fixed length, so that little of a row is padding.

Everything that a step decides (anchors, labels, weights) is said of sequences and their own
positions; a packing says where these lie in the rows that the networks are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def rows_of(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Which of these sequences lie in each row of `length` tokens, none of which is longer.

    Rows have like numbers of sequences, since all rows are given as many blocks as the fullest.

    >>> rows_of([3, 8, 2, 4, 6, 1], 10)
    [[1, 5], [4, 2], [3, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for count in range(max(-(-sum(lengths) // length), 1), len(lengths) + 1):
        rows, room = [list[int]() for _ in range(count)], [length] * count
        for index in order:
            fitting = [row for row in range(count) if room[row] >= lengths[index]]
            if not fitting:
                break
            row = min(fitting, key=lambda row: (len(rows[row]), -room[row]))
            rows[row].append(index)
            room[row] -= lengths[index]
        else:
            return rows
    raise ValueError(f"a sequence is longer than a row of {length} tokens")


@dataclass(frozen=True, slots=True)
class Packing:
    """S sequences in R rows of L tokens, at most D in a row.

    Attributes:
        length: L.
        places: int64 [S], of each sequence's first token among the R * L.
        slots: int64 [R, D], the sequences of each row, S where there is none.
        homes: int64 [S], of each sequence among the R * D slots.
    """

    length: int
    places: Tensor
    slots: Tensor
    homes: Tensor

    @staticmethod
    def of(batches: Sequence[Sequence[int]], length: int, device: torch.device) -> "list[Packing]":
        """One of each batch of sequences that have these lengths; all go to the device at once."""
        numbers, sizes = list[int](), list[tuple[int, int, int]]()
        for lengths in batches:
            rows = rows_of(lengths, length)
            count, most = len(lengths), max(map(len, rows))
            places, homes, slots = [0] * count, [0] * count, [count] * (len(rows) * most)
            for row, members in enumerate(rows):
                start = row * length
                for place, index in enumerate(members):
                    homes[index] = row * most + place
                    slots[homes[index]] = index
                    places[index] = start
                    start += lengths[index]
            numbers += [*places, *homes, *slots]
            sizes.append((count, len(rows), most))
        parts = torch.tensor(numbers, dtype=torch.int64).to(device)
        found, start = [], 0
        for count, num_rows, most in sizes:
            end = start + 2 * count + num_rows * most
            places, homes, slots = parts[start:end].split([count, count, num_rows * most])
            found.append(Packing(length, places, slots.view(num_rows, most), homes))
            start = end
        return found

    @property
    def starts(self) -> Tensor:
        """int64 [R, D], where the sequence of each slot begins in its row; 0 without one."""
        return self.by_slot(self.places % self.length)

    def by_slot(self, x: Tensor) -> Tensor:
        """What [S, ...] has of the sequence of each slot, [R, D, ...]; 0 where there is none."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.slots]

    def by_sequence(self, x: Tensor) -> Tensor:
        """The other way round: what [R, D, ...] has for each sequence, [S, ...]."""
        return x.flatten(0, 1).index_select(0, self.homes)

    def index(self, lengths: Tensor, width: int) -> Tensor:
        """int64 [S, width], of each sequence's tokens among the R * L, and R * L behind its end."""
        positions = torch.arange(width, device=lengths.device)
        index = self.places[:, None] + positions
        return index.masked_fill(positions >= lengths[:, None], len(self.slots) * self.length)

    def pack(self, x: Tensor, lengths: Tensor) -> Tensor:
        """What [S, width, ...] has of the tokens of sequences, in rows [R, L, ...]; 0 between."""
        index = self.index(lengths, x.shape[1]).flatten()
        return into_rows(x, index, len(self.slots) * self.length).unflatten(0, (-1, self.length))


def into_rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Rows [n, ...] at `index` int64 [n], of x [S, T, ...], the first two flattened."""
    room = x.new_zeros(count + 1, *x.shape[2:])  # one more, for what is behind an end
    return room.index_copy(0, index, x.flatten(0, 1))[:-1]


def out_of_rows(x: Tensor, index: Tensor) -> Tensor:
    """What rows [count, ...] have at `index` int64 [S, T], [S, T, ...]; 0 at `count`."""
    room = F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))
    return room.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
