"""Sampled text does not depend on drafts, coupled to the target's noise or not."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dflash.coupling import Coupling
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.oracle import OracleDrafter, disturbed_logits
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model

SEEDS, MAX_TOKENS, K = 240, 12, 5

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.6, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
]
"""Every batch has requests of each."""

WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_draft_tokens": K},
    "tree of 5": {"tree_nodes": 5},
    "tree of 40": {"tree_nodes": 40},
    "weighted tree of 12": {"tree_nodes": 12},
}
COUPLING = Coupling(
    (0.7, 1.2),
    a=((0.8, 0.7, 0.7, 0.6, 0.5), (0.9, 0.8, 0.8, 0.8, 0.7)),
    b=((1.0, 0.6, 0.5, 0.4, 0.3),) * 2,
)


class Case:
    """A target, unlike prompts, what plain decoding writes, and logits to draft from."""

    def __init__(self) -> None:
        model = plain_model("llama")
        self.verifier: Verifier = paged_verifier(model)
        rest = torch.randint(
            3, VOCAB, (SEEDS, 5), generator=torch.Generator().manual_seed(1)
        ).tolist()
        self.prompts = [[3 + i % 94, 3 + i // 94, *rest[i][: i % 5]] for i in range(SEEDS)]
        self.plain = self.run(None, num_draft_tokens=None)
        texts = {
            tuple(request.prompt_token_ids): request.output_token_ids for request in self.plain
        }
        logits: Tensor = disturbed_logits(
            model, [request.token_ids for request in self.plain], spread=1.0
        )
        self.drafter, self.weighted = (
            OracleDrafter(texts, logits, K),
            OracleDrafter(texts, logits, K, COUPLING),
        )

    def run(self, drafter: Drafter | None, **changes: Any) -> list[Request]:
        """All seeds in one engine."""
        memory = CacheConfig(memory_bytes=2**26, prefix_caching=False)
        config = EngineConfig(
            **{"max_num_seqs": 120, "cache": memory, "num_draft_tokens": None, **changes}
        )
        engine = SpecEngine(self.verifier, drafter, config)
        requests = [
            engine.add_request(
                prompt,
                SamplingParams(
                    max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True, **KINDS[seed % len(KINDS)]
                ),
            )
            for seed, prompt in enumerate(self.prompts)
        ]
        finish(engine)
        return requests


@cache
def case() -> Case:
    return Case()


@cache
def drafted(way: str, draft_sampling: str) -> list[Request]:
    """All seeds, with drafts."""
    drafter = case().weighted if "weighted" in way else case().drafter
    return case().run(drafter, draft_sampling=draft_sampling, **WAYS[way])


def tau(requests: list[Request], kind: int) -> float:
    """Tokens per step of requests of one kind."""
    steps = [count for request in requests[kind :: len(KINDS)] for count in request.num_emitted]
    return sum(steps) / len(steps)


PAIRS = [(way, "coupled") for way in WAYS] + [
    pytest.param(way, "greedy", marks=pytest.mark.slow) for way in ("chain", "tree of 40")
]


@pytest.mark.parametrize(("way", "draft_sampling"), PAIRS)
def test_the_tokens_of_hundreds_of_seeds(way: str, draft_sampling: str) -> None:
    """Greedy and sampled requests with every filter in one batch: plain decoding's."""
    requests = drafted(way, draft_sampling)
    assert [request.output_token_ids for request in requests] == [
        request.output_token_ids for request in case().plain
    ]
    assert min(tau(requests, kind) for kind in range(len(KINDS))) > (
        1.05 if draft_sampling == "greedy" else 1.5
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["chain", "tree of 40"])
def test_coupling_accepts_more(way: str) -> None:
    """Of drafts for sampled requests; those for greedy ones are the same."""
    coupled, greedy = drafted(way, "coupled"), drafted(way, "greedy")
    assert tau(coupled, 0) == tau(greedy, 0)
    assert all(tau(coupled, kind) > 1.1 * tau(greedy, kind) for kind in range(1, len(KINDS)))
