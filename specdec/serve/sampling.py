"""How a request is to be decoded, in the engine's words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specdec.grammar.fields import GRAMMAR_FIELDS, grammar_of
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.serve.errors import RequestError
from specdec.serve.protocol import ChatRequest, CompletionRequest, Generation

COMPLETION_TOKENS = 16
"""What a completion gets when it does not say, as everywhere."""

SAME = frozenset({
    "temperature", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt",
    "skip_special_tokens", "thinking_token_budget", "num_draft_tokens", "tree_nodes", "store",
})  # fmt: skip
"""Fields that mean the same here and there."""


def sampling_params(
    asked: Generation,
    defaults: SamplingDefaults,
    *,
    most: int,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """What a request asks for; by default as the checkpoint says, else temperature 1.

    Args:
        most: most tokens of prompt and output, a chat's limit if it names none.
        given: values that hold before these defaults where the request says nothing.

    Raises:
        RequestError: a field that cannot be honored.
        InvalidInputError: a value out of range.
    """
    limit = COMPLETION_TOKENS if isinstance(asked, CompletionRequest) else most
    values: dict[str, Any] = {
        **{"temperature": 1.0, "max_tokens": limit},
        **dict(defaults.sampled),
        **given,
        **wishes(asked),
    }
    if not values.get("ignore_eos"):
        values["stop_token_ids"] = [*values.get("stop_token_ids", ()), *defaults.served_ends]
    return SamplingParams(**values)


def wishes(asked: Generation) -> dict[str, Any]:
    """What a request says of sampling, in the engine's words."""
    if asked.best_of not in (None, asked.n or 1):
        what = f"best_of is {asked.best_of}: outputs are not ranked; leave it out"
        raise RequestError(what, "best_of")
    named = {name: getattr(asked, name) for name in SAME}
    values: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if asked.top_k is not None:
        values["top_k"] = 0 if asked.top_k == -1 else asked.top_k  # vLLM's word for all
    if values.get("seed") == -1:
        values["seed"] = None  # the same for a random one
    if values.get("top_p") == 0:
        values |= {"temperature": 0.0, "top_p": 1.0}  # the likeliest token alone
    if asked.prediction is not None:
        said = asked.prediction
        values["prediction"] = said if isinstance(said, str) else said.text
    if isinstance(asked, CompletionRequest):
        values |= _completion_logprobs(asked)
    elif isinstance(asked, ChatRequest):
        values |= {
            "logprobs": bool(asked.logprobs),
            "top_logprobs": asked.top_logprobs or 0 if asked.logprobs else 0,
        }
        if asked.top_logprobs and not asked.logprobs:
            raise RequestError("top_logprobs needs logprobs; set it to true", "top_logprobs")
    limit = asked.max_output if isinstance(asked, ChatRequest) else asked.max_tokens
    if limit is not None:
        values["max_tokens"] = limit
    grammar = grammar_of({name: getattr(asked, name) for name in GRAMMAR_FIELDS})
    return values if grammar is None else {**values, "grammar": grammar}


def _completion_logprobs(asked: CompletionRequest) -> dict[str, Any]:
    if asked.logprobs is None:
        return {}
    if asked.echo and asked.stream:
        raise RequestError("echo with logprobs comes whole; drop stream", "stream")
    return {
        "logprobs": True,
        "top_logprobs": asked.logprobs,
        "prompt_logprobs": asked.logprobs if asked.echo else None,
    }
