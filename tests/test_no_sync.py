"""Nothing between draft and commit makes the host wait for the device."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters.composed.drafter import ComposedDrafter
from drafters.draft_model.drafter import DraftModel
from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.engine.engine import SpecEngine
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import random_eagle3
from tests.helpers.engines import finish
from tests.helpers.guards import HostSyncError, no_host_sync
from tests.helpers.scripted import BoundScript, ScriptedDrafter
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)
from tests.test_lossless import engine_config

MAX_TOKENS = 5

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {
        "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3, "logprobs": True,
    },
    "penalized": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "logit_bias": {3: 2.0},
        "min_tokens": 4,
        "top_logprobs": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "caught"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: bool(x.any()), True),
        (lambda x: x[x > 0], True),
        (lambda x: x.tolist(), True),
        (lambda x: torch.tensor([0]), True),
        (lambda x: x[torch.zeros_like(x)], False),
    ],
)
def test_the_guard_works(spoil: Callable[[torch.Tensor], Any], caught: bool) -> None:
    """The guard raises for each kind of wait, and for nothing else."""
    tensor = torch.arange(3)
    with no_host_sync():
        if caught:
            with pytest.raises(HostSyncError):
                spoil(tensor)
        else:
            spoil(tensor)


def guarded_run(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampling: SamplingParams,
    draft_sampling: str = "greedy",
) -> list[list[int]]:
    """Outputs of an engine whose every launch runs under the guard."""
    engine = SpecEngine(
        verifier, drafter, engine_config(3, pipeline_depth=1, draft_sampling=draft_sampling)
    )
    engine.runner.host_may_look = False  # as on an accelerator
    launch, launches = engine.runner.step, []

    def guarded(batch: DecodeBatch) -> Any:
        launches.append(batch.k)
        with no_host_sync():
            return launch(batch)

    engine.runner.step = guarded  # type: ignore[method-assign]
    requests = [engine.add_request(prompt, sampling) for prompt in prompts]
    finish(engine)
    assert launches
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        # which begin where a model ends: one each of the others
        *itertools.product(["llama"], SAMPLINGS),
        pytest.param("gemma3", "penalized", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "filtered", marks=pytest.mark.slow),
        ("deepseek_v2", "greedy"),
        ("glm_moe_dsa", "greedy"),
    ],
)
def test_step_never_waits(name: str, sampling: str) -> None:
    """Draft, verify, accept and commit under the guard, results read one step late, with every
    sampling feature.
    """
    model = plain_model(name)
    prompts = random_prompts(2)
    outputs = {tuple(p): plain_greedy(model, p, MAX_TOKENS) for p in prompts}
    params, verifier = (
        SamplingParams(max_tokens=MAX_TOKENS, **SAMPLINGS[sampling]),
        paged_verifier(model),
    )
    scripted, eagle3 = ScriptedDrafter(outputs, 3, [{1}]), random_eagle3(verifier, 3)
    copying = (NGramDrafter(max_draft_tokens=3), SuffixDrafter(max_draft_tokens=3))
    small = DraftModel(
        paged_verifier(plain_model("llama", 5, max_position_embeddings=20)),
        verifier,
        max_draft_tokens=3,
    )
    composed = ComposedDrafter([*copying, random_dflash(verifier)])
    alone = copying if sampling == "greedy" else ()  # a composition has them too
    for drafter in (None, scripted, *alone, composed, eagle3, small):
        guarded_run(verifier, drafter, prompts, params)
    for drafter in (random_dflash(verifier), eagle3):  # others have no distribution
        guarded_run(verifier, drafter, prompts, params, "probabilistic")


def test_sync_in_a_drafter_is_caught() -> None:
    """A drafter that looks at a value on the host fails the test above."""

    class PeekingScript(BoundScript):
        def propose(self, batch: DecodeBatch) -> Any:
            assert batch.anchors[0].item() < VOCAB
            return super().propose(batch)

    class PeekingDrafter(ScriptedDrafter):
        def bind(self, verifier: Verifier, caches: Any, **run: Any) -> BoundScript:
            return PeekingScript(self, verifier, run["max_num_seqs"], run["max_len"])

    model, prompt = plain_model("llama"), random_prompts(1)[0]
    drafter = PeekingDrafter({tuple(prompt): plain_greedy(model, prompt, MAX_TOKENS)}, 3)
    with pytest.raises(HostSyncError):
        guarded_run(paged_verifier(model), drafter, [prompt], SamplingParams(max_tokens=8))
