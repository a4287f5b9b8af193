"""How one request is decoded: a frozen dataclass, validated once when it is made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice
from numbers import Real
from typing import Any

from specdec.base.errors import InvalidInputError, shown
from specdec.base.validation import (
    Range,
    as_float,
    as_integer,
    entries,
    flags,
    integers,
    numbers,
    ranges,
    require,
    sequence,
)
from specdec.grammar.grammar import Grammar

MAX_EDITS = 1024
"""Tokens that the bias and the least length of a request may name together."""

MAX_TOP_LOGPROBS = 64
"""Log-probabilities per position at most."""

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2048
"""Stop strings of a request and their characters together: each token is compared with all."""


def _few(count: int) -> bool:
    return 0 <= count < 2**31


_FEW = "it must be 0 or a count below 2**31"
_TOP = f"it must lie in [0, {MAX_TOP_LOGPROBS}]"
_PENALTY = "it must lie in [-1e6, 1e6], where 0 is off"
_SEED = "it must lie in [0, 2**63), or be left out for a random one"
_HEAT = "it must be 0 (greedy) or a positive finite number"
_REPEATED = "it must lie in [1e-30, 1e30], where 1 is off"
_RANGES: tuple[Range, ...] = (
    ("num_draft_tokens", _few, _FEW),
    ("tree_nodes", _few, _FEW),
    ("thinking_token_budget", lambda count: count >= 0, "it must be at least 0"),
    ("top_logprobs", lambda count: 0 <= count <= MAX_TOP_LOGPROBS, _TOP),
    ("prompt_logprobs", lambda count: 0 <= count <= MAX_TOP_LOGPROBS, _TOP),
    ("presence_penalty", lambda penalty: abs(penalty) <= 1e6, _PENALTY),
    ("frequency_penalty", lambda penalty: abs(penalty) <= 1e6, _PENALTY),
    ("temperature", lambda number: math.isfinite(number) and number >= 0, _HEAT),
    ("top_k", _few, "it must be 0 (off) or a count below 2**31"),
    ("top_p", lambda share: 0 < share <= 1, "it must lie in (0, 1], where 1 is off"),
    ("min_p", lambda share: 0 <= share < 1, "it must lie in [0, 1), where 0 is off"),
    # what divides float32 logits without making them infinite
    ("repetition_penalty", lambda penalty: 1e-30 <= penalty <= 1e30, _REPEATED),
    ("seed", lambda seed: 0 <= seed < 2**63, _SEED),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded.

    Processing order of the logits, the same at every verified position and the same as
    Transformers': grammar, bias and least length, repetition penalty, frequency and presence
    penalty, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: most new tokens; 0, with `prompt_logprobs`, only scores the prompt.
        temperature: 0 decodes greedily; otherwise logits are divided by it.
        top_k: keep the `top_k` most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches `top_p`, in (0, 1]; 1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely one, in [0, 1).
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or
            output have; None takes the checkpoint's own, else 1, which is off. See
            `SamplingDefaults`.
        seed: random stream of the request, in [0, 2**63); None draws one, which the result reports.
        stop: strings that end the output; the text is cut before them.
        stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        logprobs: return the log-probability of each output token under the target's unprocessed
            logits.
        top_logprobs: return, at each output token, this many of the likeliest tokens with their
            log-probabilities.
        prompt_logprobs: return the log-probability of every prompt token but the first, and this
            many of the likeliest tokens there; None means neither. Such a prompt is computed anew,
            whatever the prefix cache holds.
        min_tokens: new tokens that come before an end-of-sequence id or one of `stop_token_ids` may
            be chosen, and before stop strings count; None takes the checkpoint's own, else 0.
        presence_penalty: subtracted from the logits of all tokens that the output has; a negative
            number raises them.
        frequency_penalty: subtracted from a token's logit once for each time that the output has
            it.
        logit_bias: numbers added to the logits of tokens, by id: a mapping or pairs.
        grammar: what the output must look like; it ends with an end-of-sequence token once it is
            complete.
        grammar_after_thinking: let the grammar begin after the thinking, if there is any; None
            means for conversations.
        thinking_token_budget: most tokens of the thinking, which is closed then. As in vLLM.
        cache_salt: share the prefix cache only with requests of the same salt, such as a tenant's
            name; None means with those that have no salt.
        read_prefix_cache: reuse the beginning of the prompt that is in the prefix cache; else all
            of the prompt is computed, which others may reuse.
        skip_special_tokens: leave special tokens out of the text. A stop string that is one of them
            ends the output all the same.
        num_draft_tokens, tree_nodes: most drafts of this request in a step, see `EngineConfig`: no
            more than those of the engine; 0 draft tokens decode plainly, 0 nodes make chains. None
            takes the engine's. No output depends on it.
        prediction: what the output will be like, such as a file that it edits. Drafts are copied
            from it, and no output depends on it. A text, or tokens.
        store: it may be kept to learn from, where a server does that; see docs/serve.md.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    min_tokens: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    grammar_after_thinking: bool | None = None
    thinking_token_budget: int | None = None

    cache_salt: str | None = None
    read_prefix_cache: bool = True
    skip_special_tokens: bool = True
    prediction: str | tuple[int, ...] | None = None
    num_draft_tokens: int | None = None
    tree_nodes: int | None = None
    store: bool = True

    def __post_init__(self) -> None:
        integers(self, "max_tokens", "top_k", "seed", "min_tokens")
        integers(self, "top_logprobs", "prompt_logprobs")
        integers(self, "thinking_token_budget", "num_draft_tokens", "tree_nodes")
        numbers(self, "temperature", "top_p", "min_p")
        numbers(self, "repetition_penalty", "presence_penalty", "frequency_penalty")
        flags(self, "ignore_eos", "logprobs", "read_prefix_cache", "skip_special_tokens")
        flags(self, "grammar_after_thinking", "store")
        if not isinstance(self.prediction, str):
            tokens = sequence(self, "prediction", "token ids, or a text")
            tokens = tuple(as_integer("a token of prediction", token) for token in tokens)
            object.__setattr__(self, "prediction", tokens)
        object.__setattr__(self, "prediction", self.prediction or None)
        ranges(self, *_RANGES)
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and salt):
            what = f"cache_salt is {shown(salt)}"
            raise InvalidInputError(
                f"{what}; it must be a string that is not empty, or be left out"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else sequence(self, "stop", "strings")
        for entry in stop:
            if not isinstance(entry, str):
                what = f"stop holds {shown(entry)}"
                raise InvalidInputError(f"{what}; it must be a list of strings")
        length = sum(map(len, stop))
        require(
            len(stop) <= MAX_STOPS and length <= MAX_STOP_CHARACTERS,
            f"stop has {len(stop):,} strings of {length:,} characters together; the most are"
            f" {MAX_STOPS} of {MAX_STOP_CHARACTERS:,}, so give fewer or shorter ones",
        )
        object.__setattr__(self, "stop", stop)
        ids = sequence(self, "stop_token_ids", "token ids")
        what = f"stop_token_ids has {len(ids):,} entries and the limit is {MAX_EDITS}; give fewer"
        require(len(ids) <= MAX_EDITS, what)
        ids = tuple(as_integer("one of stop_token_ids", token) for token in ids)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        least = 1 if self.prompt_logprobs is None else 0
        what = f"max_tokens is {self.max_tokens}; it must be at least {least}"
        require(self.max_tokens >= least, what)
        object.__setattr__(self, "logprobs", self.logprobs or self.top_logprobs > 0)
        require(
            self.min_tokens is None or 0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}; it must lie in [0, {self.max_tokens}], max_tokens"
            f" being the most",
        )
        named = len(self.logit_bias) + (len(self.stop_token_ids) if self.min_tokens else 0)
        what = f"logit_bias, and stop_token_ids until min_tokens, name {named} tokens"
        require(named <= MAX_EDITS, f"{what}; they may name {MAX_EDITS} together")
        if not isinstance(self.grammar, Grammar | None):
            what = f"grammar is {shown(self.grammar)}"
            ways = "Grammar.json_schema, regex, choice, ebnf or json_object"
            raise InvalidInputError(f"{what}; make one with {ways}")
        ends = "ignore_eos" if self.ignore_eos else "min_tokens" if self.min_tokens else ""
        free = self.thinking_token_budget is None or self.grammar_after_thinking is not False
        what = "grammar_after_thinking is false with a thinking_token_budget"
        why = "a grammar for the thinking says itself where that ends, so leave out one of the two"
        require(self.grammar is None or free, f"{what}; {why}")
        what = f"{ends} is asked for with a grammar, which says itself where the output may end"
        require(self.grammar is None or not ends, f"{what}; leave out one of the two")
        what = "stop holds an empty string, which would end every output at once; remove it"
        require(all(self.stop), what)

    @property
    def masked(self) -> bool:
        """Whether not every token may follow, by what came before it."""
        return self.grammar is not None or self.thinking_token_budget is not None

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Which of them its text shows, as `IncrementalDecoder` takes it."""
        shown = frozenset[int]() if self.grammar is None else self.grammar.markers
        return {"skip_special_tokens": self.skip_special_tokens, "shown": shown}

    def for_chat(self) -> "SamplingParams":
        """Parameters of a conversation: models that think do so before they follow a grammar."""
        if self.grammar is None or self.grammar_after_thinking is not None:
            return self
        return replace(self, grammar_after_thinking=True)

    def at_most(self, count: int) -> "SamplingParams":
        """The same for at most so many tokens.

        >>> few = SamplingParams(min_tokens=30).at_most(16)
        >>> few.max_tokens, few.min_tokens
        (16, 16)
        """
        most = min(self.max_tokens, count)
        least = self.min_tokens and min(self.min_tokens, most)
        return replace(self, max_tokens=most, min_tokens=least)

    @property
    def penalized(self) -> bool:
        """Whether there is a repetition penalty."""
        return self.repetition_penalty not in (None, 1.0)

    def plain(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON has them."""
        owned = ((name, getattr(self, name), default) for name, default in _defaults())
        changed = {name: own for name, own, default in owned if own != default}
        if self.grammar is not None:
            changed["grammar"] = {"kind": self.grammar.kind, "text": self.grammar.text}
        return changed

    @classmethod
    def from_plain(cls, given: dict[str, Any], *, known: bool = False) -> "SamplingParams":
        """What `plain` or `dataclasses.asdict` made plain.

        Args:
            known: the grammar was checked where it was made, and is not checked again.
        """
        grammar, make = given.get("grammar"), Grammar.known if known else Grammar
        return cls(**{**given, "grammar": grammar and make(**grammar)})

    def choice(self, index: int) -> "SamplingParams":
        """Parameters of output number `index` of several from one prompt: its seed is `seed` plus
        `index`. Unless `max_tokens` is 0, only output 0 scores the prompt.

        >>> SamplingParams(seed=7, prompt_logprobs=2).choice(3) == SamplingParams(seed=10)
        True
        """
        if index == 0:
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**63
        scores = None if self.max_tokens else self.prompt_logprobs
        return replace(self, seed=seed, prompt_logprobs=scores)


@cache
def _defaults() -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in fields(SamplingParams)]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a checkpoint asks of requests that do not say it themselves; by itself, nothing.

    Attributes:
        repetition_penalty, min_tokens: see `SamplingParams`; they hold everywhere, as in
            Transformers' `generate`.
        min_length: the same as `min_tokens`, the prompt counted; that goes first.
        sampled: temperature, top-k, top-p and min-p, as far as they are stated; only
            `specdec serve` decodes by them.
        served_ends: end-of-sequence ids at which `specdec serve` stops beside the verifier's.
    """

    repetition_penalty: float = 1.0
    min_tokens: int | None = None
    min_length: int = 0
    sampled: tuple[tuple[str, float], ...] = ()
    served_ends: tuple[int, ...] = ()

    def fill(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        """These parameters with what the checkpoint asks, for a prompt of so many tokens.

        A grammar says itself where an output may end. Mostly nothing is asked, and nothing copied.

        >>> filled = SamplingDefaults(1.1, min_length=8).fill(SamplingParams(max_tokens=4), 3)
        >>> filled.repetition_penalty, filled.min_tokens
        (1.1, 4)
        """
        changes: dict[str, Any] = {}
        if sampling.repetition_penalty is None and self.repetition_penalty != 1:
            changes["repetition_penalty"] = self.repetition_penalty
        if sampling.min_tokens is None and sampling.grammar is None:
            own = self.min_tokens
            own = max(0, self.min_length - prompt_len) if own is None else own
            if own:
                changes["min_tokens"] = min(own, sampling.max_tokens)
        return replace(sampling, **changes) if changes else sampling

    @property
    def stated(self) -> dict[str, Any]:
        """What differs from asking nothing, for a report."""
        own = {
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "min_length": self.min_length,
        }
        return {name: value for name, value in own.items() if value not in (None, 0, 1)} | dict(
            self.sampled
        )


def _bias(given: Any) -> tuple[tuple[int, float], ...]:
    """What `logit_bias` says, in the order of the tokens.

    >>> _bias({"7": 1, 5: -2.5})
    ((5, -2.5), (7, 1.0))
    """
    found = entries(given.items() if isinstance(given, Mapping) else given)
    if found is None:
        what = f"logit_bias is {shown(given)}"
        raise InvalidInputError(f"{what}; it must map token ids to numbers")
    pairs = list(islice(found, MAX_EDITS + 1))
    what = f"logit_bias names more than {MAX_EDITS} tokens, which is the limit; name fewer"
    require(len(pairs) <= MAX_EDITS, what)
    biases: dict[int, float] = {}
    for pair in pairs:
        right = isinstance(pair, tuple | list) and len(pair) == 2
        require(right, f"logit_bias holds {shown(pair)}; it must map token ids to numbers")
        token, value = pair
        by_text = isinstance(token, str) and token.isdecimal() and len(token) < 20
        token = int(token) if by_text else as_integer("a token of logit_bias", token)
        number = isinstance(value, Real) and not isinstance(value, bool)
        right = number and abs(as_float(value)) <= 1e6
        what = f"logit_bias of token {token} is {shown(value)}"
        require(right, f"{what}; it must be a number in [-1e6, 1e6]")
        require(token not in biases, f"logit_bias names token {token} twice; name it once")
        biases[token] = float(value)
    return tuple(sorted(biases.items()))
