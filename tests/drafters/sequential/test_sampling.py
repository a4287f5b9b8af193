"""Sampled drafts, token by token: a target drafting for itself is always right."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.sequential.drafter import SequentialDrafter
from drafters.sequential.network import Rows, SequentialNetwork
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import LayerSpec
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.core import DraftOutput, Verifier
from specdec.sampling.noise import Purpose, gumbel, stream
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import random_eagle3
from tests.drafters.sequential.toy import ToyNetwork, noted_run, toy_drafter
from tests.helpers.engines import finish
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts

K = 4
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
]


class SelfNetwork(SequentialNetwork):
    """The target as its own drafter, in layers of the cache of its own."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        return self.verifier.kv_specs

    @property
    def weight_bytes(self) -> int:
        return self.verifier.weight_bytes

    def forward(self, rows: Rows, caches: Sequence[Any], wanted: Tensor | None) -> Tensor:
        return self.verifier.forward(
            ForwardInput(rows.token_ids, rows.position_ids, rows.metadata, wanted), caches
        ).logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("draft_sampling", ["coupled", "probabilistic"])
def test_a_target_that_drafts_for_itself_is_right(draft_sampling: str) -> None:
    """All drafts are accepted, sampled too: noise and distributions are the target's."""
    verifier = paged_verifier(plain_model("llama"))
    drafter = SequentialDrafter(SelfNetwork(verifier), verifier, max_draft_tokens=K)
    for seed, kind in enumerate(KINDS):
        sampling = SamplingParams(max_tokens=5 * (K + 1) + 1, ignore_eos=True, seed=seed, **kind)
        _, requests, _ = noted_run(
            verifier, drafter, random_prompts(3), sampling=sampling, draft_sampling=draft_sampling
        )
        assert [request.num_emitted for request in requests] == [[K + 1] * 5] * 3, kind


def test_the_tree_of_one_draft_of_a_target_that_drafts_for_itself() -> None:
    """It is right; of larger ones the chain of the likeliest tokens need not be a likely path."""
    verifier = paged_verifier(plain_model("llama"))
    drafter = SequentialDrafter(SelfNetwork(verifier), verifier, max_draft_tokens=K)
    for seed, kind in enumerate(KINDS[:3]):
        sampling = SamplingParams(max_tokens=9, ignore_eos=True, seed=seed, **kind)
        _, requests, _ = noted_run(
            verifier,
            drafter,
            random_prompts(3),
            sampling=sampling,
            tree_nodes=1,
            num_draft_tokens="auto",
        )
        assert [request.num_emitted for request in requests] == [[2] * 4] * 3, kind


@pytest.mark.parametrize("count", [1, 5])
def test_trees_of_a_drafter_of_few_tokens(count: int) -> None:
    """No level has more paths than the drafter has tokens, however large the tree may be."""
    verifier, texts = paged_verifier(plain_model("llama")), []
    drafter = random_eagle3(verifier, 7, draft_vocab_size=count)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, seed=1, temperature=1.0)
    for shape in ({"num_draft_tokens": 1}, {"num_draft_tokens": "auto", "tree_nodes": 63}):
        _, requests, _ = noted_run(verifier, drafter, random_prompts(3), sampling=sampling, **shape)
        texts.append([request.output_token_ids for request in requests])
    assert texts[0] == texts[1]
    assert any(sum(request.num_drafted) for request in requests), "the tree has drafts"


@pytest.mark.parametrize(
    "kind", [{}, {"features": False}, {"parallel": True}, {"reduced": True}], ids=str
)
@pytest.mark.parametrize("draft_sampling", ["coupled", "greedy", "trees"])
def test_point_masses_leave_the_text_of_a_seed(kind: dict[str, Any], draft_sampling: str) -> None:
    """Output with a seed is that without drafts, in batches of requests of every kind."""
    verifier = paged_verifier(plain_model("llama"))
    params = [
        SamplingParams(max_tokens=16, seed=seed, ignore_eos=True, **KINDS[seed % 4])
        for seed in range(6)
    ]

    def texts(engine: SpecEngine) -> list[list[int]]:
        return finish(
            engine,
            *(
                engine.add_request(prompt, one)
                for prompt, one in zip(random_prompts(6), params, strict=True)
            ),
        )

    plain = texts(SpecEngine(verifier))
    options = (
        {"tree_nodes": 12, "num_draft_tokens": "auto"}
        if draft_sampling == "trees"
        else {"draft_sampling": draft_sampling}
    )
    engine, _, _ = noted_run(verifier, toy_drafter(verifier, K, **kind), [], **options)
    assert texts(engine) == plain


@pytest.mark.parametrize("draft_sampling", ["coupled", "probabilistic"])
def test_forecasts_are_of_the_drafts_own_probabilities(draft_sampling: str) -> None:
    """Those of each draft after the one before, with the noise where drafts know it."""
    verifier = paged_verifier(plain_model("llama"))
    drafter = SequentialDrafter(SelfNetwork(verifier), verifier, max_draft_tokens=K)
    forecasts: list[Tensor] = []

    def asking(engine: SpecEngine) -> None:
        bound = engine.runner.drafter
        assert bound is not None
        bound.forecasts, propose = True, bound.propose

        def proposing(batch: DecodeBatch) -> DraftOutput:
            output = propose(batch)
            assert output.forecast is not None
            forecasts.append(output.forecast)
            return output

        bound.propose = proposing  # type: ignore[method-assign]

    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, ignore_eos=True)
    _, _, noted = noted_run(
        verifier,
        drafter,
        random_prompts(3),
        sampling=params,
        draft_sampling=draft_sampling,
        prepare=asking,
    )
    for one, forecast in zip(noted, torch.cat(forecasts), strict=True):
        scores = one.logits
        if draft_sampling == "coupled":
            positions = torch.arange(one.length + 1, one.length + 1 + len(one.drafts))[None]
            scores = (
                scores
                + gumbel(stream(torch.tensor([1]), positions, Purpose.SAMPLE), verifier.vocab_size)[
                    0
                ]
            )
        own = scores.softmax(-1).gather(1, torch.tensor(one.drafts)[:, None])[:, 0]
        torch.testing.assert_close(forecast, own.cumprod(0).sum())


@torch.inference_mode()
def test_a_reduced_vocabulary_says_what_its_probabilities_are_of() -> None:
    """Drafts are tokens of the target, each with the probability that is stated."""
    verifier = paged_verifier(plain_model("llama"))
    drafter = toy_drafter(verifier, K, reduced=True)
    assert isinstance(drafter.network, ToyNetwork)
    outputs: list[DraftOutput] = []

    def listening(engine: SpecEngine) -> None:
        bound = engine.runner.drafter
        assert bound is not None
        propose = bound.propose

        def proposing(batch: DecodeBatch) -> DraftOutput:
            outputs.append(propose(batch))
            return outputs[-1]

        bound.propose = proposing  # type: ignore[method-assign]

    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    _, _, noted = noted_run(
        verifier,
        drafter,
        random_prompts(3),
        sampling=sampling,
        draft_sampling="probabilistic",
        prepare=listening,
    )
    rows = iter(noted)
    for output in outputs:
        assert output.probs is not None and output.candidate_ids is not None
        for tokens, probs, ids in zip(
            output.token_ids, output.probs, output.candidate_ids, strict=True
        ):
            torch.testing.assert_close(probs, next(rows).logits.softmax(-1))
            assert (ids == drafter.network.target_ids).all() and all(
                token in ids[0] for token in tokens
            )
