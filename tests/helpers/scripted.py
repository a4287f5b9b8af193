"""Drafters that know the answer, for tests: always right, always wrong, or wrong at one chosen position."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.config import DraftSampling
from specdec.core import AcceptOutput, DecodeBatch, DraftOutput, PrefillBatch, Verifier, VerifyOutput
from specdec.kv_cache import KVLayerSpec, LayerCache


class ScriptedDrafter:
    """Proposes the known continuation of each prompt, changed at the draft positions in `wrong_at`.

    Args:
        outputs: prompt -> its whole greedy output.
        k: drafts per step.
        wrong_at: draft positions (0-based) to spoil; one set for all requests, or per prompt by index modulo its length.
    """

    aux_layer_ids: tuple[int, ...] = ()
    draft_rows = 0
    weight_bytes = 0

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], k: int, wrong_at: Sequence[set[int]] = (set(),)) -> None:
        self.outputs, self.max_draft_tokens, self.wrong_at = outputs, k, wrong_at
        self.kv_specs: list[KVLayerSpec] = []

    def bind(
        self, verifier: Verifier, caches: Sequence[LayerCache], *, max_num_seqs: int, max_len: int, draft_sampling: DraftSampling
    ) -> None:
        self.vocab_size = verifier.vocab_size
        self.script = torch.zeros(max_num_seqs, max_len + self.max_draft_tokens + 1, dtype=torch.int64, device=verifier.device)
        self.spoil = torch.zeros(max_num_seqs, self.max_draft_tokens, dtype=torch.int64, device=verifier.device)

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        tokens = tuple(token_ids)
        index, prompt = max(
            ((i, p) for i, p in enumerate(self.outputs) if tokens[: len(p)] == p and _fits(tokens, p, self.outputs[p])),
            key=lambda found: len(found[1]),
        )
        row = [*prompt, *self.outputs[prompt]]
        self.script[slot] = 0
        self.script[slot, : len(row)] = torch.tensor(row)
        wrong = self.wrong_at[index % len(self.wrong_at)]
        self.spoil[slot] = torch.tensor([int(j in wrong) for j in range(self.max_draft_tokens)])

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        pass

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        rows = self.script.index_select(0, batch.slots)
        right = rows.gather(1, batch.positions(batch.k + 1)[:, 1:].clamp(max=rows.shape[1] - 1))
        spoil = self.spoil.index_select(0, batch.slots)[:, : batch.k]
        return DraftOutput(token_ids=(right + spoil) % self.vocab_size)

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput) -> None:
        pass


def _fits(tokens: tuple[int, ...], prompt: tuple[int, ...], output: list[int]) -> bool:
    """Whether `tokens` is the prompt with a beginning of its output, as after a preemption."""
    return list(tokens[len(prompt) :]) == output[: len(tokens) - len(prompt)]
