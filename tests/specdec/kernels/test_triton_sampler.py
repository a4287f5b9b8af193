"""Drawing tokens against the plain version; where the kernels run, see
`tests.helpers.triton_interpreter`.
"""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from specdec.sampling.filters import filtered_scores
from specdec.sampling.noise import Purpose, gumbel, stream
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.kernels.triton_argmax import DTYPES, SLICE  # noqa: E402 (only where Triton can run)
from specdec.sampling.triton_filters import (  # noqa: E402
    HELD,
    MAX_GROUPS,
    SMALLEST_GROUP,
    TILE,
    min_kept,
)
from specdec.sampling.triton_sampler import sample  # noqa: E402

FILTERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in product((0.0, 0.7), (0, 1, 20), (1.0, 0.9, 1e-9), (0.0, 0.1))
]


def draw(logits: Tensor, params: list[SamplingParams], positions: Tensor) -> tuple[Tensor, Tensor]:
    """The kernels, with request `i` seeded `i`."""
    sampling = SamplingTensors.of(params, range(len(params)))
    on_device = [
        tensor.to(DEVICE) for tensor in (logits, sampling.floats, sampling.ints, positions)
    ]
    token_ids, finite = sample(*on_device, filtered=sampling.plan.filtered)
    return token_ids.cpu(), finite.cpu()


def noisy_scores(logits: Tensor, params: list[SamplingParams], positions: Tensor) -> Tensor:
    """What the plain version takes the highest of, float32 [num_reqs, n, V]."""
    sampling = SamplingTensors.of(params, range(len(params)))
    noise = gumbel(stream(sampling.seeds, positions, Purpose.SAMPLE), logits.shape[-1])
    greedy = sampling.temperature[:, None, None] == 0
    return torch.where(greedy, logits.float(), filtered_scores(logits, sampling) + noise)


def positions_of(num_reqs: int, width: int) -> Tensor:
    return torch.arange(num_reqs)[:, None] * 7 + torch.arange(width) + 2**33


def assert_as_plain(logits: Tensor, params: list[SamplingParams]) -> None:
    """The plain version's token, or one whose score is within the rounding of the
    logarithms of it.
    """
    positions = positions_of(*logits.shape[:2])
    token_ids, finite = draw(logits, params, positions)
    scores = noisy_scores(logits, params, positions)
    assert finite.all()
    assert (scores.amax(-1) - scores.gather(-1, token_ids[..., None]).squeeze(-1)).max() < 1e-4
    assert (token_ids != scores.argmax(-1)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_filter_draws_what_plain_torch_draws(dtype: torch.dtype) -> None:
    """All combinations beside each other, also greedy ones; catches a wrong least logit, and
    settings of another request.
    """
    logits = (3 * torch.randn(len(FILTERS), 2, 97, generator=torch.Generator().manual_seed(0))).to(
        dtype
    )
    assert_as_plain(logits, FILTERS)


@pytest.mark.parametrize(
    ("vocab_size", "params"),
    [
        (1, SamplingParams(temperature=0.8, top_k=50, top_p=0.9)),
        (SLICE + 1, SamplingParams(temperature=1.0)),
        (SLICE + 1, SamplingParams(temperature=0.8, top_k=50, top_p=0.9)),
        (TILE + SLICE + 5, SamplingParams(temperature=1.0)),
        # more stay than are set apart
        (TILE + SLICE + 5, SamplingParams(temperature=100.0, top_p=0.9)),
    ],
    ids=str,
)
def test_any_vocabulary(vocab_size: int, params: SamplingParams) -> None:
    """Also with more logits than a slice or a tile has, and fewer than top-k asks for."""
    logits = (
        3 * torch.randn(2, 1, vocab_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    )
    assert_as_plain(logits, [params] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_least_logit_kept(dtype: torch.dtype) -> None:
    """Negative logits, both zeros, ties at the edge, and temperatures that make the rest as likely
    as the best.
    """
    logits = torch.tensor([-1.5, -1.25, -1.0, -1.0, -0.5, 0.0, -0.0, 0.25, 9.0, -30.0]).to(dtype)
    expected = [
        (SamplingParams(temperature=1e30, top_k=1), 9.0),
        (SamplingParams(temperature=1e30, top_k=3), 0.0),
        (SamplingParams(temperature=1e30, top_k=6), -1.0),
        (SamplingParams(temperature=1e30, top_k=10), -30.0),
        (SamplingParams(temperature=1e30, top_k=11), -torch.inf),
        (SamplingParams(temperature=1e30, top_k=8, top_p=0.55), -0.5),
        (SamplingParams(temperature=1e30, top_p=0.05), 9.0),
        (SamplingParams(temperature=1e30, top_p=0.95), -30.0),
        (SamplingParams(temperature=1.0, top_p=0.999), 9.0),
        (SamplingParams(temperature=2.0, top_k=4, min_p=math.exp(-4.4)), 9 - 8.8),
        (SamplingParams(temperature=0.0, top_k=4), -torch.inf),
        (SamplingParams(temperature=1.0), -torch.inf),
    ]
    sampling = SamplingTensors.of([params for params, _ in expected], range(len(expected)))
    least = min_kept(
        logits.expand(len(expected), 1, -1).to(DEVICE),
        sampling.floats.to(DEVICE),
        sampling.ints.to(DEVICE),
    )
    torch.testing.assert_close(
        least.flatten().cpu(), torch.tensor([value for _, value in expected]), rtol=1e-6, atol=1e-5
    )


def test_top_p_is_of_what_top_k_keeps() -> None:
    """The highest share a group with lower ones, so that more are looked at than top-k keeps: their
    mass must not count.
    """
    logits = torch.full((1, 1, 2 * TILE), -10.0)
    for column, value in ((0, 4.0), (TILE, 3.75), (1, 3.5), (TILE + 1, 3.25)):
        logits[..., column] = value
    sampling = SamplingTensors.of([SamplingParams(temperature=1e30, top_k=2, top_p=0.5)], [0])
    assert (
        min_kept(
            logits.bfloat16().to(DEVICE), sampling.floats.to(DEVICE), sampling.ints.to(DEVICE)
        ).item()
        == 4.0
    )


@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    list(zip(DTYPES, (300, 3 * HELD, MAX_GROUPS * SMALLEST_GROUP + 5), strict=True)),
    ids=str,
)
def test_the_least_kept_is_one_of_the_logits(dtype: torch.dtype, vocab_size: int) -> None:
    """Exactly the k-th highest, or the one at which the probability reaches top-p, where few groups
    hold it and where many do.
    """
    params = [
        SamplingParams(temperature=0.7, top_k=k, top_p=p)
        for k, p in product((0, 20, 400), (1.0, 0.95, 0.5))
        if k or p < 1
    ]
    logits = (
        2 * torch.randn(len(params), 1, vocab_size, generator=torch.Generator().manual_seed(5))
    ).to(dtype)
    sampling = SamplingTensors.of(params, range(len(params)))
    found = (
        min_kept(logits.to(DEVICE), sampling.floats.to(DEVICE), sampling.ints.to(DEVICE))
        .flatten()
        .cpu()
    )
    for row, request, least in zip(logits[:, 0].double(), params, found.double(), strict=True):
        highest = row.sort(descending=True).values
        kept = (
            highest[highest >= highest[request.top_k - 1]]
            if 0 < request.top_k <= vocab_size
            else highest
        )
        probs = ((kept - kept[0]) / request.temperature).softmax(0)
        if request.top_p == 1:
            assert least == (kept[-1] if request.top_k <= vocab_size else -torch.inf)
        else:
            assert (row == least).any()
            rounding = vocab_size * torch.finfo(torch.float32).eps
            assert (
                probs[kept >= least].sum() > request.top_p - rounding
                and probs[kept > least].sum() < request.top_p + rounding
            )


def test_rows_do_not_depend_on_their_neighbors() -> None:
    """Alone, in a crowd, and beside rows with other filters: the same token."""
    params = FILTERS[-1:0:-5]
    logits, positions = (
        3 * torch.randn(len(params), 2, 300, generator=torch.Generator().manual_seed(2)),
        positions_of(len(params), 2),
    )
    crowd, _ = draw(logits, params, positions)
    sampling = SamplingTensors.of(params, range(len(params)))
    for i in range(0, len(params), 2):
        floats, ints = (
            sampling.floats[:, i : i + 1].contiguous(),
            sampling.ints[:, i : i + 1].contiguous(),
        )
        arguments = (logits[i : i + 1, 1:], floats, ints, positions[i : i + 1, 1:])
        alone, _ = sample(*(tensor.to(DEVICE) for tensor in arguments), filtered=True)
        assert alone.item() == crowd[i, 1]


def test_values_that_are_not_finite_are_told() -> None:
    """NaN, +inf and rows of -inf, with and without filters; a single -inf is only a token that is
    never drawn.
    """
    logits = torch.zeros(5, 1, SLICE + 9)
    logits[0, 0, SLICE + 3] = torch.nan
    logits[1, 0, 4] = torch.inf
    logits[2] = -torch.inf
    logits[3, 0, :-1] = -torch.inf
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1),
    ):
        token_ids, finite = draw(logits, [params] * 5, positions_of(5, 1))
        assert finite.flatten().tolist() == [False, False, False, True, True]
        assert (
            token_ids[3].item() == SLICE + 8
            and token_ids.min() >= 0
            and token_ids.max() < SLICE + 9
        )


def test_strides() -> None:
    """Rows of a padded vocabulary and of every second request are read where they lie."""
    torch.manual_seed(0)
    logits = torch.randn(6, 4, 130)
    for view in (logits[:, 1:3, :97], logits[::2], logits.transpose(0, 1)):
        assert_as_plain(view, [SamplingParams(temperature=0.9, top_k=9)] * len(view))
