"""The losses of training against definitions written out: weights, chunks, heads."""

import math

import pytest
import torch
from torch import Tensor, nn

from drafters.head import Head
from drafters.training.loss.losses import (
    ChunkedLoss,
    LossConfig,
    block_loss,
    decay_weights,
    dpace_weights,
)
from drafters.training.loss.objective import Objective


def test_weights() -> None:
    """Catches decay that starts at the wrong row, and D-PACE against its double loop."""
    torch.testing.assert_close(
        decay_weights(3, 7.0), torch.tensor([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])
    )
    probs, alpha = [0.9, 0.5, 0.2, 0.7], 0.5
    valid = [True, True, True, False]
    smoothed = [(1 - alpha) * p + alpha for p in probs]
    expected = [
        sum(math.prod(smoothed[: m + 1]) for m in range(j, 3)) if valid[j] else 0.0
        for j in range(4)
    ]
    torch.testing.assert_close(
        dpace_weights(torch.tensor([probs]), torch.tensor([valid]), alpha), torch.tensor([expected])
    )
    of_four = [1 - (1 - p) ** 4 for p in probs]  # that one of four draws is the label
    torch.testing.assert_close(
        dpace_weights(torch.tensor([probs]), torch.tensor([valid]), alpha, candidates=4),
        dpace_weights(torch.tensor([of_four]), torch.tensor([valid]), alpha),
    )


def test_without_smoothing_the_gradient_is_that_of_the_accepted_length() -> None:
    """The chain loss: of the sum of the products of the first probabilities, negated."""
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = logits.detach().topk(2, dim=-1).indices[..., 1]
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    loss, _, _ = block_loss(logits, labels, valid, LossConfig(gamma=None, dpace_alpha=0.0))
    probs = logits.softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    accepted = (torch.where(valid, probs, 0.0).cumprod(-1)).sum()
    ours, theirs = (torch.autograd.grad(x, logits)[0] for x in (loss, -accepted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(gamma=None),
        LossConfig(gamma=3.0, ce=0.1, kl=0.7, tv=0.9),
        LossConfig(gamma=3.0, first_error=2.0, nla=0.6),
    ],
)
def test_loss_is_its_definition(config: LossConfig) -> None:
    """Catches a wrong factor, direction, weight or match, against loops over rows."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (2 * torch.randn(3, 4, 9, generator=generator) for _ in "ab")
    labels = torch.randint(9, (3, 4), generator=generator)
    labels[0] = logits[0].argmax(dim=-1)
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    teacher[2], logits[2, 1:] = torch.nan, torch.inf  # where nothing is asked, anything may stand
    own = teacher.log_softmax(dim=-1)
    loss, weight, matches = block_loss(logits, labels, valid, config, own)
    expected, total = 0.0, 0.0
    for block in range(3):
        q = logits[block].softmax(dim=-1)
        p = teacher[block].softmax(dim=-1)
        label_probs = q[range(4), labels[block]][None]
        weights = (
            decay_weights(4, config.gamma)
            if config.gamma
            else dpace_weights(label_probs, valid[block : block + 1], 0.5)[0]
        )
        wrong = [row for row in range(4) if q[row].argmax() != labels[block, row]]
        for row in range(4):
            if valid[block, row]:
                weights[row] *= 1 + config.first_error * (row == min(wrong, default=4))
                ce = -q[row, labels[block, row]].log()
                kl = (p[row] * (p[row] / q[row]).log()).sum()
                tv = 0.5 * (p[row] - q[row]).abs().sum()
                ce = config.ce * ce - config.nla * (1 - tv).log()
                expected += float(weights[row] * (ce + config.kl * kl + config.tv * tv))
                total += float(weights[row])
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert weight.item() == pytest.approx(total, rel=1e-5)
    assert matches[0].all()
    assert not matches[~valid].any()


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(gamma=None, kl=0.5, tv=0.5)])
def test_chunked_loss_has_the_gradient_of_the_whole(config: LossConfig) -> None:
    """Catches chunks that are lost, doubled or scaled."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(9, 6, generator=generator)
    hidden, teacher = (torch.randn(5, 3, 6, generator=generator) for _ in "ab")
    labels = torch.randint(9, (5, 3), generator=generator)
    valid = torch.rand(5, 3, generator=generator) < 0.8
    whole = hidden.clone().requires_grad_()
    own = (teacher @ head.T).log_softmax(dim=-1)
    loss, weight, matches = block_loss(whole @ head.T, labels, valid, config, own)
    torch.autograd.backward(3 * loss)
    parts = hidden.clone().requires_grad_()
    chunked = ChunkedLoss(
        Objective(lambda h: h @ head.T, config, teacher=lambda h: h @ head.T), rows=7
    )
    part_loss, part_weight, part_matches = chunked(parts, labels, valid, labels, teacher)
    torch.autograd.backward(3 * part_loss)
    torch.testing.assert_close((part_loss, part_weight, parts.grad), (loss, weight, whole.grad))
    assert torch.equal(part_matches, matches)


class TinyHead(nn.Module, Head):
    """A Markov head of rank 2 over 9 tokens, from `first_slot` on or among candidates."""

    def __init__(self, first_slot: int = 0, num_candidates: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first_slot = first_slot
        self.num_candidates = num_candidates
        self.compares_candidates = num_candidates is not None
        self.table, self.readout = (
            nn.Parameter(torch.randn(9, 2, generator=generator)) for _ in "lr"
        )
        self.gate, self.told = (
            nn.Parameter(torch.randn(6, size, generator=generator)) for size in (2, 1)
        )

    @property
    def right(self) -> Tensor:
        return self.readout

    def left(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return self.table[previous] * (hidden @ self.gate), None

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return torch.sigmoid(hidden @ self.told).squeeze(-1)


TO_LOGITS = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))


def head_blocks() -> dict[str, Tensor]:
    """Five blocks of three rows."""
    generator = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (torch.randn(5, 3, 6, generator=generator) for _ in "ab")
    labels, previous = (torch.randint(9, (5, 3), generator=generator) for _ in "ab")
    valid = torch.rand(5, 3, generator=generator) < 0.8
    return {
        "hidden": hidden,
        "labels": labels,
        "valid": valid,
        "previous": previous,
        "teacher_hidden": teacher_hidden,
    }


@torch.no_grad()
def rows_of_a_head(config: LossConfig, head: TinyHead, base_share: float = 0.0) -> float:
    """The loss of `head_blocks`, row by row."""
    blocks, total = head_blocks(), 0.0
    for block in range(5):
        hidden, labels, valid = (blocks[name][block] for name in ("hidden", "labels", "valid"))
        base, edges = hidden @ TO_LOGITS.T, []
        for row in range(3):
            left = head.table[blocks["previous"][block, row]] * (hidden[row] @ head.gate)
            edges.append(base[row] + head.right @ left * (row >= head.first_slot))
        final = torch.stack(edges)
        loss, _, _ = block_loss(final[None], labels[None], valid[None], config)
        based, _, _ = block_loss(base[None], labels[None], valid[None], config)
        whole = head.num_candidates is None or config.head_loss == "vocabulary"
        total += float(loss * (1 - base_share) + based * base_share) if whole else float(based)
        q = final.softmax(-1) if whole else base.softmax(-1)
        for row in range(0 if whole else 3):
            chosen = base[row].topk(head.num_candidates or 0).indices.tolist()
            if labels[row] not in chosen:
                chosen[-1] = int(labels[row])
            logprob = final[row][chosen].log_softmax(-1)[chosen.index(int(labels[row]))]
            total -= config.selector * float(
                logprob * decay_weights(3, config.gamma or 0)[row] * valid[row]
            )
            q[row, chosen] = final[row][chosen].softmax(-1) * q[row, chosen].sum()
        p = (blocks["teacher_hidden"][block] @ TO_LOGITS.T).softmax(-1)
        wanted = 1 - 0.5 * (q - p).abs().sum(-1)
        told = torch.sigmoid(hidden @ head.told).squeeze(-1)
        total -= config.confidence * float(
            ((wanted * told.log() + (1 - wanted) * (1 - told).log()) * valid).sum()
        )
    return total


@pytest.mark.parametrize(
    ("config", "head", "share"),
    [
        (LossConfig(), TinyHead(), 0.0),
        (LossConfig(gamma=None, confidence=0.5, base_until=1.0), TinyHead(first_slot=1), 0.3),
        (LossConfig(selector=2.0, confidence=0.5), TinyHead(num_candidates=3), 0.0),
        (LossConfig(head_loss="vocabulary", base_share=0.3), TinyHead(num_candidates=3), 0.3),
    ],
)
def test_loss_with_a_head_is_its_definition_and_trains_it(
    config: LossConfig, head: TinyHead, share: float
) -> None:
    """Catches a wrong slot, candidate or share, and gradients that chunks lose."""
    blocks = head_blocks()
    found = []
    for rows in (99, 4):
        objective = Objective(
            lambda h: h @ TO_LOGITS.T, config, head=head, teacher=lambda h: h @ TO_LOGITS.T
        )
        objective.move(1 - share)
        given = blocks | {"hidden": blocks["hidden"].clone().requires_grad_()}
        if rows == 99:
            loss, weight, matches = objective(**given)
        else:
            loss, weight, matches = ChunkedLoss(
                objective, rows=rows, weights=list(head.parameters())
            )(**given)
        for parameter in head.parameters():
            parameter.grad = None
        torch.autograd.backward(3 * loss)
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in head.parameters()]
        found.append((loss, weight, given["hidden"].grad, grads))
        assert not matches[~blocks["valid"]].any()
    assert found[0][0].item() == pytest.approx(rows_of_a_head(config, head, share), rel=1e-5)
    torch.testing.assert_close(found[1], found[0])
    assert all(gradient.abs().sum() > 0 for gradient in found[1][3][:3])
