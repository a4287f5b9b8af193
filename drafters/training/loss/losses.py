"""The loss of a block's rows, and chunks of blocks: logits of all rows at once would not fit.

Position weights: exponential decay (DFlash, arXiv 2602.06036), or D-PACE, which weighs a position
by what it adds to the expected accepted length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Step = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""`(hidden, labels, valid, previous, teacher_hidden, context) -> (loss, weight, matches)`."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What is minimized.

    Attributes:
        gamma: positions over which weights fall to 1/e; None weighs by D-PACE.
        dpace_alpha: smoothing of D-PACE's probabilities, 0 for none.
        dpace_candidates: tokens of a row that a tree may hold, 1 for a chain.
        first_error: added to the weight 1 of a block's first row whose best token is not the label:
            what a chain says behind it is thrown away.
        ce, kl, tv, nla: factors of the cross-entropy with the label, of KL(target || drafter), of
            the total variation between both, of -log(1 - total variation), the probability that
            rejection sampling accepts.
        head_loss: what a head that corrects candidates alone learns: to choose among them
            ("candidates"), or to correct all tokens ("vocabulary"), as others do.
        selector: factor of the cross-entropy among the candidates, where a head learns that.
        confidence: of a confidence's binary cross-entropy with what the target would accept.
        base_until: share of the run over which the loss moves to the logits with the head.
        base_share: share of the loss that stays with the logits without the head.
    """

    gamma: float | None = 7.0
    dpace_alpha: float = 0.5
    dpace_candidates: int = 1
    first_error: float = 0.0
    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    nla: float = 0.0
    selector: float = 1.0
    confidence: float = 0.0
    head_loss: str = "candidates"
    base_until: float = 0.0
    base_share: float = 0.0


def default_gamma(block_size: int) -> float:
    """The published decay for blocks of 16, 10 and 8, and a straight line through and beyond them.

    >>> default_gamma(16), default_gamma(10), default_gamma(8)
    (7.0, 5.0, 4.0)
    """
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, 0.4 * block_size + 0.8))


def decay_weights(num_rows: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """float32 [num_rows]: exp(-(k - 1) / gamma) of predicting row k = 1, 2, ..."""
    return torch.exp(-torch.arange(num_rows, dtype=torch.float32, device=device) / gamma)


def dpace_weights(label_probs: Tensor, valid: Tensor, alpha: float, candidates: int = 1) -> Tensor:
    """Weights of D-PACE, float32 [..., K] and without gradient.

    The expected accepted length is the sum over m of the product of the first m probabilities; a
    row weighs as much as all products that it is part of. A tree has several candidates in a row:
    the probability that one of n draws is the label takes the place of the label's own, so that
    late rows, which a chain hardly reaches, weigh more.

    Args:
        label_probs: probability [..., K] of the label in each row.
        valid: bool [..., K], rows that have a label; a prefix of the block.
        alpha: probabilities become (1 - alpha) * p + alpha.
        candidates: n.
    """
    reached = 1 - (1 - label_probs.detach().float()) ** candidates
    smoothed = torch.where(valid, (1 - alpha) * reached + alpha, 0.0)
    return smoothed.cumprod(dim=-1).flip(-1).cumsum(dim=-1).flip(-1) * valid


def block_weights(label_probs: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    """float32 [..., K] of rows whose labels have these probabilities; 0 where not `valid`."""
    if config.gamma is None:
        return dpace_weights(label_probs, valid, config.dpace_alpha, config.dpace_candidates)
    return decay_weights(valid.shape[-1], config.gamma, valid.device) * valid


def block_loss(
    logits: Tensor, labels: Tensor, valid: Tensor, config: LossConfig, teacher: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss of some blocks, not yet divided by the weights.

    Args:
        logits: [n, K, V] of the predicting rows.
        labels: int64 [n, K].
        valid: bool [n, K].
        config: what is minimized.
        teacher: log-probabilities [n, K, V] of the target for the same positions, float32; needed
            for `kl`, `tv` and `nla`. They sum to less than 1 where it has more tokens.

    Returns:
        Sums of weighted losses and weights, and bool [n, K] whether the label is likeliest.
    """
    # Compiled, its gradient is one pass over the logits; a gather's fills zeros of their size.
    rows = logits.float().flatten(0, 1)
    log_probs = -F.cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)
    with torch.no_grad():
        matches = (logits.gather(-1, labels[..., None]).squeeze(-1) >= logits.amax(dim=-1)) & valid
        weights = block_weights(log_probs.exp(), valid, config)
        if config.first_error:
            before = F.pad(matches[..., :-1], (1, 0), value=True).cumprod(dim=-1)
            weights = weights * (1 + config.first_error * (before * ~matches))
    loss = -config.ce * log_probs
    if config.kl or config.tv or config.nla:
        assert teacher is not None, "distillation needs the target's logits"
        draft_log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        teacher_probs = teacher.exp()
        if config.kl:
            loss = loss + config.kl * (teacher_probs * (teacher - draft_log_probs)).sum(dim=-1)
        if config.tv:
            apart = (teacher_probs - draft_log_probs.exp()).abs().sum(dim=-1)
            elsewhere = 1 - teacher_probs.sum(dim=-1)  # on tokens that the drafter lacks
            loss = loss + config.tv * 0.5 * (apart + elsewhere)
        if config.nla:
            accepted = torch.minimum(teacher_probs, draft_log_probs.exp()).sum(dim=-1)
            loss = loss - config.nla * accepted.clamp(min=1e-6).log()
    # A row without a label may hold anything, and 0 times infinity is not 0.
    return torch.where(valid, weights * loss, 0.0).sum(), weights.sum(), matches


class _ChunkedLoss(torch.autograd.Function):
    """Computes gradients beside the loss, chunk by chunk, so that a chunk's logits can go at once:
    those of the hidden states, and of the weights that `step` reads, summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        valid: Tensor,
        previous: Tensor,
        teacher_hidden: Tensor | None,
        context: Tensor | None,
        step: Callable[..., Any],
        chunks: int,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in weights]
        loss = hidden.new_zeros((), dtype=torch.float32)
        weight = hidden.new_zeros((), dtype=torch.float32)
        matches = []
        given = hidden, gradient, labels, valid, previous, teacher_hidden, context
        parts: Any = zip(
            *([None] * chunks if x is None else x.tensor_split(chunks) for x in given), strict=True
        )
        for part, into, *rest in parts:
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                part_loss, part_weight, part_matches = step(leaf, *rest)
                found = torch.autograd.grad(part_loss, [leaf, *weights], allow_unused=True)
            into.copy_(found[0])
            for total, part_gradient in zip(sums, found[1:], strict=True):
                if part_gradient is not None:
                    total += part_gradient
            loss += part_loss.detach()
            weight += part_weight
            matches.append(part_matches)
        ctx.save_for_backward(gradient, *sums)
        matched = torch.cat(matches)
        ctx.mark_non_differentiable(weight, matched)
        return loss, weight, matched

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *sums = ctx.saved_tensors
        moved = gradient * gradients[0].to(gradient.dtype)
        return moved, *[None] * 7, *(total * gradients[0] for total in sums)


class ChunkedLoss:
    """A loss of any number of blocks with bounded memory.

    Args:
        step: loss of some blocks, as `drafters.training.loss.objective` has it.
        rows: most rows whose logits exist at once.
        weights: that `step` reads, and which are trained.
        compile: fuse the passes over the logits.
    """

    def __init__(
        self, step: Step, *, rows: int, weights: Sequence[Tensor] = (), compile: bool = False
    ) -> None:
        self.rows, self._weights = rows, list(weights)
        self._step = torch.compile(step) if compile else step

    def __call__(
        self,
        hidden: Tensor,
        labels: Tensor,
        valid: Tensor,
        previous: Tensor,
        teacher_hidden: Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of losses and weights, and bool [n, K] whether a row's best token is its label.
        Arguments are those of `drafters.training.loss.objective.Objective`.
        """
        chunks = min(max(-(-labels.numel() // self.rows), 1), len(labels))
        inputs = hidden, labels, valid, previous, teacher_hidden, context
        result: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(
            *inputs, self._step, chunks, *self._weights
        )
        return result
