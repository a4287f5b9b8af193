"""Drafting with layers that read the target's keys and values, as Gemma 4's assistants do.

They cache nothing, so of a request nothing is kept but the target's last hidden state. All drafts
of a step are made at the position of its anchor, of what the target has read before it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.mtp.network import PredictionNetwork
from drafters.sequential.drafter import SequentialDrafter
from drafters.sequential.drafts import TokenByToken
from drafters.sequential.network import Rows
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import DraftSampling
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import AcceptOutput, DraftOutput, Verifier, VerifyOutput


class AssistantDrafter(SequentialDrafter):
    """An assistant made ready for its target."""

    network: PredictionNetwork

    def __init__(
        self, network: PredictionNetwork, verifier: Verifier, *, max_draft_tokens: int
    ) -> None:
        super().__init__(network, verifier, max_draft_tokens=max_draft_tokens)
        self.tokens_ahead = 0  # since nothing is cached

    def bound(
        self, caches: Sequence[Any], max_num_seqs: int, draft_sampling: DraftSampling
    ) -> "BoundAssistant":
        return BoundAssistant(self, caches, max_num_seqs, draft_sampling)


class BoundAssistant(TokenByToken):
    """An `AssistantDrafter` in one engine; see `specdec.model.core.BoundDrafter`. Its caches are
    those of the target's layers that its own layers read.
    """

    def __init__(
        self,
        drafter: AssistantDrafter,
        caches: Sequence[Any],
        max_num_seqs: int,
        draft_sampling: DraftSampling,
    ) -> None:
        super().__init__(drafter.network, caches, draft_sampling)
        target = drafter.verifier
        self._hidden = torch.zeros(
            max_num_seqs, target.hidden_size, dtype=target.dtype, device=target.device
        )

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        """Keeps the hidden state of the last row of each chunk."""
        starts, counts = batch.forward.metadata.query_start_loc, batch.forward.row_counts
        counts = starts.diff() if counts is None else counts
        self._keep(batch.slots, verify, (starts[:-1] + counts - 1).clamp(min=0).long())

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts a chain or a tree, one token after another."""
        metadata = AttentionMetadata.uniform(
            1,
            # requests that only pad the batch may have read nothing
            batch.seq_lens.clamp(min=1).int(),
            batch.block_table,
            torch.zeros_like(batch.slots),
            max_seq_len=batch.max_seq_len,
            min_seq_len=batch.min_seq_len,
        )
        hidden, position_ids = self._hidden.index_select(0, batch.slots), batch.position_ids(1)
        rows = Rows(batch.anchors, hidden, position_ids, metadata)
        out = self.network.forward(rows, self.caches, None)
        return self._drafts(batch, out, 1, [(position_ids, metadata)] * (batch.shape.depth - 1))

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Keeps the hidden state of the last row that was accepted."""
        first = torch.arange(0, token_ids.numel(), token_ids.shape[1], device=token_ids.device)
        self._keep(batch.slots, verify, first + accept.num_accepted)

    def _keep(self, slots: Tensor, verify: VerifyOutput, rows: Tensor) -> None:
        assert verify.aux_hidden is not None, "the engine taps aux_layer_ids"
        hidden = self.network.condense(verify.aux_hidden.index_select(0, rows))
        self._hidden.index_copy_(0, slots, hidden)
