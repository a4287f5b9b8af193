"""Drafters that know the answer, for tests: always right, always wrong, or wrong at one chosen
position.
"""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.kv_cache import LayerCache
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, Drafter, DraftOutput, Verifier


class ScriptedDrafter(Drafter):
    """Proposes the known continuation of each prompt, changed at the draft positions in `wrong_at`.

    Args:
        outputs: prompt -> its whole greedy output.
        k: drafts per step.
        wrong_at: draft positions (0-based) to spoil; one set for all requests, or per prompt by
            index modulo its length.
    """

    def __init__(
        self,
        outputs: dict[tuple[int, ...], list[int]],
        k: int,
        wrong_at: Sequence[set[int]] = (set(),),
    ) -> None:
        self.outputs, self.max_draft_tokens, self.wrong_at = outputs, k, wrong_at

    def bind(self, verifier: Verifier, caches: Sequence[LayerCache], **run: Any) -> "BoundScript":
        return BoundScript(self, verifier, run["max_num_seqs"], run["max_len"])


class BoundScript(BoundDrafter):
    """The scripts of the requests of one engine."""

    def __init__(
        self, drafter: ScriptedDrafter, verifier: Verifier, max_num_seqs: int, max_len: int
    ) -> None:
        self.drafter, self.vocab_size, most = drafter, verifier.vocab_size, drafter.max_draft_tokens
        self.script = torch.zeros(
            max_num_seqs, max_len + most + 1, dtype=torch.int64, device=verifier.device
        )
        self.spoil = torch.zeros(max_num_seqs, most, dtype=torch.int64, device=verifier.device)

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self.write(slot, token_ids)

    def write(self, slot: int, token_ids: Sequence[int]) -> int:
        """Writes the script of a request; returns the index of its prompt."""
        tokens, outputs, wrong_at = tuple(token_ids), self.drafter.outputs, self.drafter.wrong_at
        index, prompt = max(
            (
                (i, p)
                for i, p in enumerate(outputs)
                if tokens[: len(p)] == p and _fits(tokens, p, outputs[p])
            ),
            key=lambda found: len(found[1]),
        )
        row = [*prompt, *outputs[prompt]]
        self.script[slot] = 0
        self.script[slot, : len(row)] = torch.tensor(row)
        wrong = wrong_at[index % len(wrong_at)]
        self.spoil[slot] = torch.tensor(
            [int(j in wrong) for j in range(self.drafter.max_draft_tokens)]
        )
        return index

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        rows = self.script.index_select(0, batch.slots)
        right = rows.gather(1, batch.positions(batch.k + 1)[:, 1:].clamp(max=rows.shape[1] - 1))
        spoil = self.spoil.index_select(0, batch.slots)[:, : batch.k]
        return DraftOutput(token_ids=(right + spoil) % self.vocab_size)


def _fits(tokens: tuple[int, ...], prompt: tuple[int, ...], output: list[int]) -> bool:
    """Whether `tokens` is the prompt with a beginning of its output, as after a preemption."""
    return list(tokens[len(prompt) :]) == output[: len(tokens) - len(prompt)]
