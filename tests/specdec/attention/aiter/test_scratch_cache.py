"""Forwards beside the engine on AITER's 8-bit caches: the cache of their own has the type that the
kernels are told of.

The emulation raises where it has another; AITER reads noise.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from evals.accuracy.scoring import score
from evals.divergence import Parting, explain_divergence
from specdec.attention.aiter.scratch import Scratch
from specdec.session.decoder import SpecDecoder
from tests.helpers.bounds import assert_as_exact, in_float64
from tests.helpers.fa_case import BACKENDS, model_of
from tests.helpers.rocm import FP8, Install
from tests.helpers.tiny_models import paged_verifier, random_prompts


@pytest.mark.parametrize("layout", BACKENDS)
@torch.inference_mode()
def test_logits_margins_and_scores(rocm: Install, layout: str) -> None:
    """Of whole prompts, whose rows are no part of what is rounded: as exact as the plain model."""
    rocm(tiny=True)
    model = model_of("llama")
    backend = BACKENDS[layout]
    verifier = paged_verifier(
        model, 16, backend=lambda asked: backend(replace(asked, cache_dtype=FP8["gfx942"]))
    )
    decoder = SpecDecoder(verifier, None)
    prompts = [prompt for prompt in random_prompts(4, seed=3, longest=30) if len(prompt) > 4]
    exact, plain = (
        [run(torch.tensor([prompt]))[0] for prompt in prompts]
        for run in (lambda ids: in_float64(model, ids).logits, lambda ids: model(ids).logits)
    )
    for prompt, usual, want in zip(prompts, plain, exact, strict=True):
        logits = decoder.next_token_logits(prompt)
        assert_as_exact(logits, usual[-1], want[-1])
        largest, second = logits.topk(2).values.tolist()
        assert (
            explain_divergence(decoder, Parting(0, 0, prompt, [1], [2])).margin == largest - second
        )
    found = [
        scored.log_probability for scored in score(decoder, [(prompt, 3) for prompt in prompts])
    ]
    assert_as_exact(
        torch.tensor(found),
        log_probabilities(plain, prompts, 3),
        log_probabilities(exact, prompts, 3),
    )


def log_probabilities(logits: list[Tensor], prompts: list[list[int]], count: int) -> Tensor:
    """Of the last `count` tokens of each prompt, summed."""
    sums = []
    for rows, prompt in zip(logits, prompts, strict=True):
        chosen = rows.log_softmax(-1)[-count - 1 : -1].gather(
            1, torch.tensor(prompt[-count:])[:, None]
        )
        sums.append(chosen.sum())
    return torch.stack(sums)


def test_types_have_buffers_of_their_own() -> None:
    """And names and sizes, of which a power of two is one."""
    scratch = Scratch(torch.device("cpu"))
    half, whole = (scratch.take("out", 40, dtype) for dtype in (torch.float16, torch.float32))
    assert (half.dtype, whole.dtype) == (torch.float16, torch.float32)
    assert half.data_ptr() != whole.data_ptr()
    assert scratch.take("out", 64, torch.float16).data_ptr() == half.data_ptr()
    others = scratch.take("out", 65, torch.float16), scratch.take("in", 40, torch.float16)
    assert half.data_ptr() not in {other.data_ptr() for other in others}
