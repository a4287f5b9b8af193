"""What AITER's latent decode kernel is told about a forward: which cached tokens to read, and how the work is split.

The kernel takes *entries*: a few consecutive rows, causal among each other, and the list of cached tokens that their last one
sees. It has up to 4 rows per entry, so a request with more becomes several entries, each ending where its own last row does. Six
rows of a request with 20 tokens, in two entries of three:

    rows     14 15 16 | 17 18 19          entry 0 reads tokens 0..16, entry 1 reads tokens 0..19

An entry of one row sees exactly the tokens it lists. Rows that are not causal, which the kernel has only for few shapes, on one
architecture and in new versions, therefore run everywhere, as entries of one row that list the whole sequence.

Nothing here reads from the device: the lists are computed there, in buffers sized by what the host knows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.attention.aiter.plan import Group
from specdec.attention.mla import MlaSpec
from specdec.kernels.aiter import AiterMla

MAX_ENTRY_ROWS = 4
"""Most rows per entry for which every supported architecture and version has a persistent kernel."""

HEAD_MULTIPLE = 16
"""Heads come in groups of so many; missing ones are added."""


@dataclass(slots=True)
class DecodePlan:
    """Entries of one group of requests; every tensor has a fixed address that the next plan of its size takes over."""

    max_seqlen_q: int  # rows of each entry
    qo_indptr: Tensor  # int32 [num_entries + 1], first row of each entry
    kv_indptr: Tensor  # int32 [num_entries + 1], first cached token of each entry in `kv_indices`
    kv_indices: Tensor  # int32 [bound], cache slots; past the last entry's, any valid slot
    kv_last_page_lens: Tensor  # int32 [num_entries], tokens in the last page: pages hold one
    work: dict[str, Tensor]  # AITER's work and reduction lists, under AITER's names


@dataclass(slots=True)
class _Buffers:
    """Memory of plans with up to `capacity` entries of equally many rows."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_last_page_lens: Tensor
    work: dict[str, Tensor]


@dataclass(slots=True)
class DecodePlanner:
    """Makes decode plans for one model.

    Memory is kept once per power of two of entries and of listed tokens, and never given up, so that captured graphs may go on
    using its addresses, and that a warmed-up step allocates nothing here.
    """

    spec: MlaSpec
    ops: AiterMla
    num_heads: int  # padded
    _buffers: dict[tuple[int, int], _Buffers] = field(default_factory=dict)
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def plan(self, group: Group) -> DecodePlan:
        """Lists for requests with `group.max_query_len` rows each."""
        width = group.max_query_len
        entry_rows = rows_per_entry(width, causal=group.causal)
        per_request = width // entry_rows
        num_entries = group.num_reqs * per_request
        buffers = self._buffers_for(num_entries, entry_rows)

        lengths = group.seq_lens[:, None].expand(-1, per_request)
        if group.causal:
            lengths = lengths - torch.arange(width - entry_rows, -1, -entry_rows, dtype=torch.int32, device=lengths.device)
        kv_indptr = buffers.kv_indptr
        torch.cumsum(lengths.reshape(-1), 0, dtype=torch.int32, out=kv_indptr[1 : num_entries + 1])
        kv_indptr[num_entries + 1 :] = kv_indptr[num_entries]  # entries past the end are empty
        plan = DecodePlan(
            max_seqlen_q=entry_rows,
            qo_indptr=buffers.qo_indptr[: num_entries + 1],
            kv_indptr=kv_indptr[: num_entries + 1],
            kv_indices=self._slots(group, kv_indptr, num_entries, per_request),
            kv_last_page_lens=buffers.kv_last_page_lens[:num_entries],
            work=buffers.work,
        )
        self.ops.get_mla_metadata_v1(
            seqlens_qo_indptr=plan.qo_indptr,
            seqlens_kv_indptr=plan.kv_indptr,
            kv_last_page_lens=plan.kv_last_page_lens,
            num_heads_per_head_k=self.num_heads,
            num_heads_k=1,
            is_causal=True,
            page_size=1,
            kv_granularity=16,
            max_seqlen_qo=entry_rows,
            uni_seqlen_qo=entry_rows,
            fast_mode=True,
            dtype_q=self.spec.dtype,
            dtype_kv=self.spec.kv_dtype,
            work_metadata_ptrs=plan.work["work_meta_data"],
            **{name: tensor for name, tensor in plan.work.items() if name != "work_meta_data"},
        )
        return plan

    def _slots(self, group: Group, kv_indptr: Tensor, num_entries: int, per_request: int) -> Tensor:
        """The cache slots of every entry's tokens, packed."""
        bound = num_entries * group.max_seq_len
        size = round_up(bound)
        if size not in self._indices:
            self._indices[size] = torch.zeros(size, dtype=torch.int32, device=self.spec.device)
        index = torch.arange(bound, dtype=torch.int32, device=self.spec.device)
        entries = torch.searchsorted(kv_indptr[1 : num_entries + 1], index, right=True, out_int32=True).clamp_(max=num_entries - 1)
        positions = index - kv_indptr.index_select(0, entries)
        columns = (positions // group.block_size).clamp_(max=group.block_table.shape[1] - 1)
        blocks = group.block_table[entries // per_request, columns]
        slots = self._indices[size][:bound]
        torch.add(blocks * group.block_size, positions % group.block_size, out=slots)
        return slots

    def _buffers_for(self, num_entries: int, entry_rows: int) -> _Buffers:
        capacity = round_up(num_entries)
        if (capacity, entry_rows) not in self._buffers:
            device = self.spec.device
            shapes = self.ops.get_mla_metadata_info_v1(
                batch_size=capacity,
                max_seqlen_qo=entry_rows,
                num_head_qo=self.num_heads,
                q_dtype=self.spec.dtype,
                kv_dtype=self.spec.kv_dtype,
                is_sparse=False,
                fast_mode=True,
            )
            # In the order of AITER's answer, which is not that of the planner's arguments.
            names = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
            self._buffers[capacity, entry_rows] = _Buffers(
                qo_indptr=torch.arange(0, (capacity + 1) * entry_rows, entry_rows, dtype=torch.int32, device=device),
                kv_indptr=torch.zeros(capacity + 1, dtype=torch.int32, device=device),
                kv_last_page_lens=torch.ones(capacity, dtype=torch.int32, device=device),
                work={n: torch.zeros(shape, dtype=t, device=device) for n, (shape, t) in zip(names, shapes, strict=True)},
            )
        return self._buffers[capacity, entry_rows]


def rows_per_entry(width: int, *, causal: bool) -> int:
    """The most rows, up to what the kernel has, into which `width` rows divide evenly.

    >>> [rows_per_entry(width, causal=True) for width in (1, 2, 3, 5, 6, 8, 9, 16)]
    [1, 2, 3, 1, 3, 4, 3, 4]
    >>> rows_per_entry(8, causal=False)
    1
    """
    if not causal:
        return 1
    return next(rows for rows in range(MAX_ENTRY_ROWS, 0, -1) if width % rows == 0)


def round_up(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()
