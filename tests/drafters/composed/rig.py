"""A composition of drafters that draft what they are told to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from specdec.base.config import DraftSampling
from specdec.kv_cache import LayerCache
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, Drafter, DraftOutput, Verifier, VerifyOutput
from tests.drafters.tiny import FakeVerifier, Rig


class Fixed(Drafter, BoundDrafter):
    """Proposes the same tokens for every request, and promises what it is told to."""

    def __init__(
        self,
        token_ids: Sequence[int],
        forecasts: Sequence[float] | None,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.tokens = torch.tensor([token_ids])
        self.promised = None if forecasts is None else torch.tensor(forecasts)
        self.max_draft_tokens, self.aux_layer_ids = len(token_ids), taps
        self.committed: list[VerifyOutput] = []

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[LayerCache],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> "Fixed":
        return self

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        assert self.forecasts, "a composition asks for them"
        return DraftOutput(
            self.tokens[:, : batch.k].expand(batch.num_reqs, -1), forecast=self.promised
        )

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: Any, verify: VerifyOutput
    ) -> None:
        self.committed.append(verify)


def rig_of(*parts: Drafter) -> Rig:
    """Two requests."""
    rig = Rig(ComposedDrafter(parts), FakeVerifier())
    for slot in range(2):
        rig.bound.begin(slot, [1, 2])
    return rig
