"""The engine's edges: stops inside a block, NaN logits, cancellation, seeds, logprobs, limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.core import DraftOutput, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import paged_verifier, plain_greedy, plain_model, random_prompts

MAX_TOKENS = 30
Case = tuple[Verifier, list[list[int]], dict[tuple[int, ...], list[int]]]


@pytest.fixture(scope="module")
def case() -> Case:
    """A target, 4 prompts, and their greedy outputs."""
    model = plain_model("llama")
    prompts = random_prompts(4, seed=9)
    return (
        paged_verifier(model),
        prompts,
        {tuple(p): plain_greedy(model, p, MAX_TOKENS) for p in prompts},
    )


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=4,
        cache=CacheConfig(memory_bytes=2**22),
        **{"num_draft_tokens": None, **changes},
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_token_inside_a_block(case: Case, depth: int) -> None:
    """The output ends with the stop token wherever it falls among accepted drafts, and the surplus
    is never seen.
    """
    verifier, prompts, outputs = case
    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 5), config(pipeline_depth=depth))
    for prompt in prompts:
        whole = outputs[tuple(prompt)]
        for stop in sorted(set(whole)):
            request = engine.add_request(
                prompt, SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(stop,))
            )
            finish(engine, request)
            assert request.output_token_ids == whole[: whole.index(stop) + 1]
            assert request.finish_reason == "stop"
            assert sum(request.num_emitted) == len(request.output_token_ids) - 1
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_inside_a_block(case: Case, max_tokens: int, depth: int) -> None:
    """Neither one token more nor less than asked for,
    also when fewer are left than a block holds.
    """
    verifier, prompts, outputs = case
    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 5), config(pipeline_depth=depth))
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts
    ]
    assert finish(engine, *requests) == [outputs[tuple(p)][:max_tokens] for p in prompts]
    assert {r.finish_reason for r in requests} == {"length"}


def test_end_of_sequence_can_be_ignored(case: Case) -> None:
    """The model's own stop ids end an output unless the request says otherwise."""
    verifier, prompts, outputs = case
    whole = outputs[tuple(prompts[0])]
    engine = SpecEngine(verifier, None, config())
    kept, verifier.eos_token_ids = verifier.eos_token_ids, (whole[4],)
    try:
        stopped = engine.add_request(prompts[0], SamplingParams(max_tokens=MAX_TOKENS))
        ignored = engine.add_request(
            prompts[0], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        )
        finish(engine)
    finally:
        verifier.eos_token_ids = kept
    assert stopped.output_token_ids == whole[: whole.index(whole[4]) + 1]
    assert ignored.output_token_ids == whole


@contextmanager
def poisoned(verifier: Verifier, victims: list[Request], first_bad: int) -> Iterator[None]:
    """Makes keys, values and logits of the victim NaN from position `first_bad` on."""
    forward = verifier.forward

    def forward_with_nan(rows: ForwardInput, caches: Any, aux: Any = ()) -> VerifyOutput:
        output = forward(rows, caches, aux)
        slots = torch.tensor(
            [b * 4 + o for victim in victims for b in victim.block_ids for o in range(4)] or [-1]
        )
        bad = torch.isin(rows.metadata.slot_mapping, slots) & (rows.position_ids >= first_bad)
        for layer in caches:
            for side in layer:
                side.view(-1, *side.shape[2:])[rows.metadata.slot_mapping[bad]] = torch.nan
        selected = bad if rows.logit_rows is None else bad[rows.logit_rows]
        return VerifyOutput(
            output.logits.masked_fill(selected[:, None], torch.nan), output.aux_hidden
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "forward", forward_with_nan)
        yield


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nan_logits_end_one_request_and_spare_the_others(
    case: Case, phase: str, depth: int
) -> None:
    """NaN keys, values and logits of one request: it ends with an error, its neighbors and
    successors keep their outputs.
    """
    verifier, prompts, outputs = case
    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 3, [{2}]), config(pipeline_depth=depth))
    first_bad = len(prompts[1]) - 1 if phase == "prefill" else len(prompts[1]) + 6
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts
    ]
    victim = requests[1]
    with poisoned(verifier, [victim], first_bad):
        finish(engine)
    assert victim.finish_reason == "error"
    assert victim.error is not None
    assert "NaN" in victim.error
    assert "\n" not in victim.error
    assert victim.output_token_ids == outputs[tuple(prompts[1])][: len(victim.output_token_ids)]
    for request in (*requests[:1], *requests[2:]):
        assert request.output_token_ids == outputs[tuple(request.prompt_token_ids)]
    assert engine.pool.num_used == 0
    assert all(torch.isfinite(side).all() for layer in engine.kv_cache.layers for side in layer)
    again = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts
    ]
    assert finish(engine, *again) == list(outputs.values())


def test_block_tables_never_point_at_anothers_blocks(case: Case) -> None:
    """What an earlier owner of the slot left in the table would let a neighbor's NaN in, although
    it is masked.
    """
    verifier = case[0]
    cache = CacheConfig(memory_bytes=25 * 4096)
    engine = SpecEngine(
        verifier,
        None,
        EngineConfig(num_draft_tokens=None, max_num_seqs=2, pipeline_depth=1, cache=cache),
    )
    long, short = list(range(3, 63)), [7, 8, 9]
    finish(engine, engine.add_request(long, SamplingParams(max_tokens=4)))
    expected = finish(engine, engine.add_request(short, SamplingParams(max_tokens=12)))
    finish(engine, engine.add_request(long[::-1], SamplingParams(max_tokens=4)))
    request = engine.add_request(short, SamplingParams(max_tokens=12))
    victim = engine.add_request(long[1:], SamplingParams(max_tokens=12))
    with poisoned(verifier, [victim], first_bad=len(victim.prompt_token_ids) + 2):
        assert finish(engine, request) == expected
    assert victim.finish_reason == "error"


def test_seed_repeats_the_output_whatever_the_neighbors_and_drafts(case: Case) -> None:
    """A sampled request alone, among others, with right and with wrong drafts: the same tokens for
    the same seed.
    """
    verifier, prompts, outputs = case
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, seed=11)
    engine = SpecEngine(verifier, None, config())
    (alone,) = finish(engine, engine.add_request(prompts[0], sampling))
    for wrong in (set(), {0}, {1, 2}):
        drafter = ScriptedDrafter({**outputs, tuple(prompts[0]): alone}, 4, [wrong])
        engine = SpecEngine(verifier, drafter, config())
        others = [
            engine.add_request(p, SamplingParams(max_tokens=9, temperature=1.5))
            for p in prompts[1:]
        ]
        request = engine.add_request(prompts[0], sampling)
        finish(engine, *others, request)
        assert request.output_token_ids == alone
        if not wrong:
            assert sum(request.num_accepted) == len(alone) - 1 - len(request.num_emitted) + (
                request.num_emitted[-1] <= request.num_accepted[-1]
            )
    engine = SpecEngine(verifier, None, config())
    (other,) = finish(
        engine,
        engine.add_request(
            prompts[0], SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, seed=12)
        ),
    )
    assert other != alone


def test_every_position_has_its_own_random_number(case: Case) -> None:
    """A sampled output continues the same from any of its prefixes, the first token included."""
    verifier, prompts, _ = case
    sampling = SamplingParams(max_tokens=8, temperature=1.2, seed=5)
    engine = SpecEngine(verifier, None, config())
    (whole,) = finish(engine, engine.add_request(prompts[0], sampling))
    for cut in range(1, 4):
        (rest,) = finish(engine, engine.add_request([*prompts[0], *whole[:cut]], sampling))
        assert rest[: len(whole) - cut] == whole[cut:]


def test_unseeded_requests_differ_and_report_a_seed_that_repeats_them(case: Case) -> None:
    """Two requests without a seed draw different ones; the drawn seed reproduces its output."""
    verifier, prompts, _ = case
    engine = SpecEngine(verifier, None, config(seed=1))
    warm = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5)
    first, second = engine.add_request(prompts[0], warm), engine.add_request(prompts[0], warm)
    a, b = finish(engine, first, second)
    assert a != b
    repeat = engine.add_request(
        prompts[0], SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, seed=second.seed)
    )
    assert finish(engine, repeat) == [b]


def test_logprobs_are_the_targets(case: Case) -> None:
    """One log-probability per output token, under unprocessed logits, for accepted, recovered and
    bonus tokens alike.
    """
    verifier, prompts, outputs = case
    model = plain_model("llama")
    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 3, [{1}, set(), {0}]), config())
    wanted = [
        engine.add_request(p, SamplingParams(max_tokens=MAX_TOKENS, logprobs=True))
        for p in prompts[:2]
    ]
    unwanted = engine.add_request(prompts[2], SamplingParams(max_tokens=MAX_TOKENS))
    finish(engine)
    for request in wanted:
        ids = request.token_ids
        with torch.inference_mode():
            table: Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        n = len(request.prompt_token_ids)
        expected = [table[i - 1, ids[i]].item() for i in range(n, len(ids))]
        assert request.logprobs == pytest.approx(expected, abs=1e-4)
    assert unwanted.logprobs == []


def test_cancelled_request_leaves_its_neighbors_alone(case: Case) -> None:
    """Ending a request between steps keeps what it has and frees its blocks; ending it twice does
    nothing.
    """
    verifier, prompts, outputs = case
    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 2), config(pipeline_depth=1))
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts
    ]
    for _ in range(4):
        engine.step()
    engine.abort(requests[0])
    engine.abort(requests[0])
    got = finish(engine, *requests)
    assert requests[0].finish_reason == "cancelled"
    assert 0 < len(got[0]) < MAX_TOKENS
    assert got[1:] == list(outputs.values())[1:]
    assert engine.pool.num_used == 0


def test_the_size_of_a_prefill_chunk(case: Case) -> None:
    """Unless it is given, it is that of the device."""
    for given, taken in ((None, 512), (7, 7)):
        engine = tiny_engine(
            case[0], num_draft_tokens=None, max_prefill_tokens=given, cache_bytes=2**20
        )
        assert engine.scheduler.max_prefill_tokens == taken


def test_k_is_checked_against_the_drafter(case: Case) -> None:
    """More drafts than the block holds, or drafts without a drafter, are refused; 0 decodes plainly
    without using the drafter.
    """
    verifier, prompts, outputs = case
    with pytest.raises(
        InvalidInputError,
        match=r"num_draft_tokens is 6 and the drafter gives at most 5; choose 1 to 5",
    ):
        SpecEngine(verifier, ScriptedDrafter(outputs, 5), config(num_draft_tokens=6))
    with pytest.raises(InvalidInputError, match=r"num_draft_tokens is 1 .* name a drafter"):
        SpecEngine(verifier, None, config(num_draft_tokens=1))
    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 5), config(num_draft_tokens=0))
    request = engine.add_request(prompts[0], SamplingParams(max_tokens=8))
    assert finish(engine, request) == [outputs[tuple(prompts[0])][:8]]
    assert request.num_emitted == [1] * 7


def test_cache_budget_too_small_says_how_much_is_needed(case: Case) -> None:
    """A budget that does not pay for two blocks is refused with the sum that would."""
    with pytest.raises(
        CapacityError,
        match=r"budget of 100 bytes pays for 0 blocks of 4,096 bytes; give it at least 8,192 bytes",
    ):
        tiny_engine(case[0], num_draft_tokens=None, cache_bytes=100)


def test_drafts_that_do_not_count_are_not_accepted(case: Case) -> None:
    """`num_drafts` limits what may be accepted, per request, even when the rest would be right."""
    verifier, prompts, outputs = case

    engine = SpecEngine(verifier, ScriptedDrafter(outputs, 4), config())
    assert engine.runner.drafter is not None
    propose = engine.runner.drafter.propose

    def short(batch: DecodeBatch) -> DraftOutput:
        draft = propose(batch)
        draft.num_drafts = batch.slots % 2
        return draft

    engine.runner.drafter.propose = short  # type: ignore[method-assign]
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts
    ]
    assert finish(engine, *requests) == list(outputs.values())
    offered = [set(request.num_drafted[:-1]) for request in requests]
    assert sorted(offered, key=str) == [{0}, {0}, {1}, {1}]
    assert all(a <= d for r in requests for a, d in zip(r.num_accepted, r.num_drafted, strict=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("",)}, "empty string"),
    ],
)
def test_sampling_values_out_of_range(values: dict[str, Any], message: str) -> None:
    """Each names the value and the range it must lie in."""
    with pytest.raises(InvalidInputError, match=message) as error:
        SamplingParams(**values)
    assert "\n" not in str(error.value)
