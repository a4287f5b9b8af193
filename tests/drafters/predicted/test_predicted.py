"""Predicted outputs: where an output stands in its prediction, and that none depends on it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.composed.drafter import ComposedDrafter
from drafters.ngram import NGramDrafter
from drafters.predicted.alignment import BACK, BEFORE, COMPARED, WINDOW, align
from drafters.predicted.drafter import BoundCopier, PredictionCopier
from drafters.suffix.drafter import SuffixDrafter
from drafters.suffix.matches import NOTHING
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.core import AcceptOutput, Drafter, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from tests.drafters.eagle3.heads import random_eagle3
from tests.drafters.tiny import FakeVerifier, Rig
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.guards import no_host_sync
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts

Tokens = list[int]


def found(row: Tokens, place: int, end: Tokens) -> tuple[int, int]:
    """The place and length of `align` by its definition."""
    best, first = (0.0, place, 0), max(COMPARED - 1, min(place - BACK, len(row) - WINDOW))
    for last in range(first, min(first + WINDOW, len(row))):
        length = 0
        while length < min(COMPARED, len(end)) and row[last - length] == end[-1 - length]:
            length += 1
        away = last + 1 - place
        score = length - 0.5 * math.log2(1 + (away if away >= 0 else 0.5 - away))
        if score > best[0] + 1e-6:
            best = (score, last + 1, length)
    return best[1:]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_alignment_is_what_it_says(data: st.DataObject) -> None:
    """Of two rows, against a search through all places; ties are as good as each other."""
    rows, places, ends = [], [], []
    for _ in range(2):
        text = data.draw(st.lists(st.integers(0, 3), min_size=COMPARED, max_size=60))
        rows.append([*text, *[NOTHING] * (61 - len(text))])
        places.append(data.draw(st.integers(COMPARED, len(text))))
        end = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=COMPARED))
        ends.append([BEFORE] * (COMPARED - len(end)) + end)
    given_rows, at_places, at_ends = torch.tensor(rows), torch.tensor(places), torch.tensor(ends)
    with no_host_sync():
        got = align(given_rows, at_places, at_ends)
    for row, place, end, at, length in zip(
        rows, places, ends, got.places.tolist(), got.lengths.tolist(), strict=True
    ):
        expected = found(row, place, end)
        if (at, length) != expected:
            scores = [
                size - 0.5 * math.log2(1 + (far if far >= 0 else 0.5 - far))
                for size, far in ((length, at - place), (expected[1], expected[0] - place))
            ]
            assert scores[0] == pytest.approx(scores[1]) and length and expected[1]


def test_a_long_prediction_is_looked_at_around_the_last_place() -> None:
    """What lies further away than the window is not found, and nothing runs over its ends."""
    count = 3 * WINDOW
    row = torch.arange(count + COMPARED + 1)[None]
    row[0, -1] = NOTHING
    for last in (COMPARED, 500, BACK, WINDOW, count // 2, count + COMPARED - 2):
        end = row[:, last - COMPARED + 1 : last + 1].clone()
        for place in (last + 1, max(COMPARED, last - WINDOW // 2)):
            got = align(row, torch.tensor([place]), end)
            assert (got.places.item(), got.lengths.item()) == (last + 1, COMPARED)
    end = row[:, -COMPARED - 1 : -1]
    assert align(row, torch.tensor([COMPARED]), end).lengths.item() == 0


class Written:
    """An output that a target writes step by step, with drafts from its prediction alone.

    Args:
        prompt, output, prediction: tokens.
        k: drafts of a step.
    """

    def __init__(self, prompt: Tokens, output: Tokens, prediction: Tokens, k: int = 31) -> None:
        self.rig = Rig(PredictionCopier(), FakeVerifier(), num_reqs=1, max_len=4000)
        assert isinstance(self.rig.bound, BoundCopier)
        self.rig.bound.predict(0, prompt, [], prediction)
        self.steps = self.accepted = 0
        known = 1
        while known < len(output):
            batch = self.rig.batch([output[known - 1]], [len(prompt) + known - 1], k)
            with no_host_sync():
                draft = self.rig.bound.propose(batch)
            assert draft.num_drafts is not None
            drafts = draft.token_ids[0, : int(draft.num_drafts[0])].tolist()
            right = 0
            while right < min(len(drafts), len(output) - known - 1):
                if drafts[right] != output[known + right]:
                    break
                right += 1
            tokens = [*output[known : known + right + 1], *[7] * (k - right)]
            accept = AcceptOutput(
                torch.tensor([tokens]),
                torch.tensor([right]),
                torch.tensor([output[known + right]]),
                torch.tensor([True]),
            )
            rows = torch.tensor([[output[known - 1], *draft.token_ids[0].tolist()]])
            with no_host_sync():
                self.rig.bound.commit(batch, rows, accept, VerifyOutput(torch.zeros(0)))
            known, self.steps, self.accepted = known + right + 1, self.steps + 1, right


EDITS: dict[str, Callable[[Tokens], Tokens]] = {
    "none": lambda text: text,
    "changed": lambda text: [*text[:700], 91, 92, 93, *text[702:]],
    "inserted": lambda text: [*text[:700], *range(80, 100), *text[700:]],
    "deleted": lambda text: [*text[:700], *text[820:]],
    "moved": lambda text: [*text[:300], *text[900:1000], *text[300:900], *text[1000:]],
    "begun otherwise": lambda text: [*range(80, 90), *text],
    "cut": lambda text: text[:900],
}


MORE = {"none": 0, "cut": 0, "changed": 15, "inserted": 60, "deleted": 12, "moved": 36}


@pytest.mark.parametrize("edit", EDITS)
def test_drafts_go_on_behind_an_edit(edit: str) -> None:
    """Three texts of few different tokens, so that short matches are many: each edit costs the
    tokens that are new, and a few steps to be found again.
    """
    more = 0
    for seed in (5, 6, 7):
        draw = random.Random(seed)
        lines = [[draw.randrange(40) for _ in range(draw.randrange(4, 15))] for _ in range(60)]
        text = [token for _ in range(160) for token in draw.choice(lines)][:1500]
        output = EDITS[edit](text)
        more += Written([1, 2, 3], output, text).steps - math.ceil(len(output) / 32)
    assert more <= MORE.get(edit, 30)


def test_a_wrong_prediction_is_given_up() -> None:
    """Where an output has nothing to do with its prediction little is drafted with any trust."""
    rig = Rig(PredictionCopier(), FakeVerifier(), num_reqs=1)
    assert isinstance(rig.bound, BoundCopier)
    rig.bound.predict(0, [1, 2], [], [3, 4, 5])
    expected_accepted = rig.bound.expected_accepted(rig.batch([3], [2], 9))
    assert expected_accepted.tolist() == [2]  # what is left of it
    expected_accepted = rig.bound.expected_accepted(rig.batch([50], [2], 9))
    assert expected_accepted.tolist() == [0]


def test_a_slot_forgets_the_prediction_before() -> None:
    """The next request there has none, or its own, also when it has begun before."""
    rig = Rig(PredictionCopier(), FakeVerifier(), num_reqs=1)
    assert isinstance(rig.bound, BoundCopier)
    rig.bound.predict(0, [1, 2], [], list(range(10, 30)))
    rig.bound.predict(0, [1, 2], [10, 11, 12], list(range(10, 20)))
    draft = rig.bound.propose(rig.batch([12], [4], 9))
    assert draft.num_drafts is not None and draft.num_drafts.tolist() == [7]
    assert draft.token_ids[0, :7].tolist() == list(range(13, 20))
    rig.bound.predict(0, [1, 2], [], [])
    draft = rig.bound.propose(rig.batch([10], [2], 9))
    assert draft.num_drafts is not None and draft.num_drafts.tolist() == [0]


MAX_TOKENS = 40


@pytest.fixture(scope="module")
def target() -> Verifier:
    return paged_verifier(plain_model("llama"))


DRAFTERS: dict[str, Callable[[Verifier], Drafter]] = {
    "ngram": lambda target: NGramDrafter(),
    "suffix": lambda target: SuffixDrafter(max_draft_tokens=9),
    "dflash": lambda target: random_dflash(target, block_size=6),
    "eagle3": lambda target: random_eagle3(target, 3),
    "composed": lambda target: ComposedDrafter(
        [SuffixDrafter(max_draft_tokens=9), random_dflash(target, block_size=4)]
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"tree_nodes": 9},
    "chosen": {"num_draft_tokens": "auto"},
    "ahead": {"pipeline_depth": 1},
}


def decoded(
    target: Verifier,
    drafter: Drafter | None,
    predictions: Sequence[Tokens | None],
    sampling: dict[str, Any],
    **changes: Any,
) -> tuple[list[Request], SpecEngine]:
    """Some prompts at once, each with its prediction."""
    options = {"num_draft_tokens": None, **changes}
    engine = tiny_engine(target, drafter, max_num_seqs=3, max_prefill_tokens=13, **options)
    requests = [
        engine.add_request(
            prompt,
            SamplingParams(max_tokens=MAX_TOKENS, seed=3, prediction=tuple(text or ()), **sampling),
        )
        for prompt, text in zip(random_prompts(len(predictions)), predictions, strict=True)
    ]
    finish(engine)
    return requests, engine


def outputs_of(requests: Sequence[Request]) -> list[Tokens]:
    return [request.output_token_ids for request in requests]


def predicted_for(outputs: Sequence[Tokens]) -> list[Tokens | None]:
    """None, what comes, what comes with edits, and what never comes."""
    _, two, three, four, *_ = outputs
    return [None, two, [*three[:10], 5, 6, *three[14:]], four[::-1], None]


SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8}]
PAIRS = [
    (name, way, (place + turn) % 2)
    for place, name in enumerate(DRAFTERS)
    for turn, way in enumerate(WAYS)
]
"""Every drafter in every way, by turns greedy and sampled."""


@pytest.fixture(scope="module")
def written(target: Verifier) -> list[list[Tokens]]:
    """Outputs of plain decoding, of each sampling."""
    return [outputs_of(decoded(target, None, [None] * 5, how)[0]) for how in SAMPLINGS]


@pytest.mark.parametrize(("name", "way", "sampled"), PAIRS)
def test_no_output_depends_on_a_prediction(
    target: Verifier, written: list[list[Tokens]], name: str, way: str, sampled: int
) -> None:
    """Beside any drafter, in batches where some requests have one."""
    plain, sampling = written[sampled], SAMPLINGS[sampled]
    drafter = DRAFTERS[name](target)
    requests, _ = decoded(target, drafter, predicted_for(plain), sampling, **WAYS[way])
    assert outputs_of(requests) == plain
    copied = [GenerationResult.of(request, "").stats.num_predicted for request in requests]
    assert copied[0] == copied[4] == (0, 0)
    if way == "chain":
        without, _ = decoded(target, drafter, [None] * 5, sampling)
        assert copied[1][0] > MAX_TOKENS / 2 and copied[1][1] < 10
        assert len(requests[1].num_emitted) < len(without[1].num_emitted)
        assert len(requests[2].num_emitted) < len(without[2].num_emitted)


def test_a_prediction_is_found_again_after_a_preemption(target: Verifier) -> None:
    """Where blocks are short."""
    plain = outputs_of(decoded(target, None, [None] * 5, {})[0])
    specs = sum(spec.bytes_per_token(target.dtype) for spec in target.kv_specs)
    requests, engine = decoded(
        target,
        SuffixDrafter(max_draft_tokens=5),
        [*plain],
        {},
        cache=CacheConfig(memory_bytes=24 * 4 * specs),
    )
    assert engine.scheduler.num_preemptions > 0
    assert outputs_of(requests) == plain


@pytest.mark.parametrize("drafted", [False, True], ids=["no drafter", "probabilistic"])
def test_where_nothing_can_be_copied_it_is_left_aside(target: Verifier, drafted: bool) -> None:
    drafter = random_dflash(target) if drafted else None
    way = {"draft_sampling": "probabilistic"} if drafted else {}
    plain = outputs_of(decoded(target, None, [None] * 5, {})[0])
    requests, _ = decoded(target, drafter, [*plain], {}, **way)
    assert outputs_of(requests) == plain
    stats = [GenerationResult.of(request, "").stats for request in requests]
    assert {one.num_predicted for one in stats} == {(0, 0)}


def test_what_is_no_prediction(target: Verifier) -> None:
    """Each in one line with a way out; an empty one is none."""
    engine = SpecEngine(target, NGramDrafter(), EngineConfig(max_model_len=64))
    cases: list[tuple[Any, type[Exception], str]] = [
        ("text", InvalidInputError, "this engine has no tokenizer; give token ids"),
        ([3, 10**6], InvalidInputError, "holds token id 1000000; ids of this model lie in"),
        ([1] * 65, CapacityError, "65 tokens and the limit is 64"),
    ]
    for prediction, kind, message in cases:
        with pytest.raises(kind, match=message):
            engine.add_request([1], SamplingParams(prediction=prediction))
    values: list[Any] = [5, [1.5], [True], b"a", {"a": 1}]
    for value in values:
        with pytest.raises(InvalidInputError, match="prediction"):
            SamplingParams(prediction=value)
    values = ["", [], torch.tensor([3, 4])]
    assert [SamplingParams(prediction=value).prediction for value in values] == [None, None, (3, 4)]
