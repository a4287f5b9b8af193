"""Drafts that share the target's noise: how often they are right, and why only equality may judge
them.

Seeds are fixed. Rates are judged at five standard errors and distributions at 1e-6, about twenty
comparisons in all: a fresh choice of seeds would raise a false alarm in about one run of 40,000.
"""

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec.sampling import noise as noise_module
from specdec.sampling.noise import Purpose, gumbel, stream, uniform
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.candidates import candidates

V, SEEDS, POSITIONS = 8, 2000, 200
TARGET = 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(0))
AT = torch.arange(POSITIONS).expand(SEEDS, -1)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping 400,000 short rows takes ten times as long as computing them; `test_sampler` shows
    that it changes none.
    """
    monkeypatch.setattr(noise_module, "REMEMBERED", 0)


def sampling_of(temperature: float = 1.0) -> SamplingTensors:
    return SamplingTensors.of([SamplingParams(temperature=temperature)] * SEEDS, range(SEEDS))


def everywhere(logits: Tensor) -> Tensor:
    return logits.expand(SEEDS, POSITIONS, V)


def match_probability(p: Tensor, q: Tensor) -> float:
    """J(p, q) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), in float64 (Daliri, Musco and Suresh,
    arXiv 2408.07978).
    """
    return float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(dim=1)).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.5])
def test_one_draft_is_right_as_often_as_the_formula_says(spread: float, temperature: float) -> None:
    """Over 400,000 positions; between the bound of any scheme without communication and that of
    rejection sampling.
    """
    drafter = TARGET + spread * torch.randn(V, generator=torch.Generator().manual_seed(1))
    sampling = sampling_of(temperature)
    drafts, _ = candidates(everywhere(drafter), sampling, AT, 1)
    tokens, _ = sample(everywhere(TARGET), sampling, AT)
    right = (drafts.squeeze(-1) == tokens).double().mean().item()
    p, q = ((logits.double() / temperature).softmax(0) for logits in (TARGET, drafter))
    expected, shared = match_probability(p, q), float(torch.minimum(p, q).sum())
    assert abs(right - expected) < 5 * (expected * (1 - expected) / AT.numel()) ** 0.5
    assert shared / (2 - shared) <= expected <= shared
    independent = float((p * q).sum())
    assert right > independent + 0.05, "noise of its own would not do"


def test_a_drafter_that_knows_the_target_is_always_right() -> None:
    """The same tokens to the last, where filters drop some, too."""
    params = [
        SamplingParams(temperature=0.9, top_k=4),
        SamplingParams(temperature=1.4, top_p=0.8, min_p=0.02),
    ] * (SEEDS // 2)
    sampling = SamplingTensors.of(params, range(SEEDS))
    drafts, _ = candidates(everywhere(TARGET), sampling, AT, 1)
    assert torch.equal(drafts.squeeze(-1), sample(everywhere(TARGET), sampling, AT)[0])


def kept_by_ratio(drafter: Tensor, *, shared: bool) -> Tensor:
    """Drafts by the target's noise, kept with probability p / q and else drawn from the residual,
    by the same noise or another.
    """
    p, q = TARGET.softmax(0), drafter.softmax(0)
    seeds = torch.arange(SEEDS)
    noise = gumbel(stream(seeds, AT, Purpose.SAMPLE), V)
    drafts = (q.log() + noise).argmax(-1)
    again = noise if shared else gumbel(stream(seeds, AT, Purpose.DRAFT), V)
    residual = (p - q).clamp(min=0)
    kept = uniform(seeds, AT, Purpose.ACCEPT) * q[drafts] < p[drafts]
    return torch.where(kept, drafts, (residual.log() + again).argmax(-1))


def chi_square(tokens: Tensor) -> float:
    """Of tokens against the target's distribution."""
    p = TARGET.double().softmax(0)
    return float(
        stats.chisquare(
            tokens.flatten().bincount(minlength=V).numpy(), (p * tokens.numel()).numpy()
        ).statistic
    )


def test_shared_noise_and_ratios_do_not_go_together() -> None:
    """The residual must not be drawn with the noise that chose the draft: far off the target, where
    equality is not, nor ratios with noise of their own.
    """
    drafter = TARGET + torch.randn(V, generator=torch.Generator().manual_seed(1))
    threshold = float(stats.chi2.isf(1e-6, V - 1))
    assert chi_square(sample(everywhere(TARGET), sampling_of(), AT)[0]) < threshold
    assert chi_square(kept_by_ratio(drafter, shared=False)) < threshold
    assert chi_square(kept_by_ratio(drafter, shared=True)) > 10 * threshold
