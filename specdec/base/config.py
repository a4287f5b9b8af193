"""Configuration: frozen dataclasses, validated once when they are made."""

from dataclasses import dataclass, field, replace
from typing import Literal

from specdec.base.blocks import MAX_NODES
from specdec.base.chat.messages import template_text, variables_text
from specdec.base.errors import shown
from specdec.base.validation import choices, flags, integers, is_number, ranges, require

DraftSampling = Literal["coupled", "greedy", "probabilistic"]
CacheDtype = Literal["auto", "fp8"]
PrefillDtype = Literal["auto", "model"]
WeightForm = Literal["as-stored", "bfloat16"]
GenerationSource = Literal["model", "none"]


DEFAULT_BLOCK_SIZE = 16
"""Tokens per cache block."""

MAX_BLOCK = 2**16
"""Most of them."""

MAX_RANKS = 64
"""Most processes that compute a target; they start before its heads are known."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a target is loaded; what an engine cannot change afterwards.

    Attributes:
        device: "auto", "cpu", "cuda" or "cuda:N" (ROCm devices answer to "cuda").
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16, but float32 on a CPU without
            bfloat16 instructions, except for GGUF files and the embedded model.
        attention: "auto" or a backend, by its name in `specdec doctor`.
        block_size: tokens per cache block.
        kv_dtype: "auto" stores keys and values in the model's own type; "fp8" stores 8-bit floats,
            half the memory and no longer exact, on backends that have them. Layers whose keys are
            too large for that keep the model's type where the backend allows it.
        prefill_dtype: "auto" computes prompts, and queries of an 8-bit cache, in 8-bit floats where
            a kernel does that (latent attention on gfx950); "model" always in the model's own type.
        weights: "as-stored" keeps quantized weights packed where a kernel multiplies with them (in
            half precision on an accelerator) and unpacks others; "bfloat16" unpacks all as they are
            read.
        tensor_parallel: processes that compute the target together, each on an accelerator of its
            own; None takes the number that `torchrun` has started, else 1.
        generation_config: "model" takes what a request leaves out from the checkpoint's
            generation_config.json; "none" takes only end-of-sequence tokens from it.
        chat_template: a file with a Jinja template in place of the tokenizer's own. It may be the
            text of one, too, and the text is what is kept.
        chat_template_kwargs: variables of the chat template as a JSON object, such as
            {"enable_thinking": false}. Python may give a mapping; JSON is what is kept.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_dtype: CacheDtype = "auto"
    prefill_dtype: PrefillDtype = "auto"
    weights: WeightForm = "as-stored"
    tensor_parallel: int | None = None
    generation_config: GenerationSource = "model"
    chat_template: str | None = field(default=None, metadata={"metavar": "FILE"})
    chat_template_kwargs: str | None = field(default=None, metadata={"metavar": "JSON"})

    def __post_init__(self) -> None:
        for name in ("device", "dtype", "attention"):
            value = getattr(self, name)
            # torch's devices and types say their names
            right = isinstance(value, str) or type(value).__module__ == "torch"
            require(right, f"{name} is {shown(value)}; it must be a string")
            object.__setattr__(self, name, str(value).removeprefix("torch."))
        integers(self, "block_size", "tensor_parallel")
        ranks = f"it must be at least 1 and at most {MAX_RANKS}"
        size = f"it must be at least 1 token and at most {MAX_BLOCK:,}"
        ranges(
            self,
            ("tensor_parallel", lambda count: 1 <= count <= MAX_RANKS, ranks),
            ("block_size", lambda count: 1 <= count <= MAX_BLOCK, size),
        )
        choices(self, kv_dtype=CacheDtype, prefill_dtype=PrefillDtype)
        choices(self, generation_config=GenerationSource, weights=WeightForm)
        right = self.weights == "as-stored" or self.dtype in ("auto", "bfloat16")
        what = f"weights are asked for in {self.weights} and dtype is {shown(self.dtype)}"
        require(right, f"{what}; leave out one of the two")
        object.__setattr__(self, "chat_template", template_text(self.chat_template))
        object.__setattr__(self, "chat_template_kwargs", variables_text(self.chat_template_kwargs))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache of the target and, in the same blocks, of the drafter.

    Attributes:
        memory_bytes: memory of all key and value tensors; None takes what the device has room for
            (`specdec.device.device`).
        prefix_caching: keep full blocks of prompts and outputs, and share them with requests that
            begin alike.
    """

    memory_bytes: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        integers(self, "memory_bytes")
        flags(self, "prefix_caching")
        says = "it must be a positive number of bytes"
        ranges(self, ("memory_bytes", lambda size: size > 0, says))


MAX_SEQS = 2**16
"""Most requests decoded at once; state for so many already takes gigabytes."""

MAX_TOKENS = 2**28
"""Most tokens of a request, and of a prefill chunk; indices of so many already take a gigabyte."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine.

    Attributes:
        max_num_seqs: requests decoded at once; sizes all per-request device state.
        max_model_len: most tokens of prompt and output together; None takes what the model is made
            for.
        max_prefill_tokens: prompt tokens per step, the size of a prefill chunk; None takes 512 on a
            CPU, elsewhere what the attention backend says, up to 8,192, and 2,048 while other
            requests decode.
        num_draft_tokens: k, drafts per step: a number, 0 for plain decoding, or "auto" for what
            decodes fastest, chosen step by step from measured times and acceptance, up to the
            drafter's own number (`specdec.engine.policy.block_choice`). None takes what the
            drafter's checkpoint recommends, else its own number. With "auto", probabilistic drafts
            make sampled output depend on the speed of the machine, which a seed does not repeat.
        tree_nodes: drafts of a step, as a tree, up to 64; 0 makes chains only. None leaves it to
            "auto", which chooses among chains and trees where drafter and target serve trees; a
            number of draft tokens makes chains.
        verify_budget: drafts per request that a step verifies, on average over all requests; None
            means all. The likeliest of all requests are taken (`specdec.engine.policy.budget`).
            "auto", for blocks whose shape is chosen, lets some have a budget.
        draft_sampling: how drafts of sampled requests are made: "coupled" with the noise that the
            target will choose by (Daliri, Musco and Suresh, arXiv 2408.07978), "greedy" as the
            likeliest, "probabilistic" by drawing. The first two are point masses, so sampled output
            equals plain decoding with the same seed token for token. Probabilistic drafts are drawn
            from the drafter's distribution with numbers of their own, in chains alone; output is
            exact in distribution.
        pipeline_depth: steps launched before the oldest result is read; None means 1 on an
            accelerator and 0 on a CPU.
        graphs: capture decode steps as CUDA or HIP graphs, one per shape when it first occurs or
            a server starts (`specdec.engine.capture.graphs`), and with triton_fa the prefill of
            short chunks as well (`specdec.engine.capture.prefill_graphs`); without effect on a
            CPU. None captures on CUDA, and on AMD's gfx942 and gfx950 once a captured step has
            passed its self-check (`specdec.device.self_check`), and warns and goes on without
            where the device refuses; True raises there.
        timing: measure the phases of each step; this makes an accelerator slower, and runs without
            graphs.
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
    verify_budget: float | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        integers(self, "max_num_seqs", "max_model_len", "max_prefill_tokens")
        integers(self, "pipeline_depth", "seed", "tree_nodes")
        flags(self, "graphs", "timing")
        if self.num_draft_tokens is not None and not isinstance(self.num_draft_tokens, str):
            integers(self, "num_draft_tokens")
        what = f"cache is a {type(self.cache).__name__}; it must be a CacheConfig"
        require(isinstance(self.cache, CacheConfig), what)
        seqs = f"it must be at least 1 and at most {MAX_SEQS:,}"
        least, most = "a prompt and an output token need at least 2", MAX_TOKENS
        many = f"it must be at most {most:,}"
        ranges(
            self,
            ("max_num_seqs", lambda count: 1 <= count <= MAX_SEQS, seqs),
            ("max_model_len", lambda count: count >= 2, least),
            ("max_prefill_tokens", lambda count: count >= 1, "it must be at least 1"),
            ("max_model_len", lambda count: count <= most, many),
            ("max_prefill_tokens", lambda count: count <= most, many),
        )
        k, says = self.num_draft_tokens, "it must be 'auto', 0 (plain decoding) or a positive count"
        right = k in ("auto", None) or (isinstance(k, int) and k >= 0)
        require(right, f"num_draft_tokens is {shown(k)}; {says}")
        says = f"it must be 0 (chains) to {MAX_NODES}, or left out"
        ranges(self, ("tree_nodes", lambda nodes: 0 <= nodes <= MAX_NODES, says))
        both = f"tree_nodes is {self.tree_nodes} and num_draft_tokens {k}"
        says = "a block is a tree or a chain, so leave out one of the two"
        require(not self.tree_nodes or k in ("auto", None), f"{both}; {says}")
        budget, chosen = self.verify_budget, k == "auto" and not self.tree_nodes
        what = f"verify_budget is {shown(budget)}"
        right = budget in (None, "auto") or (is_number(budget) and float(budget) > 0)
        require(right, f"{what}; it must be 'auto', a number above 0, or left out")
        how = "chosen; say num_draft_tokens or tree_nodes" if chosen else "given; give a number"
        right = budget is None or (budget == "auto") == chosen
        require(right, f"{what} and the shape of blocks is {how}, or leave it out")
        choices(self, draft_sampling=DraftSampling)
        ranges(self, ("pipeline_depth", lambda depth: depth in (0, 1), "it must be 0 or 1"))

    def plain(self) -> "EngineConfig":
        """This config without drafts."""
        return replace(self, num_draft_tokens=0, tree_nodes=0, verify_budget=None)
