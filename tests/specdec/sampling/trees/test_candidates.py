"""Candidates of drafted positions in plain torch: their order, their log-probabilities, and whose
noise they see.
"""

import pytest
import torch
from torch import Tensor

from specdec.kernels.native import native
from specdec.sampling.argmax import argmax
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.candidates import candidates, highest_columns, off, plain_candidates
from tests.helpers.guards import no_host_sync

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=12),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02),
]


def case(
    params: list[SamplingParams], width: int = 3, vocab_size: int = 211
) -> tuple[Tensor, SamplingTensors, Tensor]:
    """Logits, requests seeded by their numbers, and positions."""
    logits = 3 * torch.randn(
        len(params), width, vocab_size, generator=torch.Generator().manual_seed(0)
    )
    return (
        logits,
        SamplingTensors.of(params, range(len(params))),
        torch.arange(width).expand(len(params), width) + 77,
    )


def test_one_candidate_is_what_would_be_drawn() -> None:
    """Bit for bit the token of `sample` from the drafter's logits, so that a chain is a tree of one
    candidate.
    """
    logits, sampling, positions = case(PARAMS * 8)
    ones = torch.ones(2, *positions.shape)
    for weights in (None, ones):
        token_ids, _ = candidates(logits, sampling, positions, 1, weights=weights)
        assert torch.equal(token_ids.squeeze(-1), sample(logits, sampling, positions)[0])
    greedy = SamplingTensors.neutral(0, torch.device("cpu"))
    token_ids, logprobs = candidates(logits, greedy, positions, 1)
    assert torch.equal(token_ids.squeeze(-1), argmax(logits)[0])
    assert torch.equal(logprobs.squeeze(-1), logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("weighted", [False, True])
def test_log_probabilities(weighted: bool) -> None:
    """Normalized over the whole vocabulary, in falling order; what a filter drops has none."""
    logits, sampling, positions = case(PARAMS)
    weights = torch.rand(2, *positions.shape) + 0.4 if weighted else None
    with no_host_sync():
        token_ids, logprobs = candidates(logits, sampling, positions, 16, weights=weights)
    deviation = off(logits, sampling, positions, weights, None, token_ids, logprobs)
    assert deviation.error <= deviation.bound
    assert (logprobs[..., 1:] <= logprobs[..., :-1]).all() and (logprobs <= 0).all()
    assert torch.equal((logprobs[2] > -torch.inf).sum(-1), torch.full((3,), 12))  # top-k


def test_noise_belongs_to_the_target_s_tokens() -> None:
    """A drafter of fewer tokens guesses those that the target would choose among them."""
    logits, sampling, positions = case(PARAMS)
    target_ids = torch.arange(5, 211, 3)
    token_ids, logprobs = candidates(
        logits[..., target_ids], sampling, positions, 4, target_ids=target_ids
    )
    masked = torch.full_like(logits, -torch.inf).index_copy(-1, target_ids, logits[..., target_ids])
    expected = candidates(masked, sampling, positions, 4)
    assert torch.equal(token_ids[[0, 1]], expected[0][[0, 1]])  # filters see other vocabularies
    torch.testing.assert_close(logprobs[[0, 1]], expected[1][[0, 1]])


def test_equal_scores_come_in_the_order_of_their_tokens() -> None:
    """Also zeros of either sign, and tokens that nothing distinguishes any more:
    all of them -inf.
    """
    logits = torch.tensor([[[-1.0, 0.0, 2.0, -0.0, 2.0, 0.0, -torch.inf, -torch.inf]]])
    greedy = SamplingTensors.neutral(1, torch.device("cpu"))
    token_ids, logprobs = candidates(logits, greedy, torch.zeros(1, 1, dtype=torch.long), 8)
    assert token_ids.flatten().tolist() == [2, 4, 1, 3, 5, 0, 6, 7]
    assert logprobs.flatten().isneginf().tolist() == [False] * 6 + [True] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(value: float) -> None:
    """Valid tokens, no log-probability that is not a number, and no other row touched."""
    logits, sampling, positions = case(PARAMS)
    usual = candidates(logits, sampling, positions, 4)
    logits[:, 1] = value
    token_ids, logprobs = candidates(logits, sampling, positions, 4)
    assert ((token_ids >= 0) & (token_ids < 211)).all() and logprobs[:, 1].isneginf().all()
    assert torch.equal(token_ids[:, ::2], usual[0][:, ::2]) and torch.equal(
        logprobs[:, ::2], usual[1][:, ::2]
    )


@pytest.mark.parametrize("vocab_size", [97, 128, 49155, 50257, 128167])
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_of_either_sign_leads_to_columns_that_exist(vocab_size: int, sign: int) -> None:
    """Catches columns beyond a vocabulary that is no multiple of 64: as bits a NaN may come before
    what pads it.
    """
    scores = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1))
    nan = torch.tensor(0x7FC00000 if sign > 0 else -0x400000, dtype=torch.int32).view(torch.float32)
    scores[0], scores[1, [7, vocab_size - 1]], scores[2, :-3], scores[3] = nan, nan, nan, -torch.inf
    for count in (1, 2, 3, 17, 64):
        found = highest_columns(scores, count)
        assert ((found >= 0) & (found < vocab_size)).all()
        assert all(len(row.unique()) == count for row in found)
        assert torch.equal(found[4], scores[4].topk(count).indices)
        assert found[1, :2].tolist() == [7, vocab_size - 1][:count], (
            "as for torch a NaN is above all"
        )


@pytest.mark.parametrize("vocab_size", [7, 64, 65, 1000])
def test_of_equal_ones_the_first_wherever_they_lie(vocab_size: int) -> None:
    """Catches a tie between groups of columns, or with what pads the last one, that goes to a later
    column.
    """
    scores = (
        torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        .mul(2)
        .round()
    )
    scores[1], scores[2, ::2], scores[3, : vocab_size // 2] = 0.0, -0.0, -1e9
    for count in (2, 7, min(vocab_size, 64)):
        sampling = SamplingTensors.neutral(4, torch.device("cpu"))
        found, _ = candidates(
            scores[:, None], sampling, torch.zeros(4, 1, dtype=torch.int64), count
        )
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert found[:, 0].equal(expected)


@pytest.mark.skipif(native() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("vocab_size", [1, 5, 17, 100, 1000])
@pytest.mark.parametrize("value", [None, "ties", torch.nan, torch.inf, -torch.inf])
def test_greedy_ones_on_a_cpu(vocab_size: int, value: float | str | None) -> None:
    """In C++ the very tokens of plain torch, also of equal ones and of rows that are not finite."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(2, 3, vocab_size, generator=generator).bfloat16()
    if value == "ties":
        logits = logits.round()
    elif isinstance(value, float):
        logits[0, 0, vocab_size // 2] = value
        logits[1, 2, vocab_size // 2 :] = value
    greedy, positions = SamplingTensors.of([SamplingParams()] * 2, range(2)), torch.zeros(2, 3)
    target_ids = torch.arange(vocab_size) * 3
    for count in {1, min(16, vocab_size), min(64, vocab_size)}:
        arguments = logits, greedy, positions.long(), count
        tokens, logprobs = candidates(*arguments, target_ids=target_ids)
        expected = plain_candidates(*arguments, None, target_ids)
        assert tokens.equal(expected[0])
        torch.testing.assert_close(logprobs, expected[1], atol=2e-6, rtol=0)
