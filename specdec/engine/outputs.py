"""What a caller gets: results, and chunks of them while decoding goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.engine.request import Request
from specdec.metrics import AcceptanceStats


@dataclass(slots=True)
class GenerationResult:
    """Output of one request.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        text: the output, special tokens left out, cut before a stop string.
        token_ids: the output, its stop token included.
        finish_reason: "stop", "length", "cancelled" or "error".
        error: one line, when the reason is "error".
        logprobs: one per output token when asked for, under the target's unprocessed logits; else None.
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
    seed: int = 0
    stats: AcceptanceStats = field(default_factory=lambda: AcceptanceStats([], [], []))
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, request: Request, text: str) -> GenerationResult:
        """What a finished request has become."""
        return cls(
            prompt_token_ids=request.prompt_token_ids,
            text=text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason or "cancelled",
            error=request.error,
            logprobs=request.logprobs if request.sampling.logprobs else None,
            seed=request.seed,
            num_cached_tokens=request.num_cached_tokens or 0,
            stats=AcceptanceStats(
                request.num_drafted,
                request.num_accepted,
                request.num_emitted,
                request.tree_sizes,
                [request.num_by_rank[rank] for rank in range(max(request.num_by_rank, default=-1) + 1)],
                request.parts,
            ),
        )

    @classmethod
    def refused(cls, error: Exception) -> GenerationResult:
        """What an input becomes that cannot be served."""
        return cls([], "", [], "error", error=str(error))


@dataclass(slots=True)
class StreamChunk:
    """New output of one request.

    Attributes:
        index: which of the inputs.
        text: new text; may lag the tokens while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        result: the whole result, on the last chunk of an input; None before.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
