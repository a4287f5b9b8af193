"""Whatever a head corrects, what comes out is plain decoding's; no step waits."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drafters.dflash.drafter import BoundDFlash
from drafters.dflash2.selector import SelectorConfig
from drafters.dspark.markov import MarkovConfig
from drafters.head import Head, HeadConfig, HeadSizes, Lattice
from drafters.lilicorr.lattice import LatticeConfig
from drafters.xpress.refiner import XPressConfig
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.guards import guard_steps
from tests.helpers.oracle import OracleDrafter, disturbed_logits
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts

SEEDS, MAX_TOKENS, K = 36, 12, 5
HEADS: dict[str, HeadConfig] = {
    "vanilla": MarkovConfig(4),
    "gated of few": MarkovConfig(4, "gated", draft_top_k=8),
    "rnn": MarkovConfig(4, "rnn", has_confidence=True),
    "selector": SelectorConfig(4, 8),
    "lattice": LatticeConfig(16, 8, num_heads=2, factor_dim=4),
    "refiner": XPressConfig(4, num_passes=2),
}
CASES = [
    ("vanilla", {"num_draft_tokens": K}),
    ("vanilla", {"tree_nodes": 12}),
    ("gated of few", {"num_draft_tokens": K}),
    ("rnn", {"num_draft_tokens": K}),
    ("rnn", {"tree_nodes": 20}),
    ("selector", {"num_draft_tokens": K}),
    ("selector", {"tree_nodes": 12, "draft_sampling": "greedy"}),
    ("refiner", {"num_draft_tokens": K}),
    ("refiner", {"num_draft_tokens": K, "verify_budget": 2}),
    ("refiner", {"tree_nodes": 20}),
]


def small_head(config: HeadConfig) -> Head:
    """Random weights that leave most of what the given logits say."""
    torch.manual_seed(1)
    model = nn.Module()
    for name, module in config.modules(HeadSizes(VOCAB, VOCAB, VOCAB, K + 1)).items():
        model.add_module(name, module.requires_grad_(False))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 if isinstance(config, XPressConfig) else 0.4)
    head = config.head(model, lambda tokens: tokens)
    assert not isinstance(head, Lattice), "one is given states, which an oracle lacks"
    return head


class Case:
    """A target, prompts, what plain decoding writes, and logits to draft from."""

    def __init__(self) -> None:
        model = plain_model("llama")
        self.verifier: Verifier = paged_verifier(model)
        self.prompts = [
            [3 + i % 90, 5, *prompt[:6]] for i, prompt in enumerate(random_prompts(SEEDS))
        ]
        self.plain = self.run(None, num_draft_tokens=None)
        self.texts = {
            tuple(request.prompt_token_ids): request.output_token_ids for request in self.plain
        }
        self.logits: Tensor = disturbed_logits(
            model, [request.token_ids for request in self.plain], spread=1.0
        )

    def run(self, drafter: Drafter | None, **changes: Any) -> list[Request]:
        """Every third request greedy, in one engine whose every step runs under the guard."""
        memory = CacheConfig(memory_bytes=2**24, prefix_caching=False)
        engine = SpecEngine(
            self.verifier, drafter, EngineConfig(max_num_seqs=20, cache=memory, **changes)
        )
        guard_steps(engine)
        requests = [
            engine.add_request(
                prompt,
                SamplingParams(
                    max_tokens=MAX_TOKENS,
                    temperature=(0.0, 1.0, 0.7)[seed % 3],
                    top_k=20,
                    seed=seed,
                    ignore_eos=True,
                ),
            )
            for seed, prompt in enumerate(self.prompts)
        ]
        finish(engine)
        return requests


@cache
def case() -> Case:
    return Case()


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_tokens_of_plain_decoding(name: str, shape: dict[str, Any]) -> None:
    """Greedy and sampled in one batch, in chains and trees of drafts that are often right."""
    drafter = OracleDrafter(case().texts, case().logits, K, head=small_head(HEADS[name]))
    requests = case().run(drafter, **shape)
    assert [request.output_token_ids for request in requests] == [
        request.output_token_ids for request in case().plain
    ]
    emitted = [count for request in requests for count in request.num_emitted]
    assert sum(emitted) / len(emitted) > 1.3 and 1 in emitted


@pytest.mark.parametrize("name", HEADS)
def test_drawn_drafts_of_a_whole_drafter(name: str) -> None:
    """A drafter with random weights, drawn from: greedy requests beside sampled ones are those of
    plain decoding; nothing waits.
    """
    size = K + (name in ("lattice", "refiner"))
    drafter = random_dflash(case().verifier, block_size=size, head=HEADS[name])
    requests = case().run(drafter, num_draft_tokens=K, draft_sampling="probabilistic")
    plain = case().plain
    assert [request.output_token_ids for request in requests[::3]] == [
        request.output_token_ids for request in plain[::3]
    ]
    assert all(len(request.output_token_ids) == MAX_TOKENS for request in requests)


@pytest.mark.parametrize("shape", [{"num_draft_tokens": K}, {"tree_nodes": 12}])
def test_a_refiner_is_told_the_token_before_the_anchor(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prompt, a path, a step without drafts: catches another row or request."""
    found, propose = set[tuple[int, int, int]](), BoundDFlash.propose

    def noted(self: BoundDFlash, batch: DecodeBatch) -> DraftOutput:
        assert self._before is not None
        told = batch.seq_lens, self._before.index_select(0, batch.slots), batch.anchors
        found.update(zip(*(numbers.tolist() for numbers in told), strict=True))
        return propose(self, batch)

    monkeypatch.setattr(BoundDFlash, "propose", noted)
    monkeypatch.setattr("tests.test_head_lossless.guard_steps", lambda engine: None)
    drafter = random_dflash(case().verifier, block_size=K + 1, head=HEADS["refiner"])
    requests = case().run(drafter, **shape)
    assert any(count > 1 for request in requests for count in request.num_emitted)
    texts = [[*request.prompt_token_ids, *request.output_token_ids] for request in requests]
    known = {(n, *text[n - 1 : n + 1]) for text in texts for n in range(1, len(text))}
    assert found <= known and len(found) > len(texts)
