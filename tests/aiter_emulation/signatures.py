"""Exact signatures of AITER's functions, by the version from which they hold."""

import inspect
from collections.abc import Iterator

VERSIONS = ("0.1.15", "0.1.16", "0.1.20")
"""Versions that can be emulated; arguments moved between them."""

SIGNATURES: dict[str, dict[str, str]] = {
    "flash_attn_with_kvcache": {
        "0.1.15": """q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None, softmax_scale=None, causal=True,
            window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=0, pack_gqa=None, sm_margin=0, q_descale=None,
            k_descale=None, v_descale=None, max_seqlen_q=None, return_softmax_lse=False, page_table=None, cache_batch_idx=None,
            cache_leftpad=None, rotary_cos=None, rotary_sin=None, rotary_seqlens=None, cu_seqlens_q=None,
            cu_seqlens_k_new=None""",
    },
    "unified_attention": {
        "0.1.15": """q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
            block_table, softcap, q_descale, k_descale, v_descale, alibi_slopes=None, output_scale=None, qq_bias=None,
            sinks=None""",
        "0.1.16": """q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
            block_table, softcap, q_descale, k_descale, v_descale, q_scales=None, alibi_slopes=None, output_scale=None,
            qq_bias=None, sinks=None, shuffled_kv_cache=False, skip_reduce=False""",
    },
    "flash_attn_varlen_func": {
        "0.1.15": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0,
            softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None,
            deterministic=False, return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None,
            cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, sink_ptr=None""",
    },
    "paged_attention_v1": {
        "0.1.15": """out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens, context_lens,
            max_context_len, alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap, k_scale, v_scale,
            fp8_out_scale=None, partition_size=256, mtp=1, sliding_window=0""",
    },
    "paged_attention_rocm": {
        "0.1.15": """out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables,
            context_lens, block_size, max_context_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, fp8_out_scale=None,
            partition_size=256, mtp=1, q_scale=None""",
    },
    "paged_attention_common": {
        "0.1.15": """Q, K, V, exp_sums, max_logits, tmp_out, block_tables, context_lens, block_tables_stride0, scale,
            max_qlen=1, max_seq_len=1, K_QScale_hip=None, V_QScale_hip=None, K_QScale_asm=None, V_QScale_asm=None, out_=None,
            qo_indptr=None, high_precision=1, kernelName=None, kv_cache_dtype='auto', kv_cache_tensor_dtype=None""",
    },
    "pa_fwd_asm": {
        "0.1.15": """Q, K, V, block_tables, context_lens, block_tables_stride0, max_qlen=1, K_QScale=None, V_QScale=None,
            out_=None, qo_indptr=None, high_precision=1, kernelName=None""",
    },
    "reshape_and_cache": {
        "0.1.15": """key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale=None, v_scale=None,
            asm_layout=False""",
    },
    "reshape_and_cache_flash": {
        "0.1.15": "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale",
    },
}

SOURCES: dict[str, str] = {
    "flash_attn_with_kvcache": "ops/triton/attention/mha_v3.py",
    "unified_attention": "ops/triton/attention/unified_attention.py",
    "flash_attn_varlen_func": "ops/mha.py",
    "paged_attention_v1": "ops/attention.py",
    "paged_attention_rocm": "ops/attention.py",
    "paged_attention_common": "ops/attention.py",
    "pa_fwd_asm": "ops/attention.py",
    "reshape_and_cache": "ops/cache.py",
    "reshape_and_cache_flash": "ops/cache.py",
}
"""Where AITER defines each function, inside its package."""


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare by.

    >>> version_key("0.1.16") < version_key("0.1.20")
    True
    """
    return tuple(map(int, version.split(".")))


def signature(name: str, version: str) -> inspect.Signature | None:
    """Signature of `name` in `version`; None when that version lacks the function."""
    known = {v: s for v, s in SIGNATURES[name].items() if version_key(v) <= version_key(version)}
    if not known:
        return None
    text = known[max(known, key=version_key)]
    function: object = eval(f"lambda {' '.join(text.split())}: None", {})
    return inspect.signature(function)  # type: ignore[arg-type]


def signatures(version: str) -> Iterator[tuple[str, inspect.Signature]]:
    """Names and signatures of everything in `version`."""
    for name in SIGNATURES:
        found = signature(name, version)
        if found is not None:
            yield name, found
