"""Predicted outputs: drafts copied from what a request says its output will be like.

Files that are edited are mostly as they were. So the text is followed as far as it goes, and found
again behind each edit (`alignment`). Whichever drafter an engine has, drafts beside it, as in any
composition; batches without a prediction know nothing of all this.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.composed.drafter import BoundComposed, ComposedDrafter
from drafters.predicted.alignment import BEFORE, COMPARED, Alignment, agreed, align, following
from drafters.suffix.matches import NOTHING
from specdec.base.config import DraftSampling
from specdec.base.metrics import PREDICTED
from specdec.kv_cache import LayerCache
from specdec.model.batch import DecodeBatch
from specdec.model.core import (
    AcceptOutput,
    BoundDrafter,
    Drafter,
    DraftOutput,
    Verifier,
    VerifyOutput,
)
from specdec.sampling.trees.tries import trie

TRUSTED = 2
"""Drafts that are expected to be right for each token of a match, until it is known better."""


class PredictionCopier(Drafter):
    """Copies what is predicted; see `specdec.model.core.Drafter`."""

    draws_trees = True

    def __init__(self, max_draft_tokens: int = 31) -> None:
        self.max_draft_tokens = max_draft_tokens

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[LayerCache],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> "BoundCopier":
        return BoundCopier(max_num_seqs, max_len, verifier.device)


class BoundCopier(BoundDrafter):
    """The predictions of the requests of one engine; see `specdec.model.core.BoundDrafter`."""

    has_expected_accepted = True

    def __init__(self, num_slots: int, max_len: int, device: torch.device) -> None:
        shape = (num_slots, COMPARED + max_len + 1)
        self.rows = torch.full(shape, NOTHING, dtype=torch.int32, device=device)
        # Where outputs are in their predictions, and their tokens before the anchor.
        self.places = torch.full((num_slots,), COMPARED, device=device)
        self.ends = torch.full((num_slots, COMPARED), BEFORE, device=device)
        self._starts: Tensor | None = None  # of the drafts of the step under way
        self._held: set[int] = set()  # slots that have a prediction

    def predict(
        self, slot: int, prompt: Sequence[int], output: Sequence[int], prediction: Sequence[int]
    ) -> None:
        """Takes over a prediction, or none, for the request that starts in `slot`; between steps.

        Args:
            slot: its own.
            prompt: its tokens.
            output: what there is of its output, the last of which is the anchor.
            prediction: tokens; of too many the first.
        """
        if not prediction and slot not in self._held:
            return
        row = self.rows[slot].fill_(NOTHING)
        self._held.discard(slot)
        if prediction:
            self._held.add(slot)
            text = [*_end_of(prompt), *prediction][: len(row) - 1]
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        self.ends[slot] = torch.tensor(_end_of([*prompt[-COMPARED:], *output[:-1]]))
        self.places[slot] = min(COMPARED + max(0, len(output) - 1), len(row) - 1)

    def expected_accepted(self, batch: DecodeBatch) -> Tensor:
        found = self._align(batch)
        tokens = following(self.rows.index_select(0, batch.slots), found.places, batch.k)
        return _forecast(found, _count(tokens))

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """What follows in the predictions; k drafts, or as many as there are."""
        found, depth = self._align(batch), batch.shape.depth
        self._starts = found.places
        tokens = following(self.rows.index_select(0, batch.slots), found.places, depth)
        count = _count(tokens)
        forecast, token_ids = _forecast(found, count), tokens.clamp(min=0)
        if not batch.shape.is_tree:
            return DraftOutput(token_ids, num_drafts=count, forecast=forecast)
        # As many of the one path as there are drafts to be found.
        shape = (-1, -(-batch.k // depth))
        lengths, kept = count[:, None].expand(shape), (forecast / (forecast + 1))[:, None]
        paths = token_ids[:, None].expand(*shape, -1)
        keep = kept.expand(shape).contiguous()
        drafts = trie(paths, lengths, torch.ones_like(keep), batch.k, keep=keep)
        return DraftOutput(
            drafts.token_ids,
            num_drafts=drafts.num_drafts,
            tree=drafts.tree,
            forecast=forecast,
            scores=drafts.scores,
        )

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Follows what came out from the drafts' place, or else from the last known one."""
        starts = self._starts if batch.k else self._align(batch).places
        slots, emitted = batch.slots, accept.num_accepted + 1
        rows, places = self.rows.index_select(0, slots), self.places.index_select(0, slots)
        width = accept.token_ids.shape[1]
        stays = agreed(following(rows, places, width), accept.token_ids, emitted)
        assert starts is not None, "drafts come before their outcome"
        goes = agreed(following(rows, starts, width), accept.token_ids, emitted)
        places = torch.where(goes > 0, starts + goes, places + stays)
        self.places.index_copy_(0, slots, places)
        text = torch.cat([self.ends.index_select(0, slots), token_ids], dim=1)
        cells = emitted[:, None] + torch.arange(COMPARED, device=text.device)
        self.ends.index_copy_(0, slots, text.gather(1, cells))

    def _align(self, batch: DecodeBatch) -> Alignment:
        ends = self.ends.index_select(0, batch.slots)
        rows = self.rows.index_select(0, batch.slots)
        places = self.places.index_select(0, batch.slots)
        return align(rows, places, torch.cat([ends[:, 1:], batch.anchors[:, None]], dim=1))


class BoundPredicted(BoundComposed):
    """A run's drafter and predictions beside it, for batches in which a request has one.

    The drafter itself begins, prefills and forgets requests, and serves all other batches.
    """

    def __init__(
        self,
        drafter: Drafter,
        bound: BoundDrafter,
        verifier: Verifier,
        *,
        num_slots: int,
        max_len: int,
    ) -> None:
        copier = PredictionCopier()
        drafters, parts = [drafter], [bound]
        if isinstance(drafter, ComposedDrafter) and isinstance(bound, BoundComposed):
            drafters, parts = list(drafter.parts), list(bound.parts)
        self._own = [(part, part.forecasts) for part in parts]
        self.copies = copier.bind(
            verifier, (), max_num_seqs=num_slots, max_len=max_len, draft_sampling="greedy"
        )
        composed = ComposedDrafter([*drafters, copier])
        super().__init__(composed, [*parts, self.copies], num_slots, verifier)
        self._forecasting(False)
        self._begun[:-1] = 1  # all but the slot of rows that pad

    def predict(
        self, slot: int, prompt: Sequence[int], output: Sequence[int], prediction: Sequence[int]
    ) -> None:
        """See `BoundCopier.predict`."""
        self.copies.predict(slot, prompt, output, prediction)

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        self._forecasting(True)
        try:
            output = super().propose(batch)
        finally:
            self._forecasting(False)
        if output.part is not None and not batch.shape.is_tree:
            output.part = self._named(output.part)
        return output

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """See `BoundComposed.commit`; says of which requests the drafts were copied."""
        output = self._step.output if self._step and batch.shape.is_tree else None
        super().commit(batch, token_ids, accept, verify)
        if output is not None and output.part is not None:  # of a tree it is known by now
            output.part = self._named(output.part)

    def _named(self, part: Tensor) -> Tensor:
        return torch.where(part == len(self.parts) - 1, PREDICTED, part)

    def _forecasting(self, on: bool) -> None:
        """What the drafter forecasts in other batches is its own affair."""
        for part, own in self._own:
            part.forecasts = on or own


def _end_of(tokens: Sequence[int]) -> list[int]:
    end = list(tokens[-COMPARED:])
    return [BEFORE] * (COMPARED - len(end)) + end


def _count(tokens: Tensor) -> Tensor:
    return (tokens >= 0).sum(dim=1)


def _forecast(found: Alignment, count: Tensor) -> Tensor:
    return torch.minimum(TRUSTED * found.lengths, count).float()
