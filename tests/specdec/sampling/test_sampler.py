"""Random numbers, logit processing and drawing.

The statistical tests use fixed seeds and p-value thresholds of 1e-6 (five standard errors for
correlations), about forty comparisons in all: a fresh choice of seeds would raise a false alarm in
about one run of 25,000.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.sampling import filters, noise
from specdec.sampling.filters import processed_probs
from specdec.sampling.noise import Purpose, gumbel, stream, uniform
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample, sample_from
from specdec.sampling.scores import penalized
from specdec.sampling.tensors import SamplingPlan, SamplingTensors

MASK = 2**64 - 1
GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in product(
        (0.0, 0.3, 1.0, 1.7), (0, 1, 4, 1000), (1.0, 0.9, 0.4), (0.0, 0.05, 0.5), (1.0, 1.4, 0.8)
    )
]


def tensors(params: list[SamplingParams], seen: Tensor | None = None) -> SamplingTensors:
    """Request `i` has setting `params[i]` and seed `i`."""
    return SamplingTensors.of(params, range(len(params)), seen=seen)


def transformers_probs(params: SamplingParams, input_ids: Tensor, logits: Tensor) -> Tensor:
    """Probabilities [n, V] as Transformers' own processors give them, in the order in which
    `generate` applies them.
    """
    chain: Any = LogitsProcessorList()
    if params.logit_bias:
        chain.append(
            SequenceBiasLogitsProcessor({(token,): value for token, value in params.logit_bias})
        )
    if params.penalized:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            chain.append(MinPLogitsWarper(params.min_p))
    scores: Tensor = chain(input_ids, logits.float())
    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
    return scores.softmax(-1)


def random_logits(*shape: int, coarse: bool = False, seed: int = 0) -> Tensor:
    logits = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return logits.mul(2).round().div(2).bfloat16() if coarse else logits


def python_uniform(seed: int, position: int, purpose: int) -> float:
    """The definition in arithmetic without overflow."""

    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return bits ^ bits >> 31

    return (
        mix((mix(seed) + (3 * position + purpose + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11
    ) / 2**53


def test_uniform_is_the_defined_hash_of_seed_position_and_purpose() -> None:
    """Catches a changed stream (old seeds would give new text) and arithmetic shifts of negative
    numbers.
    """
    seeds = torch.tensor([0, 1, 12345, 2**62 + 17, 2**63 - 1])
    positions = torch.tensor([[0, 1, 999, 131_071]]).expand(5, -1)
    for purpose in Purpose:
        expected = [
            [python_uniform(s, p, purpose) for p in row]
            for s, row in zip(seeds.tolist(), positions.tolist(), strict=True)
        ]
        assert uniform(seeds, positions, purpose).tolist() == expected
    assert uniform(seeds[:1], positions[:1, :1], Purpose.SAMPLE).item() == 0.8833108082136426


def seed_families() -> dict[str, Tensor]:
    count = torch.arange(2000)
    return {"consecutive": count, "high bits": count << 40, "largest": 2**63 - 1 - count}


@pytest.mark.parametrize("family", ["consecutive", "high bits", "largest"])
def test_uniform_is_flat_and_uncorrelated(family: str) -> None:
    """Catches a weak hash: uneven values, poor low bits, or streams of neighboring seeds, positions
    or purposes that agree.
    """
    seeds = seed_families()[family]
    u = torch.stack(
        [uniform(seeds, torch.arange(100).expand(2000, -1), purpose) for purpose in Purpose]
    )
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    count = u.numel()
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5

    pairs = {
        "seeds": (u[:, 1:], u[:, :-1]),
        "positions": (u[:, :, 1:], u[:, :, :-1]),
        "sample and accept": (u[0], u[1]),
        "accept and draft": (u[1], u[2]),
        "sample and draft": (u[0], u[2]),
    }
    for name, (a, b) in pairs.items():
        x, y = a.flatten() - 0.5, b.flatten() - 0.5
        assert abs((x * y).mean() * 12) < 5 / x.numel() ** 0.5, name
        cells = (a.flatten() * 16).long() * 16 + (b.flatten() * 16).long()
        assert stats.chisquare(cells.bincount(minlength=256).numpy()).pvalue > 1e-6, name
    low_bits = (u * 2**53).long().flatten() & 255
    assert stats.chisquare(low_bits.bincount(minlength=256).numpy()).pvalue > 1e-6


@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16 with ties"])
def test_every_combination_in_one_batch_equals_transformers(coarse: bool) -> None:
    """Catches a wrong order, a wrong threshold, ties counted differently, and settings leaking
    between requests.

    Of equal logits at the edge of top-p Transformers keeps some, as its sort has left them; here
    all of them stay.
    """
    vocab_size, prompt_len, width = 40, 5, 3
    logits = random_logits(len(GRID), width, vocab_size, coarse=coarse)
    history = torch.randint(
        vocab_size, (len(GRID), prompt_len + width), generator=torch.Generator().manual_seed(1)
    )
    seen = torch.zeros(len(GRID), vocab_size, dtype=torch.bool).scatter(
        1, history[:, :prompt_len], True
    )
    sampling = tensors(GRID, seen)
    untouched = logits.clone(), seen.clone()
    scores = penalized(
        logits, sampling, history[:, prompt_len:], torch.arange(width).expand(len(GRID), -1)
    )
    probs = processed_probs(scores, sampling)
    assert torch.equal(logits, untouched[0]) and torch.equal(seen, untouched[1])
    assert probs.dtype == torch.float32
    for i, params in enumerate(GRID):
        for j in range(width):
            expected = transformers_probs(
                params, history[i : i + 1, : prompt_len + j + 1], logits[i, j : j + 1]
            )
            if coarse and params.temperature > 0:
                least = scores[i, j][expected[0] > 0].min()
                expected = (
                    (scores[i, j] / params.temperature)
                    .masked_fill(scores[i, j] < least, -torch.inf)
                    .softmax(-1)[None]
                )
            assert (probs[i, j : j + 1] - expected).abs().max() < 1e-6, params


@pytest.mark.parametrize(
    "params", [p for p in GRID if not p.penalized and p.temperature in (0, 1)], ids=str
)
def test_alone_or_among_all_others_gives_the_same_bits(params: SamplingParams) -> None:
    """Catches a host flag whose code path changes rows that do not use the filter, and a flag that
    skips one that does.
    """
    logits = random_logits(1, 2, 40, seed=2)
    coarse = random_logits(1, 2, 40, coarse=True, seed=2)
    alone = processed_probs(logits, tensors([params]))
    crowd = processed_probs(logits.expand(len(GRID) + 1, -1, -1), tensors([*GRID, params]))
    assert torch.equal(alone[0], crowd[-1])
    crowd_with_ties = processed_probs(
        coarse.expand(len(GRID) + 1, -1, -1), tensors([*GRID, params])
    )
    assert torch.equal(processed_probs(coarse, tensors([params]))[0], crowd_with_ties[-1])
    torch.testing.assert_close(
        alone[0], transformers_probs(params, torch.empty(2, 0).long(), logits[0]), rtol=0, atol=1e-6
    )


def test_penalty_of_one_leaves_logits_as_they_are() -> None:
    logits = random_logits(2, 3, 10, seed=3)
    sampling = tensors(
        [SamplingParams(), SamplingParams(repetition_penalty=2.0)],
        torch.ones(2, 10, dtype=torch.bool),
    )
    scores = penalized(logits, sampling, *torch.zeros(2, 2, 3, dtype=torch.long))
    assert torch.equal(scores[0], logits[0])
    assert not torch.equal(scores[1], logits[1])


def test_extreme_settings_leave_the_best_token() -> None:
    """Catches a division that overflows at a tiny temperature, and a tiny top-p that drops every
    token.
    """
    logits = 100 * random_logits(4, 2, 10, seed=4)
    params = [SamplingParams(temperature=t) for t in (1e-3, 1e-30, 1.2e-38)] + [
        SamplingParams(temperature=1.0, top_p=1e-9)
    ]
    probs = processed_probs(logits, tensors(params))
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 10).float())


def test_of_equal_scores_at_the_edge_of_top_p_all_stay() -> None:
    """Catches a choice among equals, which the shape of the batch or the device could decide."""
    logits = torch.tensor([0.0, 1.0] * 2000).expand(1, 1, -1)
    for top_p, kept in ((0.5, 2000), (0.8, 4000)):
        probs = processed_probs(logits, tensors([SamplingParams(temperature=1.0, top_p=top_p)]))
        assert (probs > 0).sum() == kept


@pytest.mark.parametrize("vocabulary", [2_000, 30_000], ids=["small", "large"])
@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p_keeps_what_sorting_would_keep(
    top_p: float, coarse: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both searches, the large vocabulary with every digit, against the definition: sort, add up,
    drop what is below the edge.
    """
    assert 2_000 <= filters.SORTED_VOCABULARY < 30_000
    logits = random_logits(3, 2, vocabulary, coarse=coarse, seed=7).float()
    logits[0, 0] = 0.0
    logits[0, 0, ::2] = -0.0
    logits[0, 1, 100:] = -torch.inf
    logits[1, 0] *= 30  # a few tokens hold everything
    kept = processed_probs(logits, tensors([SamplingParams(temperature=1.0, top_p=top_p)] * 3)) > 0
    ordered = logits.sort(dim=-1).values
    cumulative = ordered.double().softmax(dim=-1).cumsum(dim=-1)
    first = (cumulative <= 1 - top_p).sum(dim=-1, keepdim=True).clamp(max=vocabulary - 1)
    expected = (logits >= ordered.gather(-1, first)) & (logits.softmax(dim=-1) > 0)
    # In float64 the definition itself is sharper than the float32 probabilities that are added up,
    # so a token may differ.
    assert coarse or (kept != expected).sum(dim=-1).max() <= 1
    assert torch.equal(kept[1, 0], expected[1, 0])
    monkeypatch.setattr(
        filters, "SORTED_VOCABULARY", 10**9 if vocabulary > filters.SORTED_VOCABULARY else 0
    )
    other = processed_probs(logits, tensors([SamplingParams(temperature=1.0, top_p=top_p)] * 3)) > 0
    assert torch.equal(other, kept)  # to the token, whichever search is taken


def python_gumbel(bits: int, token: int) -> float:
    """The definition in arithmetic without overflow; `bits` unsigned."""
    x = (token * 0x9E3779B1 + bits) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF) ^ bits >> 32
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return -math.log(-math.log1p(-(((x ^ x >> 16) >> 1) + 0.5) / 2**31))


def test_noise_is_the_defined_hash_of_position_and_token() -> None:
    """Catches a changed stream, and arithmetic shifts of negative numbers."""
    bits = torch.tensor([0, 1, 2**63 - 1, -(2**63), -12345678901234567])
    noise = gumbel(bits, 50_000)
    tokens = [0, 1, 777, 32_767, 49_999]
    expected = torch.tensor(
        [[python_gumbel(b & MASK, token) for token in tokens] for b in bits.tolist()]
    )
    torch.testing.assert_close(noise[:, tokens], expected, rtol=1e-6, atol=2e-6)


def test_a_cpu_computes_noise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches noise of other positions, requests or vocabularies, noise that a caller has changed,
    and a store that grows; also with several threads.
    """
    computed: list[int] = []

    def counted(bits: Tensor, tokens: int | Tensor) -> Tensor:
        computed.extend(bits.tolist())
        return gumbel(bits, tokens)

    monkeypatch.setattr(noise, "gumbel", counted)
    monkeypatch.setattr(noise, "REMEMBERED", 12 * 700)
    seen = stream(torch.tensor([3]), torch.arange(9)[None], Purpose.SAMPLE)[0]
    for part, new in (
        (seen[:6], 6),
        (seen[2:7], 1),
        (seen[5:], 2),
        (seen[:9], 0),
        (seen[[4, 4, 1]], 0),
        (seen[4:5], 0),
        (seen[4:5], 0),
    ):
        computed.clear()
        again = noise.gumbel_again(part, 700)
        assert torch.equal(again, gumbel(part, 700)) and len(computed) == new
        again.zero_()
    assert torch.equal(noise.gumbel_again(seen, 300), gumbel(seen, 300))
    ids = torch.arange(0, 900, 3)
    assert torch.equal(noise.gumbel_again(seen, ids), gumbel(seen, ids))
    seeds = range(8)
    bits = [
        stream(torch.tensor([seed % 3]), torch.arange(40)[None], Purpose.SAMPLE)[0]
        for seed in seeds
    ]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda one: [noise.gumbel_again(one[i : i + 5], 700) for i in range(30)], bits
        )
    for one, rows in zip(bits, found, strict=True):
        assert all(torch.equal(row, gumbel(one[i : i + 5], 700)) for i, row in enumerate(rows))
    assert len(noise._remembered) == 12


@pytest.mark.parametrize("family", ["consecutive", "high bits", "largest"])
def test_noise_is_gumbel_and_uncorrelated(family: str) -> None:
    """Catches a weak hash: values that are not Gumbel's, and tokens, positions or seeds whose noise
    agrees.
    """
    seeds = seed_families()[family][:100]
    noise = gumbel(stream(seeds, torch.arange(20).expand(100, -1), Purpose.SAMPLE), 300)
    assert noise.dtype == torch.float32 and noise.isfinite().all()
    assert stats.kstest(noise.flatten()[::7].numpy(), "gumbel_r").pvalue > 1e-6
    u = torch.exp(-torch.exp(-noise.double()))
    pairs = {
        "tokens": (u[..., 1:], u[..., :-1]),
        "positions": (u[:, 1:], u[:, :-1]),
        "seeds": (u[1:], u[:-1]),
        "the next token at the next position": (u[:, 1:, 1:], u[:, :-1, :-1]),
    }
    for name, (a, b) in pairs.items():
        x, y = a.flatten() - 0.5, b.flatten() - 0.5
        assert abs((x * y).mean() * 12) < 5 / x.numel() ** 0.5, name


def test_large_noise_is_not_cut_off() -> None:
    """Catches a grid too coarse at the end where tokens win: of 4e7 values the largest is as large
    as it should be.
    """
    largest = torch.stack(
        [
            gumbel(
                stream(torch.tensor([s]), torch.zeros(1, 1).long(), Purpose.SAMPLE), 2_000_000
            ).max()
            for s in range(20)
        ]
    )
    assert stats.kstest((largest - math.log(2_000_000)).numpy(), "gumbel_r").pvalue > 1e-6
    assert largest.max() > math.log(2_000_000) + 1


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=2.0, top_k=6, top_p=0.95)],
    ids=str,
)
def test_sample_draws_the_distribution(params: SamplingParams) -> None:
    """Catches a biased draw, by a chi-square test of 100,000 tokens from a skewed row, over seeds
    and positions.
    """
    logits = random_logits(8, seed=6)
    sampling = tensors([params] * 1000)
    token_ids, finite = sample(
        logits.expand(1000, 100, 8), sampling, torch.arange(100).expand(1000, -1)
    )
    probs = processed_probs(logits[None, None], tensors([params]))[0, 0]
    observed = token_ids.flatten().bincount(minlength=8)
    assert finite.all() and not observed[probs == 0].any()
    expected = probs.double() / probs.double().sum() * observed.sum()
    assert stats.chisquare(observed[probs > 0].numpy(), expected[probs > 0].numpy()).pvalue > 1e-6


def test_a_sample_is_the_same_alone_and_in_a_crowd() -> None:
    """Catches noise that depends on the row's place in the batch, and greedy requests that are
    drawn.
    """
    logits, positions = random_logits(1, 2, 40, seed=8), torch.tensor([[11, 12]])
    crowd, _ = sample(
        logits.expand(len(GRID), -1, -1), tensors(GRID), positions.expand(len(GRID), -1)
    )
    for i in range(0, len(GRID), 11):
        numbers = tensors(GRID)
        alone = SamplingTensors(
            SamplingPlan.of([GRID[i]]), numbers.floats[:, i : i + 1], numbers.ints[:, i : i + 1]
        )
        assert torch.equal(sample(logits, alone, positions)[0][0], crowd[i])
    greedy = torch.tensor([params.temperature == 0 for params in GRID])
    assert (crowd[greedy] == logits.argmax(-1)).all() and (
        crowd[~greedy] != logits.argmax(-1)
    ).any()


def test_sample_from_inverts_the_cumulative_distribution() -> None:
    """Catches an index off by one and a total taken to be 1."""
    probs = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0]).expand(7, -1)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert sample_from(probs, u).tolist() == [1, 1, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("edge", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0])
def test_sample_from_never_returns_an_impossible_token(edge: float) -> None:
    """Catches zeros at either end chosen when `u` is extreme or the sum is off by rounding."""
    generator = torch.Generator().manual_seed(5)
    probs = torch.rand(2000, 50, generator=generator).softmax(-1)
    probs = (
        probs
        * (torch.rand(2000, 50, generator=generator) < 0.2)
        * 10 ** torch.randint(-6, 3, (2000, 1), generator=generator)
    )
    probs[:, 25] += 1e-3
    token_ids = sample_from(probs, torch.full((2000,), edge, dtype=torch.float64))
    assert probs.gather(1, token_ids[:, None]).min() > 0


def test_sample_from_keeps_to_the_vocabulary_without_a_distribution() -> None:
    probs = torch.stack([torch.zeros(4), torch.full((4,), torch.nan), torch.full((4,), torch.inf)])
    token_ids = sample_from(probs, torch.full((3,), 0.7, dtype=torch.float64))
    assert token_ids.min() >= 0 and token_ids.max() < 4


def test_sample_from_resolves_rare_tokens_of_a_large_vocabulary() -> None:
    """Catches a float32 sum, in which 100,000 tokens of probability 1e-9 after a common one can
    never be drawn.
    """
    probs = torch.full((100_001,), 1e-9)
    probs[0] = 1.0
    u = torch.tensor(1.00005 / 1.0001, dtype=torch.float64)
    assert abs(sample_from(probs, u) - 50_000) <= 1


def test_sample_from_draws_the_distribution() -> None:
    """Catches a biased draw, by a chi-square test of 200,000 tokens from a skewed row."""
    probs = random_logits(8, seed=6).softmax(-1)
    u = uniform(torch.arange(2000), torch.arange(100).expand(2000, -1), Purpose.SAMPLE)
    observed = sample_from(probs.expand(2000, 100, 8), u).flatten().bincount(minlength=8)
    expected = probs.double() / probs.double().sum() * observed.sum()
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-6
