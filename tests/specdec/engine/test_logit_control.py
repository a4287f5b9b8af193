"""What a request may say about its logits, through the engine: with drafts as without, token for
token.
"""

from functools import cache
from typing import Any

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts

MAX_TOKENS = 24
BIAS = {5: 3.0, 9: -4.0, 11: 2.0}
ENDS = (5, 11)  # which the bias makes likely
CONTROLS: list[dict[str, Any]] = [
    {"logit_bias": BIAS, "top_logprobs": 3},
    {"logit_bias": BIAS, "min_tokens": 13, "stop_token_ids": ENDS},
    {"logit_bias": BIAS, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    {
        "temperature": 0.9,
        "logit_bias": BIAS,
        "min_tokens": 8,
        "stop_token_ids": ENDS,
        "logprobs": True,
    },
    {"temperature": 1.1, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 30},
    {"temperature": 0.8},
    {},
]


@cache
def target() -> Verifier:
    return paged_verifier(plain_model("llama"))


def run(drafter: Drafter | None, max_num_seqs: int = 3, **changes: Any) -> list[Request]:
    """Every kind of request, seven side by side and one after the other in few slots."""
    memory = changes.pop("memory_bytes", 2**22)
    options = {"num_draft_tokens": None, "max_prefill_tokens": 13, "pipeline_depth": 1, **changes}
    engine = SpecEngine(
        target(),
        drafter,
        EngineConfig(max_num_seqs, cache=CacheConfig(memory_bytes=memory), **options),
    )
    pairs = zip(random_prompts(len(CONTROLS), seed=3), CONTROLS, strict=True)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **control))
        for seed, (prompt, control) in enumerate(pairs)
    ]
    finish(engine)
    assert engine.pool.num_used == 0
    assert "memory_bytes" not in changes or engine.scheduler.num_preemptions
    return requests


@cache
def plain() -> list[Request]:
    return run(None, 1)


def script() -> dict[tuple[int, ...], list[int]]:
    return {tuple(r.prompt_token_ids): r.output_token_ids for r in plain()}


DRAFTERS: dict[str, Any] = {
    "plain": lambda: None,
    "ngram": lambda: NGramDrafter(max_draft_tokens=4),
    "dflash": lambda: random_dflash(target(), block_size=5),
    "right": lambda: ScriptedDrafter(script(), 4),
    "wrong": lambda: ScriptedDrafter(script(), 4, [{0}, {1}, {2, 3}, set()]),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing(drafter: str) -> None:
    """Greedy and seeded requests among each other equal each of them alone without drafts."""
    requests = run(DRAFTERS[drafter]())
    for request, alone in zip(requests, plain(), strict=True):
        assert request.output_token_ids == alone.output_token_ids
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert drafter != "right" or sum(sum(r.num_accepted) for r in requests) > 60


def test_preemption_changes_nothing() -> None:
    """What penalties count is known again after a request has lost its slot."""
    spec = sum(layer.bytes_per_token(target().dtype) for layer in target().kv_specs)
    requests = run(NGramDrafter(max_draft_tokens=4), memory_bytes=24 * 4 * spec)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain()]


def test_greedy_equals_generate() -> None:
    """Transformers has no penalty for presence; bias and least length are its own."""
    model = plain_model("llama")
    for request, control in list(zip(plain(), CONTROLS, strict=True))[:2]:
        prompt = torch.tensor([request.prompt_token_ids])
        ends = [*control.get("stop_token_ids", ()), *target().eos_token_ids]
        options = {
            "sequence_bias": {(token,): value for token, value in BIAS.items()},
            "max_new_tokens": MAX_TOKENS,
        }
        least = {"min_new_tokens": control["min_tokens"]} if "min_tokens" in control else {}
        whole = model.generate(prompt, do_sample=False, eos_token_id=ends, **options, **least)[0]
        assert request.output_token_ids == whole[prompt.shape[1] :].tolist()
    assert (
        not set(plain()[1].output_token_ids[:13]) & set(ENDS)
        and plain()[1].output_token_ids[-1] in ENDS
    )


def test_the_top_list_is_of_the_raw_logits() -> None:
    """The token that was chosen is in it with the very number of its own, also where the bias has
    chosen it.
    """
    request = run(DRAFTERS["wrong"]())[0]
    ids, start = request.token_ids, len(request.prompt_token_ids)
    table = plain_model("llama")(torch.tensor([ids])).logits[0].log_softmax(-1)
    extra = 0
    for index, (token, value, top) in enumerate(
        zip(request.output_token_ids, request.logprobs, request.top_logprobs, strict=True),
        start - 1,
    ):
        best = table[index].topk(3)
        assert list(top)[:3] == best.indices.tolist()
        assert list(top.values())[:3] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert top[token] == value and len(top) == (3 if token in best.indices else 4)
        extra += len(top) == 4
    assert extra


def test_the_models_own_ends_wait_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """`min_tokens` bars them unless they are ignored anyway."""
    (prompt,) = random_prompts(1, seed=3)
    config = EngineConfig(1, num_draft_tokens=4, cache=CacheConfig(memory_bytes=2**20))
    engine = SpecEngine(target(), NGramDrafter(max_draft_tokens=4), config)

    def output(**sampling: Any) -> list[int]:
        return finish(
            engine, engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, **sampling))
        )[0]

    free = output()
    at = next(index for index, token in enumerate(free) if index > 1 and token not in free[:index])
    monkeypatch.setattr(target(), "eos_token_ids", (free[at],))
    assert output() == free[: at + 1]
    least = at + 4
    later = output(min_tokens=least)
    assert later[:at] == free[:at] and free[at] not in later[:least] and len(later) > least
    assert output(min_tokens=least, ignore_eos=True) == free


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds token {VOCAB}; ids of this model lie in"),
        (
            {"min_tokens": 2, "stop_token_ids": (VOCAB + 3,)},
            f"stop_token_ids holds token {VOCAB + 3}; ids",
        ),
        (
            {"min_tokens": 1, "stop_token_ids": range(VOCAB)},
            f"name all {VOCAB} tokens of this model, and min_tokens",
        ),
    ],
)
def test_tokens_that_cannot_be_held_to(sampling: dict[str, Any], message: str) -> None:
    engine = tiny_engine(target(), cache_bytes=2**20, num_draft_tokens=0)
    with pytest.raises(InvalidInputError, match=message):
        engine.add_request([1], SamplingParams(**sampling))
