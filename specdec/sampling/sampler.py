"""From scores to tokens, batched: the draw.

A token is drawn by adding a Gumbel variable of its own to every token's score and taking the
highest (the Gumbel-max trick, arXiv 1411.0030): no sum over the vocabulary, and whoever guesses the
token can know the noise beforehand.
"""

import math

import torch
from torch import Tensor

from specdec.device.deviation import Deviation
from specdec.kernels.kernel import Kernel
from specdec.sampling.argmax import argmax
from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import Purpose, gumbel, gumbel_again, stream
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors

CACHED_NUMBERS = 2**18
"""How many numbers a CPU draws from at once: those of more rows would leave its cache between two
operations, and of fewer the operations take longer to begin than to run."""


def sample(logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token from each row; a greedy request gets its best one.

    Rows are computed from their own values, bit for bit the same whatever others' filters.

    Args:
        logits: [num_reqs, n, V], see `specdec.sampling.scores.scored`.
        positions: int64 [num_reqs, n], of the tokens to draw.

    Returns:
        int64 [num_reqs, n], and bool [num_reqs, n]: whether its maximum is finite, else no token.
    """
    if KERNEL.runs_on(logits.device):
        from specdec.sampling import triton_sampler  # it imports Triton

        return triton_sampler.sample(
            logits, sampling.floats, sampling.ints, positions, filtered=sampling.plan.filtered
        )
    best, finite = argmax(logits)
    rows = filtered_scores(logits, sampling).flatten(0, 1)
    bits = stream(sampling.seeds, positions, Purpose.SAMPLE).flatten()
    most = (
        max(1, CACHED_NUMBERS // rows.shape[-1]) if rows.device.type == "cpu" else max(1, len(rows))
    )
    parts = zip(rows.split(most), bits.split(most), strict=True)
    drawn = torch.cat(
        [argmax(gumbel_again(part, rows.shape[-1]).add_(scores))[0] for scores, part in parts]
    )
    return torch.where(sampling.temperature[:, None] == 0, best, drawn.view_as(best)), finite


def check_sampler(device: torch.device) -> Deviation:
    """Filtered and greedy rows of several slices: how far drawn noisy scores are from the best.

    Between the two ways scores of a token differ by the rounding of their logarithms.
    """
    from specdec.kernels import triton_argmax
    from specdec.sampling import triton_sampler

    filters = [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (5, 0.7, 0.05)]
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.0, 0.7, 1.5)
        for k, p, m in filters
    ]
    sampling = SamplingTensors.of(params, range(len(params)))
    generator = torch.Generator().manual_seed(0)
    shape = len(params), 3, triton_argmax.SLICE + 5
    logits = 3 * torch.randn(shape, generator=generator).bfloat16()
    positions = torch.arange(3).expand(len(params), 3) + 2**33
    moved = [tensor.to(device) for tensor in (logits, sampling.floats, sampling.ints, positions)]
    token_ids, finite = triton_sampler.sample(*moved, filtered=True)
    noise = gumbel(stream(sampling.seeds, positions, Purpose.SAMPLE), logits.shape[-1])
    greedy, drawn = sampling.temperature[:, None, None] == 0, filtered_scores(logits, sampling)
    scores = torch.where(greedy, logits.float(), drawn + noise)
    missing = scores.amax(-1) - scores.gather(-1, token_ids.cpu()[..., None]).squeeze(-1)
    farthest = float(missing.max()) if finite.all() else math.inf
    return Deviation(farthest, 64 * torch.finfo(torch.float32).eps * float(scores.amax()))


KERNEL = Kernel("sampler", check_sampler)


def sample_from(probs: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `u` times the total.

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
    found = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return found.clamp(max=probs.shape[-1] - 1)
