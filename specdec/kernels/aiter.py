"""AITER, AMD's kernel library: the only file that imports it, and only once a backend needs a function.

The distribution is called `amd-aiter` and the package `aiter`; the distribution called `aiter` is an unrelated library. Arguments
moved between AITER's versions, so everything is called by keyword, and the keywords are checked against the installed functions.
Each family of functions is loaded by itself, so that what one lacks does not keep the others from working.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Literal

MINIMUM_VERSION = (0, 1, 15)
"""The oldest AITER the backends are tested against."""

NON_CAUSAL_VERSION = (0, 1, 16)
"""Before it, `flash_attn_with_kvcache` reads sequence lengths on the host, in the middle of a step."""

SHUFFLE_VERSION = (0, 1, 16)
"""From it, `unified_attention` reads the shuffled layout."""

Family = Literal["fa", "mla", "indexer", "router"]
Function = Callable[..., Any]

_HOMES: dict[Family, dict[str, tuple[str, str]]] = {
    "fa": {
        "flash_attn_varlen_func": ("aiter", "max_seqlen_q logits_soft_cap causal window_size return_lse sink_ptr"),
        "flash_attn_with_kvcache": (
            "aiter.ops.triton.attention.mha_v3",
            "k_cache v_cache cache_seqlens page_table softmax_scale causal window_size",
        ),
        "unified_attention": (
            "aiter.ops.triton.attention.unified_attention",
            "out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap sinks",
        ),
        "paged_attention_v1": (
            "aiter",
            "out workspace_buffer block_tables cu_query_lens context_lens max_context_len sliding_window",
        ),
        "paged_attention_rocm": ("aiter", "exp_sums max_logits tmp_out num_kv_heads block_tables context_lens max_context_len"),
        "paged_attention_common": (
            "aiter",
            "K_QScale_hip V_QScale_hip K_QScale_asm V_QScale_asm out_ max_seq_len kv_cache_dtype",
        ),
        "reshape_and_cache": ("aiter", "slot_mapping kv_cache_dtype k_scale v_scale asm_layout"),
        "reshape_and_cache_flash": ("aiter", "slot_mapping kv_cache_dtype k_scale v_scale"),
    },
    "mla": {
        "flash_attn_varlen_func": ("aiter", "max_seqlen_q causal softmax_scale return_lse"),
        "mla_decode_fwd": (
            "aiter.mla",
            "qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size nhead_kv sm_scale work_meta_data work_indptr"
            " work_info_set reduce_indptr reduce_final_map reduce_partial_map q_scale kv_scale return_lse",
        ),
        "get_mla_metadata_info_v1": ("aiter", "batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode"),
        "get_mla_metadata_v1": (
            "aiter",
            "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k is_causal work_metadata_ptrs"
            " work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size kv_granularity max_seqlen_qo"
            " uni_seqlen_qo fast_mode dtype_q dtype_kv",
        ),
        "mla_reduce_v1": (
            "aiter",
            "partial_output partial_lse reduce_indptr reduce_final_map reduce_partial_map max_seqlen_q final_output final_lse",
        ),
        "concat_and_cache_mla": ("aiter", "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale"),
        "get_ps_metadata_info_v1": ("aiter", "batch_size num_head_k max_qlen qlen_granularity"),
        "get_ps_metadata_v1": (
            "aiter",
            "seqlens_qo_indptr pages_kv_indptr context_lens gqa_ratio num_heads_k work_metadata_ptrs work_indptr work_info"
            " reduce_indptr reduce_final_map reduce_partial_map qhead_granularity qlen_granularity kvlen_granularity block_size"
            " is_causal",
        ),
        "mla_prefill_ps_asm_fwd": (
            "aiter",
            "qo_indptr kv_indptr kv_page_indices work_indptr work_info_set max_seqlen_q softmax_scale is_causal splitData splitLse"
            " output q_scale k_scale v_scale",
        ),
    },
    "indexer": {
        "indexer_k_quant_and_cache": ("aiter", "kv_cache slot_mapping quant_block_size scale_fmt"),
        "cp_gather_indexer_k_quant_cache": ("aiter", "kv_cache dst_k dst_scale block_table cu_seq_lens"),
        "fp8_mqa_logits": (
            "aiter.ops.triton.attention.fp8_mqa_logits",
            "Q KV kv_scales weights cu_starts cu_ends clean_logits",
        ),
        "deepgemm_fp8_paged_mqa_logits": (
            "aiter.ops.triton.attention.pa_mqa_logits",
            "q_fp8 kv_cache weights out_logits context_lens kv_indices max_model_len KVBlockSize ChunkK",
        ),
        "top_k_per_row_prefill": ("aiter", "logits rowStarts rowEnds indices values numRows stride0 stride1 k"),
        "top_k_per_row_decode": ("aiter", "logits next_n seqLens indices numRows stride0 stride1 k"),
    },
    "router": {
        "biased_grouped_topk": (
            "aiter",
            "gating_output correction_bias topk_weights topk_ids num_expert_group topk_group need_renorm routed_scaling_factor",
        ),
        "grouped_topk": (
            "aiter",
            "gating_output topk_weights topk_ids num_expert_group topk_group need_renorm is_softmax routed_scaling_factor",
        ),
        "topk_softmax": ("aiter", "topk_weights topk_indices token_expert_indices gating_output need_renorm"),
    },
}
"""Module of each function, and keywords that have to exist."""

_OPTIONAL = ("get_ps_metadata_info_v1", "get_ps_metadata_v1", "mla_prefill_ps_asm_fwd")
"""Functions a version may lack: those of the 8-bit prefill."""


@dataclass(frozen=True, slots=True)
class Aiter:
    """AITER's functions for ordinary heads, under AITER's names and with AITER's signatures."""

    version: tuple[int, ...]
    flash_attn_varlen_func: Function
    flash_attn_with_kvcache: Function
    unified_attention: Function
    paged_attention_v1: Function
    paged_attention_rocm: Function
    paged_attention_common: Function
    reshape_and_cache: Function
    reshape_and_cache_flash: Function


@dataclass(frozen=True, slots=True)
class AiterMla:
    """The same for latent attention; the three of the 8-bit prefill are None when the installed version lacks them.

    Attributes:
        takes_num_kv_splits: `mla_reduce_v1` demands `num_kv_splits` (0 lets it choose).
    """

    version: tuple[int, ...]
    takes_num_kv_splits: bool
    flash_attn_varlen_func: Function
    mla_decode_fwd: Function
    get_mla_metadata_info_v1: Function
    get_mla_metadata_v1: Function
    mla_reduce_v1: Function
    concat_and_cache_mla: Function
    get_ps_metadata_info_v1: Function | None
    get_ps_metadata_v1: Function | None
    mla_prefill_ps_asm_fwd: Function | None


@dataclass(frozen=True, slots=True)
class AiterIndexer:
    """The same for the indexer of sparse latent attention."""

    version: tuple[int, ...]
    indexer_k_quant_and_cache: Function
    cp_gather_indexer_k_quant_cache: Function
    fp8_mqa_logits: Function
    deepgemm_fp8_paged_mqa_logits: Function
    top_k_per_row_prefill: Function
    top_k_per_row_decode: Function


@dataclass(frozen=True, slots=True)
class AiterRouter:
    """The same for choosing a token's experts."""

    version: tuple[int, ...]
    biased_grouped_topk: Function
    grouped_topk: Function
    topk_softmax: Function


def installed_version() -> str | None:
    """Version of the distribution `amd-aiter`, None when it is not installed."""
    try:
        return metadata.version("amd-aiter")
    except metadata.PackageNotFoundError:
        return None


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


def unavailable_reasons(family: Family = "fa") -> list[str]:
    """Why AITER's functions of one family cannot be used, with the way out; empty when they can."""
    text = installed_version()
    if wrong_package_installed():
        return [
            "the installed package 'aiter' is an unrelated async library: uninstall it and install AMD's amd-aiter (docs/rocm.md)"
        ]
    if text is None:
        return ["AITER is not installed: install amd-aiter (docs/rocm.md)"]
    if version_numbers(text) < MINIMUM_VERSION:
        return [f"amd-aiter {text} is older than {dotted(MINIMUM_VERSION)}: install a newer one"]
    try:
        _functions(family)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return [f"amd-aiter {text} cannot be used: {reason[:200]}"]
    return []


def load() -> Aiter:
    """Imports what attention with ordinary heads needs.

    Raises:
        ImportError: AITER is missing, or a function or keyword is.
        RuntimeError: AITER finds no ROCm on this machine.
    """
    return Aiter(version=_version(), **_functions("fa"))


def load_mla() -> AiterMla:
    """Imports what latent attention needs; raises as `load` does."""
    functions, version = _functions("mla"), _version()
    return AiterMla(
        version=version,
        takes_num_kv_splits=_takes(functions["mla_reduce_v1"], "num_kv_splits", version >= (0, 1, 16)),
        **functions,
    )


def load_indexer() -> AiterIndexer:
    """Imports what the indexer of sparse latent attention needs; raises as `load` does."""
    return AiterIndexer(version=_version(), **_functions("indexer"))


def load_router() -> AiterRouter:
    """Imports what choosing experts needs; raises as `load` does."""
    return AiterRouter(version=_version(), **_functions("router"))


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it.

    >>> dotted((0, 1, 16))
    '0.1.16'
    """
    return ".".join(map(str, version))


def _version() -> tuple[int, ...]:
    return version_numbers(installed_version() or "")


def _functions(family: Family) -> dict[str, Any]:
    return {name: _function(name, module, required.split()) for name, (module, required) in _HOMES[family].items()}


def _function(name: str, module: str, required: list[str]) -> Function | None:
    function: Function | None = getattr(import_module(module), name, None)
    if function is None:
        if name in _OPTIONAL:
            return None
        raise ImportError(f"{module} has no {name}")
    parameters = _parameters(function)
    missing = [keyword for keyword in required if parameters is not None and keyword not in parameters]
    if missing:
        raise ImportError(f"{name} of {module} takes no {', '.join(missing)}")
    return function


def _parameters(function: Function) -> set[str] | None:
    """Names of the parameters; None when the function hides them, and then the version has to do."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function of C++ that keeps its arguments to itself
        return None
    # Wrappers of custom operators may hide the real signature behind **kwargs.
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if open_ended else set(parameters)


def _takes(function: Function, keyword: str, by_version: bool) -> bool:
    parameters = _parameters(function)
    return by_version if parameters is None else keyword in parameters
