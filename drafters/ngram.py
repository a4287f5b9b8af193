"""Drafts copied from the request's own text: the longest recent repetition of its last tokens, and what followed it.

Prompt lookup decoding (Saxena, 2023), for a batch and without leaving the device.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.config import DraftSampling
from specdec.core import AcceptOutput, BoundDrafter, DecodeBatch, Drafter, DraftOutput, Verifier, VerifyOutput
from specdec.errors import InvalidInputError
from specdec.kv_cache import LayerCache


class NGramDrafter(Drafter):
    """Copies what followed the last n-gram the last time it occurred; see `specdec.core.Drafter`.

    Args:
        max_draft_tokens: largest k.
        prompt_lookup_max: longest n-gram compared; a longer match is preferred, a later one among equals.
        prompt_lookup_min: shortest match that counts. A short one costs nothing: the step has k rows either way.

    Raises:
        InvalidInputError: a number out of range.
    """

    def __init__(self, *, max_draft_tokens: int = 8, prompt_lookup_max: int = 4, prompt_lookup_min: int = 1) -> None:
        if max_draft_tokens < 1:
            raise InvalidInputError(f"max_draft_tokens is {max_draft_tokens}; it must be at least 1")
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise InvalidInputError(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max {prompt_lookup_max}; they must be ordered, from 1"
            )
        self.max_draft_tokens = max_draft_tokens
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def bind(
        self, verifier: Verifier, caches: Sequence[LayerCache], *, max_num_seqs: int, max_len: int, draft_sampling: DraftSampling
    ) -> "BoundNGram":
        """See `specdec.core.Drafter.bind`; copied drafts are point masses under either `draft_sampling`."""
        # The rows of a step reach k positions past the last one that a request may keep.
        width = max_len + self.max_draft_tokens + 1
        return BoundNGram(self, torch.zeros(max_num_seqs, width, dtype=torch.long, device=verifier.device))


class BoundNGram(BoundDrafter):
    """The texts of the requests of one engine; see `specdec.core.BoundDrafter`.

    Args:
        drafter: how to look.
        history: int64 [max_num_seqs, positions], taken over.
    """

    def __init__(self, drafter: NGramDrafter, history: Tensor) -> None:
        self._drafter, self.history = drafter, history

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Uploads the tokens of a request."""
        self.history[slot, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.long, device=self.history.device)

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts k tokens for every request whose last tokens occurred before, and 0 for the others."""
        last = batch.seq_lens[:, None]  # position of the anchor
        self._store(batch, batch.anchors[:, None])
        tokens = self.history[:, : batch.max_seq_len].index_select(0, batch.slots)
        ends, found = self._find(tokens, last)
        # A continuation that reaches the anchor repeats from its start, as an overlapping copy does in LZ77.
        steps = torch.arange(batch.k, device=tokens.device) % (last - ends).clamp(min=1)
        token_ids = tokens.gather(1, (ends + 1 + steps).clamp(max=tokens.shape[1] - 1))
        return DraftOutput(token_ids=token_ids, num_drafts=found * batch.k)

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput) -> None:
        """Stores the verified rows; those past the accepted ones lie beyond the next anchor, where nothing looks."""
        self._store(batch, token_ids)

    def _store(self, batch: DecodeBatch, token_ids: Tensor) -> None:
        """Writes `token_ids` [num_reqs, n] to the positions from the anchor on."""
        self.history.index_put_((batch.slots[:, None], batch.positions(token_ids.shape[1])), token_ids)

    def _find(self, tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Where the best match ends.

        Args:
            tokens: int64 [num_reqs, width].
            last: int64 [num_reqs, 1], position of each request's last token.

        Returns:
            int64 [num_reqs, 1], the position of the match's last token, and bool [num_reqs], whether there is one.
        """
        width = tokens.shape[1]
        columns = torch.arange(width, device=tokens.device)
        matched = columns < last  # the last j + 1 tokens end here, too
        lengths = torch.zeros_like(tokens)
        for j in range(min(self._drafter.prompt_lookup_max, width)):
            token = tokens.gather(1, (last - j).clamp(min=0))
            matched = matched & F.pad(tokens[:, : width - j] == token, (j, 0))
            lengths += matched
        scores = torch.where(lengths >= self._drafter.prompt_lookup_min, lengths * width + columns, -1)
        best, ends = scores.max(dim=1, keepdim=True)
        return ends, best[:, 0] >= 0


def load_ngram(path: str | Path | None = None, *, verifier: Verifier) -> NGramDrafter:
    """The n-gram drafter with its defaults.

    Raises:
        InvalidInputError: a path, for there is no checkpoint to read.
    """
    if path is not None:
        raise InvalidInputError(f"the ngram drafter has no checkpoint; leave out {str(path)!r}")
    return NGramDrafter()
