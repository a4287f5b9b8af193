"""What a block is trained for: its backbone's logits, and those that a head makes of them.

A head (`drafters.head`) corrects logits by the token before. In training that is the answer's own
token, which is exact: what a run drafts behind its first wrong token is thrown away.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.drafts import Slots
from drafters.head import Head, Lattice, left_sides
from drafters.training.loss.losses import LossConfig, block_loss, block_weights

ToLogits = Callable[[Tensor], Tensor]
"""Final hidden states [..., H] to logits [..., V]."""


class _Rows(NamedTuple):
    """What a loss is made of beside the head's part; see `block_loss`."""

    logits: Tensor
    labels: Tensor
    valid: Tensor
    teacher: Tensor | None


class Objective:
    """Loss of some blocks, for `ChunkedLoss`.

    Args:
        to_logits: the frozen output head of the drafter.
        config: what is minimized.
        head: the drafter's, trained with it; None without one.
        teacher: the target's output head with all it does to logits; for distillation.
        columns: int64 [draft_vocab_size], the target's token of each of the drafter's, or None.

    Attributes:
        base_share: float32 scalar, how much of the loss is that of the logits without the head;
            None is nothing. Beside a strong head the backbone would else not learn what it can say
            alone (Domino begins with 1 and falls to 0).
    """

    def __init__(
        self,
        to_logits: ToLogits,
        config: LossConfig,
        *,
        head: Head | Lattice | None = None,
        teacher: ToLogits | None = None,
        columns: Tensor | None = None,
    ) -> None:
        self._columns = columns
        self._to_logits, self._config, self._head, self._teacher = to_logits, config, head, teacher
        self.base_share: Tensor | None = None

    def move(self, progress: float) -> None:
        """Sets `base_share` for `progress` of the run, in [0, 1]."""
        until, share = self._config.base_until, self._config.base_share
        if progress < until:
            share = max(share, 1 - progress / until)
        if self._head is None or isinstance(self._head, Lattice) or not share:
            self.base_share = None
        elif self.base_share is None:
            self.base_share = torch.tensor(share, device=self._head.right.device)
        else:
            self.base_share.fill_(share)  # the same tensor, or the loss would be compiled again

    def __call__(
        self,
        hidden: Tensor,
        labels: Tensor,
        valid: Tensor,
        previous: Tensor,
        teacher_hidden: Tensor | None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of weighted losses and of weights, and bool [n, K], as of `block_loss`.

        Args:
            hidden: [n, K, H], or [n, B, H] for a refiner, see `Slots.of`.
            labels, previous: int64 [n, K].
            valid: bool [n, K].
            teacher_hidden: [n, K, H] of the target for the same positions.
            context: see `drafters.training.loss.blocks.before_anchors`.
        """
        config, head, teacher = self._config, self._head, None
        if teacher_hidden is not None:
            assert self._teacher is not None
            with torch.no_grad():
                teacher = self._teacher(teacher_hidden).log_softmax(dim=-1, dtype=torch.float32)
                if self._columns is not None:
                    teacher = teacher.index_select(-1, self._columns)
        hidden, base, context = Slots.of(hidden, self._to_logits, head, context)
        if head is None:
            return block_loss(base, labels, valid, config, teacher)
        if isinstance(head, Lattice):
            assert context is not None, "a lattice is given the anchor's context"
            return self._paired(_Rows(base, labels, valid, teacher), hidden, context, head)
        left = left_sides(head, hidden, previous, context)
        few = head.num_candidates is not None and config.head_loss != "vocabulary"
        rows = _Rows(base, labels, valid, teacher)
        loss, weight, matches, said = (self._chosen if few else self._corrected)(rows, left, head)
        if config.confidence:
            added = config.confidence * self._confidence(said, teacher, hidden, previous, valid)
            loss = loss + added
        return loss, weight, matches

    def _corrected(
        self, rows: _Rows, left: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss of logits that are corrected over the whole vocabulary, and the logits."""
        config, (base, labels, valid, teacher) = self._config, rows
        left = F.pad(left[:, head.first_slot :], (0, 0, head.first_slot, 0))
        final = torch.addmm(base.flatten(0, 1), left.flatten(0, 1), head.right.T).view_as(base)
        loss, weight, matches = block_loss(final, labels, valid, config, teacher)
        if self.base_share is not None:
            base_loss, base_weight, _ = block_loss(base, labels, valid, config, teacher)
            loss = torch.lerp(loss, base_loss, self.base_share)
            weight = torch.lerp(weight, base_weight, self.base_share)
        return loss, weight, matches, final

    def _paired(
        self, rows: _Rows, hidden: Tensor, context: Tensor, head: Lattice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The backbone's loss, and each label's cross-entropy behind the label before."""
        config, (base, labels, valid, teacher) = self._config, rows
        loss, weight, _ = block_loss(base, labels, valid, config, teacher)
        tokens, held = _with_labels(base, labels, head.num_candidates)
        with torch.no_grad():
            scores = base.gather(-1, tokens).float() - base.float().logsumexp(dim=-1, keepdim=True)
            ranks = (tokens == labels[..., None]).int().argmax(dim=-1)
            before = F.pad(ranks[:, :-1], (1, 0))
        table = head.table(hidden, tokens, scores, context)
        chosen = before[..., None, None].expand(-1, -1, 1, table.shape[-1])
        logprobs = table.gather(2, chosen).squeeze(2).log_softmax(dim=-1)
        of_label = logprobs.gather(-1, ranks[..., None]).squeeze(-1)
        chosen, matches = self._among(logprobs, of_label, held, valid)
        return loss + chosen, weight, matches

    def _among(
        self, logprobs: Tensor, of_label: Tensor, held: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss among candidates, of log-probabilities [n, K, C] and those of the
        labels [n, K], and whether the best one is a label that they held.
        """
        with torch.no_grad():
            weights = block_weights(of_label.exp(), valid, self._config)
            matches = (of_label >= logprobs.amax(dim=-1)) & held & valid
        return self._config.selector * torch.where(valid, -weights * of_label, 0.0).sum(), matches

    def _chosen(
        self, rows: _Rows, left: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The backbone's loss and the cross-entropy among its candidates, whose logits are
        corrected, and all logits. A label that is no candidate takes the last one's place.
        """
        config, (base, labels, valid, teacher) = self._config, rows
        loss, weight, _ = block_loss(base, labels, valid, config, teacher)
        assert head.num_candidates is not None
        tokens, held = _with_labels(base, labels, head.num_candidates)
        old = base.gather(-1, tokens).float()
        edges = old + (F.embedding(tokens, head.right) @ left[..., None]).squeeze(-1).float()
        logprobs = edges.log_softmax(dim=-1)
        of_label = torch.where(tokens == labels[..., None], logprobs, 0.0).sum(dim=-1)
        chosen, matches = self._among(logprobs, of_label, held, valid)
        with torch.no_grad():
            final = base
            if config.confidence:  # the candidates keep the probability that they have together
                moved = logprobs + old.logsumexp(dim=-1, keepdim=True)
                final = base.float().scatter(-1, tokens, moved)
        return loss + chosen, weight, matches, final

    def _confidence(
        self, final: Tensor, teacher: Tensor | None, hidden: Tensor, previous: Tensor, valid: Tensor
    ) -> Tensor:
        """Binary cross-entropy with 1 - TV, the probability that a draft is accepted."""
        assert self._head is not None and teacher is not None, (
            "confidences learn from the target's distribution"
        )
        said = self._head.confidences(hidden, previous)
        assert said is not None, "the head has no confidence"
        with torch.no_grad():
            own = final.softmax(dim=-1, dtype=torch.float32)
            accepted = torch.minimum(own, teacher.exp()).sum(dim=-1).clamp(max=1)
        rows = F.binary_cross_entropy(said.clamp(1e-6, 1 - 1e-6), accepted, reduction="none")
        return torch.where(valid, rows, 0.0).sum()


@torch.no_grad()
def _with_labels(base: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens int64 [n, K, count] of logits [n, K, V], of which the last one
    leaves its place to a label that is none of them, and whether they held it, bool [n, K].
    """
    tokens = base.topk(count, dim=-1).indices
    held = (tokens == labels[..., None]).any(dim=-1)
    last = torch.where(held, tokens[..., -1], labels)[..., None]
    return torch.cat([tokens[..., :-1], last], dim=-1), held
