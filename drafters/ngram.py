"""Drafts copied from the request's own text: what followed the last tokens when they occurred before.

Prompt lookup decoding (Saxena, 2023), for a batch and without leaving the device. A chain copies what followed the longest recent
repetition. A tree holds what followed several, as the trees of suffix decoding do (snowflakedb/ArcticInference).
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
from specdec.sampling.tries import trie

OCCURRENCES = 8
"""Matches of which a tree is made: the longest ones, and of equal ones the latest."""
_BY_LENGTH = 4.0  # times as much does a match weigh as one that is a token shorter
_BY_AGE = 0.9  # the same, of one that is next in that order
_KEEP = 0.9  # probability that a text goes on as before, per token
_SHORTEST = -16  # tokens by which a match may be shorter and still weigh less; bounds the weights


class NGramDrafter(Drafter):
    """Copies what followed the last n-gram the last time it occurred, or in a tree the last times; see `specdec.core.Drafter`.

    Args:
        max_draft_tokens: largest k.
        prompt_lookup_max: longest n-gram compared; a longer match is preferred, a later one among equals.
        prompt_lookup_min: shortest match that counts. A short one costs nothing: the step has k rows either way.

    Raises:
        InvalidInputError: a number out of range.
    """

    draws_trees = True

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
        """Drafts for every request whose last tokens occurred before: k in a chain, up to k in a tree; and 0 for the others."""
        last = batch.seq_lens[:, None]  # position of the anchor
        self._store(batch, batch.anchors[:, None])
        tokens = self.history[:, : batch.max_seq_len].index_select(0, batch.slots)
        scores = self._scores(tokens, last)
        if batch.shape.is_tree:
            return self._tree(batch, tokens, last, scores)
        best, ends = scores.max(dim=1, keepdim=True)
        return DraftOutput(_continued(tokens, last, ends, batch.k)[:, 0], num_drafts=(best[:, 0] >= 0) * batch.k)

    def _tree(self, batch: DecodeBatch, tokens: Tensor, last: Tensor, scores: Tensor) -> DraftOutput:
        """What followed the best matches, put together; the longer and later a match, the more its continuation weighs."""
        depth = batch.shape.depth
        count = max(OCCURRENCES, -(-batch.k // depth))  # so many that there could be k drafts
        best, ends = F.pad(scores, (0, count), value=-1).topk(count, dim=1)
        lengths, ages = best // tokens.shape[1], torch.arange(count, device=tokens.device)
        weights = _BY_LENGTH ** (lengths - lengths[:, :1]).clamp(min=_SHORTEST) * _BY_AGE**ages
        drafts = trie(_continued(tokens, last, ends, depth), (best >= 0) * depth, weights, batch.k, keep=_KEEP)
        return DraftOutput(drafts.token_ids, num_drafts=drafts.num_drafts, tree=drafts.tree)

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput) -> None:
        """Stores the verified rows; those past the accepted ones lie beyond the next anchor, where nothing looks."""
        self._store(batch, token_ids)

    def _store(self, batch: DecodeBatch, token_ids: Tensor) -> None:
        """Writes `token_ids` [num_reqs, n] to the positions from the anchor on."""
        self.history.index_put_((batch.slots[:, None], batch.positions(token_ids.shape[1])), token_ids)

    def _scores(self, tokens: Tensor, last: Tensor) -> Tensor:
        """How good a match ends at each position.

        Args:
            tokens: int64 [num_reqs, width].
            last: int64 [num_reqs, 1], position of each request's last token.

        Returns:
            int64 [num_reqs, width], higher for a longer one and of equal ones for the later: its length times the width, and the
            position. -1 where there is none.
        """
        width = tokens.shape[1]
        columns = torch.arange(width, device=tokens.device)
        matched = columns < last  # the last j + 1 tokens end here, too
        lengths = torch.zeros_like(tokens)
        for j in range(min(self._drafter.prompt_lookup_max, width)):
            token = tokens.gather(1, (last - j).clamp(min=0))
            matched = matched & F.pad(tokens[:, : width - j] == token, (j, 0))
            lengths += matched
        return torch.where(lengths >= self._drafter.prompt_lookup_min, lengths * width + columns, -1)


def _continued(tokens: Tensor, last: Tensor, ends: Tensor, count: int) -> Tensor:
    """int64 [num_reqs, M, count], what follows the matches that end at `ends` int64 [num_reqs, M]."""
    # A continuation that reaches the anchor repeats from its start, as an overlapping copy does in LZ77.
    steps = torch.arange(count, device=tokens.device) % (last - ends).clamp(min=1)[..., None]
    places = (ends[..., None] + 1 + steps).clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, places.flatten(1)).view_as(places)


def load_ngram(path: str | Path | None = None, *, verifier: Verifier) -> NGramDrafter:
    """The n-gram drafter with its defaults.

    Raises:
        InvalidInputError: a path, for there is no checkpoint to read.
    """
    if path is not None:
        raise InvalidInputError(f"the ngram drafter has no checkpoint; leave out {str(path)!r}")
    return NGramDrafter()
