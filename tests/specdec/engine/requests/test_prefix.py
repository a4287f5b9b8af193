"""Reuse of what was computed before: the last answer of a chat, whoever drafted it; and what must
never be reused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.composed.drafter import ComposedDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.engine import build
from specdec.engine.engine import SpecEngine
from specdec.engine.requests import prefix as module
from specdec.engine.requests.request import Request
from specdec.kv_cache import BlockPool, StateCache, prefix_hashes
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.core import Drafter, DraftOutput, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from tests.drafters.sequential.toy import toy_drafter
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)

BLOCK = 4
SAMPLED = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5)
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
PATTERN = [4, 0, 0, 0, 3, 4, *[0] * 20, 4, 1, 0, 4]
"""Drafts of steps: of context that is put off now and then, and of more than may be."""

Make = Callable[[Verifier], Drafter | None]
MAKERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "plain": (lambda verifier: None, {}),
    "dflash": (random_dflash, {}),
    "dflash trees": (random_dflash, {"num_draft_tokens": "auto", "tree_nodes": 24}),
    "dflash now and then": (random_dflash, {"num_draft_tokens": "auto", "tree_nodes": 0}),
    "pairs": (toy_drafter, {}),
    "pairs now and then": (toy_drafter, {"num_draft_tokens": "auto", "tree_nodes": 0}),
    "pairs in trees": (toy_drafter, {"num_draft_tokens": "auto", "tree_nodes": 24}),
    "tokens": (lambda verifier: toy_drafter(verifier, features=False), {}),
    "composed": (
        lambda verifier: ComposedDrafter(
            [SuffixDrafter(max_draft_tokens=4), toy_drafter(verifier)]
        ),
        {},
    ),
}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return paged_verifier(plain_model("llama"), BLOCK)


@contextmanager
def an_engine(
    verifier: Verifier, name: str = "plain", *, caching: bool = True, **changes: Any
) -> Iterator[SpecEngine]:
    """An engine with one of `MAKERS`; every other draft of a chain is what the target chooses, so
    that some are accepted.
    """
    make, own = MAKERS[name]
    cache = CacheConfig(memory_bytes=changes.pop("memory", 2**22), prefix_caching=caching)
    options = {
        "max_num_seqs": 3,
        "max_prefill_tokens": 13,
        "num_draft_tokens": None,
        "cache": cache,
        **own,
        **changes,
    }
    engine = SpecEngine(verifier, make(verifier), EngineConfig(**options))
    with pytest.MonkeyPatch.context() as patch:
        if name.endswith("now and then"):
            drafts = cycle(PATTERN)
            patch.setattr(
                engine.planner.choice, "choose", lambda *args, **options: BlockShape(next(drafts))
            )
        yield engine


def help_out(engine: SpecEngine, texts: list[list[int]]) -> None:
    """Makes the first drafts of a chain right, up to a depth that changes with the position, where
    a text is known.
    """
    bound = engine.runner.drafter
    if bound is None or engine.config.tree_nodes:
        return
    propose = bound.propose
    bound.allow(engine.num_draft_tokens)

    def helped(batch: DecodeBatch) -> DraftOutput:
        draft = propose(batch)
        owners = {request.slot: request.prompt_token_ids for request in engine.scheduler.working}
        for row, (slot, start) in enumerate(
            zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True)
        ):
            known = next((text for text in texts if text[: len(owners[slot])] == owners[slot]), [])
            right = known[start + 1 : start + 1 + min(batch.k, start % 6)]
            draft.token_ids[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return draft

    bound.propose = helped  # type: ignore[method-assign]


def kept_of(engine: SpecEngine, block: int) -> list[Tensor]:
    """What target and drafter have of a block's tokens."""
    return [
        side[block].clone() for layer in engine.kv_cache.layers for side in layer if side.numel()
    ]


@pytest.mark.parametrize(
    ("name", "depth"), [*((name, i % 2) for i, name in enumerate(MAKERS)), ("dflash", 0)]
)
def test_what_is_offered_is_what_a_prefill_writes(
    verifier: Verifier, name: str, depth: int
) -> None:
    """Of target and drafter, from the moment on that a block is offered; nothing is left out but
    the end of each text.
    """
    prompts = random_prompts(3, seed=1)
    with an_engine(verifier, caching=False) as plain:
        texts = [
            p + o
            for p, o in zip(
                prompts,
                finish(plain, *(plain.add_request(p, GREEDY) for p in prompts)),
                strict=True,
            )
        ]
    offered: dict[bytes, tuple[int, list[Tensor]]] = {}
    with an_engine(verifier, name, pipeline_depth=depth) as engine:
        help_out(engine, texts)
        publish = engine.pool.publish

        def noting(block: int, digest: bytes) -> None:
            publish(block, digest)
            offered[digest] = block, kept_of(engine, block)

        engine.pool.publish = noting  # type: ignore[method-assign]
        requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        assert finish(engine, *requests) == [
            text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)
        ]
        accepted = sum(sum(request.num_accepted) for request in requests)
        assert engine.runner.drafter is None or accepted > (0 if engine.config.tree_nodes else 5)
    ahead = engine.scheduler.prefix._ahead
    missing = 0
    with an_engine(verifier, name, caching=False, max_prefill_tokens=100) as fresh:
        for text in texts:
            again = fresh.add_request(text, GREEDY)
            fresh.step()
            digests = prefix_hashes(text, BLOCK, ahead=ahead)
            missing += sum(digest not in offered for digest in digests)
            for block, digest in zip(again.block_ids, digests, strict=False):
                if digest in offered:
                    where, first = offered[digest]
                    for then, now, right in zip(
                        first, kept_of(engine, where), kept_of(fresh, block), strict=True
                    ):
                        torch.testing.assert_close(then, right, rtol=1e-4, atol=1e-4)
                        assert torch.equal(then, now)
            fresh.abort(again)
    # The last block may be full but for the context of the last step.
    assert missing <= len(texts) * (
        1 + 2 * (engine.scheduler.prefix._late or "now and then" in name)
    )


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("plain", SAMPLED),
        ("dflash", GREEDY),
        ("dflash", SAMPLED),
        ("dflash trees", SAMPLED),
        ("pairs", GREEDY),
        ("composed", GREEDY),
    ],
)
def test_the_next_turn_of_a_chat(verifier: Verifier, name: str, sampling: SamplingParams) -> None:
    """It computes its own words alone, and says the same as without what was cached."""
    news = [random_prompts(1, seed=seed, longest=12)[0] for seed in range(3)]

    def chat(caching: bool) -> tuple[list[list[int]], list[int], SpecEngine]:
        said, cached, text = list[list[int]](), list[int](), list[int]()
        with an_engine(
            verifier, name, caching=caching, pipeline_depth=int(name == "dflash")
        ) as engine:
            for words in news:
                request = engine.add_request(text + words, sampling)
                text = text + words + finish(engine, request)[0]
                said.append(request.output_token_ids)
                cached.append(request.num_cached_tokens or 0)
        return said, cached, engine

    said, cached, engine = chat(True)
    assert (said, [0] * 3) == chat(False)[:2]
    before = 0  # tokens when the last turn ended
    for words, output, found in zip(news, said, cached, strict=True):
        assert before - BLOCK - 6 * engine.scheduler.prefix._late <= found <= before
        before += len(words) + len(output)
    assert engine.prefix_counts.found == sum(cached) > 40
    assert engine.prefix_counts.queried == sum(
        sum(map(len, [*news[: i + 1], *said[:i]])) for i in range(3)
    )


@cache
def hybrid() -> tuple[PreTrainedModel, Verifier]:
    model = plain_model("qwen3_5", 0)
    return model, paged_verifier(model, BLOCK)


def in_turn(engine: SpecEngine, prompts: list[list[int]]) -> list[Request]:
    """One request after the other; every output is that of `generate`."""
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
        finish(engine)
        assert requests[-1].output_token_ids == plain_greedy(hybrid()[0], prompt, 5)
    return requests


@pytest.mark.parametrize(("drafts", "depth"), [("plain", 1), ("dflash", 0)])
@pytest.mark.parametrize(
    ("chunk", "counts"),
    [(512, [0, 0, 60, 60, 60]), (32, [0, 32, 60, 60, 60]), (50, [0, 48, 48, 48, 48])],
)
def test_states_where_prompts_part(
    chunk: int, counts: list[int], drafts: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request that begins as another did keeps them for all that come after, however
    long chunks are.

    Where the last chunk's are near, a step more would not pay.
    """
    monkeypatch.setattr(build, "SNAPSHOT_TOKENS", 16)
    monkeypatch.setitem(MAKERS, "dflash", (lambda v: random_dflash(v, taps=(0, 1, 2)), {}))
    system = [3 + (7 * j + j // 50) % 90 for j in range(62)]
    prompts = [system + [3 + (31 * i + j + 1) % 90 for j in range(11)] for i in range(5)]
    with an_engine(hybrid()[1], drafts, pipeline_depth=depth, max_prefill_tokens=chunk) as engine:
        requests = in_turn(engine, prompts)
        assert [request.num_cached_tokens for request in requests] == counts
        assert len(engine.pool._free_rows) + len(engine.pool._snapshot_of) == 3


def test_states_where_a_prompt_parts_from_one_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are offered from its prefill on, and it need not have ended."""
    monkeypatch.setattr(build, "SNAPSHOT_TOKENS", 16)
    system = [3 + (7 * j + j // 50) % 90 for j in range(62)]
    with an_engine(hybrid()[1], max_prefill_tokens=512) as engine:
        requests = []
        for i in range(3):
            requests.append(
                engine.add_request([*system, 9 + i, *range(20, 30)], SamplingParams(max_tokens=30))
            )
            engine.step()
            engine.step()
        assert [request.num_cached_tokens for request in requests] == [0, 0, 60]
        texts = finish(engine, *requests)
    assert texts == [
        plain_greedy(hybrid()[0], request.prompt_token_ids, 30) for request in requests
    ]


@pytest.mark.parametrize("chunk", [512, 64, 32])
def test_a_long_prompt_takes_few_states_of_others(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chats, then a prompt of many chunks by somebody else: the chats' next turns find what
    they have said.
    """
    monkeypatch.setattr(build, "SNAPSHOT_TOKENS", 16)
    chats = [[3 + (31 * i + 7 * j) % 90 for j in range(40)] for i in range(3)]
    with an_engine(hybrid()[1], max_prefill_tokens=chunk, max_num_seqs=4) as engine:
        answers = [request.output_token_ids for request in in_turn(engine, chats)]
        in_turn(engine, [[3 + j * 13 % 90 for j in range(256)]])
        turns = in_turn(
            engine, [[*chat, *answer, 9, 10] for chat, answer in zip(chats, answers, strict=True)]
        )
        assert [turn.num_cached_tokens for turn in turns] == [40] * 3


def test_preempted_requests_take_back_what_they_had(verifier: Verifier) -> None:
    """With too few blocks for all, and outputs as without; what a request finds again of itself
    counts nowhere.
    """
    prompts, expected = random_prompts(6, seed=3), []
    for prompt in prompts:
        with an_engine(verifier, caching=False) as engine:
            expected += finish(engine, engine.add_request(prompt, GREEDY))
    bytes_per_token = sum(spec.bytes_per_token(torch.float32) for spec in verifier.kv_specs)
    for depth in (0, 1):
        with an_engine(
            verifier, "dflash", memory=2 * 22 * BLOCK * bytes_per_token, pipeline_depth=depth
        ) as engine:
            requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
            assert finish(engine, *requests) == expected
            assert engine.scheduler.num_preemptions > 0
            assert engine.prefix_counts.queried == sum(map(len, prompts))
            assert engine.pool.num_used == 0


@pytest.mark.parametrize(
    ("drafts", "depth"), [("plain", 0), ("plain", 1), ("dflash", 0), ("dflash", 1), ("pairs", 1)]
)
def test_states_of_generated_tokens(
    drafts: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent layers go on in the midst of the last answer, from states with tokens pending;
    catches states of another place.
    """
    monkeypatch.setattr(module, "SNAPSHOT_SPACING", 2 * BLOCK)
    verifier = paged_verifier(plain_model("qwen3_5", 0), BLOCK)
    monkeypatch.setitem(MAKERS, "dflash", (lambda v: random_dflash(v, taps=(0, 1, 2)), {}))
    prompt, tails = random_prompts(1, seed=6)[0], [[7, 8, 9], [11, 5]]
    with an_engine(verifier, caching=False) as plain:
        text = prompt + finish(plain, plain.add_request(prompt, GREEDY))[0]
        expected = [finish(plain, plain.add_request([*text, *tail], GREEDY))[0] for tail in tails]
    pendings = set()
    for shift in (0, 9):  # answers that end elsewhere, after other numbers of drafts
        sampling = SamplingParams(max_tokens=30 - shift, ignore_eos=True)
        with an_engine(verifier, drafts, pipeline_depth=depth) as engine:
            help_out(engine, [text])
            finish(engine, engine.add_request(prompt, sampling))
            requests = []
            for tail in tails:
                requests.append(engine.add_request([*text, *tail], GREEDY))
                finish(engine)
                snapshot = requests[-1].snapshot
                assert (
                    snapshot is not None
                    and (requests[-1].num_cached_tokens or 0) >= len(prompt) + 2 * BLOCK
                )
                pendings.add(snapshot.pending)
            assert [request.output_token_ids for request in requests] == expected
            assert len(engine.pool._free_rows) + len(engine.pool._snapshot_of) == 3
    assert pendings == {0} if drafts == "plain" else max(pendings) > 0, pendings
    assert any(isinstance(layer, StateCache) for layer in engine.kv_cache.layers)


@pytest.mark.parametrize("stop", range(3, 9))
def test_an_output_that_is_cut_within_a_step(verifier: Verifier, stop: int) -> None:
    """What a step committed past a stop token is nobody's text."""
    prompt = list(range(10, 18))
    with an_engine(verifier, caching=False) as plain:
        whole = finish(plain, plain.add_request(prompt, GREEDY))[0]
    engine = tiny_engine(verifier, ScriptedDrafter({tuple(prompt): whole}, 12), num_draft_tokens=12)
    request = engine.add_request(
        prompt, SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(whole[stop],))
    )
    finish(engine, request)
    assert request.finish_reason == "stop"
    assert (
        len(engine.pool.match(prefix_hashes(prompt + whole, BLOCK))) == request.num_tokens // BLOCK
    )


def test_who_shares_with_whom(verifier: Verifier) -> None:
    """Salts share among themselves alone; who does not read still offers, and counts nowhere."""
    prompt = list(range(10, 10 + 5 * BLOCK))

    def cached(engine: SpecEngine, **options: Any) -> int:
        request = engine.add_request(prompt, SamplingParams(max_tokens=2, **options))
        finish(engine, request)
        return request.num_cached_tokens or 0

    with an_engine(verifier) as engine:
        assert [cached(engine, cache_salt=salt) for salt in ("a", "b", None)] == [0, 0, 0]
        assert [cached(engine, cache_salt=salt) for salt in ("b", None, "a", "c")] == [
            4 * BLOCK
        ] * 3 + [0]
        counts = engine.prefix_counts.queried, engine.prefix_counts.found
        assert counts == (7 * len(prompt), 12 * BLOCK)
        assert cached(engine, cache_salt="d", read_prefix_cache=False) == 0
        assert cached(engine, cache_salt="a", read_prefix_cache=False) == 0
        assert (engine.prefix_counts.queried, engine.prefix_counts.found) == counts
        assert cached(engine, cache_salt="d") == 4 * BLOCK
    for salt in ("", 7):
        with pytest.raises(
            InvalidInputError,
            match=r"cache_salt is .*; it must be a string that is not empty, or be left out",
        ):
            SamplingParams(cache_salt=salt)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_of_a_request_that_ended_with_nan_is_offered(
    verifier: Verifier, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the block with the bad row, nor those before it, which may hold what led to it."""
    prompt, forward = list(range(10, 20)), verifier.forward
    with an_engine(verifier, "dflash", pipeline_depth=depth) as engine:
        whole = finish(engine, engine.add_request(prompt, GREEDY))[0]
    bad = len(prompt) + 17

    def poisoned(rows: ForwardInput, caches: Any, aux: Any = ()) -> VerifyOutput:
        output = forward(rows, caches, aux)
        selected = rows.position_ids >= bad
        selected = selected if rows.logit_rows is None else selected[rows.logit_rows]
        return VerifyOutput(
            output.logits.masked_fill(selected[:, None], torch.nan), output.aux_hidden
        )

    with an_engine(verifier, "dflash", pipeline_depth=depth) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(verifier, "forward", poisoned)
            victim = engine.add_request(prompt, GREEDY)
            finish(engine)
        assert victim.finish_reason == "error" and len(victim.output_token_ids) > 10
        assert engine.pool.match(prefix_hashes(prompt + whole, BLOCK)) == []
        assert not engine.pool._digest_of


def test_what_nobody_can_find_is_handed_out_first() -> None:
    """A free block that was never offered goes before those that were, however long ago these were
    freed.
    """
    pool = BlockPool(7)
    digests = prefix_hashes(range(6), 2)
    offered = pool.allocate(3)
    for block, digest in zip(offered, digests, strict=True):
        pool.publish(block, digest)
    pool.release(offered)
    others = pool.allocate(3)
    assert not set(others) & set(offered)
    pool.release(others)
    assert set(pool.allocate(3)) == set(others)
    assert pool.allocate(1) == offered[-1:]  # the end of a sequence first
    pool.discard(offered[:1])
    assert pool.allocate(1) == offered[:1]
    assert pool.match(digests) == []
