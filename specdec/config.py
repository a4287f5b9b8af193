"""Configuration: frozen dataclasses, validated once when they are made."""

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from specdec.blocks import MOST_NODES
from specdec.errors import InvalidInputError
from specdec.grammar.grammar import Grammar

DraftSampling = Literal["coupled", "greedy", "probabilistic"]
CacheDtype = Literal["auto", "fp8"]
PrefillDtype = Literal["auto", "model"]
WeightForm = Literal["as-stored", "bfloat16"]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidInputError(message)


def as_integer(name: str, value: Any) -> int:
    """An integer of any library as Python's own.

    Raises:
        InvalidInputError: another type; a bool as well, which to Python is an int.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise InvalidInputError(f"{name} is {reprlib.repr(value)}; it must be an integer")


def _integers(config: Any, *names: str) -> None:
    """Makes fields Python's own integers, those of None aside whose default that is."""
    for name in names:
        value = getattr(config, name)
        if value is not None or type(config).__dataclass_fields__[name].default is not None:
            object.__setattr__(config, name, as_integer(name, value))


def _numbers(config: Any, *names: str) -> None:
    """Makes fields Python's own floats."""
    for name in names:
        value = getattr(config, name)
        right = isinstance(value, Real) and not isinstance(value, bool)
        _require(right, f"{name} is {reprlib.repr(value)}; it must be a number")
        try:
            object.__setattr__(config, name, float(value))
        except OverflowError:
            object.__setattr__(config, name, math.inf)


def _flags(config: Any, *names: str) -> None:
    """Checks that fields are True or False, or None where that is the default."""
    for name in names:
        value = getattr(config, name)
        right = isinstance(value, bool) or (value is None and type(config).__dataclass_fields__[name].default is None)
        _require(right, f"{name} is {reprlib.repr(value)}; it must be True or False")


def _sequence(config: Any, name: str, noun: str) -> tuple[Any, ...]:
    """The entries of a field; none where it is None."""
    value = getattr(config, name)
    right = value is None or (isinstance(value, Iterable) and not isinstance(value, str | bytes))
    _require(right, f"{name} is {reprlib.repr(value)}; it must be a list of {noun}")
    return tuple(value if value is not None else ())


MOST_EDITS = 1024
"""Tokens that the bias and the least length of a request may name together."""

MOST_TOP_LOGPROBS = 64
"""Log-probabilities per position at most."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded.

    Processing order of the logits, the same at every verified position and the same as Transformers': grammar, bias and least
    length, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: most new tokens, at least 1; 0 with `prompt_logprobs`, which then are all that is asked for.
        temperature: 0 decodes greedily; otherwise logits are divided by it.
        top_k: keep the `top_k` most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches `top_p`, in (0, 1]; 1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely one, in [0, 1).
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off.
        seed: random stream of the request, in [0, 2**63); None draws one, which the result reports.
        stop: strings that end the output; the text is cut before them.
        stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        logprobs: return the log-probability of each output token under the target's unprocessed logits.
        top_logprobs: return so many of the likeliest tokens at each output token, too, with theirs.
        prompt_logprobs: return the same of every prompt token but the first, with so many of the likeliest; None returns none.
            Such a prompt is computed anew, whatever the prefix cache holds.
        min_tokens: least new tokens before an end-of-sequence id or one of `stop_token_ids`, which cannot be chosen until then, and
            before the text in which a stop string is found.
        presence_penalty: taken off the logit of every token of the output so far; negative numbers favor it.
        frequency_penalty: the same, as often as the output has the token.
        logit_bias: numbers added to the logits of tokens, by id: a mapping or pairs.
        grammar: what the output must look like; it ends with an end-of-sequence token once it is complete.
        cache_salt: prompts share cached beginnings only with those of the same salt, such as a tenant's name; None is a salt, too.
        read_prefix_cache: begin with what the cache has of the prompt; False computes all of it, and still offers it to others.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    cache_salt: str | None = None
    read_prefix_cache: bool = True

    def __post_init__(self) -> None:
        _integers(self, "max_tokens", "top_k", "seed", "top_logprobs", "prompt_logprobs", "min_tokens")
        _numbers(self, "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        _flags(self, "ignore_eos", "logprobs", "read_prefix_cache")
        salt = self.cache_salt
        right = salt is None or (isinstance(salt, str) and salt != "")
        _require(right, f"cache_salt is {reprlib.repr(salt)}; it must be a string that is not empty, or be left out")
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence(self, "stop", "strings")
        wrong = next((entry for entry in stop if not isinstance(entry, str)), None)
        _require(all(isinstance(entry, str) for entry in stop), f"stop holds {reprlib.repr(wrong)}; it must be a list of strings")
        object.__setattr__(self, "stop", stop)
        ids = _sequence(self, "stop_token_ids", "token ids")
        object.__setattr__(self, "stop_token_ids", tuple(as_integer("one of stop_token_ids", token) for token in ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        least = 1 if self.prompt_logprobs is None else 0
        _require(self.max_tokens >= least, f"max_tokens is {self.max_tokens}; it must be at least {least}")
        for name in ("top_logprobs", "prompt_logprobs"):
            count = getattr(self, name) or 0
            _require(0 <= count <= MOST_TOP_LOGPROBS, f"{name} is {count}; it must lie in [0, {MOST_TOP_LOGPROBS}]")
        object.__setattr__(self, "logprobs", self.logprobs or self.top_logprobs > 0)
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}; it must lie in [0, {self.max_tokens}], max_tokens being the most",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(abs(penalty) <= 1e6, f"{name} is {penalty}; it must lie in [-1e6, 1e6], where 0 is off")
        named = len(self.logit_bias) + (len(self.stop_token_ids) if self.min_tokens else 0)
        _require(
            named <= MOST_EDITS,
            f"logit_bias, and stop_token_ids until min_tokens, name {named} tokens; they may name {MOST_EDITS} together",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}; it must be 0 (greedy) or a positive finite number",
        )
        _require(0 <= self.top_k < 2**31, f"top_k is {self.top_k}; it must be 0 (off) or a count below 2**31")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1], where 1 is off")
        _require(0 <= self.min_p < 1, f"min_p is {self.min_p}; it must lie in [0, 1), where 0 is off")
        _require(
            1e-30 <= self.repetition_penalty <= 1e30,  # what divides float32 logits without making them infinite
            f"repetition_penalty is {self.repetition_penalty}; it must lie in [1e-30, 1e30], where 1 is off",
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed is {self.seed}; it must lie in [0, 2**63), or be left out for a random one",
        )
        right = self.grammar is None or isinstance(self.grammar, Grammar)
        _require(
            right, f"grammar is {reprlib.repr(self.grammar)}; make one with Grammar.json_schema, regex, choice, ebnf or json_object"
        )
        ends = "ignore_eos" if self.ignore_eos else "min_tokens" if self.min_tokens else ""
        _require(
            self.grammar is None or not ends,
            f"{ends} is asked for with a grammar, which says itself where the output may end; leave out one of the two",
        )
        _require(all(self.stop), "stop holds an empty string, which would end every output at once; remove it")

    def choice(self, index: int) -> "SamplingParams":
        """Those of output number `index` of several from one prompt: its seed lies so much higher, and of those that go on only the
        first scores the prompt.

        >>> SamplingParams(seed=7, prompt_logprobs=2).choice(3) == SamplingParams(seed=10)
        True
        """
        if index == 0:
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**63
        return replace(self, seed=seed, prompt_logprobs=None if self.max_tokens else self.prompt_logprobs)


def _bias(given: Any) -> tuple[tuple[int, float], ...]:
    """What `logit_bias` says, in the order of the tokens.

    >>> _bias({"7": 1, 5: -2.5})
    ((5, -2.5), (7, 1.0))
    """
    pairs = given.items() if isinstance(given, Mapping) else given
    right = isinstance(pairs, Iterable) and not isinstance(pairs, str | bytes)
    _require(right, f"logit_bias is {reprlib.repr(given)}; it must map token ids to numbers")
    found: dict[int, float] = {}
    for pair in pairs:
        right = isinstance(pair, tuple | list) and len(pair) == 2
        _require(right, f"logit_bias holds {reprlib.repr(pair)}; it must map token ids to numbers")
        token, value = pair
        token = int(token) if isinstance(token, str) and token.isdecimal() else as_integer("a token of logit_bias", token)
        right = isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) <= 1e6
        _require(right, f"logit_bias of token {token} is {reprlib.repr(value)}; it must be a number in [-1e6, 1e6]")
        _require(token not in found, f"logit_bias names token {token} twice; name it once")
        found[token] = float(value)
    return tuple(sorted(found.items()))


DEFAULT_BLOCK_SIZE = 16
"""Tokens per cache block."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a target is loaded; what an engine cannot change afterwards.

    Attributes:
        device: "auto", "cpu", "cuda" or "cuda:N" (ROCm devices answer to "cuda").
        dtype: "auto", "float32", "bfloat16" or "float16".
        attention: "auto" or the name of an attention backend.
        block_size: tokens per cache block.
        kv_dtype: "auto" stores keys and values in the model's own type; "fp8" stores 8-bit floats, half the memory and no longer
            exact, on backends that have them.
        prefill_dtype: "auto" computes prompts in 8-bit floats where a backend has a kernel for that: latent attention on gfx950;
            "model" in the model's own type everywhere.
        weights: "as-stored" leaves quantized weights packed where a kernel multiplies with them, in half precision on an
            accelerator; "bfloat16" makes plain numbers of them when they are read, as everywhere else.
        tensor_parallel: processes, each with an accelerator of its own, that compute the target together; None takes those that
            `torchrun` has started for a command, and one otherwise.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_dtype: CacheDtype = "auto"
    prefill_dtype: PrefillDtype = "auto"
    weights: WeightForm = "as-stored"
    tensor_parallel: int | None = None

    def __post_init__(self) -> None:
        for name in ("device", "dtype", "attention"):
            value = getattr(self, name)
            right = isinstance(value, str) or type(value).__module__ == "torch"  # torch's devices and types say their names
            _require(right, f"{name} is {reprlib.repr(value)}; it must be a string")
            object.__setattr__(self, name, str(value).removeprefix("torch."))
        _integers(self, "block_size", "tensor_parallel")
        right = self.tensor_parallel is None or self.tensor_parallel >= 1
        _require(right, f"tensor_parallel is {self.tensor_parallel}; it must be at least 1")
        _require(self.block_size >= 1, f"block_size is {self.block_size}; it must be at least 1 token")
        _require(self.kv_dtype in ("auto", "fp8"), f"kv_dtype is {self.kv_dtype!r}; choose 'auto' or 'fp8'")
        right = self.prefill_dtype in ("auto", "model")
        _require(right, f"prefill_dtype is {self.prefill_dtype!r}; choose 'auto' or 'model'")
        right = self.weights in ("as-stored", "bfloat16")
        _require(right, f"weights is {self.weights!r}; choose 'as-stored' or 'bfloat16'")
        right = self.weights == "as-stored" or self.dtype in ("auto", "bfloat16")
        _require(right, f"weights are asked for in {self.weights} and dtype is {self.dtype!r}; leave out one of the two")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache of the target and, in the same blocks, of the drafter.

    Attributes:
        memory_bytes: budget for all key and value tensors; None takes what the device has room for (`specdec.device`).
        prefix_caching: keep full blocks of prompts and outputs, and share them with requests that begin alike.
    """

    memory_bytes: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _integers(self, "memory_bytes")
        _flags(self, "prefix_caching")
        _require(
            self.memory_bytes is None or self.memory_bytes > 0,
            f"memory_bytes is {self.memory_bytes}; it must be a positive number of bytes",
        )


MOST_SEQS = 2**16
"""Most requests decoded at once; state for so many already takes gigabytes."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine.

    Attributes:
        max_num_seqs: requests decoded at once; sizes all per-request device state.
        max_model_len: most tokens of prompt and output together; None takes the model's own limit.
        max_prefill_tokens: prompt tokens per step, the size of a prefill chunk; None takes 512 on a CPU, elsewhere up to 8,192, as
            the attention backend says, and 2,048 beside requests that decode, which wait for a chunk.
        num_draft_tokens: k, drafts per step: a number, 0 for plain decoding, or "auto" for what decodes fastest, chosen step by
            step up to the drafter's own number, by the times and the acceptance measured so far (`specdec.engine.block_choice`).
            None takes the drafter's own number. With "auto", probabilistic drafts make sampled output depend on the speed of the
            machine, which a seed does not repeat.
        tree_nodes: drafts of a step that form a tree, up to 64; 0 makes chains alone. None leaves it to "auto", which chooses among
            chains and trees where drafter and target serve trees; a number of draft tokens makes chains.
        draft_sampling: "coupled" drafts of sampled requests are chosen with the noise that the target will choose by (Daliri, Musco
            and Suresh, arXiv 2408.07978), "greedy" ones without it. Either is a point mass, so sampled output equals plain decoding
            with the same seed token for token. "probabilistic" draws drafts from the drafter's distribution with numbers of their
            own, in chains alone, exact in distribution.
        pipeline_depth: steps launched before the oldest result is read; None means 1 on an accelerator and 0 on a CPU.
        graphs: capture decode steps as CUDA or HIP graphs, one per shape when it first occurs (`specdec.engine.graphs`), and with
            triton_fa the prefill of short chunks as well (`specdec.engine.prefill_graphs`); without effect on a CPU. None captures
            on CUDA, and on AMD's gfx942 and gfx950 once a captured step has passed its self-check (`specdec.self_check`), and
            warns and goes on without where the device refuses; True raises there.
        timing: measure the phases of each step; synchronizes the device, so it slows an accelerator down, and runs without graphs.
        seed: source of the seeds of requests that bring none.
        cache: the KV cache.
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_prefill_tokens: int | None = None
    num_draft_tokens: int | Literal["auto"] | None = "auto"
    draft_sampling: DraftSampling = "coupled"
    pipeline_depth: int | None = None
    graphs: bool | None = None
    timing: bool = False
    seed: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    tree_nodes: int | None = None

    def __post_init__(self) -> None:
        _integers(self, "max_num_seqs", "max_model_len", "max_prefill_tokens", "pipeline_depth", "seed", "tree_nodes")
        _flags(self, "graphs", "timing")
        if self.num_draft_tokens is not None and not isinstance(self.num_draft_tokens, str):
            _integers(self, "num_draft_tokens")
        _require(isinstance(self.cache, CacheConfig), f"cache is a {type(self.cache).__name__}; it must be a CacheConfig")
        _require(
            1 <= self.max_num_seqs <= MOST_SEQS,
            f"max_num_seqs is {self.max_num_seqs}; it must be at least 1 and at most {MOST_SEQS:,}",
        )
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len is {self.max_model_len}; a prompt and an output token need at least 2",
        )
        _require(
            self.max_prefill_tokens is None or self.max_prefill_tokens >= 1,
            f"max_prefill_tokens is {self.max_prefill_tokens}; it must be at least 1",
        )
        _require(
            self.num_draft_tokens in ("auto", None) or (isinstance(self.num_draft_tokens, int) and self.num_draft_tokens >= 0),
            f"num_draft_tokens is {self.num_draft_tokens!r}; it must be 'auto', 0 (plain decoding) or a positive count",
        )
        _require(
            self.tree_nodes is None or 0 <= self.tree_nodes <= MOST_NODES,
            f"tree_nodes is {self.tree_nodes}; it must be 0 (chains) to {MOST_NODES}, or left out",
        )
        _require(
            not self.tree_nodes or self.num_draft_tokens in ("auto", None),
            f"tree_nodes is {self.tree_nodes} and num_draft_tokens {self.num_draft_tokens}; a block is a tree or a chain, so leave"
            " out one of the two",
        )
        _require(
            self.draft_sampling in ("coupled", "greedy", "probabilistic"),
            f"draft_sampling is {self.draft_sampling!r}; choose 'coupled', 'greedy' or 'probabilistic'",
        )
        _require(
            self.pipeline_depth is None or self.pipeline_depth in (0, 1),
            f"pipeline_depth is {self.pipeline_depth}; it must be 0 or 1",
        )
