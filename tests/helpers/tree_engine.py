"""A tiny target, scripted trees for it, and engines around both."""

from collections.abc import Iterable
from typing import Any

from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.core import Drafter
from specdec.sampling.params import SamplingParams
from tests.helpers import engines
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts
from tests.helpers.trees import Parents, random_trees

MAX_TOKENS, DRAFTS = 30, 14
Outputs = dict[tuple[int, ...], list[int]]
TREES: list[Parents] = random_trees(4, DRAFTS)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalized": {
        "repetition_penalty": 1.8,
        "frequency_penalty": 0.6,
        "logit_bias": {3: 2.0, 4: -2.0},
        "top_logprobs": 3,
    },
    "sampled": {"temperature": 0.8},
    "filtered": {
        "temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3,
        "logprobs": True,
    },
}  # fmt: skip


class TreeCase:
    """A target, prompts, and what plain decoding makes of them with each sampling."""

    def __init__(self, model: str = "llama", samplings: Iterable[str] = SAMPLINGS) -> None:
        self.verifier = paged_verifier(plain_model(model))
        self.prompts = random_prompts(4, seed=9)
        self.plain = {name: self.run(None, **SAMPLINGS[name]) for name in samplings}
        self.outputs = self.outputs_of("greedy")

    def outputs_of(self, sampling: str) -> Outputs:
        """By prompt."""
        return {
            tuple(request.prompt_token_ids): request.output_token_ids
            for request in self.plain[sampling]
        }

    def engine(self, drafter: Drafter | None, **changes: Any) -> SpecEngine:
        trees = {"tree_nodes": DRAFTS} if drafter else {}
        options = {"max_num_seqs": 4, "num_draft_tokens": None, **trees, **changes}
        return engines.tiny_engine(self.verifier, drafter, **options)

    def scripted(self, sampling: str = "greedy", **changes: Any) -> SpecEngine:
        """An engine whose drafter knows what `sampling` writes."""
        return self.engine(ScriptedTrees(self.outputs_of(sampling), TREES), **changes)

    def run(self, engine: SpecEngine | None, **sampling: Any) -> list[Request]:
        """All prompts, each with a seed of its own; without an engine plain."""
        engine = engine or self.engine(None)
        options = [
            {"max_tokens": MAX_TOKENS, "seed": seed, **sampling}
            for seed in range(len(self.prompts))
        ]
        requests = [
            engine.add_request(prompt, SamplingParams(**each))
            for prompt, each in zip(self.prompts, options, strict=True)
        ]
        return finish(engine, *requests)


def finish(engine: SpecEngine, *requests: Request) -> list[Request]:
    engines.finish(engine)
    assert engine.pool.num_used == 0
    return list(requests)


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]
