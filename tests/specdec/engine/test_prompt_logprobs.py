"""Log-probabilities of prompts: those of the target, whatever is cached, chunked or preempted."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.ngram import NGramDrafter
from specdec.engine.capture import prefill_graphs
from specdec.engine.engine import SpecEngine
from specdec.engine.requests import scheduler
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash
from tests.specdec.engine.capture.test_graphs import Case
from tests.specdec.engine.capture.test_prefill_graphs import captured_engine

PROMPTS = [
    [(7 * i + 3 * j) % 90 + 3 for i in range(length)] for j, length in enumerate((30, 1, 2, 17))
]


@cache
def target(name: str = "llama") -> Verifier:
    return paged_verifier(plain_model(name))


def engine_for(name: str = "llama", drafter: Any = None, **changes: Any) -> SpecEngine:
    memory = changes.pop("memory_bytes", 2**22)
    options = {
        "num_draft_tokens": None,
        "max_prefill_tokens": 13,
        "max_num_seqs": 3,
        "pipeline_depth": 1,
        **changes,
    }
    return tiny_engine(target(name), drafter, cache_bytes=memory, **options)


def finish(engine: SpecEngine, *requests: Request) -> list[GenerationResult]:
    while engine.has_work:
        engine.step()
    assert engine.pool.num_used == 0
    return [GenerationResult.of(request, "") for request in requests]


@cache
def expected(name: str, prompt: tuple[int, ...]) -> tuple[Tensor, float]:
    """Log-probabilities [n, V] in float64, and how far those of the model in float32 are off."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        exact: Tensor = plain_model(name).double()(tokens).logits[0].log_softmax(-1)
        plain: Tensor = plain_model(name).float()(tokens).logits[0].log_softmax(-1)
    return exact, float((plain - exact).abs().max())


def check(result: GenerationResult, top: int, name: str = "llama") -> None:
    prompt = result.prompt_token_ids
    exact, own_error = expected(name, tuple(prompt))
    bound = 4 * own_error + 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert result.prompt_logprobs is not None and result.prompt_top_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_top_logprobs) == len(prompt)
    assert result.prompt_logprobs[0] is None and result.prompt_top_logprobs[0] is None
    for i, token in enumerate(prompt[1:], 1):
        value, likeliest = result.prompt_logprobs[i], result.prompt_top_logprobs[i]
        assert value is not None and likeliest is not None
        assert abs(value - exact[i - 1, token].item()) <= bound
        best = exact[i - 1].topk(top)
        assert list(likeliest)[:top] == best.indices.tolist()
        assert likeliest[token] == value and len(likeliest) == top + (token not in best.indices)
        assert all(
            abs(a - b) <= bound
            for a, b in zip(list(likeliest.values())[:top], best.values.tolist(), strict=True)
        )


@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2"])
def test_values_are_the_targets(name: str) -> None:
    """In chunks, beside requests that want none or that decode, with and without tokens to write;
    no other output changes.
    """
    engine = engine_for(
        name,
        random_dflash(target(name), block_size=4)
        if name == "llama"
        else NGramDrafter(max_draft_tokens=3),
    )
    requests = [
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=0, prompt_logprobs=1)),
        engine.add_request(PROMPTS[0][:9], SamplingParams(max_tokens=6, ignore_eos=True)),
        *[
            engine.add_request(
                p, SamplingParams(max_tokens=4, prompt_logprobs=2, logprobs=True, ignore_eos=True)
            )
            for p in PROMPTS[1:]
        ],
    ]
    results = finish(engine, *requests)
    for result, top in zip([results[0], *results[2:]], [1, 2, 2, 2], strict=True):
        check(result, top, name)
    assert results[0].token_ids == [] and results[0].finish_reason == "length"
    assert results[1].prompt_logprobs is None and len(results[1].token_ids) == 6
    assert all(len(result.token_ids) == len(result.logprobs or ()) == 4 for result in results[2:])


def test_the_prefix_cache_is_not_read() -> None:
    """A prompt whose blocks are all cached is scored to the last token,
    and leaves them for others.
    """
    engine = engine_for(max_num_seqs=1)
    counts = engine.scheduler.prefix.counts
    finish(engine, engine.add_request(PROMPTS[0], SamplingParams(max_tokens=2)))
    asked = counts.queried
    (result,) = finish(
        engine, engine.add_request(PROMPTS[0], SamplingParams(max_tokens=2, prompt_logprobs=0))
    )
    check(result, 0)
    assert counts.queried == asked, "what does not read it counts as no miss"
    reader = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=2))
    engine.step()
    assert reader.num_prefilled > 16, "others do read it"
    assert finish(engine, reader)[0].token_ids == result.token_ids


def test_rows_are_told_once_under_preemption() -> None:
    """Requests that lose their blocks in the midst of a prompt, or after it, and come back."""
    spec = sum(layer.bytes_per_token(target().dtype) for layer in target().kv_specs)
    engine = engine_for(drafter=NGramDrafter(max_draft_tokens=3), memory_bytes=20 * 4 * spec)
    params = SamplingParams(max_tokens=20, prompt_logprobs=1)
    results = finish(engine, *[engine.add_request(prompt, params) for prompt in PROMPTS])
    assert engine.scheduler.num_preemptions > 0
    for result in results:
        check(result, 1)


def test_preemption_within_a_prompt() -> None:
    """Rows that were told are not told again, although their blocks are found in the cache only in
    part.
    """
    engine = engine_for(max_prefill_tokens=7)
    request = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=2, prompt_logprobs=1))
    engine.step()
    engine.step()
    engine.scheduler._preempt(request)
    (result,) = finish(engine, request)
    check(result, 1)


def test_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks for the logits of no more rows than memory was planned for, however long its
    chunks may be.
    """
    monkeypatch.setattr(scheduler, "MAX_ROWS_TO_SCORE", 5)
    engine = engine_for(max_prefill_tokens=100)
    rows, prefill = [], engine.runner.prefill

    def counting(chunks: Sequence[Chunk], *, reads: bool = True) -> Any:
        rows.append(sum(len(chunk.rows_to_score) for chunk in chunks))
        return prefill(chunks, reads=reads)

    engine.runner.prefill = counting  # type: ignore[method-assign]
    results = finish(
        engine,
        *[engine.add_request(p, SamplingParams(max_tokens=1, prompt_logprobs=1)) for p in PROMPTS],
    )
    for result in results:
        check(result, 1)
    # a newcomer has one row in any case
    assert max(rows) <= 5 + 2 and sum(rows) == sum(len(p) - 1 for p in PROMPTS)


def test_beside_captured_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured prefill has no logits of inner rows, so a step that wants some is launched
    eagerly, and others are not.
    """
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 16)
    engine, recorder, eager = captured_engine(Case(), "ngram", 3)
    plain = engine.add_request(PROMPTS[0][:9], SamplingParams(max_tokens=4))
    finish(engine, plain)
    assert recorder.num_replays and not eager
    (result,) = finish(
        engine, engine.add_request(PROMPTS[3], SamplingParams(max_tokens=3, prompt_logprobs=2))
    )
    check(result, 2)
    assert len(eager) == 2, "17 tokens in chunks of 13"
