"""A slot's former request leaves nothing in the forwards of the next one: rows without a draft hold
no token of another user's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters.composed.drafter import ComposedDrafter
from drafters.draft_model.drafter import DraftModel
from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.engine.policy.block import Block
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import random_eagle3
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash

K = 5
THEIRS = range(60, 96)
"""Tokens of requests before; the next ones have none of them."""

DRAFTERS: dict[str, Callable[[Verifier], Drafter]] = {
    "ngram": lambda verifier: NGramDrafter(max_draft_tokens=K),
    "suffix": lambda verifier: SuffixDrafter(max_draft_tokens=K, pool_tokens=0),
    "suffix of one": lambda verifier: SuffixDrafter(
        max_draft_tokens=K, pool_tokens=0, occurrences=1
    ),
    "pooled suffix": lambda verifier: SuffixDrafter(
        max_draft_tokens=K, pool_tokens=400, shortest=2
    ),
    "dflash": lambda verifier: random_dflash(verifier, block_size=K + 1),
    "eagle3": lambda verifier: random_eagle3(verifier, K),
    "draft_model": lambda verifier: DraftModel(
        paged_verifier(plain_model("qwen3", 5)), verifier, max_draft_tokens=K
    ),
    "suffix+dflash": lambda verifier: ComposedDrafter(
        [
            SuffixDrafter(max_draft_tokens=K + 2, pool_tokens=0),
            random_dflash(verifier, block_size=K + 1),
        ]
    ),
}


@pytest.mark.parametrize(
    "shape", [{"num_draft_tokens": None}, {"tree_nodes": 9}], ids=["chain", "tree"]
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_without_a_draft_hold_no_foreign_token(
    name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a token of the request's own text, or 0."""
    verifier = paged_verifier(plain_model("llama"))
    bias = tuple((token, -100.0) for token in THEIRS)
    engine = tiny_engine(verifier, DRAFTERS[name](verifier), max_num_seqs=2, **shape)
    for _ in range(2):
        engine.add_request([*THEIRS] * 2, SamplingParams(max_tokens=9, ignore_eos=True))
    finish(engine)
    draft, spare = engine.runner.draft, 0
    found: list[int] = []

    def noting(batch: DecodeBatch) -> Block:
        nonlocal spare
        block = draft(batch)
        if block.draft is not None and block.draft.num_drafts is not None:
            rows = torch.arange(block.draft.token_ids.shape[1])
            beyond = block.draft.token_ids[rows >= block.draft.num_drafts[:, None]]
            spare += len(beyond)
            found.extend(set(beyond.tolist()) & set(THEIRS))
        return block

    monkeypatch.setattr(engine.runner, "draft", noting)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=12, logit_bias=bias))
        for prompt in ([5, 6, 7], [8], [9, 10])
    ]
    finish(engine)
    assert not found
    assert not {token for request in requests for token in request.output_token_ids} & set(THEIRS)
    assert spare or name in ("dflash", "eagle3", "draft_model"), (
        "the test needs rows without a draft"
    )
