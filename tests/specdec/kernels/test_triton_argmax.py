"""The highest logit of every row against torch's maximum; where the kernel runs, see
`tests.helpers.triton_interpreter`.
"""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafters import choice
from specdec.engine import acceptance
from specdec.engine.acceptance import accept
from specdec.model.core import AcceptOutput
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts
from tests.helpers.triton_interpreter import require_triton
from tests.specdec.sampling.test_sampler import tensors

DEVICE = require_triton()

from specdec.kernels import triton_argmax  # noqa: E402 (only where Triton can run)
from specdec.kernels.triton_argmax import DTYPES, SLICE, argmax  # noqa: E402

INF, NAN = math.inf, math.nan
NUM_REQS = 40


def assert_as_torch(logits: Tensor) -> None:
    """Shapes, types, finiteness, and of equal values the first index, which a CPU gives."""
    indices, finite = argmax(logits)
    expected = logits.cpu().max(dim=-1)
    assert indices.dtype == torch.int64 and finite.dtype == torch.bool
    assert finite.cpu().equal(expected.values.isfinite())
    assert indices.cpu().equal(expected.indices), (indices, expected.indices)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    list(zip((1, 97, SLICE, SLICE + 1, 3 * SLICE - 5), DTYPES * 2, strict=False)),
)
def test_any_vocabulary(vocab_size: int, dtype: torch.dtype) -> None:
    """Random rows, also negative ones, whose maximum must not be what fills up the last slice."""
    torch.manual_seed(0)
    for shift in (0, -50):
        assert_as_torch((torch.randn(5, vocab_size) + shift).to(DEVICE, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_place_can_win(dtype: torch.dtype) -> None:
    """First and last of each slice, one row each, by the least possible lead."""
    places = [0, 1, SLICE - 1, SLICE, 2 * SLICE - 1, 2 * SLICE, 2 * SLICE + 6]
    for base in (1.0, -1.0):
        logits = torch.full((len(places), 2 * SLICE + 7), base, dtype=dtype)
        lead = base * (1 + math.copysign(1, base) * torch.finfo(dtype).eps)
        logits[torch.arange(len(places)), torch.tensor(places)] = lead
        indices, _ = argmax(logits.to(DEVICE))
        assert indices.tolist() == places


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_first(dtype: torch.dtype) -> None:
    """Within a slice and between slices, of both signs and both zeros."""
    logits = torch.full((6, 2 * SLICE + 3), -7.0)
    for row, (value, places) in enumerate(
        [
            (3.0, [5, 6]),
            (3.0, [SLICE - 1, SLICE]),
            (-2.0, [SLICE + 2, 2 * SLICE + 2]),
            (0.0, [9, 4000]),
            (-0.0, [9, 4000]),
        ]
    ):
        logits[row, places] = value
    logits[3, 7], logits[4, 10] = -0.0, 0.0
    assert_as_torch(logits.to(DEVICE, dtype))
    assert argmax(logits.to(DEVICE, dtype))[0].tolist() == [5, SLICE - 1, SLICE + 2, 7, 9, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite(dtype: torch.dtype) -> None:
    """A NaN of either sign beats infinity, the first of several wins, and a row of -inf has its
    first token.
    """
    logits = torch.zeros(8, SLICE + 9)
    logits[0, SLICE + 3] = NAN
    logits[1, [4, SLICE + 1]], logits[1, 2] = NAN, INF
    logits[2, [SLICE + 8, 77]] = INF
    logits[3] = -INF
    logits[4, 0], logits[4, 1:] = -INF, torch.finfo(dtype).min
    logits[5, 3] = torch.finfo(dtype).max
    logits[6, 6] = -torch.tensor(NAN)
    logits[7] = NAN
    logits = logits.to(DEVICE, dtype)
    assert_as_torch(logits)
    assert argmax(logits)[0].tolist() == [SLICE + 3, 4, 77, 0, 1, 3, 6, 0]


def test_subnormal_numbers_differ() -> None:
    """They are not taken for zero; Triton's interpreter does that itself to those of bfloat16."""
    for dtype in DTYPES if DEVICE.type == "cuda" else (torch.float16, torch.float32):
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert_as_torch(
            torch.tensor(
                [[0.0, least, 2 * least], [-2 * least, -least, -least]], dtype=dtype, device=DEVICE
            )
        )


def test_strides() -> None:
    """Rows of a padded vocabulary, slices of three axes whose rows lie at no one distance, one row
    alone; nothing is copied.
    """
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 130).to(DEVICE)
    views = [
        logits[0, 0],
        logits[1],
        logits[:, 1:4, :97],
        logits[:, 1:],
        logits.transpose(0, 1),
        logits[:1].expand(3, 5, 130),
    ]
    for view in [*views, logits[:, ::2, 3:], logits[:, 0], logits[:0]]:
        assert_as_torch(view)


def torchs_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same without the kernel."""
    best = logits.max(dim=-1)
    return best.indices, best.values.isfinite()


def greedy_step(logits: Tensor, drafts: Tensor) -> AcceptOutput:
    """Outcome of a step of 40 requests at these logits [40, 4, V]."""
    tokens = torch.cat([torch.zeros_like(drafts[:, :1]), drafts], 1)
    positions = torch.arange(4, device=DEVICE).expand_as(tokens)
    return accept(tokens, logits, None, tensors([SamplingParams()] * NUM_REQS), positions)


def test_acceptance_reports_what_it_would_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, accepted drafts and finiteness; bad rows before and behind the first rejection."""
    torch.manual_seed(0)
    logits = torch.randn(NUM_REQS, 4, 97)
    request, row = torch.arange(NUM_REQS), torch.arange(4)
    drafts = logits[:, :3].argmax(-1)
    # every second request has a wrong one
    drafts[request, request % 3] = (drafts[request, request % 3] + request % 2) % 97
    for i, bad in enumerate((NAN, INF, -INF)):
        logits[12 * i + row, row, 5] = bad
        logits[12 * i + 4 + row, row] = bad
    logits, drafts = logits.to(DEVICE), drafts.to(DEVICE)
    ours = greedy_step(logits, drafts)
    assert 0 < ours.finite.sum() < NUM_REQS
    monkeypatch.setattr(acceptance, "argmax", torchs_argmax)
    theirs = greedy_step(logits, drafts)
    for name in ("token_ids", "num_accepted", "next_anchors", "finite"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name


def generate() -> list[list[int]]:
    """Greedy output of two requests with a random DFlash drafter."""
    verifier = paged_verifier(plain_model("llama"), device=str(DEVICE))
    engine = tiny_engine(
        verifier,
        random_dflash(verifier, block_size=4),
        max_num_seqs=2,
        num_draft_tokens=3,
        cache_bytes=2**20,
    )
    return run_all(engine, random_prompts(2, longest=9), max_tokens=8, ignore_eos=True)


def test_greedy_tokens_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation uses the kernel for drafts and for the target's choice, and neither changes a
    token.
    """
    calls: Counter[str] = Counter()

    def counted(
        name: str, function: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def call(logits: Tensor) -> tuple[Tensor, Tensor]:
            calls[name] += 1
            return function(logits)

        return call

    monkeypatch.setattr(triton_argmax, "argmax", counted("kernel", argmax))
    for name, module in (("target", acceptance), ("drafter", choice)):
        monkeypatch.setattr(module, "argmax", counted(name, module.argmax))
    tokens = generate()
    assert (
        calls["target"]
        and calls["drafter"]
        and calls["kernel"] == calls["target"] + calls["drafter"]
    )
    for module in (acceptance, choice):
        monkeypatch.setattr(module, "argmax", torchs_argmax)
    assert generate() == tokens
