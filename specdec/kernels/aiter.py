"""AITER, AMD's kernel library: the only file that imports it, and only when needed.

The distribution is called `amd-aiter` and the package `aiter`; the distribution called `aiter` is
an unrelated library. Arguments moved between AITER's versions, so everything is called by keyword,
and the keywords are checked against the installed functions. Each family of functions is a class,
loaded by itself, so that what one lacks does not keep the others from working. A function has
AITER's name and signature; its type names its module and the keywords that have to exist, and with
`None` it may be missing.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, metadata
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import torch

MINIMUM_VERSION = (0, 1, 15)
"""The oldest AITER the backends are tested against."""

CHECKED_VERSION = (0, 1, 23)
"""The newest AITER that the calls have been compared with; from 0.1.21 on with single files of it.
"""

NON_CAUSAL_VERSION = (0, 1, 16)
"""Before it, `flash_attn_with_kvcache` reads sequence lengths on the host, in the middle of a step.
"""

SHUFFLE_VERSION = (0, 1, 16)
"""From it, `unified_attention` reads the shuffled layout."""

FLOAT16_VERSION = (0, 1, 17)
"""From it, `unified_attention` reads a float16 cache of any length; some releases of the version
before stop at 512 keys.
"""

Function = Callable[..., Any]


Varlen = Annotated[
    Function, "aiter", "max_seqlen_q softmax_scale logits_soft_cap causal window_size return_lse"
]


@dataclass(frozen=True)
class AiterTriton:
    """What attention with ordinary heads needs where AITER has its Triton kernels alone."""

    version: tuple[int, ...]
    flash_attn_with_kvcache: Annotated[
        Function,
        "aiter.ops.triton.attention.mha_v3",
        "k_cache v_cache cache_seqlens page_table softmax_scale causal window_size"
        " return_softmax_lse",
    ]
    unified_attention: Annotated[
        Function,
        "aiter.ops.triton.attention.unified_attention",
        "out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size"
        " block_table softcap sinks",
    ]


@dataclass(frozen=True)
class AiterFa(AiterTriton):
    """What attention with ordinary heads needs where AITER has all of its kernels."""

    flash_attn_varlen_func: Varlen
    paged_attention_v1: Annotated[
        Function,
        "aiter",
        "out workspace_buffer block_tables cu_query_lens context_lens max_context_len"
        " sliding_window",
    ]
    paged_attention_rocm: Annotated[
        Function,
        "aiter",
        "exp_sums max_logits tmp_out num_kv_heads block_tables context_lens max_context_len",
    ]
    paged_attention_common: Annotated[
        Function,
        "aiter",
        "K_QScale_hip V_QScale_hip K_QScale_asm V_QScale_asm out_ max_seq_len kv_cache_dtype",
    ]
    reshape_and_cache: Annotated[
        Function, "aiter", "slot_mapping kv_cache_dtype k_scale v_scale asm_layout"
    ]
    reshape_and_cache_flash: Annotated[
        Function, "aiter", "slot_mapping kv_cache_dtype k_scale v_scale"
    ]


@dataclass(frozen=True)
class AiterMla:
    """What latent attention needs; the optional functions are those of the 8-bit prefill."""

    version: tuple[int, ...]
    flash_attn_varlen_func: Varlen
    mla_decode_fwd: Annotated[
        Function,
        "aiter.mla",
        "qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size nhead_kv sm_scale"
        " work_meta_data work_indptr"
        " work_info_set reduce_indptr reduce_final_map reduce_partial_map q_scale kv_scale"
        " return_lse",
    ]
    get_mla_metadata_info_v1: Annotated[
        Function,
        "aiter",
        "batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode",
    ]
    get_mla_metadata_v1: Annotated[
        Function,
        "aiter",
        "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k"
        " is_causal work_metadata_ptrs"
        " work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size"
        " kv_granularity max_seqlen_qo"
        " uni_seqlen_qo fast_mode dtype_q dtype_kv",
    ]
    mla_reduce_v1: Annotated[
        Function,
        "aiter",
        "partial_output partial_lse reduce_indptr reduce_final_map reduce_partial_map max_seqlen_q"
        " final_output final_lse",
    ]
    concat_and_cache_mla: Annotated[
        Function, "aiter", "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale"
    ]
    get_ps_metadata_info_v1: Annotated[
        Function | None, "aiter", "batch_size num_head_k max_qlen qlen_granularity"
    ]
    mla_prefill_ps_asm_fwd: Annotated[
        Function | None,
        "aiter",
        "qo_indptr kv_indptr kv_page_indices work_indptr work_info_set max_seqlen_q softmax_scale"
        " is_causal splitData splitLse"
        " output q_scale k_scale v_scale",
    ]

    @cached_property
    def reduce_options(self) -> dict[str, int]:
        """`num_kv_splits`, where `mla_reduce_v1` demands it; 0 lets it choose."""
        return (
            {"num_kv_splits": 0}
            if takes(self, "mla_reduce_v1", "num_kv_splits", since=(0, 1, 16))
            else {}
        )

    @property
    def missing(self) -> list[str]:
        """Names of the optional functions that the installed version lacks."""
        return [name for name in _declared(type(self)) if getattr(self, name) is None]


@dataclass(frozen=True)
class AiterIndexer:
    """What the indexer of sparse latent attention needs."""

    version: tuple[int, ...]
    indexer_k_quant_and_cache: Annotated[
        Function, "aiter", "kv_cache slot_mapping quant_block_size scale_fmt"
    ]
    cp_gather_indexer_k_quant_cache: Annotated[
        Function, "aiter", "kv_cache dst_k dst_scale block_table cu_seq_lens"
    ]
    fp8_mqa_logits: Annotated[
        Function,
        "aiter.ops.triton.attention.fp8_mqa_logits",
        "Q KV kv_scales weights cu_starts cu_ends clean_logits",
    ]
    deepgemm_fp8_paged_mqa_logits: Annotated[
        Function,
        "aiter.ops.triton.attention.pa_mqa_logits",
        "q_fp8 kv_cache weights out_logits context_lens kv_indices max_model_len KVBlockSize"
        " ChunkK",
    ]
    top_k_per_row_prefill: Annotated[
        Function, "aiter", "logits rowStarts rowEnds indices values numRows stride0 stride1 k"
    ]
    top_k_per_row_decode: Annotated[
        Function, "aiter", "logits next_n seqLens indices numRows stride0 stride1 k"
    ]

    @cached_property
    def top_k_options(self) -> dict[str, bool]:
        """`stable`, where the two can be told to prefer the lower of two positions with equal
        scores.
        """
        kernels = ("top_k_per_row_prefill", "top_k_per_row_decode")
        return (
            {"stable": True}
            if all(takes(self, name, "stable", since=(0, 1, 20)) for name in kernels)
            else {}
        )


@dataclass(frozen=True)
class AiterRouter:
    """What choosing a token's experts needs."""

    version: tuple[int, ...]
    biased_grouped_topk: Annotated[
        Function,
        "aiter",
        "gating_output correction_bias topk_weights topk_ids num_expert_group topk_group"
        " need_renorm routed_scaling_factor",
    ]
    grouped_topk: Annotated[
        Function,
        "aiter",
        "gating_output topk_weights topk_ids num_expert_group topk_group need_renorm is_softmax"
        " routed_scaling_factor",
    ]
    topk_softmax: Annotated[
        Function,
        "aiter",
        "topk_weights topk_indices token_expert_indices gating_output need_renorm",
    ]


Family = TypeVar("Family")


def installed_version() -> str | None:
    """Version of the distribution `amd-aiter`, None when it is not installed."""
    try:
        return metadata.version("amd-aiter")
    except metadata.PackageNotFoundError:
        return None


def newer_than_checked() -> str | None:
    """A note on an AITER newer than what the calls have been compared with; None for others."""
    text = installed_version()
    if text is None or known_numbers(text) <= CHECKED_VERSION:
        return None
    return (
        f"amd-aiter {text} is newer than {dotted(CHECKED_VERSION)}, the newest that was checked;"
        " compare the arguments of its functions with: python -m"
        " tests.helpers.aiter_emulation.compare_signatures"
    )


def wrong_package_installed() -> bool:
    """Whether the unrelated distribution `aiter` is installed and `amd-aiter` is not."""
    if installed_version() is not None:
        return False
    try:
        metadata.version("aiter")
    except metadata.PackageNotFoundError:
        return False
    return True


def version_numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> version_numbers("0.1.16.post3+rocm7.1"), version_numbers("v0.1.20")
    ((0, 1, 16), (0, 1, 20))
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(map(int, match[1].split("."))) if match else ()


def known_numbers(text: str) -> tuple[int, ...]:
    """The same, where a version says something: a shallow clone calls itself 0.1.dev1 or 0.1.0.

    It counts as the newest checked one: functions and keywords are looked at before any is called.

    >>> known_numbers("0.1.dev1+g0123abc"), known_numbers("0.1.0"), known_numbers("0.1.14")
    ((0, 1, 23), (0, 1, 23), (0, 1, 14))
    """
    numbers = version_numbers(text)
    return CHECKED_VERSION if numbers in ((0, 1), (0, 1, 0)) else numbers


def unavailable_reasons(family: type[Any] = AiterFa) -> list[str]:
    """Why AITER's functions of one family cannot be used, with the way out; empty when they can."""
    text = installed_version()
    if wrong_package_installed():
        return [
            "the installed package 'aiter' is an unrelated async library: uninstall it and install"
            " AMD's amd-aiter (docs/rocm.md)"
        ]
    if text is None:
        return ["AITER is not installed: install amd-aiter (docs/rocm.md)"]
    if known_numbers(text) < MINIMUM_VERSION:
        return [f"amd-aiter {text} is older than {dotted(MINIMUM_VERSION)}: install a newer one"]
    why = loading_error(family)
    return [f"amd-aiter {text} cannot be used: {why}"] if why else []


def loading_error(family: type[Any]) -> str | None:
    """What goes wrong when a family is loaded, in at most 200 characters;
    None when nothing does.
    """
    try:
        load(family)
    except ImportError as error:
        return _one_line(str(error) or "ImportError")
    except (
        Exception
    ) as error:  # importing AITER looks at the machine, parses what it finds, and may build
        return _one_line(f"{type(error).__name__}: {error}".removesuffix(": "))
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def load(family: type[Family]) -> Family:
    """Imports the functions of one family.

    Raises:
        ImportError: AITER is missing, or a function or keyword is.
        Exception: of any kind, from AITER's own import, such as a RuntimeError without ROCm.
    """
    functions: dict[str, Any] = {
        name: _function(name, declared) for name, declared in _declared(family).items()
    }
    build: Callable[..., Family] = family
    return build(known_numbers(installed_version() or ""), **functions)


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it.

    >>> dotted((0, 1, 16))
    '0.1.16'
    """
    return ".".join(map(str, version))


def _declared(family: type[Any]) -> dict[str, Any]:
    """The `Annotated` type of each function of a family."""
    return {
        name: hint
        for name, hint in get_type_hints(family, include_extras=True).items()
        if hasattr(hint, "__metadata__")
    }


def _function(name: str, declared: Any) -> Function | None:
    module, keywords = declared.__metadata__
    function: Function | None = getattr(import_module(module), name, None)
    if function is None:
        if type(None) in get_args(declared.__origin__):
            return None
        raise ImportError(f"{module} has no {name}")
    names = _parameters(name, function)
    missing = [
        keyword for keyword in keywords.split() if names is not None and keyword not in names
    ]
    if missing:
        raise ImportError(f"{name} of {module} takes no {', '.join(missing)}")
    return function


def takes(family: Any, name: str, keyword: str, *, since: tuple[int, ...]) -> bool:
    """Whether a function has a keyword, by its version only when nothing else tells."""
    names = _parameters(name, getattr(family, name))
    return family.version >= since if names is None else keyword in names


def _parameters(name: str, function: Function) -> set[str] | None:
    """Names of the parameters of AITER's function `name`; None when nothing tells them, and then
    the version has to do.
    """
    try:
        declared = inspect.signature(function).parameters
    except ValueError:  # a function of C++ that keeps its arguments to itself
        return _operator_arguments(name)
    # What AITER compiles stands behind a wrapper of *args and **kwargs, and the operator that it
    # calls has the arguments.
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in declared.values())
    return _operator_arguments(name) if open_ended else set(declared)


def _operator_arguments(name: str) -> set[str] | None:
    """Names of the arguments of torch's operator `aiter::name`; None when there is none."""
    operator = getattr(torch.ops.aiter, name, None)
    return {argument.name for argument in operator.default._schema.arguments} if operator else None
