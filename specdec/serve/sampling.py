"""How a request is to be decoded, in the engine's words."""

from __future__ import annotations

from typing import Any

from specdec.grammar.fields import GRAMMAR_FIELDS, grammar_of
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.serve.errors import RequestError
from specdec.serve.protocol import ChatRequest, CompletionRequest, Generation

COMPLETION_TOKENS = 16
"""What a completion gets when it does not say, as everywhere."""

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "cache_salt",
    "skip_special_tokens",
    "thinking_token_budget",
)
"""Fields that mean the same here and there."""


def sampling_params(asked: Generation, defaults: SamplingDefaults, *, most: int) -> SamplingParams:
    """What a request asks for. It is sampled as the checkpoint says when it does not say, else at
    temperature 1.

    Args:
        asked: the request.
        defaults: of the checkpoint.
        most: tokens that prompt and output can have together, which a chat gets that names no
            limit.

    Raises:
        RequestError: a field that cannot be honored.
        InvalidInputError: a value out of range.
    """
    if asked.best_of not in (None, asked.n or 1):
        raise RequestError(
            400,
            f"best_of is {asked.best_of}: outputs are not ranked; leave it out",
            param="best_of",
        )
    values: dict[str, Any] = {"temperature": 1.0, **dict(defaults.sampled)}
    for name in _SAME:
        value = getattr(asked, name)
        if value is not None:
            values[name] = value
    if asked.top_k is not None:
        values["top_k"] = 0 if asked.top_k == -1 else asked.top_k  # vLLM's word for all
    if values.get("seed") == -1:
        del values["seed"]  # the same for a random one
    if values.get("top_p") == 0:
        values |= {"temperature": 0.0, "top_p": 1.0}  # the likeliest token alone
    if not asked.ignore_eos:
        values["stop_token_ids"] = [*values.get("stop_token_ids", ()), *defaults.served_ends]
    if isinstance(asked, CompletionRequest):
        values["max_tokens"] = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        values |= _completion_logprobs(asked)
    elif isinstance(asked, ChatRequest):
        values["max_tokens"] = most if asked.most_output is None else asked.most_output
        values |= {
            "logprobs": bool(asked.logprobs),
            "top_logprobs": asked.top_logprobs or 0 if asked.logprobs else 0,
        }
        if asked.top_logprobs and not asked.logprobs:
            raise RequestError(
                400, "top_logprobs needs logprobs; set it to true", param="top_logprobs"
            )
    return SamplingParams(
        **values, grammar=grammar_of({name: getattr(asked, name) for name in GRAMMAR_FIELDS})
    )


def _completion_logprobs(asked: CompletionRequest) -> dict[str, Any]:
    if asked.logprobs is None:
        return {}
    if asked.echo and asked.stream:
        raise RequestError(400, "echo with logprobs comes whole; drop stream", param="stream")
    return {
        "logprobs": True,
        "top_logprobs": asked.logprobs,
        "prompt_logprobs": asked.logprobs if asked.echo else None,
    }
