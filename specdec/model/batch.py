"""What the forwards of a step are given: packed rows, chunks of prompts, and its requests.

Shapes use `num_reqs` requests of a batch and `k` drafts per request. Token ids are int64. How
drafts lie behind the anchor is told in `specdec.base.blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, TreeRows, Visibility
from specdec.base.blocks import BlockShape, DraftTree
from specdec.kv_cache import NULL_BLOCK
from specdec.model.block_rows import KERNEL, BlockRows, TreePlaces, block_rows, tree_places
from specdec.model.packing import Packing
from specdec.sampling.tensors import SamplingTensors


@dataclass(slots=True)
class ForwardInput:
    """Packed rows for one forward of the target.

    Attributes:
        token_ids: int64 [num_tokens].
        position_ids: int64 [num_tokens].
        metadata: attention metadata of these rows.
        logit_rows: int64 [n], rows whose logits are wanted; None for all rows.
        rope_lens: int64 [num_tokens], length that the rotations of a row's request are for at
            least; 0 for the usual ones, None for all. See `specdec.model.core.LengthRule`.

    What follows is for layers that keep a state per request, see `specdec.kv_cache.StateCache`:

        slots: int64 [num_reqs], where the states lie; None serves models without such layers.
        row_counts: int64 [num_reqs], rows of each request that do not pad, the first ones; None for
        all. final: no row will be rejected.
        max_pending: host bound on accepted rows of the step before that the states have not taken
        in.
    """

    token_ids: Tensor
    position_ids: Tensor
    metadata: AttentionMetadata
    logit_rows: Tensor | None = None
    rope_lens: Tensor | None = None
    slots: Tensor | None = None
    row_counts: Tensor | None = None
    final: bool = True
    max_pending: int = 0


@dataclass(slots=True)
class PrefillBatch:
    """A chunk of one or more prompts, packed. Rows of a request are consecutive positions."""

    forward: ForwardInput
    slots: Tensor  # int64 [num_reqs]
    # int64 [num_reqs], tokens after the chunks; 0 where it is yet to be chosen
    next_token_ids: Tensor
    reads: bool = True  # the drafter takes over its context


Context = Literal["now", "later", "all"]
"""Which context a drafter takes over after a step: "now" says that of the step; "later", after a
step without drafts, lets it put that off, as long as such steps follow; and "all" has it take over
what it has put off as well. Of too many such steps one that reads late reads anew."""


@dataclass(slots=True)
class DecodeBatch:
    """The requests of one step, as tensors on the device. Row `i` of every tensor belongs to the
    request in `slots[i]`.

    The invariant of the engine holds: `seq_lens` (L) tokens have their KV in the cache; `anchors`
    is the token at position L, whose KV is not. The block tables reach position `L + k`, and as far
    as the drafter writes.

    Attributes:
        slots: int64 [num_reqs], where the request's device state lives; smaller than
            `max_num_seqs`.
        anchors: int64 [num_reqs].
        seq_lens: int64 [num_reqs], L.
        block_table: int32 [num_reqs, max_blocks].
        shape: of the block of each request.
        max_seq_len: host bound on `L + k + 1`, and on the end of what the drafter writes.
        block_size: tokens per cache block.
        max_model_len: position ids never reach this, so that learned position tables are safe.
        sampling: sampling state of the requests.
        min_seq_len: host bound, at most the smallest L; requests that pad the batch may have less.
        rope_lens: int64 [num_reqs], see `ForwardInput.rope_lens`; None where nobody asks.
        context: see `Context`.

    What the models of a step are fed beside tokens depends on the rows per request alone. It is
    computed once for each width.
    """

    slots: Tensor
    anchors: Tensor
    seq_lens: Tensor
    block_table: Tensor
    shape: BlockShape
    max_seq_len: int
    block_size: int
    max_model_len: int
    sampling: SamplingTensors
    min_seq_len: int = 0
    rope_lens: Tensor | None = None
    context: Context = "now"
    _positions: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _position_ids: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _metadata: dict[int, AttentionMetadata] = field(default_factory=dict, init=False, repr=False)
    _rows: dict[int, BlockRows] = field(default_factory=dict, init=False, repr=False)
    _places: tuple[DraftTree, TreePlaces] | None = field(default=None, init=False, repr=False)

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return self.slots.shape[0]

    @property
    def k(self) -> int:
        """Drafts per request in this step."""
        return self.shape.drafts

    def positions(self, width: int) -> Tensor:
        """int64 [num_reqs, width]: positions L, L+1, ... of each request, not clamped."""
        if width not in self._positions:
            if rows := self._rows_of(width):
                self._positions[width] = rows.positions
            else:
                places = torch.arange(width, device=self.slots.device)
                self._positions[width] = self.seq_lens[:, None] + places
        return self._positions[width]

    def _rows_of(self, width: int) -> BlockRows | None:
        """All about rows of a width at once; None where that is not one kernel."""
        if not KERNEL.runs_on(self.slots.device):
            return None
        if width not in self._rows:
            self._rows[width] = block_rows(self.seq_lens, self.block_table, width, self.block_size)
        return self._rows[width]

    def position_ids(self, width: int) -> Tensor:
        """int64 [num_reqs * width]: the same for a model; only surplus rows past the model's length
        are clamped.

        Always the same tensor for a width, so that what follows is not computed twice either.
        """
        if width not in self._position_ids:
            positions = self.positions(width)
            if self.max_seq_len > self.max_model_len:
                positions = positions.clamp(max=self.max_model_len - 1)
            self._position_ids[width] = positions.reshape(-1)
        return self._position_ids[width]

    def slot_mapping(self, width: int) -> Tensor:
        """int64 [num_reqs * width]: cache slots of those positions."""
        return self.metadata(width, visibility="causal").slot_mapping

    def metadata(self, width: int, *, visibility: Visibility) -> AttentionMetadata:
        """Attention metadata of `width` new rows per request, starting at the anchor."""
        if width not in self._metadata:
            least = self.min_seq_len + width
            self._metadata[width] = self.rows_behind(self.seq_lens, width, min_seq_len=least)
        return replace(self._metadata[width], visibility=visibility)

    def rows_behind(self, first: Tensor, width: int, *, min_seq_len: int) -> AttentionMetadata:
        """Causal attention metadata of rows all of which are written.

        Args:
            first: int64 [num_reqs], position of the first row of each request.
            width: rows of each.
            min_seq_len: see `AttentionMetadata`.
        """
        table, most = self.block_table, max(self.max_seq_len, width)
        bounds: dict[str, Any] = {"max_seq_len": most, "min_seq_len": min_seq_len}
        of_block = first is self.seq_lens  # whose rows are computed once
        if KERNEL.runs_on(first.device):
            own = self._rows_of(width) if of_block else None
            rows = own or block_rows(first, table, width, self.block_size)
            bounds["starts"] = rows.starts
            return AttentionMetadata.uniform(width, rows.seq_lens, table, rows.slots, **bounds)
        if of_block:
            return self.rows_from(first, self.positions(width), **bounds)
        positions = first[:, None] + torch.arange(width, device=first.device)
        return self.rows_from(first, positions, **bounds)

    def rows_from(
        self,
        first: Tensor,
        positions: Tensor,
        *,
        max_seq_len: int,
        min_seq_len: int,
        written: Tensor | None = None,
    ) -> AttentionMetadata:
        """Causal attention metadata of rows that begin elsewhere than at the anchor.

        Args:
            first: int64 [num_reqs], position of the first row of each request.
            positions: int64 [num_reqs, width], first, first + 1, ...
            max_seq_len, min_seq_len: see `AttentionMetadata`.
            written: bool [num_reqs, width], rows whose keys and values are kept; None for all.
        """
        width = positions.shape[1]
        blocks = self.block_table.gather(1, positions // self.block_size)
        # The kernels that add up also convert: to int64 what is multiplied, to int32 what is kept.
        slots = torch.add(positions % self.block_size, blocks, alpha=self.block_size)
        if written is not None:
            slots = torch.where(written, slots, NULL_BLOCK * self.block_size)
        seq_lens = torch.add(first, width, out=torch.empty_like(first, dtype=torch.int32))
        return AttentionMetadata.uniform(
            width,
            seq_lens,
            self.block_table,
            slots.reshape(-1),
            max_seq_len=max_seq_len,
            min_seq_len=min_seq_len,
        )

    def row_positions(self, tree: DraftTree | None) -> Tensor:
        """int64 [num_reqs, k + 1]: positions of the rows of the block, not clamped."""
        return self.positions(self.shape.rows) if tree is None else self._places_of(tree).positions

    def _places_of(self, tree: DraftTree) -> TreePlaces:
        if self._places is None or self._places[0] is not tree:
            self._places = tree, tree_places(self.seq_lens, tree, self.max_model_len)
        return self._places[1]

    def verification(
        self,
        token_ids: Tensor,
        tree: DraftTree | None,
        *,
        max_pending: int,
        packing: Packing | None = None,
    ) -> ForwardInput:
        """The forward of the target over the rows of the block: `token_ids` int64 [num_reqs, k +
        1], at `row_positions`; over those of `packing` alone where it is given.
        """
        width = self.shape.rows
        if tree is None:
            position_ids = self.position_ids(width)
            metadata = self.metadata(width, visibility="causal")
        else:
            places = self._places_of(tree)
            position_ids = places.position_ids
            packed = self.metadata(width, visibility="ancestors")
            metadata = replace(packed, tree=TreeRows(places.ancestors, places.depths))
        if packing is not None:
            return self._packed(token_ids, position_ids, metadata, packing, max_pending)
        return ForwardInput(
            token_ids.flatten(),
            position_ids,
            metadata,
            rope_lens=None if self.rope_lens is None else self.rope_lens.repeat_interleave(width),
            slots=self.slots,
            final=width == 1,
            max_pending=max_pending,
        )

    def _packed(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        metadata: AttentionMetadata,
        packing: Packing,
        max_pending: int,
    ) -> ForwardInput:
        """The rows of the forward over whole blocks that are verified."""
        rows, tree = packing.rows, metadata.tree
        own = replace(
            metadata,
            query_start_loc=packing.starts,
            seq_lens=(self.seq_lens + packing.drafts + 1).int(),
            slot_mapping=metadata.slot_mapping.index_select(0, rows),
            num_tokens=len(rows),
            min_seq_len=self.min_seq_len + 1,
            tree=tree and TreeRows(*(of_rows.index_select(0, rows) for of_rows in tree)),
            ragged=True,
        )
        lens = self.rope_lens
        return ForwardInput(
            packing.pack(token_ids),
            position_ids.index_select(0, rows),
            own,
            rope_lens=None if lens is None else lens.index_select(0, packing.requests),
            slots=self.slots,
            final=False,
            max_pending=max_pending,
        )
