"""Times of our engine's prefill and steps, apart, at a shape whose output means nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evals.roofline import synchronize
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, DraftSampling, EngineConfig
from specdec.base.errors import CapacityError
from specdec.engine.build import PREFILL_TOKENS_BESIDE
from specdec.engine.capture.buckets import batch_bucket
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request, Status
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from specdec.sampling.trees.trees import best_first

WARM_STEPS = 8
"""Steps of every request before the clock starts."""

ROOM = 2**62
"""Cache budget in bytes: whatever the requests need, refused where the device has less."""


CANDIDATES = 16
"""Drafts per position among which a tree chooses."""

TREE_DEPTH = 15
"""Drafts of a path of a tree."""

PLAIN = BlockShape(0)


class FreeDrafter(Drafter):
    """Random drafts, the same in every step, that take no time: the rest of a step is the target's.

    Args:
        depth: positions of which there are drafts.
    """

    draws_trees = True

    def __init__(self, depth: int) -> None:
        self.max_draft_tokens = depth

    def bind(
        self,
        verifier: Verifier,
        caches: Sequence[Any],
        *,
        max_num_seqs: int,
        max_len: int,
        draft_sampling: DraftSampling,
    ) -> BoundDrafter:
        generator = torch.Generator().manual_seed(1)
        shape = batch_bucket(max_num_seqs), self.max_draft_tokens, CANDIDATES
        first = torch.randint(verifier.vocab_size, (*shape[:2], 1), generator=generator)
        token_ids = (first + torch.arange(CANDIDATES)) % verifier.vocab_size  # siblings differ
        scores = torch.randn(shape, generator=generator).log_softmax(-1).sort(descending=True)[0]
        return _FreeDrafts(token_ids.to(verifier.device), scores.to(verifier.device))


class _FreeDrafts(BoundDrafter):
    """Candidates [most requests, depth, C], and their log-probabilities."""

    def __init__(self, token_ids: Tensor, scores: Tensor) -> None:
        self._token_ids, self._scores = token_ids, scores

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """See `BoundDrafter.propose`; a tree is built anew in every step."""
        part = slice(batch.num_reqs), slice(batch.shape.depth)
        token_ids, scores = self._token_ids[part], self._scores[part]
        if not batch.shape.is_tree:
            return DraftOutput(token_ids[:, :, 0].contiguous())
        best = best_first(scores, batch.k)
        return DraftOutput(token_ids.flatten(1).gather(1, best.places), tree=best.tree)


@dataclass(frozen=True, slots=True)
class Room:
    """What a sweep needs of an engine.

    Attributes:
        num_reqs: most requests at once.
        max_model_len: most tokens of prompt and output together.
    """

    num_reqs: int
    max_model_len: int

    @classmethod
    def of(
        cls, verifier: Verifier, num_reqs: int, prompt_tokens: int, steps: int, per_step: int = 2
    ) -> Room:
        """Room for so many prompts and steps; some requests decode while others are prefilled.

        Args:
            per_step: most tokens of a step for a request: one draft is accepted by chance at times.

        Raises:
            CapacityError: the model has no such length.
        """
        chunk = 512 if verifier.device.type == "cpu" else PREFILL_TOKENS_BESIDE
        early = -(-num_reqs * prompt_tokens // chunk) + 1
        most = prompt_tokens + per_step * (WARM_STEPS + steps + early)
        if most > verifier.max_model_len:
            raise CapacityError(
                f"prompts of {prompt_tokens:,} tokens and {steps} steps need {most:,} positions and"
                f" {verifier.name} has {verifier.max_model_len:,}; shorten the prompts, or raise"
                " max_position_embeddings in the config"
            )
        return cls(num_reqs, most)


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.output_token_ids) for request in requests)


class OwnSteps:
    """Our engine, plain or with drafts.

    Args:
        room: sizes the cache, and no larger.
        shape: of each request's block in a step; None has the engine choose it step by step.
        drafter: makes the drafts; None takes `FreeDrafter`.
        survival: rates of accepted drafts, see `StepRunner.force`; None leaves it to the target.

    Attributes:
        distinct: different tokens among those that the requests decoded last.
        tokens: that the timed steps put out.
    """

    name = "specdec"

    def __init__(
        self,
        verifier: Verifier,
        room: Room,
        *,
        shape: BlockShape | None = PLAIN,
        drafter: Drafter | None = None,
        survival: Sequence[Sequence[float]] | None = None,
        graphs: bool | None = None,
    ) -> None:
        if drafter is None and shape is not None and shape.drafts:
            drafter = FreeDrafter(shape.depth)
        config = EngineConfig(
            max_num_seqs=room.num_reqs,
            max_model_len=room.max_model_len,
            num_draft_tokens="auto" if shape is None or shape.is_tree else shape.drafts,
            tree_nodes=shape.drafts if shape is not None and shape.is_tree else None,
            graphs=graphs,
            cache=CacheConfig(memory_bytes=ROOM, prefix_caching=False),
        )
        self.engine = SpecEngine(verifier, drafter, config)
        if survival is not None:
            self.engine.runner.force(survival)
        self.distinct = self.tokens = 0

    def prefill(self, prompts: Sequence[list[int]]) -> float:
        """Seconds from the first request to the last one's first token."""
        synchronize(self.engine.verifier.device)
        started = time.perf_counter()
        self._submit(prompts, 1)
        self._drain()
        return time.perf_counter() - started

    def steps(self, prompts: Sequence[list[int]], count: int) -> float:
        """Seconds of `count` steps in which every prefilled prompt decodes."""
        requests = self._submit(prompts, self.engine.max_model_len - len(prompts[0]))
        while any(request.status is not Status.RUNNING for request in requests):
            self.engine.step()
        for _ in range(WARM_STEPS):
            self.engine.step()
        synchronize(self.engine.verifier.device)
        before = _num_tokens(requests)
        started = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        synchronize(self.engine.verifier.device)
        seconds = time.perf_counter() - started
        self.tokens = _num_tokens(requests) - before
        running = all(request.status is Status.RUNNING for request in requests)
        assert running, "a request ended while steps were timed"
        self.distinct = len({request.output_token_ids[-1] for request in requests})
        for request in requests:
            self.engine.abort(request)
        self._drain()
        return seconds

    def close(self) -> None:
        """Gives the memory back."""
        del self.engine
        gc.collect()  # captured steps and their engine refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _submit(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Request]:
        greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        samplings = [replace(greedy, seed=seed) for seed in range(len(prompts))]
        return [self.engine.add_request(*one) for one in zip(prompts, samplings, strict=True)]

    def _drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        synchronize(self.engine.verifier.device)
