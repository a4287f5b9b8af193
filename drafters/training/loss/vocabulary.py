"""Embeddings and an output head of the drafter's own, which are not trained, and a reduced
vocabulary: which tokens it has, and what it means for labels.

A drafter with a reduced vocabulary scores some tokens of the target alone, as EAGLE-3 does (arXiv
2503.01840). Its head is the target's, these rows of it.
"""

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

from drafters.dflash.model import DFlashModel
from drafters.training.data.dataset import AnswerSet
from drafters.training.target import Target
from drafters.vocabulary import target_ids
from specdec.base.errors import InvalidInputError
from specdec.model.core import Verifier

ROWS = 256
"""Rows of the target's head that are read at once."""


def most_frequent(answers: AnswerSet, count: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `count` tokens of the target that its answers have most often, int64, rising; and the
    share of all their tokens that they are. Of those as frequent the first ones are taken.
    """
    counts = answers.counts(vocab_size)
    order = counts.argsort(descending=True, stable=True)[:count]
    share = (counts[order].sum() / counts.sum()).item()
    return order.sort().values.cpu(), share


@torch.no_grad()
def give_vocabulary(model: DFlashModel, verifier: Verifier, tokens: Tensor) -> None:
    """Gives a drafter these tokens int64 [draft_vocab_size], and the head's rows of them.

    Raises:
        InvalidInputError: the target's head adds a bias.
    """
    assert model.d2t is not None and model.lm_head is not None
    weight = model.lm_head.weight
    model.d2t.copy_(tokens - torch.arange(len(tokens)))
    size, columns = verifier.hidden_size, tokens.to(verifier.device)
    one = torch.eye(size, dtype=verifier.dtype, device=verifier.device)
    if verifier.head(torch.zeros_like(one[:1])).any():
        what = f"the output head of {verifier.name} adds a bias, which a drafter's own does not"
        raise InvalidInputError(f"{what}; leave --draft-vocab out")
    for start in range(0, size, ROWS):
        part = verifier.head(one[start : start + ROWS]).index_select(-1, columns)
        weight[:, start : start + ROWS] = part.T.to(weight)


def fingerprint(d2t: Tensor | None) -> int | None:
    """A number that tells one reduced vocabulary from another; None for a whole one."""
    return None if d2t is None else crc32(d2t.cpu().numpy().tobytes())


def embed_of(model: DFlashModel, target: Target) -> Callable[[Tensor], Tensor]:
    """Input embeddings of the drafter, as the target scales its own."""
    own = model.embed_tokens
    if own is None:
        return target.embed
    return lambda token_ids: target.scaled(own(token_ids))


def head_of(model: DFlashModel, target: Target) -> Callable[[Tensor], Tensor]:
    """Output head of the drafter, with the target's final softcap."""
    own = model.lm_head
    if own is None:
        return target.head
    return lambda hidden: target.capped(own(hidden))


class DraftLabels:
    """Labels in the drafter's vocabulary.

    Attributes:
        columns: int64 [draft_vocab_size], the target's token of each; None for all of them.
    """

    def __init__(self, d2t: Tensor | None, vocab_size: int) -> None:
        self.columns = self._places = None
        if d2t is not None:
            self.columns = target_ids(d2t)
            self._places = torch.full((vocab_size,), -1, device=d2t.device)
            self._places[self.columns] = torch.arange(len(self.columns), device=d2t.device)

    def __call__(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Labels int64 [n, K], and bool which count: none behind one that cannot be drafted."""
        if self._places is None:
            return labels, valid
        own = self._places[labels]
        return own.clamp(min=0), valid & (own >= 0).cumprod(dim=-1).bool()
