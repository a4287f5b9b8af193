"""A drafter that goes token by token: EAGLE-3, multi-token prediction, draft models.

Of committed tokens the network's cache holds rows made of the target's own features. Those that a
step adds wait in a ring, and the next `propose` begins with one forward over the rows that the
cache lacks; the last of them predicts the first draft. A forward of one row for each further draft
follows. Their rows are made of the network's own features, and the next step makes those of
accepted drafts anew: the first forward takes hardly longer for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.checkpoint import check_same_target
from drafters.sequential.drafts import TokenByToken
from drafters.sequential.growth import num_beams
from drafters.sequential.network import Rows, SequentialNetwork
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import DraftSampling
from specdec.kv_cache import LayerSpec
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import (
    AcceptOutput,
    BoundDrafter,
    Drafter,
    DraftOutput,
    Verifier,
    VerifyOutput,
)

USUAL_DRAFTS = 7
"""Drafts of a step at most where a checkpoint does not say: each costs a forward."""

MAX_DEFERRED = 16
"""Steps without drafts whose context is put off at most."""


class SequentialDrafter(Drafter):
    """A network made ready for one target; see `specdec.model.core.Drafter`.

    Its trees take no more forwards than a chain as deep: see `drafters.sequential.growth`.
    """

    draws_trees = True
    likeliest_first = True
    late_context = True

    def __init__(
        self, network: SequentialNetwork, verifier: Verifier, *, max_draft_tokens: int
    ) -> None:
        self.network, self.verifier, self.max_draft_tokens = network, verifier, max_draft_tokens
        self.aux_layer_ids, self.forward_for_each = network.aux_layer_ids, network.mask is None
        # A pair holds the token after its position.
        self.tokens_ahead = 1 if network.feature_size else 0
        self.reads_late = not network.feature_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of one forward's weights; drafts after the first one read them again."""
        return self.network.weight_bytes

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        return self.network.kv_specs

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[Any],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> BoundDrafter:
        """See `specdec.model.core.Drafter.bind`.

        Raises:
            InvalidInputError: another target than the one this was made for.
        """
        check_same_target(self.verifier, verifier)
        return self.bound(caches, max_num_seqs, draft_sampling)

    def bound(
        self, caches: Sequence[Any], max_num_seqs: int, draft_sampling: DraftSampling
    ) -> BoundDrafter:
        """What `bind` returns for the right target."""
        return BoundSequential(self, caches, max_num_seqs, draft_sampling)


class BoundSequential(TokenByToken):
    """A `SequentialDrafter` over an engine's paged cache; see `specdec.model.core.BoundDrafter`."""

    max_deferred = MAX_DEFERRED

    def __init__(
        self,
        drafter: SequentialDrafter,
        caches: Sequence[Any],
        max_num_seqs: int,
        draft_sampling: DraftSampling,
    ) -> None:
        super().__init__(drafter.network, caches, draft_sampling)
        self.drafter, self._ahead = drafter, drafter.tokens_ahead
        target = drafter.verifier
        device, self._dtype = target.device, target.dtype
        self._due = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.allow(drafter.max_draft_tokens)

    def allow(self, max_drafts: int) -> None:
        """See `BoundDrafter.allow`.

        Makes the ring: token and features of position p lie in column p % size. The cache lacks
        rows from position `_due` on.
        """
        self._max_lacking, num_slots, device = max_drafts + 1, len(self._due), self._due.device
        self._size = self._max_lacking + MAX_DEFERRED
        self._tokens = torch.zeros(num_slots, self._size, dtype=torch.int64, device=device)
        self._features = torch.zeros(
            num_slots, self._size, self.network.feature_size, dtype=self._dtype, device=device
        )

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `BoundDrafter.begin`. Rows of a text that is not read are not written, as blocks of
        it may be shared.
        """
        self._due[slot] = len(token_ids)

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        """Writes the rows of a prompt chunk. Of a pair whose token is not known yet the features
        stay in the ring.
        """
        rows, starts = batch.forward, batch.forward.metadata.query_start_loc
        counts = starts.diff() if rows.row_counts is None else rows.row_counts
        # a request that only pads has no rows
        last = (starts[:-1] + counts.clamp(min=1) - 1).long()
        token_ids, features = rows.token_ids, None
        if self._ahead:
            token_ids = token_ids.roll(-1).index_copy_(0, last, batch.next_token_ids)
            features = self._condense(verify)
        known = Rows(token_ids, features, rows.position_ids, rows.metadata)
        self.network.forward(known, self.caches, last)
        positions = rows.position_ids.index_select(0, last)
        if features is not None:
            self._keep_features(batch.slots, positions, features.index_select(0, last))
        self._due.index_copy_(0, batch.slots, positions + 1 - self._ahead)

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts a chain or a tree: all tokens at once with a mask, else one after another."""
        network, shape, last = self.network, batch.shape, batch.seq_lens - self._ahead
        parallel = network.mask is not None
        wanted = shape.depth if parallel else 1
        hidden = self._write_lacking(batch, last, batch.anchors, self._max_lacking, wanted)
        self._due.index_copy_(0, batch.slots, last + 1)
        beams = 1 if parallel or not network.takes_trees else num_beams(shape)
        if beams > 1:
            return self._grown(batch, last, beams, self._features_at(batch.slots, last), hidden)
        single_rows = [] if parallel or shape.depth == 1 else self._single_rows(batch)
        return self._drafts(batch, hidden, wanted, single_rows)

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Keeps tokens and features of verified rows; writes what was put off when due."""
        width = token_ids.shape[1]
        positions = batch.positions(width)
        cells = self._cells(batch.slots[:, None], positions).flatten()
        self._tokens.view(-1).index_copy_(0, cells, token_ids.flatten())
        if self._ahead:
            self._keep_features(batch.slots[:, None], positions, self._condense(verify))
        if batch.context == "all":
            assert width == 1, "context is put off in steps without drafts"
            newest = accept.next_anchors if self._ahead else batch.anchors
            self._write_lacking(batch, batch.seq_lens, newest, self._max_lacking + MAX_DEFERRED, 1)
            self._due.index_copy_(0, batch.slots, batch.seq_lens + 1)

    def _write_lacking(
        self, batch: DecodeBatch, last: Tensor, newest: Tensor, most: int, wanted: int
    ) -> Tensor:
        """Writes the rows from `_due` to `last`, and behind them those of masks.

        Rows that the cache has, which may be shared, and rows past the last go to the null block.

        Args:
            batch: the step.
            last: int64 [num_reqs], position of the newest row.
            newest: int64 [num_reqs], its token.
            most: bound on the rows that the cache lacks.
            wanted: rows whose hidden states are wanted, from `last` on.

        Returns:
            Hidden states [num_reqs * wanted, ...].
        """
        network, device = self.network, batch.slots.device
        width = min(most + wanted - 1, batch.block_table.shape[1] * batch.block_size)
        first = (last - (most - 1)).clamp(min=0)
        positions = first[:, None] + torch.arange(width, device=device)
        due = positions >= torch.minimum(self._due.index_select(0, batch.slots), last)[:, None]
        due &= positions < last[:, None] + wanted
        cells = self._cells(batch.slots[:, None], positions + self._ahead)
        is_last = positions == last[:, None]
        token_ids = torch.where(is_last, newest[:, None], self._tokens.view(-1)[cells])
        features = self._features_at(batch.slots[:, None], positions)
        if network.mask is not None:
            masked = positions > last[:, None]
            token_ids = token_ids.masked_fill(masked, network.mask.token_id)
            if features is not None:
                features = torch.where(masked.view(-1, 1), network.mask.features, features)
        max_seq_len = max(batch.max_seq_len, width)
        min_seq_len = max(width, batch.min_seq_len - self._ahead + wanted)
        metadata = batch.rows_from(
            first, positions, max_seq_len=max_seq_len, min_seq_len=min_seq_len, written=due
        )
        position_ids = positions.clamp(max=batch.max_model_len - 1).flatten()
        starts = torch.arange(0, batch.num_reqs * width, width, device=device)
        offsets = (last - first).clamp(min=0) + starts
        rows = (offsets[:, None] + torch.arange(wanted, device=device)).flatten()
        packed = Rows(token_ids.flatten(), features, position_ids, metadata)
        return network.forward(packed, self.caches, rows)

    def _single_rows(self, batch: DecodeBatch) -> list[tuple[Tensor, AttentionMetadata]]:
        """Position ids int64 [num_reqs] and metadata of a forward for each later draft."""
        depth, width = batch.shape.depth, batch.shape.depth + 1
        behind = 1 - self._ahead  # rows begin so far behind the anchor
        slots = batch.slot_mapping(width).view(-1, width).t().contiguous()
        position_ids = batch.position_ids(width).view(-1, width).t().contiguous()
        ends = torch.arange(behind + 1, behind + depth, dtype=torch.int32, device=slots.device)
        seq_lens = batch.seq_lens.int() + ends[:, None]
        starts = torch.arange(batch.num_reqs + 1, dtype=torch.int32, device=slots.device)
        single = []
        for row in range(depth - 1):
            metadata = AttentionMetadata.uniform(
                1,
                seq_lens[row],
                batch.block_table,
                slots[row + behind],
                max_seq_len=batch.max_seq_len,
                min_seq_len=batch.min_seq_len + behind + row + 1,
                starts=starts,
            )
            single.append((position_ids[row + behind], metadata))
        return single

    def _condense(self, verify: VerifyOutput) -> Tensor:
        assert verify.aux_hidden is not None, "the engine taps aux_layer_ids"
        return self.network.condense(verify.aux_hidden)

    def _features_at(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """Features [n, F] of n positions, which the ring has; None without features."""
        if not self._ahead:
            return None
        return self._features.flatten(0, 1).index_select(0, self._cells(slots, positions).flatten())

    def _keep_features(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        cells = self._cells(slots, positions).flatten()
        self._features.flatten(0, 1).index_copy_(0, cells, features)

    def _cells(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the ring holds positions int64 [...] of requests in `slots`."""
        return slots * self._size + positions % self._size
