"""Acceptance: exact in distribution, exact token for token where that is promised, and blind to
neighbors.

A toy target (a table of logits per previous token, vocabulary of 6) is decoded for three steps by
20,000 requests at once. The joint distribution of the first three tokens is compared with
enumeration by a chi-square test. Seeds are fixed; with a threshold of 1e-6 on about forty p-values,
a fresh choice of seeds would raise a false alarm in about one run of 25,000.
"""

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec.engine import acceptance
from specdec.engine.acceptance import accept
from specdec.sampling.noise import Purpose, uniform
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.pairs import in_turns
from tests.specdec.engine import toy_target
from tests.specdec.engine.toy_target import FORMS, START, TARGET, K, V, propose, sampling_for
from tests.specdec.sampling.test_sampler import transformers_probs


def decode(
    form: str,
    sampling: SamplingTensors,
    steps: int,
    k: int = K,
    num_drafts: Tensor | None = None,
    stale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output tokens [num_reqs, steps * (k + 1)] and how many count; `stale` forgets to advance the
    random numbers.
    """
    anchors = torch.zeros_like(sampling.seeds)
    length = torch.zeros_like(anchors)
    output = torch.full((len(anchors), steps * (k + 1)), -1)
    width = torch.arange(k + 1)
    for _ in range(steps):
        positions = START + (torch.zeros_like(length) if stale else length)
        draft = propose(form, anchors, positions, sampling.seeds, k, num_drafts)
        tokens = torch.cat([anchors[:, None], draft.token_ids], 1)
        result = accept(tokens, TARGET[tokens], draft, sampling, positions[:, None] + width)
        # the next step overwrites the surplus
        output.scatter_(1, length[:, None] + width, result.token_ids)
        length += result.num_accepted + 1
        anchors = result.next_anchors
    return output, length


def p_value(output: Tensor, params: SamplingParams, num_tokens: int) -> float:
    """Chi-square test of the first `num_tokens` tokens against enumeration of the target; 0 if one
    of them is impossible.
    """
    table = transformers_probs(params, torch.empty(V, 0).long(), TARGET).double()
    table /= table.sum(-1, keepdim=True)
    joint, cells = table[0], output[:, 0]
    for i in range(1, num_tokens):
        joint = (joint.reshape(-1, V, 1) * table).flatten()
        cells = cells * V + output[:, i]
    observed = cells.bincount(minlength=V**num_tokens).double()
    if observed[joint == 0].any():
        return 0.0
    expected, order = (joint[joint > 0] * len(output)).sort()
    observed = observed[joint > 0][order]
    # pooled with the least likely cell that is not rare, to keep the approximation good
    rare = int((expected < 5).sum()) + 1
    expected, observed = (torch.cat([x[:rare].sum()[None], x[rare:]]) for x in (expected, observed))
    return (
        float(stats.chisquare(observed.numpy(), expected.numpy()).pvalue)
        if len(expected) > 1
        else 1.0
    )


FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all filters": {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "bias": {"logit_bias": {1: 1.5, 3: -1.0, 4: -100.0}},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("filters", "temperature"), in_turns(FILTERS, [1.0, 0.6], 1))
def test_joint_distribution_is_the_targets(form: str, temperature: float, filters: str) -> None:
    """Catches a wrong acceptance rule, a wrong residual, filters missing from p, and random numbers
    that must not be reused.
    """
    params = SamplingParams(temperature=temperature, **FILTERS[filters])
    output, _ = decode(form, sampling_for([params], 20_000), steps=3)
    assert p_value(output, params, 3) > 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_joint_distribution_with_fewer_drafts_than_k(form: str) -> None:
    """Catches a draft past `num_drafts` that is accepted, or judged as if it had been rejected."""
    params = SamplingParams(temperature=1.0)
    output, _ = decode(
        form, sampling_for([params], 20_000), steps=3, num_drafts=torch.arange(20_000) % (K + 1)
    )
    assert p_value(output, params, 3) > 1e-6


def shrunk_uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    u = uniform(seeds, positions, purpose)
    return u / 1.02 if purpose is Purpose.ACCEPT else u


@pytest.mark.parametrize("form", ["dense", "top-k supported"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.slow
def test_a_bias_of_two_percent_would_be_found(
    form: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the method: the true rule passes with 400,000 requests, and accepting 2 % too
    readily does not.
    """
    if biased:
        monkeypatch.setattr(acceptance, "uniform", shrunk_uniform)
    params = SamplingParams(temperature=1.0)
    output, _ = decode(form, sampling_for([params], 400_000), steps=1, k=1)
    assert (p_value(output, params, 1) > 1e-6) is not biased


@pytest.mark.parametrize("form", FORMS)
def test_random_numbers_used_for_two_tokens_would_be_found(form: str) -> None:
    """Control of the method: without the position in the random numbers, the joint distribution is
    visibly wrong.
    """
    params = SamplingParams(temperature=1.0)
    output, _ = decode(form, sampling_for([params], 20_000), steps=3, stale=True)
    assert p_value(output, params, 3) < 1e-6


def test_numbers_drawn_again_by_the_next_step_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control of the method: what lay behind a rejected block had a part in it, and drawn again by
    position it gives a bias.
    """
    by_position = lambda anchors, count: anchors[:, None] + 1 + torch.arange(count)  # noqa: E731
    monkeypatch.setattr(acceptance, "of_step", by_position)
    monkeypatch.setattr(toy_target, "of_step", by_position)
    params = SamplingParams(temperature=1.0)
    output, _ = decode("dense", sampling_for([params], 20_000), steps=3)
    assert p_value(output, params, 3) < 1e-6


def test_a_block_keeps_more_than_its_drafts_one_by_one() -> None:
    """2.97 tokens per step here, where a test of each draft gives 2.88; the spread of the mean is
    0.005.
    """
    _, length = decode("dense", sampling_for([SamplingParams(temperature=1.0)], 20_000), steps=3)
    assert float(length.float().mean()) / 3 > 2.93


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), *(SamplingParams(temperature=0.9, **f) for f in FILTERS.values())],
    ids=str,
)
def test_point_mass_output_equals_plain_decoding_token_for_token(params: SamplingParams) -> None:
    """Catches a random number that depends on the row or on whether drafts are used."""
    sampling = sampling_for([params], 2_000)
    plain, _ = decode("point mass", sampling, steps=4, k=0)
    drafted, length = decode("point mass", sampling, steps=4)
    assert length.min() >= 4
    assert torch.equal(plain[:, :4], drafted[:, :4])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "company", [[], [SamplingParams(temperature=1.0, top_p=0.9)]], ids=["all greedy", "mixed batch"]
)
def test_greedy_requests_get_the_argmax_whatever_the_proposal(
    form: str, company: list[SamplingParams]
) -> None:
    """Catches a greedy request that is treated as a sampled one, beside sampled ones or with drafts
    from a distribution.
    """
    sampling = sampling_for([SamplingParams(), *company], 200)
    output, length = decode(form, sampling, steps=4)
    greedy = torch.arange(len(output)) % (1 + len(company)) == 0
    token = torch.zeros_like(length)
    for i in range(4):
        token = TARGET[token].argmax(-1)
        assert torch.equal(output[greedy, i], token[greedy])
