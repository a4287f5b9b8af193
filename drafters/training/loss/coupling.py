"""Fitting the weights of q and of the noise (`drafters.dflash.coupling`) to a target's choice.

The target's answers were drawn with noise that their seeds give back. So of every anchor it is
known what the drafter would have chosen by, and what the target chose: a conditional logit per
slot, which is convex. Like the score of a candidate it counts all tokens: the best ones each, and a
sample in place of the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.choice import MAX_CANDIDATES
from drafters.dflash.drafts import Slots
from drafters.dflash.model import DFlashModel
from drafters.head import Head, Lattice, left_sides
from drafters.training.data.dataset import Answer, in_batches
from drafters.training.loss.blocks import SequenceBatch, before_anchors, block_hidden, make_blocks
from drafters.training.target import Target
from specdec.sampling.noise import Purpose, gumbel, stream

BEST = 256
"""Tokens of each row that count for themselves."""
OTHERS = 256
"""Tokens drawn in place of the others."""
ANCHORS = 32
"""Blocks at once."""
NEIGHBORS = 0.1
"""How far apart weights of neighboring slots may be: late ones are seldom reached."""


class Choices(NamedTuple):
    """Rows of drafts whose earlier ones a tree could have held, and what the target chose there.

    Attributes:
        slots: int64 [n], from 0.
        logprobs, noise: float32 [n, A], of the alternatives: log q and g.
        counts: float32 [n, A], log of how many tokens an alternative stands for, or -inf.
        labels: int64 [n], which alternative was chosen.
    """

    slots: Tensor
    logprobs: Tensor
    noise: Tensor
    counts: Tensor
    labels: Tensor


@torch.no_grad()
def choices_of(
    model: DFlashModel,
    target: Target,
    answer: Answer,
    *,
    temperature: float,
    seed: int,
    generator: torch.Generator,
) -> Choices:
    """What the drafter would have had to choose from along an answer, every position an anchor.

    Args:
        model: the drafter, on the target's device and in its type.
        target: the target.
        answer: drawn by it at `temperature` with `seed`, unfiltered.
        temperature: above 0.
        seed: of the request.
        generator: draws alternatives; of the target's device.
    """
    device, start = target.device, len(answer.prompt_ids)
    tokens = torch.tensor([[*answer.prompt_ids, *answer.answer_ids]], device=device)
    length = tokens.shape[1]
    ends = torch.full_like(tokens, length)
    ends[:, :start] = 0
    start_of, length_of = (torch.tensor([one], device=device) for one in (start, length))
    batch = SequenceBatch(tokens, start_of, length_of, [length], ends)
    features, _ = target.features(batch)
    context = model.context_kv(features, torch.arange(length, device=device))
    positions = torch.arange(start, length, device=device)
    bits = stream(torch.tensor([seed], device=device), positions[None], Purpose.SAMPLE)[0]
    noise = gumbel(bits, target.verifier.vocab_size)  # of the answer's tokens, [length - start, V]
    head = None if model.config.head is None else model.config.head.head(model, target.embed)
    assert not isinstance(head, Lattice), "specdec couple refuses it"
    parts = []
    for chunk in in_batches(len(positions) - 1, ANCHORS):
        anchors = positions[None, chunk.start : chunk.stop]
        valid = torch.ones_like(anchors, dtype=torch.bool)
        blocks = make_blocks(batch, anchors, valid, num_rows=model.config.max_draft_tokens)
        given = model, target.embed, batch, anchors, context
        rows = block_hidden(*given, flex=False, head=head)[0]
        before = before_anchors(head, model, batch, features, anchors)
        slots = Slots.of(rows, target.head, head, None if before is None else before[0])
        logprobs = (slots.logits.float() / temperature).log_softmax(-1)
        order = torch.arange(slots.hidden.shape[1], device=device)
        places = (anchors[0, :, None] + 1 + order - start).clamp(max=len(positions) - 1)
        if head is not None:
            left = left_sides(head, slots.hidden, blocks.previous[0], slots.context)
            _share_out(head, logprobs, logprobs + noise[places], left, temperature)
        ranks = _ranks(logprobs + noise[places], blocks.labels[0])
        held = (ranks < MAX_CANDIDATES) & blocks.valid[0]
        reached = blocks.valid[0] & F.pad(held[:, :-1], (1, 0), value=True).cumprod(dim=1).bool()
        found = reached.nonzero(as_tuple=True)
        drawn = logprobs[found], noise[places[found]], blocks.labels[0][found]
        parts.append(_alternatives(found[1], *drawn, generator))
    return Choices(*map(torch.cat, zip(*parts, strict=True)))


def _share_out(
    head: Head, logprobs: Tensor, scores: Tensor, left: Tensor, temperature: float
) -> None:
    """Puts into `logprobs` [n, K, V] what a head says behind tokens that are known, with the left
    sides [n, K, r], as `drafters.dflash.edges` does: among the best by `scores` alone, which keep
    the probability that they have together.
    """
    best = scores.topk(min(MAX_CANDIDATES, scores.shape[-1]), dim=-1).indices
    bonus = (F.embedding(best, head.right) @ left[..., None]).squeeze(-1).float() / temperature
    bonus[:, : head.first_slot] = 0
    old = logprobs.gather(-1, best)
    moved = (old + bonus).log_softmax(dim=-1) + old.logsumexp(dim=-1, keepdim=True)
    logprobs.scatter_(-1, best, moved)


def _ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Places of the labels int64 [...] among scores [..., V], from 0."""
    return (scores > scores.gather(-1, labels[..., None])).sum(dim=-1)


def _alternatives(
    slots: Tensor, logprobs: Tensor, noise: Tensor, labels: Tensor, generator: torch.Generator
) -> Choices:
    """The chosen token, the best of the others, and some for all the rest, of rows [n, V]."""
    count, vocab_size = logprobs.shape
    best = (logprobs + noise).topk(min(BEST, vocab_size), dim=-1).indices
    others = torch.randint(vocab_size, (count, OTHERS), generator=generator, device=labels.device)
    tokens = torch.cat([labels[:, None], best, others], dim=1)
    taken = tokens[:, : best.shape[1] + 1]
    named = torch.zeros_like(logprobs, dtype=torch.bool).scatter_(1, taken, True)
    # A drawn token stands for as many as there are for each draw, and for none where it is named
    # already.
    weight = torch.full((), vocab_size / OTHERS, device=labels.device).log()
    drawn = torch.where(named.gather(1, others), -torch.inf, weight)
    once = torch.where(best == labels[:, None], -torch.inf, 0.0)
    counts = torch.cat([torch.zeros_like(once[:, :1]), once, drawn], dim=1)
    own = logprobs.gather(1, tokens)
    return Choices(slots, own, noise.gather(1, tokens), counts, torch.zeros_like(labels))


class Fitted(NamedTuple):
    """Weights, and how well they tell what was chosen.

    Attributes:
        weights: float64 [2, K], a and b by slot.
        before, after: mean log-likelihood of a choice, with ones and with the weights.
    """

    weights: Tensor
    before: float
    after: float


def fit_weights(choices: Choices, num_slots: int) -> Fitted:
    """The weights under which the choices are likeliest, those of neighboring slots being close."""
    logprobs, noise, counts = (x.double() for x in choices[1:4])
    weights = torch.ones(
        2, num_slots, dtype=torch.float64, device=counts.device, requires_grad=True
    )
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=200, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def likelihood(weights: Tensor) -> Tensor:
        a, b = weights[:, choices.slots, None]
        return -F.cross_entropy(a * logprobs + b * noise + counts, choices.labels)

    def loss() -> Tensor:
        optimizer.zero_grad()
        # and somewhere near 1
        far = (weights.diff() / NEIGHBORS).square().sum() + (weights - 1).square().sum()
        value = far / 2 / len(choices.slots) - likelihood(weights)
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        best = torch.stack([weights[0].clamp(min=0.01), weights[1].clamp(min=0.0)])
        return Fitted(best, float(likelihood(torch.ones_like(best))), float(likelihood(best)))
