"""Suffix decoding (arXiv 2411.04975, snowflakedb/ArcticInference) on tensors of any device.

What ArcticInference keeps as suffix trees, of each request and of past outputs, is found by
comparing here: a pool of past outputs and the request's own text are searched for the request's
last tokens in every step. The best occurrences are followed back and forth, and counted alike
wherever they are. A chain is the continuation that is expected to be accepted for longest
(`choice`), a tree holds what followed all of them. Every chain has k drafts, whatever they promise,
since the step has k rows either way.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from drafters.suffix.matches import Found, Limits, Texts
from drafters.suffix.pool import TextPool
from drafters.suffix.search import best_chain, search, weigh
from specdec.base.config import DraftSampling
from specdec.base.errors import InvalidInputError
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

COMPARED = 4
"""Tokens by which all occurrences are told apart; those found are followed further back."""
LONGEST = 64
"""Most tokens of a match."""
POOL_CONTEXT = 4
"""Tokens of a prompt's end that are pooled, so that its output's beginning is found."""
TREE_OCCURRENCES = 8
"""Occurrences of which a tree is made, or as many as it takes to fill it."""


class SuffixDrafter(Drafter):
    """Copies what followed earlier occurrences of the text's end; see `specdec.model.core.Drafter`.

    Args:
        max_draft_tokens: largest k.
        longest: most tokens of a match that are looked at, and for which one is trusted.
        shortest: tokens of a match that counts. A short one costs nothing.
        occurrences: of which a chain is the best; 1 takes the longest, latest match.
        pool_tokens: of past outputs that are kept for all requests; 0 keeps none.

    Raises:
        InvalidInputError: a number out of range.
    """

    draws_trees = True

    def __init__(
        self,
        *,
        max_draft_tokens: int = 31,
        longest: int = 16,
        shortest: int = 1,
        occurrences: int = 16,
        pool_tokens: int = 2**15,
    ) -> None:
        _at_least(1, max_draft_tokens=max_draft_tokens, occurrences=occurrences)
        _at_least(0, pool_tokens=pool_tokens)
        if not 1 <= shortest <= longest <= LONGEST:
            what = f"shortest is {shortest} and longest {longest}"
            raise InvalidInputError(f"{what}; they must be ordered, from 1 to {LONGEST}")
        self.max_draft_tokens = max_draft_tokens
        self.occurrences = occurrences
        self.pool_tokens = pool_tokens
        self.longest, self.shortest = longest, shortest
        self.compared = min(longest, max(COMPARED, shortest))

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[LayerCache],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> "BoundSuffix":
        """Binds; copied drafts are point masses under any `draft_sampling`."""
        # The rows of a step reach k positions past the last one that a request may keep.
        width = max_len + self.max_draft_tokens + 1
        history = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=verifier.device)
        return BoundSuffix(self, history)


class BoundSuffix(BoundDrafter):
    """The texts of the requests of one engine, and the outputs of those before them; see
    `specdec.model.core.BoundDrafter`.

    Where the host may look, the engine asks for the `expected_accepted` first; what was found for
    that serves the drafts as well.

    A request's output goes to the pool when the next one gets its slot.
    """

    has_expected_accepted = True

    def __init__(self, drafter: SuffixDrafter, history: Tensor) -> None:
        self._drafter, self.history = drafter, history
        self.pool = TextPool(drafter.pool_tokens, history.device) if drafter.pool_tokens else None
        # of what is to go to the pool
        self._spans = torch.zeros(2, len(history), dtype=torch.int64, device=history.device)
        self._found: Found | None = None

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        """Uploads the tokens of a request, and pools the output of the one that had its slot."""
        self._found = None
        if self.pool:
            self.pool.add(self.history[slot], *self._spans[:, slot])
            self._spans[:, slot] = max(0, len(token_ids) - POOL_CONTEXT)
        self.history[slot, : len(token_ids)] = torch.tensor(
            token_ids, dtype=torch.int32, device=self.history.device
        )

    def keep_private(self, slot: int) -> None:
        """The output does not go to the pool: it begins behind any end."""
        self._spans[0, slot] = self.history.shape[1] + 1

    def forget(self) -> None:
        """Empties the pool."""
        self._found = None
        if self.pool:
            self.pool.clear()
            self._spans.zero_()

    def expected_accepted(self, batch: DecodeBatch) -> Tensor:
        self._found = self._find(batch, self._drafter.occurrences)
        continuations, lengths, _ = self._found
        return best_chain(continuations, lengths, self._drafter.longest).scores

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts where a request's end occurred before: k in a chain, up to k in a tree."""
        shape = batch.shape
        # Of a tree so many that there could be k drafts.
        count = self._drafter.occurrences
        if shape.is_tree:
            count = max(TREE_OCCURRENCES, -(-batch.k // shape.depth))
        found, self._found = self._found, None  # nothing outlives a step: it may be a graph's
        if found is None or not found.serves(batch, count):
            found = self._find(batch, count)
        continuations = found.continuations[:, :count, : shape.depth]
        lengths = found.lengths[:, :count]
        if shape.is_tree:
            return self._tree(batch, continuations, lengths)
        return self._chain(continuations, lengths)

    def _find(self, batch: DecodeBatch, count: int) -> Found:
        """The best `count` occurrences of the texts' ends, and what followed them."""
        self._store(batch, batch.anchors[:, None])
        drafter, pool = self._drafter, self.pool.tokens if self.pool else None
        texts = Texts(pool, self.history, batch.slots, batch.seq_lens, batch.max_seq_len)
        least = drafter.compared, drafter.shortest
        return search(texts, Limits(count, drafter.longest, *least, batch.shape.depth))

    def _chain(self, continuations: Tensor, lengths: Tensor) -> DraftOutput:
        """The best continuation."""
        token_ids, num_drafts, scores = best_chain(continuations, lengths, self._drafter.longest)
        forecast = scores if self.forecasts else None
        return DraftOutput(token_ids, num_drafts=num_drafts, forecast=forecast)

    def _tree(self, batch: DecodeBatch, continuations: Tensor, lengths: Tensor) -> DraftOutput:
        """All continuations, put together."""
        tokens, weights, keep = weigh(continuations, lengths)
        drafts = trie(continuations, tokens, weights, batch.k, keep=keep)
        output = DraftOutput(drafts.token_ids, num_drafts=drafts.num_drafts, tree=drafts.tree)
        if self.forecasts:
            output.forecast, output.scores = drafts.scores.exp().sum(dim=1), drafts.scores
        return output

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        """Stores the verified rows; nothing looks at those beyond the next anchor."""
        self._found = None
        self._store(batch, token_ids)
        if self.pool:
            self._spans[1].index_copy_(0, batch.slots, batch.seq_lens + accept.num_accepted + 1)

    def _store(self, batch: DecodeBatch, token_ids: Tensor) -> None:
        """Writes `token_ids` [num_reqs, n] to the positions from the anchor on."""
        cells = (batch.slots[:, None], batch.positions(token_ids.shape[1]))
        self.history.index_put_(cells, token_ids.int())


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise InvalidInputError(f"{name} is {number}; it must be at least {least}")


def load_suffix(path: str | Path | None = None, *, verifier: Verifier) -> SuffixDrafter:
    """The suffix drafter with its defaults.

    Raises:
        InvalidInputError: a path, for there is no checkpoint to read.
    """
    if path is not None:
        raise InvalidInputError(f"the suffix drafter has no checkpoint; leave out {str(path)!r}")
    return SuffixDrafter()
