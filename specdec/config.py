"""Configuration: frozen dataclasses, validated once when they are made."""

import math
from dataclasses import dataclass, field
from typing import Literal

from specdec.errors import InvalidInputError

DraftSampling = Literal["greedy", "probabilistic"]
CacheDtype = Literal["auto", "fp8"]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidInputError(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded.

    Processing order of the logits, the same at every verified position and the same as Transformers': repetition penalty,
    temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: most new tokens, at least 1.
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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be at least 1")
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
        _require(all(self.stop), "stop holds an empty string, which would end every output at once; remove it")


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
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_dtype: CacheDtype = "auto"

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, f"block_size is {self.block_size}; it must be at least 1 token")
        _require(self.kv_dtype in ("auto", "fp8"), f"kv_dtype is {self.kv_dtype!r}; choose 'auto' or 'fp8'")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache of the target and, in the same blocks, of the drafter.

    Attributes:
        memory_bytes: budget for all key and value tensors; None takes what the device has room for (`specdec.device`).
        prefix_caching: keep full prompt blocks of finished requests and share them with requests that begin alike.
    """

    memory_bytes: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require(
            self.memory_bytes is None or self.memory_bytes > 0,
            f"memory_bytes is {self.memory_bytes}; it must be a positive number of bytes",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine.

    Attributes:
        max_num_seqs: requests decoded at once; sizes all per-request device state.
        max_model_len: most tokens of prompt and output together; None takes the model's own limit.
        max_prefill_tokens: prompt tokens per step, the size of a prefill chunk; None takes 512 on a CPU and 2,048 elsewhere.
        num_draft_tokens: k, drafts per step: a number, 0 for plain decoding, or "auto" for what decodes fastest, chosen step by
            step up to the drafter's own number, by the times and the acceptance measured so far (`specdec.engine.draft_length`).
            None takes the drafter's own number. With "auto", probabilistic drafts make sampled output depend on the speed of the
            machine, which a seed does not repeat.
        draft_sampling: "greedy" drafts are a point mass, so sampled output equals plain decoding with the same seed token for
            token; "probabilistic" draws drafts from the drafter's distribution, exact in distribution.
        pipeline_depth: steps launched before the oldest result is read; None means 1 on an accelerator and 0 on a CPU.
        graphs: capture decode steps as CUDA or HIP graphs, one per shape when it first occurs (`specdec.engine.graphs`), and with
            triton_fa the prefill of short chunks as well (`specdec.engine.prefill_graphs`); without effect on a CPU. None captures
            on CUDA, and warns and goes on without where the device refuses; True raises there.
        timing: measure the phases of each step; synchronizes the device, so it slows an accelerator down, and runs without graphs.
        seed: source of the seeds of requests that bring none.
        cache: the KV cache.
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_prefill_tokens: int | None = None
    num_draft_tokens: int | Literal["auto"] | None = "auto"
    draft_sampling: DraftSampling = "greedy"
    pipeline_depth: int | None = None
    graphs: bool | None = None
    timing: bool = False
    seed: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
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
            self.draft_sampling in ("greedy", "probabilistic"),
            f"draft_sampling is {self.draft_sampling!r}; choose 'greedy' or 'probabilistic'",
        )
        _require(
            self.pipeline_depth is None or self.pipeline_depth in (0, 1),
            f"pipeline_depth is {self.pipeline_depth}; it must be 0 or 1",
        )
