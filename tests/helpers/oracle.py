"""A DFlash drafter in whose place a table answers: the target's own logits at every position of
known texts, disturbed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.dflash.coupling import Coupling, CouplingTable
from drafters.dflash.drafter import BoundDFlash
from drafters.dflash.drafts import Drafts
from drafters.head import Head, Refiner
from specdec.base.config import DraftSampling
from specdec.kv_cache import LayerCache
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import AcceptOutput, Drafter, Verifier, VerifyOutput


class OracleDrafter(Drafter):
    """Drafts as `DFlashDrafter` does, by coupling, trees and rejection sampling of its own, from
    given logits.

    Args:
        texts: prompt -> its whole output, all as long together.
        logits: float32 [texts, length, V], at each position for the token behind it.
        k: most drafts of a path.
        coupling: weights of these logits and of the shared noise; None are ones.
        head: what corrects these logits, which it takes for hidden states, too.
    """

    draws_trees = True

    def __init__(
        self,
        texts: dict[tuple[int, ...], list[int]],
        logits: Tensor,
        k: int,
        coupling: Coupling | None = None,
        head: Head | None = None,
    ) -> None:
        self.coupling, self.head, self.logits, self.max_draft_tokens = coupling, head, logits, k
        self.texts = {text: i for i, text in enumerate(texts)}

    def bind(self, verifier: Verifier, caches: Sequence[LayerCache], **run: Any) -> "BoundOracle":
        return BoundOracle(self, run["max_num_seqs"], run["draft_sampling"])


class BoundOracle(BoundDFlash):
    """The same in one engine."""

    max_deferred = 0

    def __init__(
        self, drafter: OracleDrafter, max_num_seqs: int, draft_sampling: DraftSampling
    ) -> None:
        self.drafter: OracleDrafter = drafter  # type: ignore[assignment]
        given = drafter.coupling
        coupling = None if given is None else CouplingTable(given, torch.device("cpu"))
        self.drafts = Drafts(draft_sampling, coupling, None, drafter.head)
        self.table = drafter.logits
        self.texts = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._before = torch.zeros_like(self.texts) if isinstance(drafter.head, Refiner) else None

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        texts = self.drafter.texts
        self.texts[slot] = next(
            texts[prompt]
            for n in range(1, len(token_ids) + 1)
            if (prompt := tuple(token_ids[:n])) in texts
        )

    def draft_hidden(self, batch: DecodeBatch) -> Tensor:
        refines = self._before is not None
        rows = self.drafter.max_draft_tokens + 1 if refines else batch.shape.depth
        positions = (batch.positions(rows) - int(refines)).clamp(max=self.table.shape[1] - 1)
        return self.table[self.texts.index_select(0, batch.slots)[:, None], positions]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        pass

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        pass


@torch.inference_mode()
def disturbed_logits(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], spread: float
) -> Tensor:
    """The target's logits over whole texts, padded behind, plus normal noise of that standard
    deviation.
    """
    length = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
    logits = torch.cat([model(part).logits for part in tokens.split(128)])
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    result: Tensor = logits + spread * noise
    return result
