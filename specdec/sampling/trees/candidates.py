"""The likeliest tokens of drafted positions, given the noise of the target's own draw there.

The target takes y = argmax(log p + g). Whoever drafts knows g, too, and with a distribution q of
its own believes that P(y = x | g) is softmax(a log q + b g). With a = b = 1 it trusts q as it is;
with b = 0 it knows nothing of the noise, as for a greedy target (Gumbel coupling, Daliri, Musco and
Suresh, arXiv 2408.07978; the weights a and b are ours). The noise decides which tokens are tried
and never what is accepted, so what comes out is the target's own choice all the same.

The softmax is over the whole vocabulary, and weights have to be fitted so. Over the candidates
alone it would promise too much: late positions often hold no right one.
"""

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.deviation import Deviation, worst
from specdec.kernels.kernel import Kernel
from specdec.kernels.native import native
from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import Purpose, gumbel, gumbel_again, stream
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import CACHED_NUMBERS
from specdec.sampling.tensors import SamplingTensors

# columns; large enough for few groups, and small enough for few columns in those that are looked at
_GROUP = 64


def candidates(
    logits: Tensor,
    sampling: SamplingTensors,
    positions: Tensor,
    count: int,
    *,
    weights: Tensor | None = None,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row by a log q + b g; what filters drop comes last.

    Rows are computed from their own values. One candidate, unweighted, is of `argmax` or `sample`.

    Args:
        logits: [num_reqs, n, V], the drafter's.
        sampling: of the requests; of greedy ones a is 1, b is 0 and the temperature 1.
        positions: int64 [num_reqs, n], of the tokens to draft.
        count: C, at most 64.
        weights: float32 [2, num_reqs, n], a > 0 and b; None are ones.
        target_ids: int64 [V], the target's token of each column; None where they are the same.

    Returns:
        int64 [num_reqs, n, C], tokens of the target, and float32 [num_reqs, n, C], their
        log-probabilities in falling order, at most 0. A row that is not finite has tokens without
        meaning, and all or some of its log-probabilities are -inf.
    """
    sampled, filtered = not sampling.plan.all_greedy, sampling.plan.filtered
    if KERNEL.runs_on(logits.device):
        from specdec.sampling.trees import triton_candidates  # it imports Triton

        floats, ints = sampling.floats, sampling.ints
        tensors, how = (logits, floats, ints, positions), (count, weights, target_ids)
        return triton_candidates.candidates(*tensors, *how, sampled=sampled, filtered=filtered)
    if not sampled and logits.device.type == "cpu" and logits.dtype == torch.bfloat16:
        library = native()
        if library is not None and count <= logits.shape[-1]:
            columns, logprobs = _native(library, logits.contiguous(), count)
            return columns if target_ids is None else target_ids[columns], logprobs
    return plain_candidates(logits, sampling, positions, count, weights, target_ids)


def _native(library: ctypes.CDLL, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`_best` of bfloat16 [num_reqs, n, V] in C++."""
    columns = logits.new_empty(*logits.shape[:2], count, dtype=torch.int64)
    logprobs = logits.new_empty(columns.shape, dtype=torch.float32)
    rows, width = columns.shape[:2].numel(), logits.shape[-1]
    where = columns.data_ptr(), logprobs.data_ptr()
    library.best(logits.data_ptr(), rows, width, count, *where, torch.get_num_threads())
    return columns, logprobs


def plain_candidates(
    logits: Tensor,
    sampling: SamplingTensors,
    positions: Tensor,
    count: int,
    weights: Tensor | None,
    target_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`candidates` in plain torch."""
    shape, vocab_size = logits.shape[:2], logits.shape[-1]
    rows = logits.flatten(0, 1)
    most = max(1, CACHED_NUMBERS // vocab_size) if rows.device.type == "cpu" else max(1, len(rows))
    if sampling.plan.all_greedy:
        found = [_best(part.float(), count) for part in rows.split(most)]
    else:
        greedy = (sampling.temperature == 0).repeat_interleave(shape[1])
        scores = torch.where(
            greedy[:, None], rows.float(), filtered_scores(logits, sampling).flatten(0, 1)
        )
        ones = torch.ones_like(greedy, dtype=torch.float32)
        a, b = (ones, ones) if weights is None else weights.flatten(1)
        a, b = torch.where(greedy, 1.0, a)[:, None], torch.where(greedy, 0.0, b)[:, None]
        tokens = vocab_size if target_ids is None else target_ids
        bits = stream(sampling.seeds, positions, Purpose.SAMPLE).flatten()
        parts = zip(*(x.split(most) for x in (scores, a, b, bits)), strict=True)
        noisy = (gumbel_again(bits, tokens).mul_(b).add_(a * own) for own, a, b, bits in parts)
        found = [_best(own, count) for own in noisy]
    columns, logprobs = (torch.cat(parts).view(*shape, count) for parts in zip(*found, strict=True))
    return columns if target_ids is None else target_ids[columns], logprobs


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns int64 and log-probabilities float32 [rows, count] of the highest of [rows, V]."""
    # `max` gives of equal ones the first, too.
    columns = (
        scores.max(dim=-1, keepdim=True).indices if count == 1 else highest_columns(scores, count)
    )
    logprobs = scores.log_softmax(dim=-1).gather(-1, columns)  # on a CPU twice as fast as logsumexp
    return columns, torch.where(logprobs.isnan(), -torch.inf, logprobs.clamp(max=0.0))


def highest_columns(scores: Tensor, count: int) -> Tensor:
    """Columns int64 [rows, count] of the highest of float32 [rows, V]; a NaN counts as infinite."""
    # They lie in the groups of the highest maxima: any other's comes after one of each.
    spare = -scores.shape[-1] % _GROUP
    groups = F.pad(scores, (0, spare), value=-torch.inf) if spare else scores
    groups = groups.unflatten(-1, (-1, _GROUP))
    best = _first_highest(groups.amax(dim=-1), min(count, groups.shape[1])).sort(dim=-1).values
    places = _first_highest(
        groups.gather(1, best[..., None].expand(-1, -1, _GROUP)).flatten(1), count
    )
    return best.gather(1, places // _GROUP) * _GROUP + places % _GROUP


def _first_highest(scores: Tensor, count: int) -> Tensor:
    """Columns int64 [rows, count] of the highest; `topk` alone would take any of equal ones."""
    # A NaN's bits, and so columns beyond the last, may come first; + 0.0 makes -0.0 equal to 0.0.
    bits = (scores.nan_to_num(torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ascends as the scores do
    keys = (order.long() << 32) | torch.arange(
        0x7FFFFFFF, 0x7FFFFFFF - scores.shape[-1], -1, device=scores.device
    )
    return 0x7FFFFFFF - (keys.topk(count, dim=-1).values & 0x7FFFFFFF)


def check_candidates(device: torch.device) -> Deviation:
    """Rows of several slices, greedy and sampled, with filters and weights: how far the
    log-probabilities are off, in order and of the very tokens.
    """
    from specdec.sampling.trees import triton_candidates

    filters = [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.1)]
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.0, 0.7, 1.5)
        for k, p, m in filters
    ]
    sampling = SamplingTensors.of(params, range(len(params)))
    generator = torch.Generator().manual_seed(0)
    shape = len(params), 2, triton_candidates.SLICE + 5
    logits = 3 * torch.randn(shape, generator=generator).bfloat16()
    weights = torch.rand(2, len(params), 2, generator=generator) + 0.5
    positions = torch.arange(2).expand(len(params), 2) + 2**33
    target_ids = torch.arange(logits.shape[-1]) * 3
    numbers = (logits, sampling.floats, sampling.ints, positions, weights, target_ids)
    x, floats, ints, places, pairs, ids = (tensor.to(device) for tensor in numbers)
    found = triton_candidates.candidates(
        x, floats, ints, places, 16, pairs, ids, sampled=True, filtered=True
    )
    return off(logits, sampling, positions, weights, target_ids, found[0].cpu(), found[1].cpu())


KERNEL = Kernel("candidates", check_candidates)


def off(
    logits: Tensor,
    sampling: SamplingTensors,
    positions: Tensor,
    weights: Tensor | None,
    target_ids: Tensor | None,
    token_ids: Tensor,
    logprobs: Tensor,
) -> Deviation:
    """How far it is from the best log-probabilities and from its tokens', in float64.

    Two ways of computing scores round logarithms otherwise: equal ones may change places.
    """
    tokens = logits.shape[-1] if target_ids is None else target_ids
    noise = gumbel(stream(sampling.seeds, positions, Purpose.SAMPLE), tokens)
    greedy = (sampling.temperature == 0)[:, None, None]
    a, b = (1.0, 1.0) if weights is None else weights.double()[..., None]
    scores = torch.where(
        greedy, logits.double(), a * filtered_scores(logits, sampling).double() + b * noise.double()
    )
    expected = scores.log_softmax(-1)
    columns = token_ids if target_ids is None else torch.searchsorted(target_ids, token_ids)
    if not all(len(row.unique()) == len(row) for row in columns.flatten(0, 1)):
        return Deviation(math.inf, 0.0)  # a token was found twice

    def largest(wanted: Tensor) -> float:
        return float(torch.where(wanted == logprobs, 0.0, wanted - logprobs).abs().max())

    highest = float(scores.abs().where(scores > -torch.inf, 0.0).amax())
    bound = 64 * torch.finfo(torch.float32).eps * highest
    best = expected.topk(logprobs.shape[-1]).values
    return worst(
        Deviation(largest(wanted), bound) for wanted in (best, expected.gather(-1, columns))
    )
