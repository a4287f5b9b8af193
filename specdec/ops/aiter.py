"""AITER, AMD's kernel library: the only file that imports it, and only once a backend needs a function.

The distribution is called `amd-aiter` and the package `aiter`; the distribution called `aiter` is an unrelated library. Arguments
moved between AITER's versions, so everything is called by keyword, and the keywords are checked against the installed functions.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

MINIMUM_VERSION = (0, 1, 15)
"""The oldest AITER the backends are tested against."""

NON_CAUSAL_VERSION = (0, 1, 16)
"""Before it, `flash_attn_with_kvcache` reads sequence lengths on the host, in the middle of a step."""

SHUFFLE_VERSION = (0, 1, 16)
"""From it, `unified_attention` reads the shuffled layout."""

_HOMES: dict[str, tuple[str, str]] = {
    "flash_attn_varlen_func": ("aiter", "max_seqlen_q logits_soft_cap causal window_size return_lse sink_ptr"),
    "flash_attn_with_kvcache": (
        "aiter.ops.triton.attention.mha_v3",
        "k_cache v_cache cache_seqlens page_table softmax_scale causal window_size",
    ),
    "unified_attention": (
        "aiter.ops.triton.attention.unified_attention",
        "out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap sinks",
    ),
    "paged_attention_v1": ("aiter", "out workspace_buffer block_tables cu_query_lens context_lens max_context_len sliding_window"),
    "paged_attention_rocm": ("aiter", "exp_sums max_logits tmp_out num_kv_heads block_tables context_lens max_context_len"),
    "paged_attention_common": ("aiter", "K_QScale_hip V_QScale_hip K_QScale_asm V_QScale_asm out_ max_seq_len kv_cache_dtype"),
    "reshape_and_cache": ("aiter", "slot_mapping kv_cache_dtype k_scale v_scale asm_layout"),
    "reshape_and_cache_flash": ("aiter", "slot_mapping kv_cache_dtype k_scale v_scale"),
}
"""Module of each function, and keywords that have to exist."""


@dataclass(frozen=True, slots=True)
class Aiter:
    """AITER's functions, under AITER's names and with AITER's signatures."""

    version: tuple[int, ...]
    flash_attn_varlen_func: Callable[..., Any]
    flash_attn_with_kvcache: Callable[..., Any]
    unified_attention: Callable[..., Any]
    paged_attention_v1: Callable[..., Any]
    paged_attention_rocm: Callable[..., Any]
    paged_attention_common: Callable[..., Any]
    reshape_and_cache: Callable[..., Any]
    reshape_and_cache_flash: Callable[..., Any]


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


def unavailable_reasons() -> list[str]:
    """Why AITER's functions cannot be used, with the way out; empty when they can."""
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
        load()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return [f"amd-aiter {text} cannot be used: {reason[:200]}"]
    return []


def load() -> Aiter:
    """Imports AITER.

    Raises:
        ImportError: it is missing, or a function or keyword is.
        RuntimeError: AITER finds no ROCm on this machine.
    """
    functions = {name: _function(name, module, required.split()) for name, (module, required) in _HOMES.items()}
    return Aiter(version=version_numbers(installed_version() or ""), **functions)


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it.

    >>> dotted((0, 1, 16))
    '0.1.16'
    """
    return ".".join(map(str, version))


def _function(name: str, module: str, required: list[str]) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(import_module(module), name, None)
    if function is None:
        raise ImportError(f"{module} has no {name}")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function of C++ that keeps its arguments to itself; the version has to do
        return function
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [keyword for keyword in required if keyword not in parameters]
    if missing and not open_ended:  # wrappers of custom operators may hide the real signature
        raise ImportError(f"{name} of {module} takes no {', '.join(missing)}")
    return function
