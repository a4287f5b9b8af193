"""Entries for decoding on latents: which rows go together, and which cached tokens each list names.

The kernel has up to 4 rows per entry, or 17 where queries are in 8 bits, so a request with more
becomes several entries, each ending where its own last row does. Six rows of a request with 20
tokens, in two entries of three:

    rows     14 15 16 | 17 18 19          entry 0 reads tokens 0..16, entry 1 reads tokens 0..19

An entry of one row sees exactly the tokens it lists. Rows that are not causal, which the kernel has
only for few shapes, on one architecture and in new versions, therefore run everywhere, as entries
of one row that list the whole sequence; and so do those of draft trees, which list the context and
what is above them.

Nothing here reads from the device: the lists are computed there, in buffers sized by what the host
knows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.aiter.groups import Group
from specdec.attention.aiter.latent.latents import Entries, LatentKernels
from specdec.attention.aiter.scratch import Scratch
from specdec.attention.backend import TreeRows
from specdec.attention.ragged import Owners, owners_of
from specdec.base.sizes import power_of_two

MAX_ENTRY_ROWS = 4
"""Most rows per entry for which each supported architecture and version has a persistent kernel."""
MAX_EIGHT_BIT_ROWS = 17
"""The same of queries in 8 bits: as many as AITER's authors have tried."""


@dataclass(slots=True)
class _Buffers:
    """Memory of plans with up to `capacity` entries of equally many rows."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_last_page_lens: Tensor
    work: dict[str, Tensor]


@dataclass(slots=True)
class EntryPlanner:
    """Lists entries for one model.

    Memory is kept once per power of two of entries and of listed tokens, and never given up, so
    that captured graphs may go on using its addresses, and that a warmed-up step allocates nothing
    here.
    """

    kernels: LatentKernels
    scratch: Scratch
    _buffers: dict[tuple[int, int], _Buffers] = field(default_factory=dict)

    def plan(self, group: Group) -> Entries:
        """Entries of requests with up to `group.max_query_len` rows each; the next plan of their
        size takes over the memory.
        """
        width = group.max_query_len
        eight_bits = self.kernels.query_dtype.itemsize == 1
        most = MAX_EIGHT_BIT_ROWS if eight_bits else MAX_ENTRY_ROWS
        entry_rows = rows_per_entry(width, most) if group.causal and not group.ragged else 1
        per_request = width // entry_rows
        num_entries = group.num_reqs * per_request
        owners = owners_of(group) if group.ragged else None
        if owners is not None:
            num_entries = len(owners.requests)
        buffers = self._buffers_for(num_entries, entry_rows)

        lengths = group.seq_lens[:, None].expand(-1, per_request)
        if owners is not None:
            lengths = owners.places + 1
            if group.tree is not None:
                context = group.seq_lens - group.query_start_loc.diff()
                lengths = context.index_select(0, owners.requests) + 1 + group.tree.depths
        elif group.tree is not None:
            lengths = lengths - width + 1 + group.tree.depths.view(-1, width)
        elif group.causal:
            lengths = lengths - torch.arange(
                width - entry_rows, -1, -entry_rows, dtype=torch.int32, device=lengths.device
            )
        kv_indptr = buffers.kv_indptr
        torch.cumsum(lengths.flatten(), 0, dtype=torch.int32, out=kv_indptr[1 : num_entries + 1])
        kv_indptr[num_entries + 1 :] = kv_indptr[num_entries]  # entries past the end are empty
        entries = Entries(
            max_seqlen_q=entry_rows,
            qo_indptr=buffers.qo_indptr[: num_entries + 1],
            kv_indptr=kv_indptr[: num_entries + 1],
            kv_indices=self._slots(group, kv_indptr, num_entries, per_request, owners),
            kv_last_page_lens=buffers.kv_last_page_lens[:num_entries],
            work=buffers.work,
        )
        self.kernels.divide(entries)
        return entries

    def _slots(
        self,
        group: Group,
        kv_indptr: Tensor,
        num_entries: int,
        per_request: int,
        owners: Owners | None,
    ) -> Tensor:
        """The cache slots of every entry's tokens, packed."""
        bound = num_entries * group.max_seq_len
        slots = self.scratch.take("slots", bound, torch.int32, torch.zeros)
        index = torch.arange(bound, dtype=torch.int32, device=slots.device)
        entries = torch.searchsorted(
            kv_indptr[1 : num_entries + 1], index, right=True, out_int32=True
        ).clamp_(max=num_entries - 1)
        positions = index - kv_indptr.index_select(0, entries)
        requests = entries // per_request if owners is None else owners.requests[entries]
        if group.tree is not None:
            positions = _of_tree(group, group.tree, entries, requests, positions)
        columns = (positions // group.block_size).clamp_(max=group.block_table.shape[1] - 1)
        blocks = group.block_table[requests, columns]
        return torch.add(blocks * group.block_size, positions % group.block_size, out=slots)

    def _buffers_for(self, num_entries: int, entry_rows: int) -> _Buffers:
        capacity, device = power_of_two(num_entries), self.scratch.device
        if (capacity, entry_rows) not in self._buffers:
            self._buffers[capacity, entry_rows] = _Buffers(
                qo_indptr=torch.arange(
                    0, (capacity + 1) * entry_rows, entry_rows, dtype=torch.int32, device=device
                ),
                kv_indptr=torch.zeros(capacity + 1, dtype=torch.int32, device=device),
                kv_last_page_lens=torch.ones(capacity, dtype=torch.int32, device=device),
                work=self.kernels.work(capacity, entry_rows, is_sparse=False),
            )
        return self._buffers[capacity, entry_rows]


def _of_tree(
    group: Group, tree: TreeRows, entries: Tensor, requests: Tensor, places: Tensor
) -> Tensor:
    """Where the tokens at `places` of the lists of `entries` lie in their sequence: the context,
    then the rows that are seen.
    """
    width = group.max_query_len
    rows = torch.arange(width, dtype=torch.int32, device=places.device)
    # [num_tokens, width], those first
    above = F.pad((tree.ancestors[:, None] >> rows[:-1] & 1).bool(), (1, 0), value=True)
    seen = rows.where(above, width).sort(dim=-1).values
    starts = (group.seq_lens - group.query_start_loc.diff()).index_select(0, requests)
    chosen = seen[entries, (places - starts).clamp(0, width - 1)]
    return torch.where(places < starts, places, starts + chosen)


def rows_per_entry(width: int, most: int) -> int:
    """The most rows, up to `most`, into which `width` rows divide evenly.

    >>> [rows_per_entry(width, MAX_ENTRY_ROWS) for width in (1, 2, 3, 5, 6, 8, 9, 16)]
    [1, 2, 3, 1, 3, 4, 3, 4]
    >>> [rows_per_entry(width, MAX_EIGHT_BIT_ROWS) for width in (5, 9, 17, 24)]
    [5, 9, 17, 12]
    """
    return next(rows for rows in range(most, 0, -1) if width % rows == 0)
