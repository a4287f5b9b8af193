"""The n-gram drafter against hand-written cases and a plain Python search."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngram import NGramDrafter, load_ngram
from drafters.suffix.choice import BY_AGE, BY_LENGTH
from drafters.suffix.drafter import TREE_OCCURRENCES
from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.model.core import DraftOutput
from specdec.sampling.params import SamplingParams
from specdec.sampling.trees.trees import walk
from tests.drafters.tiny import BLOCK, FakeVerifier, Rig, tiny_target
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.guards import no_host_sync
from tests.helpers.tiny_models import paged_verifier, plain_greedy


def naive(tokens: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """Drafts by the definition: longest, then latest match, copied with wrap-around."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[-n:]:
                copied = list(tokens)
                for i in range(k):
                    copied.append(copied[end + 1 + i])
                return copied[len(tokens) :]
    return []


def propose(texts: list[list[int]], k: int, **options: int) -> list[list[int]]:
    """Drafts for texts whose last token is the anchor."""
    drafter = NGramDrafter(max_draft_tokens=8, **options)
    rig = Rig(drafter, FakeVerifier(), num_reqs=len(texts))
    for slot, text in enumerate(texts):
        rig.bound.begin(slot, text)
    draft = rig.bound.propose(
        rig.batch([text[-1] for text in texts], [len(text) - 1 for text in texts], k)
    )
    assert draft.num_drafts is not None and draft.token_ids.shape == (len(texts), k)
    assert draft.token_ids.min() >= 0
    assert set(draft.num_drafts.tolist()) <= {0, k}
    return [
        row[:count]
        for row, count in zip(draft.token_ids.tolist(), draft.num_drafts.tolist(), strict=True)
    ]


def tree_of(texts: list[list[int]], shape: BlockShape, **options: int) -> DraftOutput:
    """The tree for texts whose last token is the anchor."""
    rig = Rig(NGramDrafter(**options), FakeVerifier(), num_reqs=len(texts))
    for slot, text in enumerate(texts):
        rig.bound.begin(slot, text)
    batch = rig.batch([text[-1] for text in texts], [len(text) - 1 for text in texts], shape.drafts)
    batch.shape = shape
    with no_host_sync():
        return rig.bound.propose(batch)


def paths_of(draft: DraftOutput, row: int) -> list[tuple[int, ...]]:
    """Tokens from the anchor to every draft that counts."""
    assert draft.tree is not None and draft.num_drafts is not None
    found: list[tuple[int, ...]] = [()]
    for i in range(int(draft.num_drafts[row])):
        found.append((*found[draft.tree.parents[row, i]], int(draft.token_ids[row, i])))
    return found[1:]


def naive_shares(
    tokens: list[int], depth: int, most: int, longest: int, shortest: int
) -> dict[tuple[int, ...], float]:
    """Probability of every path that follows one of the `most` best matches, by the definition."""
    matches = []
    for end in range(len(tokens) - 1):
        lengths = [
            n
            for n in range(1, min(longest, end + 1) + 1)
            if tokens[end - n + 1 : end + 1] == tokens[-n:]
        ]
        if lengths and max(lengths) >= shortest:
            matches.append((max(lengths), end))
    shares: dict[tuple[int, ...], float] = {}
    matches = sorted(matches, reverse=True)[:most]
    weights = [BY_LENGTH**n * BY_AGE**age for age, (n, _) in enumerate(matches)]
    for weight, (n, end) in zip(weights, matches, strict=True):
        copied = list(tokens)
        for i in range(depth):
            copied.append(copied[end + 1 + i])
            path = tuple(copied[len(tokens) :])
            shares[path] = shares.get(path, 0.0) + weight / sum(weights) * (n / (n + 1)) ** (i + 1)
    return shares


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),  # the simple case
        ([1, 2, 3, 9, 2, 5, 1, 2], [3, 9, 2, 5]),  # a longer match before a later one
        ([7, 1, 5, 7, 2, 5, 7], [2, 5, 7, 2]),  # the later of two equal ones
        ([4, 4], [4, 4, 4, 4]),  # a continuation that is the anchor itself
        ([9, 1, 2, 1, 2, 1], [2, 1, 2, 1]),  # period of two
        ([1, 2, 3, 1, 2, 3, 1], [2, 3, 1, 2]),  # period of three
        ([1, 2, 3, 4], []),  # nothing repeats
        ([5], []),  # nothing before the anchor
    ],
)
def test_by_hand(text: list[int], drafts: list[int]) -> None:
    """What the drafter is for, and its edges."""
    assert propose([text], 4) == [drafts]


def test_shortest_match() -> None:
    """Matches below prompt_lookup_min do not count."""
    assert propose([[1, 2, 3, 4, 2], [1, 2, 3, 1, 2]], 2, prompt_lookup_min=2) == [[], [3, 1]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4),
    k=st.integers(1, 8),
    limits=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_against_plain_python(texts: list[list[int]], k: int, limits: list[int]) -> None:
    """Random texts over few tokens, ragged batches, every k, every range of n."""
    shortest, longest = limits
    expected = [naive(text, k, longest, shortest) for text in texts]
    assert propose(texts, k, prompt_lookup_max=longest, prompt_lookup_min=shortest) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4),
    shape=st.sampled_from(
        [BlockShape(3, 3), BlockShape(16, 8), BlockShape(40, 4), BlockShape(64, 1)]
    ),
    limits=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_trees_against_plain_python(
    texts: list[list[int]], shape: BlockShape, limits: list[int]
) -> None:
    """The likeliest paths behind the best matches; more where they fill no tree."""
    shortest, longest = limits
    most = max(TREE_OCCURRENCES, -(-shape.drafts // shape.depth))
    draft = tree_of(
        texts,
        shape,
        max_draft_tokens=shape.depth,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
    )
    for row, text in enumerate(texts):
        shares = naive_shares(text, shape.depth, most, longest, shortest)
        found = paths_of(draft, row)
        assert len(set(found)) == len(found) == min(shape.drafts, len(shares))
        best = sorted(shares.values(), reverse=True)[: len(found)]
        assert sum(shares[path] for path in found) == pytest.approx(sum(best), rel=1e-5)


def test_a_tree_holds_what_a_chain_misses() -> None:
    """The text went on in two ways; the chain is the later, the target takes the earlier."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 9, 1, 2, 3]
    assert propose([text], 4) == [[7, 8, 9, 1]]
    draft = tree_of([text, [5]], BlockShape(12, 4))
    assert {(7, 8, 9, 1), (4, 5, 6, 1)} <= set(paths_of(draft, 0)) and paths_of(draft, 1) == []
    follower = {(): 4, (4,): 5, (4, 5): 6, (4, 5, 6): 1}
    target_ids = torch.tensor([[follower.get(path, 0) for path in [(), *paths_of(draft, 0)]]])
    target_ids = torch.nn.functional.pad(target_ids, (0, 13 - target_ids.shape[1])).repeat(2, 1)
    assert draft.tree is not None
    _, num_accepted = walk(draft.token_ids, draft.tree, target_ids, 4, draft.num_drafts)
    assert num_accepted.tolist() == [4, 0]


def test_a_longer_match_weighs_more() -> None:
    """Than shorter ones, equal ones by age: with one draft, the tree is the chain's first."""
    texts = [[1, 2, 3, 9, 2, 5, 9, 2, 5, 1, 2], [7, 1, 5, 7, 2, 5, 7]]
    draft = tree_of(texts, BlockShape(1, 1))
    assert draft.token_ids.tolist() == [[3], [2]]


def test_over_several_steps() -> None:
    """History grows by what was accepted; drafts, old requests and slots leave no trace."""
    drafter = NGramDrafter(prompt_lookup_max=4)
    rig = Rig(drafter, FakeVerifier(), num_reqs=3)
    generator = torch.Generator().manual_seed(1)

    def random(n: int, high: int = 4) -> list[int]:
        return torch.randint(0, high, (n,), generator=generator).tolist()

    for slot in range(3):
        rig.bound.begin(slot, random(80))  # an earlier, longer request
    texts = [random(12), random(3), random(7)]
    for slot, text in enumerate(texts):
        rig.bound.begin(slot, text)
    order = [2, 0]  # one request has finished
    for step in range(12):
        k = (5, 3, 8)[step % 3]
        batch = rig.batch([texts[r][-1] for r in order], [len(texts[r]) - 1 for r in order], k)
        batch.slots = torch.tensor(order)
        draft = rig.bound.propose(batch)
        assert draft.num_drafts is not None
        rows = []
        for row, r in enumerate(order):
            expected = naive(texts[r], k, 4, 1)
            assert draft.token_ids[row, : draft.num_drafts[row]].tolist() == expected
            rows.append([texts[r][-1], *random(k, 4)])
        accepted = [min(k, n) for n in random(2, 4)]
        rig.commit(batch, torch.tensor(rows), accepted)
        for row, r in enumerate(order):
            texts[r] += [*rows[row][1 : accepted[row] + 1], *random(1)]


def test_never_waits() -> None:
    """Draft and commit keep every value on the device."""
    drafter = NGramDrafter()
    rig = Rig(drafter, FakeVerifier())
    rig.bound.begin(0, [1, 2, 3, 1, 2])
    rig.bound.begin(1, [1, 2, 3])
    batch, accepted = rig.batch([2, 3], [4, 2], 5), torch.tensor([1, 0])
    with no_host_sync():
        draft = rig.bound.propose(batch)
        rig.commit_tensors(
            batch, torch.cat([batch.anchors[:, None], draft.token_ids], dim=1), accepted
        )


@pytest.mark.parametrize(
    "shape", [{"num_draft_tokens": None}, {"tree_nodes": 16}, {}], ids=["chain", "tree", "chosen"]
)
def test_in_the_engine(shape: dict[str, Any]) -> None:
    """Real steps: plain decoding's tokens, greedy in fewer steps and sampled."""
    target = tiny_target()
    verifier = paged_verifier(target, block_size=BLOCK)
    prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 7, 8]]
    params = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=3)]

    def outputs(drafter: NGramDrafter | None, **options: Any) -> tuple[list[list[int]], int]:
        engine = tiny_engine(verifier, drafter, max_num_seqs=2, max_model_len=128, **options)
        requests = [engine.add_request(prompt, one) for one in params for prompt in prompts]
        finish(engine)
        for request in requests:
            assert all(
                a <= n <= 8 for a, n in zip(request.num_accepted, request.num_drafted, strict=True)
            )
        return [request.output_token_ids for request in requests], sum(
            len(request.num_emitted) for request in requests[:3]
        )

    (tokens, steps), (plain, _) = outputs(load_ngram(verifier=verifier), **shape), outputs(None)
    assert tokens == plain and tokens[:3] == [
        plain_greedy(target, prompt, 60) for prompt in prompts
    ]
    if shape:
        assert steps < 0.8 * 3 * 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens is 0"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        (
            {"prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "prompt_lookup_min is 3 and prompt_lookup_max 2",
        ),
    ],
)
def test_options(options: dict[str, int], message: str) -> None:
    """Numbers out of range are named."""
    with pytest.raises(InvalidInputError, match=message):
        NGramDrafter(**options)


def test_path_is_refused() -> None:
    """There is no checkpoint to load, and a path is not silently ignored."""
    with pytest.raises(InvalidInputError, match="has no checkpoint; leave out 'some/where'"):
        load_ngram("some/where", verifier=FakeVerifier())
