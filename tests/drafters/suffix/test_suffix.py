"""Suffix decoding against a dictionary of all suffixes with their counts."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import COMPARED, BoundSuffix, SuffixDrafter, load_suffix
from drafters.suffix.matches import NOTHING
from drafters.suffix.pool import TextPool
from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.model.core import DraftOutput
from tests.drafters.tiny import FakeVerifier, Rig
from tests.helpers.guards import no_host_sync

Text = list[int]


class Occurrence(NamedTuple):
    """One match of a text's end, and what followed it."""

    length: int
    order: tuple[int, bool, int]
    continuation: tuple[int, ...]


def occurrences(
    suffixes: Text, texts: list[Text], *, own: bool, longest: int, shortest: int, k: int
) -> list[Occurrence]:
    """All of them, by a dictionary of every suffix of every beginning of `texts`."""
    places: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, text in enumerate(texts):
        for end in range(len(text) - own):
            for m in range(1, min(longest, end + 1) + 1):
                places[tuple(text[end - m + 1 : end + 1])].append((number, end))
    lengths: dict[tuple[int, int], int] = {}
    for m in range(1, min(longest, len(suffixes)) + 1):
        lengths |= dict.fromkeys(places.get(tuple(suffixes[-m:]), []), m)
    found = []
    for (number, end), length in lengths.items():
        text = list(texts[number])
        if own:
            for i in range(k):
                text.append(text[end + 1 + i])  # over its own end
        if length >= shortest:
            age = own, sum(map(len, texts[:number])) + number + end
            found.append(
                Occurrence(
                    length,
                    (min(length, max(COMPARED, shortest)), *age),
                    tuple(text[end + 1 : end + 1 + k]),
                )
            )
    return found


def expected_accepted(path: tuple[int, ...], m: int, among: list[Occurrence]) -> float:
    """Sum of the shares of m tokens' occurrences that begin with 1, ..., m of the path."""
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for one in among:
        for d in range(1, len(one.continuation) + 1):
            counts[one.continuation[:d]] += 1
    return sum(counts[path[:d]] for d in range(1, min(m, len(path)) + 1)) / len(among)


def best(found: list[Occurrence], longest: int) -> tuple[float, tuple[int, ...]]:
    """Score and continuation by the definition; ties go to the longer, then the first."""
    top: tuple[float, tuple[int, ...]] = (0.0, ())
    for m in range(longest, 0, -1):
        among = [one for one in found if one.length >= m]
        for one in among:
            score = expected_accepted(one.continuation, m, among)
            if score > top[0] + 1e-5:
                top = (score, one.continuation)
    return top


def most_frequent(found: list[Occurrence], longest: int) -> float:
    """ArcticInference's score: the likeliest child at every node, up to m, for the best m."""
    top = 0.0
    for m in range(1, longest + 1):
        among = [one.continuation for one in found if one.length >= m]
        score, here = 0.0, among
        for d in range(m):
            children: dict[int, int] = defaultdict(int)
            for path in here:
                if len(path) > d:
                    children[path[d]] += 1
            if not children:
                break
            token = max(children, key=lambda one: children[one])
            here = [path for path in here if len(path) > d and path[d] == token]
            score += len(here) / len(among)
        top = max(top, score)
    return top


def pool_of(rig: Rig) -> TextPool:
    assert isinstance(rig.bound, BoundSuffix) and rig.bound.pool
    return rig.bound.pool


def rig_of(texts: list[Text], past: list[Text], **options: int) -> Rig:
    """Requests with `texts`, whose last token is the anchor, and `past` in the pool."""
    rig = Rig(SuffixDrafter(**options), FakeVerifier(), num_reqs=len(texts))
    rig.bound.forecasts = True
    for slot, text in enumerate(texts):
        rig.bound.begin(slot, text)
    for text in past:
        pool = pool_of(rig)
        row = torch.tensor(text, dtype=torch.int32)
        pool.add(row, torch.tensor(0), torch.tensor(len(text)))
    return rig


def propose(rig: Rig, texts: list[Text], shape: BlockShape) -> DraftOutput:
    """Drafts for those requests; nothing waits."""
    batch = rig.batch([text[-1] for text in texts], [len(text) - 1 for text in texts], shape.drafts)
    batch.shape = shape
    with no_host_sync():
        return rig.bound.propose(batch)


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=3),
    past=st.lists(TEXT, max_size=3),
    k=st.integers(1, 9),
    limits=st.tuples(st.integers(1, 4), st.integers(1, 12)).map(sorted),
    few=st.sampled_from([2, 5, 200]),
)
def test_chains_against_a_dictionary(
    texts: list[Text], past: list[Text], k: int, limits: list[int], few: int
) -> None:
    """The chain, its forecast and length; counts are of all occurrences, or the best."""
    shortest, longest = limits[0], limits[1]
    options = {
        "longest": longest,
        "shortest": shortest,
        "occurrences": few,
        "max_draft_tokens": 9,
        "pool_tokens": 160,
    }
    draft = propose(rig_of(texts, past, **options), texts, BlockShape(k))
    assert draft.num_drafts is not None and draft.forecast is not None
    for row, text in enumerate(texts):
        limit = {"longest": longest, "shortest": shortest, "k": k}
        found = occurrences(text, [text], own=True, **limit) + occurrences(
            text, past, own=False, **limit
        )
        found = sorted(found, key=lambda one: one.order, reverse=True)[:few]
        expected = best(found, longest)
        assert draft.forecast[row].item() == pytest.approx(expected[0], abs=1e-5)
        assert tuple(draft.token_ids[row, : draft.num_drafts[row]].tolist()) == expected[1]
        assert expected[0] >= most_frequent(found, longest) - 1e-5
    assert draft.token_ids.min() >= 0


def test_frequency_beats_recency_and_length_what_is_trusted() -> None:
    """Of equal matches the one that most agree with; one that is longer for its own sake."""
    text = [1, 2, 7, 7, 9, 1, 2, 7, 7, 8, 1, 2, 5, 5, 1, 2]
    draft = propose(rig_of([text], []), [text], BlockShape(4))
    assert draft.token_ids.tolist() == [[7, 7, 8, 1]] and draft.forecast is not None
    # two tokens are trusted, and two of three went on so
    assert draft.forecast.item() == pytest.approx(2 * 2 / 3)
    longer = [6, 1, 2, 3, 4, 5, 0, 1, 2, 9, 1, 2, 9, 6, 1, 2]
    draft = propose(rig_of([longer], []), [longer], BlockShape(3))
    assert (
        draft.token_ids.tolist() == [[3, 4, 5]]
        and draft.forecast is not None
        and draft.forecast.item() == 3
    )


def test_no_match_reaches_beyond_the_beginning() -> None:
    """Of a text of one token, nor from the request's into a past text."""
    for text, past in (([1] * 6, []), ([1] * 6, [[1] * 4])):
        draft = propose(rig_of([text], past, pool_tokens=5 * len(past)), [text], BlockShape(9))
        assert (
            draft.forecast is not None
            and draft.forecast.tolist() == [5]
            and draft.num_drafts is not None
        )
        assert draft.token_ids.tolist() == [[1] * 9] and draft.num_drafts.tolist() == [9]


def test_past_outputs_are_found() -> None:
    """What one request wrote helps others; prompts are not kept; `forget` ends it."""
    rig = Rig(SuffixDrafter(max_draft_tokens=4), FakeVerifier(), num_reqs=2)
    rig.bound.begin(0, [50, 51, 52, 53, 54, 55])
    rig.bound.begin(1, [1])
    for start, block in ((5, [55, 20, 21, 22]), (8, [22, 23, 24, 25])):
        batch = rig.batch([block[0], 1], [start, 0], 3)
        with no_host_sync():
            rig.bound.propose(batch)
        rig.commit(batch, torch.tensor([block, [0] * 4]), [2, 0])
    for slot in (0, 1):
        rig.bound.begin(slot, [9, 21, 22])
        ask = [[9, 21, 22], [9, 21, 22]]
        draft = propose(rig, ask, BlockShape(4))
        assert draft.num_drafts is not None
        assert draft.num_drafts.tolist()[slot] == 2, (
            "the last draft was not accepted, so the output ends before it"
        )
        assert draft.token_ids[slot, :2].tolist() == [23, 24]
    kept = [token for token in pool_of(rig).tokens.tolist() if token != NOTHING]
    assert kept == [52, 53, 54, 55, 20, 21, 22, 23, 24, 0]
    rig.bound.forget()
    draft = propose(rig, [[9, 21, 22], [9, 21, 22]], BlockShape(4))
    assert draft.num_drafts is not None and draft.num_drafts.tolist() == [0, 0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), min_size=1, max_size=8),
    size=st.integers(2, 20),
)
def test_a_pool_keeps_the_latest_tokens(texts: list[tuple[int, int]], size: int) -> None:
    """First in, first out, in `size` tokens, whatever is added; texts stay apart."""
    pool, everything, token = TextPool(size, torch.device("cpu")), [NOTHING] * size, 0
    for start, length in texts:
        text = torch.arange(token, token + 21, dtype=torch.int32)
        with no_host_sync():
            pool.add(text, torch.full((), start), torch.full((), start + length))
        token += 21
        if length:
            everything += [*text[start : start + length].tolist()[-(size - 1) :], NOTHING]
    end = int(pool._next)
    assert pool.tokens[:-1].roll(-end).tolist() == everything[-size:]


def paths_of(draft: DraftOutput, row: int) -> list[tuple[int, ...]]:
    """Tokens from the anchor to every draft that counts."""
    assert draft.tree is not None and draft.num_drafts is not None
    found: list[tuple[int, ...]] = [()]
    for i in range(int(draft.num_drafts[row])):
        found.append((*found[draft.tree.parents[row, i]], int(draft.token_ids[row, i])))
    return found[1:]


def test_trees_hold_both_texts() -> None:
    """What followed in request and pool, the more probable first; the sum of shares."""
    text, past = [1, 2, 3, 4, 8, 1, 2, 3], [[1, 2, 3, 5, 6], [2, 3, 5, 7]]
    draft = propose(rig_of([text, [9]], past, max_draft_tokens=4), [text, [9]], BlockShape(7, 3))
    found = paths_of(draft, 0)
    # A match of m tokens goes on with probability m / (m + 1) for each; one that is shorter weighs
    # a quarter, the next one 0.9.
    once, twice = 0.9, 0.9**2 / 4
    shares = {
        (4,): 3 / 4,
        (5,): once * 3 / 4 + twice * 2 / 3,
        (4, 8): (3 / 4) ** 2,
        (5, 6): once * (3 / 4) ** 2,
    }
    shares |= {(4, 8, 1): (3 / 4) ** 3, (5, 7): twice * (2 / 3) ** 2}
    assert found == sorted(shares, key=lambda path: -shares[path])
    assert draft.forecast is not None and draft.forecast.tolist() == pytest.approx(
        [sum(shares.values()) / (1 + once + twice), 0]
    )
    assert paths_of(draft, 1) == []


@pytest.mark.parametrize(
    "shape", [BlockShape(3), BlockShape(5), BlockShape(12, 4), BlockShape(60, 5)], ids=str
)
def test_what_an_outlook_found_serves_the_drafts(shape: BlockShape) -> None:
    """Drafts are those without; only other requests, or more occurrences, search again."""
    # more occurrences than any shape takes
    many = torch.randint(1, 6, (99,), generator=torch.Generator().manual_seed(0)).tolist()
    texts, past = [many, [3, 1, 3, 1, 3], [0]], [[1, 2, 2, 3, 1], [3, 1, 2, 3, 3]]
    alone = propose(rig_of(texts, past, occurrences=16), texts, shape)
    rig = rig_of(texts, past, occurrences=16)
    batch = rig.batch([text[-1] for text in texts], [len(text) - 1 for text in texts], 5)
    assert isinstance(rig.bound, BoundSuffix)
    expected_accepted = rig.bound.expected_accepted(batch)
    chain = propose(rig_of(texts, past, occurrences=16), texts, BlockShape(5))
    assert chain.forecast is not None and expected_accepted.tolist() == chain.forecast.tolist()
    assert expected_accepted[0] > 0 == expected_accepted[2]
    found = rig.bound._found
    assert found is not None and found.serves(batch, 16) and not found.serves(batch, 17)
    assert not found.serves(replace(batch, slots=batch.slots.flip(0)), 16)
    batch.shape = shape
    draft = rig.bound.propose(batch)
    counts = alone.num_drafts
    assert (
        counts is not None
        and draft.num_drafts is not None
        and draft.num_drafts.tolist() == counts.tolist()
    )
    for row, count in enumerate(counts.tolist()):
        assert draft.token_ids[row, :count].tolist() == alone.token_ids[row, :count].tolist()
    assert (
        draft.forecast is not None
        and alone.forecast is not None
        and draft.forecast.tolist() == alone.forecast.tolist()
    )


@pytest.mark.parametrize("drafter", [SuffixDrafter(), NGramDrafter()], ids=["suffix", "ngram"])
def test_forecasts_only_when_asked(drafter: Any) -> None:
    """See `BoundDrafter.forecasts`."""
    rig = Rig(drafter, FakeVerifier(), num_reqs=1)
    rig.bound.begin(0, [1, 2, 1, 2, 1])
    for shape in (BlockShape(3), BlockShape(3, 3)):
        assert propose(rig, [[1, 2, 1, 2, 1]], shape).forecast is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens is 0"),
        ({"occurrences": 0}, "occurrences is 0"),
        ({"pool_tokens": -1}, "pool_tokens is -1; it must be at least 0"),
        ({"shortest": 3, "longest": 2}, "shortest is 3 and longest 2"),
        ({"longest": 65}, "longest 65; they must be ordered, from 1 to 64"),
    ],
)
def test_options(options: dict[str, int], message: str) -> None:
    """Numbers out of range are named."""
    with pytest.raises(InvalidInputError, match=message):
        SuffixDrafter(**options)


def test_path_is_refused() -> None:
    """There is no checkpoint to load, and a path is not silently ignored."""
    with pytest.raises(InvalidInputError, match="has no checkpoint; leave out 'some/where'"):
        load_suffix("some/where", verifier=FakeVerifier())
