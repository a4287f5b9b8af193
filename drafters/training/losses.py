"""Losses of a block, and the output head in chunks: logits of all rows at once would not fit.

Position weights: exponential decay (DFlash, arXiv 2602.06036), or D-PACE, which weighs a position by what it adds to the expected
accepted length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]
"""Final hidden states [..., H] to logits [..., V]."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What is minimised.

    Attributes:
        gamma: positions over which weights fall to 1/e; None weighs by D-PACE.
        dpace_alpha: smoothing of D-PACE's probabilities, 0 for none.
        ce, kl, tv: factors of the cross-entropy with the label, of KL(target || drafter), of the total variation between both.
    """

    gamma: float | None = 7.0
    dpace_alpha: float = 0.5
    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0


def default_gamma(block_size: int) -> float:
    """The published decay for blocks of 16, 10 and 8, and a straight line through and beyond them.

    >>> default_gamma(16), default_gamma(10), default_gamma(8)
    (7.0, 5.0, 4.0)
    """
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, 0.4 * block_size + 0.8))


def decay_weights(num_rows: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """float32 [num_rows]: exp(-(k - 1) / gamma) of predicting row k = 1, 2, ..."""
    return torch.exp(-torch.arange(num_rows, dtype=torch.float32, device=device) / gamma)


def dpace_weights(label_probs: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """Weights of D-PACE, float32 [..., K] and without gradient.

    The expected accepted length is the sum over m of the product of the first m probabilities; a row weighs as much as all
    products that it is part of.

    Args:
        label_probs: probability [..., K] of the label in each row.
        valid: bool [..., K], rows that have a label; a prefix of the block.
        alpha: probabilities become (1 - alpha) * p + alpha.
    """
    smoothed = torch.where(valid, (1 - alpha) * label_probs.detach().float() + alpha, 0.0)
    return smoothed.cumprod(dim=-1).flip(-1).cumsum(dim=-1).flip(-1) * valid


def block_loss(
    logits: Tensor, labels: Tensor, valid: Tensor, config: LossConfig, teacher: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss of some blocks, not yet divided by the weights.

    Args:
        logits: [n, K, V] of the predicting rows.
        labels: int64 [n, K].
        valid: bool [n, K].
        config: what is minimised.
        teacher: logits [n, K, V] of the target for the same positions; needed for `kl` and `tv`.

    Returns:
        Sum of the weighted losses, sum of the weights, and bool [n, K] whether the label is the most likely token.
    """
    draft_log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    log_probs = draft_log_probs.gather(-1, labels[..., None]).squeeze(-1)
    with torch.no_grad():
        matches = (log_probs >= draft_log_probs.amax(dim=-1)) & valid
        if config.gamma is None:
            weights = dpace_weights(log_probs.exp(), valid, config.dpace_alpha)
        else:
            weights = decay_weights(labels.shape[-1], config.gamma, labels.device) * valid
    loss = -config.ce * log_probs
    if config.kl or config.tv:
        assert teacher is not None, "distillation needs the target's logits"
        teacher_log_probs = teacher.log_softmax(dim=-1, dtype=torch.float32)
        teacher_probs = teacher_log_probs.exp()
        if config.kl:
            loss = loss + config.kl * (teacher_probs * (teacher_log_probs - draft_log_probs)).sum(dim=-1)
        if config.tv:
            loss = loss + config.tv * 0.5 * (teacher_probs - draft_log_probs.exp()).abs().sum(dim=-1)
    # A row without a label may hold anything, and 0 times infinity is not 0.
    return torch.where(valid, weights * loss, 0.0).sum(), weights.sum(), matches


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient of the hidden states beside the loss, chunk by chunk, so that a chunk's logits can go at once.

    The head is frozen: nothing else needs a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        valid: Tensor,
        teacher_hidden: Tensor | None,
        step: Callable[..., Any],
        chunks: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        loss, weight = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        matches = []
        teachers = [None] * chunks if teacher_hidden is None else teacher_hidden.tensor_split(chunks)
        parts = zip(*(x.tensor_split(chunks) for x in (hidden, gradient, labels, valid)), teachers, strict=True)
        for part, into, part_labels, part_valid, part_teacher in parts:
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                part_loss, part_weight, part_matches = step(leaf, part_labels, part_valid, part_teacher)
                into.copy_(torch.autograd.grad(part_loss, leaf)[0])
            loss += part_loss.detach()
            weight += part_weight
            matches.append(part_matches)
        ctx.save_for_backward(gradient)
        matched = torch.cat(matches)
        ctx.mark_non_differentiable(weight, matched)
        return loss, weight, matched

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None, None


class ChunkedLoss:
    """`block_loss` over any number of blocks with bounded memory.

    Args:
        head: the frozen output head of the drafter.
        teacher_head: that of the target, with all the target does to its logits; for distillation.
        config: what is minimised.
        rows: most rows whose logits exist at once.
        compile: fuse the passes over the logits.
    """

    def __init__(
        self, head: Head, config: LossConfig, *, rows: int, teacher_head: Head | None = None, compile: bool = False
    ) -> None:
        self.rows = rows

        def step(hidden: Tensor, labels: Tensor, valid: Tensor, teacher_hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            teacher = None
            if teacher_hidden is not None:
                assert teacher_head is not None
                with torch.no_grad():
                    teacher = teacher_head(teacher_hidden)
            return block_loss(head(hidden), labels, valid, config, teacher)

        self._step = torch.compile(step) if compile else step

    def __call__(
        self, hidden: Tensor, labels: Tensor, valid: Tensor, teacher_hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `block_loss`, from final hidden states [n, K, H] of the drafter and, for distillation, of the target."""
        chunks = -(-labels.numel() // self.rows)
        result: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(
            hidden, labels, valid, teacher_hidden, self._step, min(max(chunks, 1), len(labels))
        )
        return result
