"""What becomes a request: prompts and wishes that target, cache and grammars can fulfil."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

from specdec.base.errors import CapacityError, InvalidInputError, shown
from specdec.engine.requests.request import Request
from specdec.grammar.compiler import GrammarCompiler
from specdec.kv_cache import blocks_for
from specdec.model.core import ContextLimits, LengthRule, Verifier
from specdec.sampling.params import SamplingDefaults, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """What there is to know of a target where it is not; see `specdec.model.core.Verifier`."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    media_token_ids: Mapping[int, str]
    defaults: SamplingDefaults
    length_rule: LengthRule | None
    context: ContextLimits


OnTokens = Callable[[Request, list[int]], int | None]


class Admission:
    """Makes and checks requests of one engine.

    Args:
        verifier: the target.
        max_model_len: most tokens of prompt and output together.
        block_size: tokens per block of the cache.
        num_blocks: that one request can have.
        overshoot: rows that a step writes beyond the last token.
        grammars: compiles those of requests; None refuses requests with a grammar.
        check_drafts: raises where a request wants more drafts than there are.
        predicts: drafts may be copied from predictions; otherwise these are left aside.
        seed: of the seeds of requests without one; None is random.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        overshoot: int,
        grammars: GrammarCompiler | None,
        check_drafts: Callable[[SamplingParams], None],
        predicts: bool,
        seed: int | None,
    ) -> None:
        self.verifier: Verifier | Target = verifier
        self.grammars, self._far = grammars, False
        self.max_model_len = max_model_len
        self._block_size, self._num_blocks = block_size, num_blocks
        self._overshoot, self._predicts = overshoot, predicts
        self._check_drafts = check_drafts
        self._ids = count()
        self._told_crossing = False
        self._seeds = random.Random(seed)

    def elsewhere(self) -> Admission:
        """Admission for another process: without the target, and without what compiles grammars."""
        made = copy(self)
        values = {one.name: getattr(self.verifier, one.name) for one in fields(Target)}
        made.verifier, made.grammars, made._far = Target(**values), None, True
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: seeds of its own, so that no two processes draw the same."""
        return self.__dict__ | {"_seeds": random.Random(self._seeds.getrandbits(64))}

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and output together which model and cache allow one request."""
        return min(self.max_model_len, self._num_blocks * self._block_size - self._overshoot)

    def new_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """A request that is not queued yet.

        Args:
            prompt_token_ids: at least one token.
            sampling: how to decode it.
            on_tokens: see `Request.on_tokens`.

        Raises:
            InvalidInputError: see `check_tokens`; or there can be no grammars.
            CapacityError: it cannot fit the model or the cache, even alone.
        """
        prompt = list(prompt_token_ids)
        sampling = self._complete(sampling, len(prompt))
        total = self._total_len(prompt, sampling)
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        rule = self.verifier.length_rule
        rope_len = 0 if rule is None else rule.rope_len(len(prompt), total)
        if rule is not None and not rule.grows and rope_len > 0 and len(prompt) <= rule.start:
            self._tell_crossing(len(prompt), rule.start)
        request = Request(
            next(self._ids),
            prompt,
            sampling,
            seed=seed,
            max_total_len=total,
            stop_ids=frozenset(
                [
                    *sampling.stop_token_ids,
                    *(() if sampling.ignore_eos else self.verifier.eos_token_ids),
                ]
            ),
            rope_len=rope_len,
            on_tokens=on_tokens,
        )
        self.guide(request)
        return request

    def guide(self, request: Request) -> None:
        """Puts a request at the beginning of its grammar and its thinking, where it has such.

        Raises:
            CapacityError, InvalidInputError: see `GrammarCompiler.follow`.
        """
        sampling = request.sampling
        if self.grammars and sampling.masked:
            request.grammar = self.grammars.follow(
                request.prompt_token_ids,
                sampling.grammar,
                after_thinking=sampling.grammar_after_thinking,
                budget=sampling.thinking_token_budget,
            )

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raises what `new_request` would."""
        self._total_len(prompt_token_ids, self._complete(sampling, len(prompt_token_ids)))

    def wait_for_grammar(self, sampling: SamplingParams) -> None:
        """Waits until the grammar of a request can be followed, if it has one.

        Raises:
            InvalidInputError: there can be no grammars, or this one cannot be compiled.
        """
        compiled = self.compiled_grammar(sampling)
        if compiled is not None:
            try:
                compiled.result()
            finally:
                compiled.cancel()  # of one who is interrupted; else it is done

    def compiled_grammar(self, sampling: SamplingParams) -> Future[Any] | None:
        """What becomes of the grammar of a request; None where it has none.

        Raises:
            InvalidInputError: there can be no grammars.
        """
        return None if sampling.grammar is None else self._grammars().compiled(sampling.grammar)

    def _grammars(self) -> GrammarCompiler:
        if self.grammars is None:
            what = "a grammar needs the target's tokenizer and this engine has none"
            raise InvalidInputError(f"{what}; give it a GrammarCompiler")
        self.grammars.check()
        return self.grammars

    def _check_masks(self, sampling: SamplingParams) -> None:
        if sampling.grammar is not None:
            self._grammars()
        budget = sampling.thinking_token_budget
        if budget is not None and (self.grammars is None or self.grammars.thinking is None):
            raise InvalidInputError(
                f"thinking_token_budget is {budget}, and no token of {self.verifier.name!r} is"
                f" known"
                " to end a thinking; leave it out"
            )

    def check_tokens(self, prompt: Sequence[int]) -> None:
        """Whether the target can read a prompt, however long.

        Raises:
            InvalidInputError: it is empty, or holds ids outside the vocabulary or that stand for an
                image or a sound.
        """
        if not prompt:
            raise InvalidInputError("the prompt is empty; give at least one token")
        if (wrong := min(prompt)) < 0 or (wrong := max(prompt)) >= self.verifier.vocab_size:
            raise InvalidInputError(
                f"the prompt holds token id {shown(wrong)}; ids of this model lie in"
                f" [0, {self.verifier.vocab_size}), so tokenize it with the target's own tokenizer"
            )
        media = self.verifier.media_token_ids
        found = next((token for token in prompt if token in media), None) if media else None
        if found is not None:
            what = f"the prompt holds token {found}, which stands for {media[found]}"
            way_out = f"{self.verifier.name!r} runs as a text model, so give text alone"
            raise InvalidInputError(f"{what}; {way_out}")

    def _tell_crossing(self, prompt_len: int, start: int) -> None:
        """Says once where an output differs from that of Transformers."""
        if not (self._told_crossing or self._far):
            logger.warning(
                "a prompt of %s tokens and its max_tokens reach beyond %s, where LongRoPE changes:"
                " it has the rotations of long"
                " requests from its first token on, other than in `generate`; max_tokens of %s or"
                " less keeps the first ones",
                f"{prompt_len:,}",
                f"{start:,}",
                f"{start + 1 - prompt_len:,}",
            )
        self._told_crossing = True

    def _complete(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        """Sampling with the checkpoint's defaults, naming the model's own end-of-sequence ids as
        well where what ends the output must be known beforehand.
        """
        sampling = self.verifier.defaults.fill(sampling, prompt_len)
        self._check_prediction(sampling.prediction)
        self._check_drafts(sampling)
        if not self._predicts and sampling.prediction:
            sampling = replace(sampling, prediction=None)
        if not sampling.min_tokens or sampling.ignore_eos:
            return sampling
        ends = dict.fromkeys([*sampling.stop_token_ids, *self.verifier.eos_token_ids])
        return replace(sampling, stop_token_ids=tuple(ends))

    def _check_prediction(self, prediction: str | Sequence[int] | None) -> None:
        """Raises where the engine cannot read it."""
        if isinstance(prediction, str):
            what = "prediction is a text, and this engine has no tokenizer"
            raise InvalidInputError(f"{what}; give token ids")
        if not prediction:
            return
        size = self.verifier.vocab_size
        if min(prediction) < 0 or max(prediction) >= size:
            wrong = next(token for token in prediction if not 0 <= token < size)
            raise InvalidInputError(
                f"the prediction holds token id {wrong}; ids of this model lie in [0, {size}), so"
                f" tokenize it with the target's own tokenizer"
            )
        if len(prediction) > self.max_model_len:
            raise CapacityError(
                f"the prediction has {len(prediction):,} tokens and the limit is"
                f" {self.max_model_len:,}, those of prompt and output together; shorten it"
            )

    def _check_tokens_of(self, sampling: SamplingParams) -> None:
        """Raises where the sampling names tokens that the target does not have."""
        size = self.verifier.vocab_size
        biased = [token for token, _ in sampling.logit_bias]
        ends = sampling.stop_token_ids if sampling.min_tokens else ()  # else they may be another's
        for name, tokens in (("stop_token_ids", ends), ("logit_bias", biased)):
            if wrong := [token for token in tokens if not 0 <= token < size]:
                what = f"{name} holds token {shown(wrong[0])}"
                raise InvalidInputError(f"{what}; ids of this model lie in [0, {size})")
        if len({*ends}) == size:
            raise InvalidInputError(
                f"stop_token_ids name all {size} tokens of this model, and min_tokens lets none of"
                f" them be the first; name fewer"
            )
        most = max(sampling.top_logprobs, sampling.prompt_logprobs or 0)
        if most > size:
            raise InvalidInputError(
                f"{most} log-probabilities per token are asked for and this model has {size}"
                f" tokens; ask for fewer"
            )

    def _total_len(self, prompt: Sequence[int], sampling: SamplingParams) -> int:
        """Most tokens of prompt and output together."""
        self.check_tokens(prompt)
        self._check_tokens_of(sampling)
        if sampling.masked and not self._far:
            self._check_masks(sampling)
        if len(prompt) + min(sampling.max_tokens, 1) > self.max_model_len:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens and the limit is {self.max_model_len} for"
                f" prompt and output together;"
                f" {self.verifier.context.advice(self.max_model_len)}"
            )
        total = min(len(prompt) + sampling.max_tokens, self.max_model_len)
        needed = blocks_for(total + self._overshoot, self._block_size)
        if needed > self._num_blocks:
            raise CapacityError(
                f"prompt and output of {total} tokens need {needed} cache blocks and the cache has"
                f" {self._num_blocks};"
                " lower max_tokens, shorten the prompt or give the cache more memory"
            )
        return total
