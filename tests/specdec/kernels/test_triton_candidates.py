"""Candidates against the plain version; where the kernels run, see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch
from torch import Tensor

from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.candidates import check_candidates, off, plain_candidates
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

# Imported only where Triton can run.
from specdec.kernels.triton_argmax import DTYPES, SLICE, argmax  # noqa: E402
from specdec.sampling.trees.triton_candidates import candidates  # noqa: E402
from specdec.sampling.triton_sampler import sample  # noqa: E402

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=12),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02),
]


def find(
    logits: Tensor,
    sampling: SamplingTensors,
    positions: Tensor,
    count: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernels' tokens and log-probabilities."""
    x, floats, ints, places = (
        tensor.to(DEVICE) for tensor in (logits, sampling.floats, sampling.ints, positions)
    )
    plan, weights = sampling.plan, None if weights is None else weights.to(DEVICE)
    found = candidates(
        x,
        floats,
        ints,
        places,
        count,
        weights,
        None,
        sampled=not plan.all_greedy,
        filtered=plan.filtered,
    )
    return found[0].cpu(), found[1].cpu()


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "count", "weighted"),
    [
        (DTYPES[0], SLICE + 1, 16, True),
        (DTYPES[1], 97, 32, False),
        (DTYPES[2], 2 * SLICE + 300, 3, True),
    ],
    ids=str,
)
def test_as_plain(dtype: torch.dtype, vocab_size: int, count: int, weighted: bool) -> None:
    """Greedy and sampling requests beside each other, and slices that hold fewer tokens than are
    wanted.
    """
    logits = (
        3 * torch.randn(len(PARAMS), 2, vocab_size, generator=torch.Generator().manual_seed(1))
    ).to(dtype)
    sampling, positions = (
        SamplingTensors.of(PARAMS, range(len(PARAMS))),
        torch.arange(2).expand(len(PARAMS), 2) + 2**33,
    )
    weights = (
        torch.rand(2, len(PARAMS), 2, generator=torch.Generator().manual_seed(2)) + 0.5
        if weighted
        else None
    )
    token_ids, logprobs = find(logits, sampling, positions, count, weights)
    deviation = off(logits, sampling, positions, weights, None, token_ids, logprobs)
    assert deviation.error <= deviation.bound
    assert (
        token_ids != plain_candidates(logits, sampling, positions, count, weights, None)[0]
    ).float().mean() < 0.02
    assert (logprobs[..., 1:] <= logprobs[..., :-1]).all()


def test_one_candidate_is_what_would_be_drawn() -> None:
    """Bit for bit the token of our other kernels on this device."""
    logits = 3 * torch.randn(4, 2, SLICE + 7, generator=torch.Generator().manual_seed(3)).bfloat16()
    sampling, positions = SamplingTensors.of(PARAMS, range(4)), torch.arange(2).expand(4, 2) + 5
    moved = [tensor.to(DEVICE) for tensor in (logits, sampling.floats, sampling.ints, positions)]
    drawn = sample(*moved, filtered=True)[0].cpu()
    for weights in (None, torch.ones(2, 4, 2)):
        assert torch.equal(find(logits, sampling, positions, 1, weights)[0].squeeze(-1), drawn)
    greedy = SamplingTensors.neutral(0, torch.device("cpu"))
    assert torch.equal(
        find(logits, greedy, positions, 1)[0].squeeze(-1), argmax(logits.to(DEVICE))[0].cpu()
    )


def test_equal_scores_and_rows_that_are_not_finite() -> None:
    """The first token first, also of another slice; tokens are valid and log-probabilities numbers
    whatever the logits are.
    """
    logits = torch.zeros(1, 5, SLICE + 9)
    logits[0, 0, [SLICE + 3, 40, 7]] = 2.0
    logits[0, 0, [SLICE + 2, 3]] = -0.0
    logits[0, 1, 50] = torch.nan
    logits[0, 2, 50] = torch.inf
    logits[0, 3] = -torch.inf
    logits[0, 4, 4:] = -torch.inf
    greedy, positions = (
        SamplingTensors.neutral(1, torch.device("cpu")),
        torch.zeros(1, 5, dtype=torch.long),
    )
    token_ids, logprobs = find(logits, greedy, positions, 6)
    assert token_ids[0, 0].tolist() == [7, 40, SLICE + 3, 0, 1, 2]
    assert ((token_ids >= 0) & (token_ids < SLICE + 9)).all()
    assert logprobs[0, [1, 2, 3]].isneginf().all() and torch.isfinite(logprobs[0, 0]).all()
    assert (
        token_ids[0, 4].tolist() == [0, 1, 2, 3, 4, 5]
        and logprobs[0, 4].isneginf().tolist() == [False] * 4 + [True] * 2
    )


@pytest.mark.parametrize(
    ("vocab_size", "bits"), [(97, 0x7FC00000), (SLICE + 9, -0x400000), (97, 0x7F800000)]
)
def test_tokens_exist_whatever_is_no_number(vocab_size: int, bits: int) -> None:
    """NaN of either sign and infinity, in a whole row and in its last column, of requests that
    sample and of those that do not.
    """
    logits = torch.randn(len(PARAMS), 2, vocab_size, generator=torch.Generator().manual_seed(4))
    bad = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    logits[:, 0], logits[:, 1, -1] = bad, bad
    sampling, positions = (
        SamplingTensors.of(PARAMS, range(len(PARAMS))),
        torch.arange(2).expand(len(PARAMS), 2),
    )
    token_ids, logprobs = find(logits, sampling, positions, 33)
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all() and not logprobs.isnan().any()


def test_the_check_passes() -> None:
    error, bound = check_candidates(DEVICE)
    assert error <= bound
