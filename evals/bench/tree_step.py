"""The tree of one step of a short run, so that a report can show how drafts hang together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from evals.prompt_sets import PromptSet
from evals.runner import max_total_tokens, run_set
from specdec.base.config import CacheConfig, EngineConfig
from specdec.model.batch import DecodeBatch, PrefillBatch
from specdec.model.core import AcceptOutput, BoundDrafter, Drafter, DraftOutput, VerifyOutput
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder

MAX_TOKENS = 64
"""Output tokens of the run, at most."""


class RecordingDrafter(BoundDrafter):
    """Another drafter, whose trees and what became of them are copied to the host, which waits.

    Attributes:
        steps: the entries of `tree_step`, with token ids for texts, of each batch's first request.
    """

    def __init__(self, drafter: BoundDrafter) -> None:
        self.steps: list[dict[str, Any]] = []
        self.max_deferred = drafter.max_deferred
        self._drafter = drafter
        self._draft: DraftOutput | None = None

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self._drafter.begin(slot, token_ids)

    def prefill(self, batch: PrefillBatch, verify: VerifyOutput) -> None:
        self._drafter.prefill(batch, verify)

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        self._draft = self._drafter.propose(batch)
        return self._draft

    def commit(
        self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput, verify: VerifyOutput
    ) -> None:
        self._drafter.commit(batch, token_ids, accept, verify)
        draft, self._draft = self._draft, None  # a step without drafts proposes none
        if draft is None or draft.tree is None or accept.path is None:
            return
        tree = draft.tree
        count = draft.token_ids.shape[1] if draft.num_drafts is None else int(draft.num_drafts[0])
        step = {"tokens": [int(batch.anchors[0]), *draft.token_ids[0, :count].tolist()]}
        step["parents"] = tree.parents[0, :count].tolist()
        step["ranks"] = tree.ranks[0, :count].tolist()
        step["accepted"] = accept.path[0, 1 : 1 + int(accept.num_accepted[0])].tolist()
        self.steps.append(step | {"next_token": int(accept.next_anchors[0])})


def tree_step(
    base: SpecDecoder,
    drafter: Drafter,
    prompts: PromptSet,
    sampling: SamplingParams,
    num_nodes: int,
    *,
    raw: bool = False,
) -> dict[str, Any] | None:
    """A step of the set's first question: of those that accept a draft which is not its position's
    likeliest, if there are any, the one that accepts most.

    An engine of its own decodes the question, without captured steps: a recorder looks on.

    Returns:
        `prompt` (its id), `step` (from 1) of `num_steps`; `tokens`, texts by row of the block, that
        of the anchor first; by draft `parents` (rows) and `ranks` (from 0); `accepted` (rows); and
        `next_token`, the target's own. None of an answer without drafts.
    """
    first = prompts.items[0]
    question = replace(prompts, items=(replace(first, turns=first.turns[:1]),))
    sampling = sampling.at_most(MAX_TOKENS)
    longest = max_total_tokens(base, question, sampling.max_tokens, raw=raw)
    engine = EngineConfig(
        max_num_seqs=1,
        max_model_len=min(longest, base.verifier.max_model_len),
        num_draft_tokens=None,
        tree_nodes=num_nodes,
        graphs=False,
        pipeline_depth=0,  # no step is launched that the answer does not need
        cache=CacheConfig(prefix_caching=False),
    )
    decoder = base.variant(drafter, engine)
    runner = decoder.engine.runner
    assert runner.drafter is not None, "a tree has drafts"
    runner.drafter = recorder = RecordingDrafter(runner.drafter)
    run_set(decoder, question, sampling, raw=raw)
    steps = recorder.steps
    if not any(step["parents"] for step in steps):
        return None
    branches = [any(step["ranks"][row - 1] for row in step["accepted"]) for step in steps]
    lengths = [(len(step["accepted"]), len(step["parents"])) for step in steps]
    chosen = max(range(len(steps)), key=lambda n: (branches[n], *lengths[n]))
    found = steps[chosen]
    tokens = [base.tokenizer.decode([token_id]) for token_id in found["tokens"]]
    next_token = base.tokenizer.decode([found["next_token"]])
    where = {"prompt": first.item_id, "step": chosen + 1, "num_steps": len(steps)}
    return where | found | {"tokens": tokens, "next_token": next_token}
