"""Targets with LongRoPE: the frequencies of a request follow from its own limit, whatever else is
in the batch or in the cache.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.engine.capture import prefill_graphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.engine import SpecEngine
from specdec.model.core import Verifier
from specdec.model.scratch import next_token_logits
from specdec.sampling.params import SamplingParams
from tests.helpers.bounds import assert_as_exact, in_float64
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.recorder import Recorder
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import SHORT_LEN
from tests.helpers.tiny_models import paged_verifier, plain_greedy, plain_model, random_prompts
from tests.specdec.engine.capture.test_graphs import Case, beginnings, run

K = 3
TEXT = [token for prompt in random_prompts(3, seed=3) for token in prompt]


@pytest.fixture(scope="module")
def model() -> Any:
    return plain_model("phi3_long")


@pytest.fixture(scope="module")
def verifier(model: Any) -> Verifier:
    return paged_verifier(model)


def engine_for(verifier: Verifier, outputs: dict[tuple[int, ...], list[int]]) -> SpecEngine:
    drafter = ScriptedDrafter(outputs, K, [{0}, {2}, set()])
    return tiny_engine(
        verifier,
        drafter,
        max_num_seqs=2,
        max_prefill_tokens=13,
        cache_bytes=2**20,
        num_draft_tokens=None,
    )


def output(engine: SpecEngine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    return finish(
        engine, engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    )[0]


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None
    return plain_greedy(model, prompt, max_tokens)


def whole(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens without a cache, which older Transformers lose at the crossing."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(
                int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


def test_a_request_that_may_cross_has_the_second_frequencies_from_the_start(
    model: Any, verifier: Verifier
) -> None:
    """As if the model had no others; one token less, and it has the first from start to end, as
    `generate` would.
    """
    prompt = TEXT[:20]
    fits = SHORT_LEN + 1 - len(prompt)  # the last token is never read
    config = model.config
    long = config.rope_parameters | {"short_factor": config.rope_parameters["long_factor"]}
    second = whole(plain_model("phi3_long", rope_parameters=long), prompt, fits + 1)
    first = greedy(model, prompt, fits)
    assert second[:fits] != first
    engine = engine_for(verifier, {(*prompt,): first})
    assert output(engine, prompt, fits) == first
    assert output(engine, prompt, fits + 1) == second


def test_prefixes_are_shared_by_requests_of_a_kind(model: Any, verifier: Verifier) -> None:
    """Catches a long request that reads the keys of a short one, which begins alike."""
    prompts = [TEXT[:20], TEXT[: SHORT_LEN + 2], TEXT[:17], TEXT[: SHORT_LEN + 4]]
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    engine = engine_for(
        verifier, {tuple(p): tokens for p, tokens in zip(prompts, expected, strict=True)}
    )
    assert [output(engine, prompt, 8) for prompt in prompts] == expected
    alike = engine.add_request(prompts[0], SamplingParams(max_tokens=8))
    longer = engine.add_request(prompts[1], SamplingParams(max_tokens=8))
    engine._schedule()
    assert alike.num_prefilled == 16 and longer.num_prefilled == SHORT_LEN // 4 * 4


def test_captured_steps_ask_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the request that a graph was captured for is baked in, neither of steps nor of
    prefills.
    """
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 16)
    case = Case(
        "phi3_long",
        [TEXT[:5], TEXT[: SHORT_LEN + 1], TEXT[3:14], TEXT[1 : SHORT_LEN + 4], TEXT[7:12]],
    )
    engine = case.engine("ngram", 2, capture=True, pipeline_depth=1)
    engine.runner.prefill_graphs = PrefillGraphs(
        Recorder(),
        engine.slots,
        engine.runner.prefill_step,
        dtype=case.verifier.dtype,
        max_rows=64,
    )
    requests = run(engine, list(case.outputs))
    assert [request.output_token_ids for request in requests] == beginnings(case, requests)


@pytest.mark.parametrize("length", [SHORT_LEN, SHORT_LEN + 1])
def test_scoring_follows_the_length_of_the_sequence(
    model: Any, verifier: Verifier, length: int
) -> None:
    tokens = torch.tensor([TEXT[:length]])
    with torch.inference_mode():
        plain = model(tokens).logits[0, -1]
    assert_as_exact(
        next_token_logits(verifier, TEXT[:length]), plain, in_float64(model, tokens).logits[0, -1]
    )
