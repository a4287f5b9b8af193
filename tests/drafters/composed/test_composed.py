"""Compositions: who drafts, and that no output depends on it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import pooled
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from specdec.sampling.trees.trees import best_first
from specdec.session.drafter_choice import find_drafter
from tests.drafters.composed.rig import Fixed, rig_of
from tests.drafters.eagle3.heads import random_eagle3
from tests.drafters.tiny import FakeVerifier, Rig
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.guards import no_host_sync
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)


def test_the_highest_forecast_drafts() -> None:
    """For every request; of equal ones the first part; fewer drafts are filled up."""
    rig = rig_of(
        Fixed([3, 4, 5, 6], [2.0, 0.5]), Fixed([7, 8], [1.5, 0.6]), Fixed([9, 10, 11], None)
    )
    batch = rig.batch([1, 1], [3, 3], 4)
    with no_host_sync():
        draft = rig.bound.propose(batch)
    assert draft.token_ids.tolist() == [[3, 4, 5, 6], [7, 8, 0, 0]]
    assert draft.num_drafts is not None and draft.num_drafts.tolist() == [4, 2]
    assert draft.part is not None and draft.part.tolist() == [0, 1] and draft.forecast is None
    rig = rig_of(Fixed([3, 4], [1.0, 1.0]), Fixed([7, 8], [1.0, 1.0]))
    rig.bound.forecasts = True
    draft = rig.bound.propose(rig.batch([1, 1], [3, 3], 1))
    assert (
        draft.token_ids.tolist() == [[3], [3]]
        and draft.forecast is not None
        and draft.forecast.tolist() == [1, 1]
    )


class Foresighted(Fixed):
    """It expects the same of every text before it drafts."""

    has_expected_accepted = True

    def expected_accepted(self, batch: DecodeBatch) -> Tensor | None:
        return self.promised


def test_the_highest_outlook_counts() -> None:
    """Of the parts that have one; a composition of others has none."""
    rig = rig_of(
        Fixed([3, 4, 5, 6], [9.0, 9.0]),
        Foresighted([7, 8], [2.0, 0.5]),
        Foresighted([7, 8, 9], [1.0, 0.6]),
    )
    expected_accepted = rig.bound.expected_accepted(rig.batch([1, 1], [3, 3], 4))
    assert (
        rig.bound.has_expected_accepted
        and expected_accepted is not None
        and expected_accepted.tolist() == pytest.approx([2.0, 0.6])
    )
    rig = rig_of(Fixed([3, 4], [9.0, 9.0]), Fixed([7, 8], [2.0, 0.5]))
    assert (
        not rig.bound.has_expected_accepted
        and rig.bound.expected_accepted(rig.batch([1, 1], [3, 3], 2)) is None
    )


def test_every_part_gets_its_layers() -> None:
    """Of the layers that are tapped for all of them; the cache is shared out in the same order."""
    one, two, three = Fixed([1, 2], [1.0], (4, 1)), Fixed([1], [0.0]), Fixed([1], [0.0], (1, 7))
    drafter = ComposedDrafter([one, two, three])
    assert drafter.aux_layer_ids == (4, 1, 7)
    rig = Rig(drafter, FakeVerifier(), num_reqs=1)
    width = FakeVerifier().hidden_size
    hidden = torch.arange(2.0)[:, None] + 100 * torch.tensor([4.0, 1.0, 7.0]).repeat_interleave(
        width
    )
    rig.commit(rig.batch([1], [3], 1), torch.tensor([[1, 1]]), [0], hidden)
    for part in (one, three):
        aux = part.committed[0].aux_hidden
        assert aux is not None
        assert aux[:, ::width].tolist() == [
            [100 * layer + row for layer in part.aux_layer_ids] for row in range(2)
        ]


TAPS = {"one": (0, 2, 3), "other": (1, 3)}


@pytest.fixture(scope="module")
def case() -> tuple[Verifier, dict[tuple[int, ...], list[int]]]:
    model = plain_model("llama")
    return paged_verifier(model), {tuple(p): plain_greedy(model, p, 30) for p in random_prompts(5)}


def decoded(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    **changes: Any,
) -> tuple[list[Request], SpecEngine]:
    """All prompts at once."""
    options = {"num_draft_tokens": None, **changes}
    engine = tiny_engine(verifier, drafter, max_num_seqs=3, max_prefill_tokens=13, **options)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=30, seed=seed, **sampling))
        for seed, prompt in enumerate(prompts)
    ]
    finish(engine)
    return requests, engine


WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"tree_nodes": 9},
    "chosen": {"num_draft_tokens": "auto"},
    "uncoupled": {"draft_sampling": "greedy", "pipeline_depth": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
def test_output_is_that_of_plain_decoding(
    case: tuple[Verifier, dict[tuple[int, ...], list[int]]], way: str, sampling: dict[str, Any]
) -> None:
    """Copies beside models that tap other layers and draft fewer, one token by token."""
    verifier, prompts = case[0], [list(prompt) for prompt in case[1]]
    models = [
        random_dflash(verifier, block_size=4 + seed, seed=seed, taps=taps)
        for seed, taps in enumerate(TAPS.values())
    ]
    drafter = ComposedDrafter(
        [SuffixDrafter(max_draft_tokens=9, pool_tokens=200), *models, random_eagle3(verifier, 3)]
    )
    requests, _ = decoded(verifier, drafter, prompts, sampling, **WAYS[way])
    plain, _ = decoded(verifier, None, prompts, sampling)
    assert [request.output_token_ids for request in requests] == [
        request.output_token_ids for request in plain
    ]
    assert sampling or [request.output_token_ids for request in requests] == list(case[1].values())


def test_the_better_part_comes_to_draft_and_is_told(
    case: tuple[Verifier, dict[tuple[int, ...], list[int]]],
) -> None:
    """Neither promises anything; the second is right, and statistics say so."""
    verifier, outputs = case
    drafter = ComposedDrafter([ScriptedDrafter(outputs, 4, [{0}]), ScriptedDrafter(outputs, 4)])
    specs = sum(spec.bytes_per_token(verifier.dtype) for spec in verifier.kv_specs)
    requests, engine = decoded(
        verifier,
        drafter,
        [list(p) for p in outputs],
        {},
        cache=CacheConfig(memory_bytes=22 * 4 * specs),
    )
    assert engine.scheduler.num_preemptions > 0
    assert [request.output_token_ids for request in requests] == list(outputs.values())
    (wrong, right) = pooled(_stats(request) for request in requests).by_part
    assert 1 <= wrong[0] <= 3 and wrong[1] == 0
    assert right[0] > 20 and right[1] > 3
    assert {request.parts[-1] for request in requests} == {1}


def _stats(request: Request) -> Any:
    from specdec.session.outputs import GenerationResult

    return GenerationResult.of(request, "").stats


def test_a_reset_forgets_past_outputs(
    case: tuple[Verifier, dict[tuple[int, ...], list[int]]],
) -> None:
    """The same prompt takes fewer steps the second time, and after a reset as many as at first:
    passes of a benchmark are alike.
    """
    verifier, prompts = case[0], [list(prompt) for prompt in case[1]]
    engine = tiny_engine(
        verifier,
        ComposedDrafter([SuffixDrafter(), ScriptedDrafter(case[1], 4, [{0}])]),
        max_num_seqs=1,
        num_draft_tokens=4,
    )
    steps = []
    for turn in range(3):
        if turn == 2:
            engine.reset()
        request = engine.add_request(prompts[0], SamplingParams(max_tokens=30))
        finish(engine)
        steps.append(len(request.num_emitted))
    assert steps[1] < steps[0] == steps[2]


def test_names_with_a_plus_are_composed() -> None:
    """In the order of their names; each is looked up before a target is loaded."""
    drafter = find_drafter("suffix+ngram")(FakeVerifier())
    assert isinstance(drafter, ComposedDrafter)
    assert [type(part).__name__ for part in drafter.parts] == ["SuffixDrafter", "NGramDrafter"]
    assert drafter.max_draft_tokens == 31 and drafter.draws_trees
    for name, message in (
        ("suffix+nothing", "unknown drafter 'nothing'"),
        ("suffix+", "write names with"),
        ("none+ngram", "such as"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            find_drafter(name)


def test_what_cannot_be_composed() -> None:
    """A single drafter, and drafts that are drawn."""
    with pytest.raises(InvalidInputError, match="has 1 drafter; name two or more"):
        ComposedDrafter([SuffixDrafter()])
    with pytest.raises(
        InvalidInputError,
        match="'probabilistic' and composed drafters give point masses; choose 'coupled'",
    ):
        Rig(
            ComposedDrafter([SuffixDrafter(), SuffixDrafter()]),
            FakeVerifier(),
            draft_sampling="probabilistic",
        )


def test_trees_of_different_depths() -> None:
    """A part that drafts fewer positions makes a tree as large and less deep."""
    parts = [SuffixDrafter(max_draft_tokens=6), SuffixDrafter(max_draft_tokens=2)]
    rig = rig_of(*parts)
    rig.bound.begin(0, [1, 2, 3, 4, 5, 6, 1, 2])
    batch = rig.batch([2, 2], [7, 1], 6)
    batch.shape = BlockShape(6, 6)
    with no_host_sync():
        draft = rig.bound.propose(batch)
    assert (
        draft.tree is not None
        and draft.num_drafts is not None
        and draft.num_drafts.tolist() == [6, 0]
    )
    assert draft.token_ids[0].tolist() == [3, 4, 5, 6, 1, 2] and draft.tree.depths[0].tolist() == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip


class Star(Fixed):
    """Its tokens are candidates for one position, the first with 0.5, the next with half."""

    draws_trees = True

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        scores = torch.log(0.5 ** torch.arange(1.0, 1 + batch.k)).expand(batch.num_reqs, 1, -1)
        best = best_first(scores, batch.k)
        tokens = self.tokens.expand(batch.num_reqs, -1).gather(1, best.places)
        return DraftOutput(
            tokens, tree=best.tree, scores=best.scores, forecast=best.scores.exp().sum(dim=1)
        )


def test_trees_are_united_as_far_as_they_are_trusted() -> None:
    """The best of both at first; what is never accepted gives way; whose it was is told."""
    rig = rig_of(Star([3, 4, 5, 6], None), Star([13, 14, 5, 16], None))
    found, parts = [], []
    for _ in range(12):
        batch = rig.batch([1, 1], [3, 3], 4)
        batch.shape = BlockShape(4, 1)
        with no_host_sync():
            draft = rig.bound.propose(batch)
        assert draft.part is not None
        found.append(draft.token_ids[0].tolist())
        output = torch.tensor([[13, 0]] * 2)
        accept = type("Accept", (), {"token_ids": output, "num_accepted": torch.tensor([1, 1])})()
        rig.bound.commit(
            batch,
            torch.cat([batch.anchors[:, None], output[:, :1]], dim=1),
            accept,
            VerifyOutput(torch.zeros(0)),
        )
        parts.append(draft.part.tolist())
    assert found[0] == [3, 13, 4, 14] and found[-1][:3] == [13, 14, 5] and parts[-1] == [1, 1]


def test_trees_without_scores_are_refused() -> None:
    """There is no telling which of their paths belong into a union."""

    class Unscored(Star):
        def propose(self, batch: DecodeBatch) -> DraftOutput:
            return replace(super().propose(batch), scores=None)

    rig = rig_of(Star([3, 4], None), Unscored([3, 4], None))
    batch = rig.batch([1, 1], [3, 3], 2)
    batch.shape = BlockShape(2, 1)
    with pytest.raises(InvalidInputError, match=r"without DraftOutput\.scores; use tree_nodes=0"):
        rig.bound.propose(batch)
