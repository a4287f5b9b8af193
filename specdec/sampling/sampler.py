"""From logits to tokens, batched: the repetition penalty and the draw.

A token is drawn by adding a Gumbel variable of its own to every token's score and taking the highest (the Gumbel-max trick, arXiv
1411.0030): no sum over the vocabulary, and whoever guesses the token can know the noise beforehand.
"""

import torch
from torch import Tensor

from specdec.layers.argmax import argmax, on_triton
from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import Purpose, gumbel, stream
from specdec.sampling.tensors import SamplingTensors

CACHED_NUMBERS = 2**16
"""How many numbers a CPU draws from at once: those of more rows would leave its cache between two operations."""


def penalized(logits: Tensor, sampling: SamplingTensors, tokens: Tensor) -> Tensor:
    """Applies the repetition penalty to rows that were fed `tokens`: a row counts the tokens up to its own.

    Args:
        logits: [num_reqs, n, V].
        sampling: `seen` must be there; requests with penalty 1 are left as they are.
        tokens: int64 [num_reqs, n], the anchor, then the drafts.

    Returns:
        float32 [num_reqs, n, V].
    """
    assert sampling.seen is not None, "no request has a repetition penalty"
    width = tokens.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    # Row j names its tokens 0..j; in place of later ones it names the anchor again, which every row has.
    fed = torch.where(causal, tokens[:, None, :], tokens[:, :1, None])
    seen = sampling.seen[:, None, :].repeat(1, width, 1).scatter_(-1, fed, True)
    scores = logits.float()
    penalty = sampling.repetition_penalty[:, None, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def sample(logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token from each row; a greedy request gets its best one.

    Every row is computed from its own values only, bit for bit the same whichever filters its neighbors use.

    Args:
        logits: [num_reqs, n, V], after the repetition penalty if there is one.
        sampling: of the requests.
        positions: int64 [num_reqs, n], of the tokens to draw.

    Returns:
        int64 [num_reqs, n], and bool [num_reqs, n]: whether the row has a finite maximum; without one its token has no meaning.
    """
    if on_triton(logits.device):
        from specdec.kernels import triton_sampler  # it imports Triton

        return triton_sampler.sample(logits, sampling.floats, sampling.ints, positions, filtered=sampling.plan.filtered)
    best, finite = argmax(logits)
    rows = filtered_scores(logits, sampling).flatten(0, 1)
    bits = stream(sampling.seeds, positions, Purpose.SAMPLE).flatten()
    most = max(1, CACHED_NUMBERS // rows.shape[-1]) if rows.device.type == "cpu" else max(1, len(rows))
    parts = zip(rows.split(most), bits.split(most), strict=True)
    drawn = torch.cat([argmax(gumbel(part, rows.shape[-1]).add_(scores))[0] for scores, part in parts])
    return torch.where(sampling.temperature[:, None] == 0, best, drawn.view_as(best)), finite


def sample_from(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: the first token whose cumulative probability exceeds `u` times the total.

    A token of probability 0 is never returned while the row has any other.

    Args:
        probs: float32 [..., V], at least 0; need not sum to 1.
        u: float64 [...] in [0, 1).

    Returns:
        int64 [...] in [0, V), also for rows that are zero or not finite.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Staying below the total keeps the search off zeros at the end of a row.
    target = torch.minimum(u[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)
