"""A drafter that predicts one token after another, each from those before it: EAGLE-3, multi-token prediction, draft models.

Of committed tokens the network's cache holds rows made of the target's own features. Those that a step adds wait in a ring, and the
next `propose` begins with one forward over the rows that the cache lacks; the last of them predicts the first draft. A forward of
one row for each further draft follows. Their rows are made of the network's own features, and the next step writes over them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.checkpoint import check_same_target
from drafters.sequential.drafts import TokenByToken
from drafters.sequential.network import Rows, SequentialNetwork
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import DraftSampling
from specdec.kv_cache import LayerSpec
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import AcceptOutput, BoundDrafter, Drafter, DraftOutput, Verifier, VerifyOutput

USUAL_DRAFTS = 7
"""Drafts of a step at most, where a checkpoint does not say: each costs a forward, and is less sure than the one before it."""

MOST_DEFERRED = 16
"""Steps without drafts whose context is put off at most."""


class SequentialDrafter(Drafter):
    """A network made ready for one target; see `specdec.model.core.Drafter`.

    Its trees are a chain with other candidates beside each of its tokens: they take no more forwards than the chain.

    Args:
        network: proposes tokens.
        verifier: the target.
        max_draft_tokens: largest k.
    """

    draws_trees = True
    late_context = True

    def __init__(self, network: SequentialNetwork, verifier: Verifier, *, max_draft_tokens: int) -> None:
        self.network, self.verifier, self.max_draft_tokens = network, verifier, max_draft_tokens
        self.aux_layer_ids = network.aux_layer_ids
        # A pair holds the token after its position.
        self.tokens_ahead = 1 if network.feature_size else 0

    @property
    def weight_bytes(self) -> int:
        """See `specdec.model.core.Drafter.weight_bytes`; drafts after the first one read them
        again.
        """
        return self.network.weight_bytes

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        return self.network.kv_specs

    def bind(
        self, verifier: Verifier, caches: Sequence[Any], *, max_num_seqs: int, max_len: int, draft_sampling: DraftSampling
    ) -> BoundDrafter:
        """See `specdec.model.core.Drafter.bind`.

        Raises:
            InvalidInputError: another target than the one this was made for.
        """
        check_same_target(self.verifier, verifier)
        return self.bound(caches, max_num_seqs, draft_sampling)

    def bound(self, caches: Sequence[Any], max_num_seqs: int, draft_sampling: DraftSampling) -> BoundDrafter:
        """What `bind` returns for the right target."""
        return BoundSequential(self, caches, max_num_seqs, draft_sampling)


class BoundSequential(TokenByToken):
    """A `SequentialDrafter` over the paged cache of one engine; see
    `specdec.model.core.BoundDrafter`.

    Args:
        drafter: the network.
        caches: one per entry of its `kv_specs`.
        max_num_seqs: slots of requests.
        draft_sampling: how drafts are drawn.
    """

    most_deferred = MOST_DEFERRED

    def __init__(self, drafter: SequentialDrafter, caches: Sequence[Any], max_num_seqs: int, draft_sampling: DraftSampling) -> None:
        super().__init__(drafter.network, caches, draft_sampling)
        self._ahead = drafter.tokens_ahead
        target = drafter.verifier
        device, self._dtype = target.device, target.dtype
        # Without features the rows of accepted drafts stay, and only that of the last one is missing, beside the anchor's.
        self._most_drafts, lacking = drafter.max_draft_tokens, drafter.max_draft_tokens + 1 if self._ahead else 2
        self._drafted = torch.zeros(max_num_seqs, self._most_drafts, dtype=torch.int64, device=device)
        self._due = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._allocate(max(lacking + MOST_DEFERRED, self._most_drafts + 1), lacking)

    def allow(self, most_drafts: int) -> None:
        """See `BoundDrafter.allow`: of another's drafts all rows are missing."""
        lacking = max(most_drafts, self._most_drafts) + 1
        self._allocate(lacking + MOST_DEFERRED, lacking)

    def _allocate(self, size: int, most_lacking: int) -> None:
        """The ring: token and features of position p lie in column p % size. The cache lacks rows from position `_due` on."""
        self._size, self._most_lacking = size, most_lacking
        num_slots, device = len(self._due), self._due.device
        self._tokens = torch.zeros(num_slots, size, dtype=torch.int64, device=device)
        self._features = torch.zeros(num_slots, size, self.network.feature_size, dtype=self._dtype, device=device)

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        """Writes the rows of a prompt chunk. Of a pair whose token is not known yet the features stay in the ring."""
        rows, starts = batch.forward, batch.forward.metadata.query_start_loc
        counts = starts.diff() if rows.row_counts is None else rows.row_counts
        last = (starts[:-1] + counts.clamp(min=1) - 1).long()  # a request that only pads has no rows
        token_ids, features = rows.token_ids, None
        if self._ahead:
            token_ids = token_ids.roll(-1).index_copy_(0, last, batch.next_token_ids)
            features = self._condense(verify)
        self.network.forward(Rows(token_ids, features, rows.position_ids, rows.metadata), self.caches, last)
        positions = rows.position_ids.index_select(0, last)
        if features is not None:
            self._keep_features(batch.slots, positions, features.index_select(0, last))
        self._due.index_copy_(0, batch.slots, positions + 1 - self._ahead)

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts a chain or a tree: all tokens at once with a mask, else one after another."""
        network, depth, last = self.network, batch.shape.depth, batch.seq_lens - self._ahead
        parallel = network.mask is not None
        wanted = depth if parallel else 1
        hidden = self._write_lacking(batch, last, batch.anchors, self._most_lacking, wanted)
        # Of rows without features those of accepted drafts are right, and `commit` takes back the others.
        self._due.index_copy_(0, batch.slots, batch.seq_lens + (0 if self._ahead else depth))
        output, tokens = self._drafts(batch, hidden, wanted, [] if parallel or depth == 1 else self._single_rows(batch))
        if not self._ahead:
            self._drafted.narrow(1, 0, depth).index_copy_(0, batch.slots, tokens)
        return output

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput) -> None:
        """Keeps tokens and features of the verified rows; writes what was put off when that is due."""
        width = token_ids.shape[1]
        positions = batch.positions(width)
        self._tokens.view(-1).index_copy_(0, self._cells(batch.slots[:, None], positions).flatten(), token_ids.flatten())
        if self._ahead:
            self._keep_features(batch.slots[:, None], positions, self._condense(verify))
        else:
            self._take_back(batch, token_ids, accept)
        if batch.context == "all":
            assert width == 1, "context is put off in steps without drafts"
            newest = accept.next_anchors if self._ahead else batch.anchors
            self._write_lacking(batch, batch.seq_lens, newest, self._most_lacking + MOST_DEFERRED, 1)
            self._due.index_copy_(0, batch.slots, batch.seq_lens + 1)

    def _take_back(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput) -> None:
        """Counts rows of drafts as lacking from the first on that is not what was accepted.

        What was accepted may also be another candidate of a tree, or another drafter's draft.
        """
        count = min(token_ids.shape[1] - 1, self._most_drafts)
        own = self._drafted.index_select(0, batch.slots)[:, :count]
        agreeing = (own == token_ids[:, 1 : count + 1]).long().cumprod(dim=1).sum(dim=1)
        right = batch.seq_lens + 1 + torch.minimum(agreeing, accept.num_accepted)
        self._due.index_copy_(0, batch.slots, torch.minimum(self._due.index_select(0, batch.slots), right))

    def _write_lacking(self, batch: DecodeBatch, last: Tensor, newest: Tensor, most: int, wanted: int) -> Tensor:
        """Writes the rows from `_due` to `last`, and behind them those of masks.

        Rows that the cache has, which may be shared by other requests, and rows past the last go to the null block.

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
        cells = self._cells(batch.slots[:, None], positions + self._ahead).flatten()
        token_ids = torch.where(positions == last[:, None], newest[:, None], self._tokens.view(-1)[cells].view_as(positions))
        features = None
        if self._ahead:
            cells = self._cells(batch.slots[:, None], positions).flatten()
            features = self._features.flatten(0, 1).index_select(0, cells)
        if network.mask is not None:
            masked = positions > last[:, None]
            token_ids = token_ids.masked_fill(masked, network.mask.token_id)
            features = features if features is None else torch.where(masked.view(-1, 1), network.mask.features, features)
        metadata = batch.rows_from(
            first,
            positions,
            max_seq_len=max(batch.max_seq_len, width),
            min_seq_len=max(width, batch.min_seq_len - self._ahead + wanted),
            written=due,
        )
        position_ids = positions.clamp(max=batch.max_model_len - 1).flatten()
        offsets = (last - first).clamp(min=0) + torch.arange(0, batch.num_reqs * width, width, device=device)
        rows = (offsets[:, None] + torch.arange(wanted, device=device)).flatten()
        return network.forward(Rows(token_ids.flatten(), features, position_ids, metadata), self.caches, rows)

    def _single_rows(self, batch: DecodeBatch) -> list[tuple[Tensor, AttentionMetadata]]:
        """Position ids int64 [num_reqs] and metadata of the forwards for the drafts after the first one."""
        depth, width, behind = batch.shape.depth, batch.shape.depth + 1, 1 - self._ahead  # rows begin so far behind the anchor
        slots = batch.slot_mapping(width).view(-1, width).t().contiguous()
        position_ids = batch.position_ids(width).view(-1, width).t().contiguous()
        ends = torch.arange(behind + 1, behind + depth, dtype=torch.int32, device=slots.device)
        seq_lens = batch.seq_lens.int() + ends[:, None]
        single = []
        for row in range(depth - 1):
            metadata = AttentionMetadata.uniform(
                1,
                seq_lens[row],
                batch.block_table,
                slots[row + behind],
                max_seq_len=batch.max_seq_len,
                min_seq_len=batch.min_seq_len + behind + row + 1,
            )
            single.append((position_ids[row + behind], metadata))
        return single

    def _condense(self, verify: VerifyOutput) -> Tensor:
        assert verify.aux_hidden is not None, "the engine taps aux_layer_ids"
        return self.network.condense(verify.aux_hidden)

    def _keep_features(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        self._features.flatten(0, 1).index_copy_(0, self._cells(slots, positions).flatten(), features)

    def _cells(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the ring holds what belongs to positions int64 [...] of requests in `slots`, which fits them."""
        return slots * self._size + positions % self._size
