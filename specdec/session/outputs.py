"""What a caller gets: results, and chunks of them while decoding goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.base.journal import made
from specdec.base.metrics import AcceptanceStats
from specdec.engine.requests.request import Request
from specdec.sampling.logprobs import Top


@dataclass(slots=True)
class GenerationResult:
    """Output of one request.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        text: the output, without special tokens unless asked for, cut before a stop string.
        token_ids: the output, its stop token included.
        finish_reason: "stop", "length", "cancelled" or "error".
        error: one line, when the reason is "error".
        bad_input: the error lies in what was asked for.
        reasoning, content: thinking and answer of the text, where they were to be told apart.
        logprobs: one per output token when asked for, of the target's unprocessed logits; or None.
        top_logprobs: one per output token when asked for, of the likeliest tokens and its own.
        prompt_logprobs: one per prompt token when asked for, given those before; None first.
        prompt_top_logprobs: the same of the likeliest tokens, and of the token itself.
        seed: seed of the request's random stream; the same seed repeats the output.
        stats: how the drafts of each verify step fared.
        num_cached_tokens: of the prompt, which the cache had already.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    error: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[Top] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[Top | None] | None = None
    seed: int = 0
    stats: AcceptanceStats = field(default_factory=lambda: AcceptanceStats([], [], []))
    num_cached_tokens: int = 0
    bad_input: bool = False
    reasoning: str | None = None
    content: str | None = None

    @classmethod
    def of(cls, request: Request, text: str) -> GenerationResult:
        """What a finished request has become."""
        params, ranks = request.sampling, request.num_by_rank
        scored = params.prompt_logprobs is not None
        by_rank = [ranks[rank] for rank in range(max(ranks, default=-1) + 1)]
        counts = request.num_drafted, request.num_accepted, request.num_emitted
        stats = AcceptanceStats(*counts, request.tree_sizes, by_rank, request.parts)
        return cls(
            prompt_token_ids=request.prompt_token_ids,
            text=text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason or "cancelled",
            error=request.error,
            bad_input=request.bad_input,
            logprobs=request.logprobs if params.logprobs else None,
            top_logprobs=request.top_logprobs if params.top_logprobs else None,
            prompt_logprobs=[None, *request.prompt_logprobs] if scored else None,
            prompt_top_logprobs=[None, *request.prompt_top_logprobs] if scored else None,
            seed=request.seed,
            num_cached_tokens=request.num_cached_tokens or 0,
            stats=stats,
        )

    @classmethod
    def failed(cls, request: Request) -> GenerationResult:
        """What becomes of a request for whose output something has raised."""
        prompt, error, bad = request.prompt_token_ids, request.error, request.bad_input
        return cls(prompt, "", [], "error", error=error, bad_input=bad)

    @classmethod
    def refused(cls, error: Exception) -> GenerationResult:
        """What an input becomes that cannot be served."""
        return cls([], "", [], "error", error=str(error), bad_input=True)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> GenerationResult:
        """The result that `dataclasses.asdict` made this of, also by way of JSON."""
        return made(cls, dict(given))


@dataclass(slots=True)
class StreamChunk:
    """New output of one request.

    Attributes:
        index: which of the inputs.
        text: new text; may lag the tokens at incomplete characters or possible stop strings.
        token_ids: new tokens.
        logprobs, top_logprobs: of these tokens, as in `GenerationResult`; empty when not asked for.
        result: the whole result, on the last chunk of an input; None before.
        parts: thinking and answer of the new text, where told apart. Either may lag the text.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Top] = field(default_factory=list)
    parts: tuple[str, str] | None = None
