"""Exact signatures of AITER's functions, by the version from which they hold."""

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache

VERSIONS = (
    *("0.1.15", "0.1.15.post1", "0.1.16", "0.1.17", "0.1.18", "0.1.19", "0.1.20"),
    *("0.1.21", "0.1.22"),
)
"""Those in which an argument or a kernel was added or changed. The releases between are like the
one before. From 0.1.21 on they are known from single files and threads, not from whole releases.
"""

SIGNATURES: dict[str, dict[str, str]] = {
    "flash_attn_with_kvcache": {
        "0.1.15": """q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None,
            softmax_scale=None, causal=True, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
            num_splits=0, pack_gqa=None, sm_margin=0, q_descale=None, k_descale=None,
            v_descale=None, max_seqlen_q=None, return_softmax_lse=False, page_table=None,
            cache_batch_idx=None, cache_leftpad=None, rotary_cos=None, rotary_sin=None,
            rotary_seqlens=None, cu_seqlens_q=None, cu_seqlens_k_new=None"""
    },
    "unified_attention": {
        "0.1.15": """q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k,
            softmax_scale, causal, window_size, block_table, softcap, q_descale, k_descale,
            v_descale, alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None""",
        "0.1.15.post1": """q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k,
            softmax_scale, causal, window_size, block_table, softcap, q_descale, k_descale,
            v_descale, q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None,
            sinks=None, shuffled_kv_cache=False, skip_reduce=False""",
        "0.1.22": """q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k,
            softmax_scale, causal, window_size, block_table, softcap, q_descale, k_descale,
            v_descale, q_scales=None, alibi_slopes=None, output_scale=None, qq_bias=None,
            sinks=None, shuffled_kv_cache=False, skip_reduce=False, backend=None""",
    },
    "flash_attn_varlen_func": {
        "0.1.15": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False,
            window_size=(-1, -1, 0), bias=None, alibi_slopes=None, deterministic=False,
            return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None,
            out=None, cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, sink_ptr=None"""
    },
    "paged_attention_v1": {
        "0.1.15": """out, workspace_buffer, query, key_cache, value_cache, scale, block_tables,
            cu_query_lens, context_lens, max_context_len, alibi_slopes, kv_cache_dtype,
            kv_cache_layout, logits_soft_cap, k_scale, v_scale, fp8_out_scale=None,
            partition_size=256, mtp=1, sliding_window=0"""
    },
    "paged_attention_rocm": {
        "0.1.15": """out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache,
            num_kv_heads, scale, block_tables, context_lens, block_size, max_context_len,
            alibi_slopes, kv_cache_dtype, k_scale, v_scale, fp8_out_scale=None, partition_size=256,
            mtp=1, q_scale=None"""
    },
    "paged_attention_common": {
        "0.1.15": """Q, K, V, exp_sums, max_logits, tmp_out, block_tables, context_lens,
            block_tables_stride0, scale, max_qlen=1, max_seq_len=1, K_QScale_hip=None,
            V_QScale_hip=None, K_QScale_asm=None, V_QScale_asm=None, out_=None, qo_indptr=None,
            high_precision=1, kernelName=None, kv_cache_dtype='auto', kv_cache_tensor_dtype=None"""
    },
    "pa_fwd_asm": {
        "0.1.15": """Q, K, V, block_tables, context_lens, block_tables_stride0, max_qlen=1,
            K_QScale=None, V_QScale=None, out_=None, qo_indptr=None, high_precision=1,
            kernelName=None"""
    },
    "reshape_and_cache": {
        "0.1.15": """key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale=None,
            v_scale=None, asm_layout=False"""
    },
    "reshape_and_cache_flash": {
        "0.1.15": "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale,"
        " v_scale"
    },
    "concat_and_cache_mla": {"0.1.15": "kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale"},
    "mla_decode_fwd": {
        "0.1.15": """q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens,
            max_seqlen_q, page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None,
            num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None,
            reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None,
            kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False""",
        "0.1.17": """q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens,
            max_seqlen_q, page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None,
            num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None,
            reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None,
            kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False,
            g_kv_indptr=None, cp_world_size=1, cp_rank=0""",
        "0.1.20": """q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens,
            max_seqlen_q, page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None,
            num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None,
            reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, q_scale=None,
            kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False,
            g_kv_indptr=None, cp_world_size=1, cp_rank=0, causal=True""",
    },
    "get_mla_metadata_info_v1": {
        "0.1.15": """batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse,
            fast_mode=True, num_kv_splits=32, intra_batch_mode=False""",
        "0.1.16": """batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse,
            fast_mode=True, num_kv_splits=32, intra_batch_mode=False, max_split_per_batch=-1""",
    },
    "get_mla_metadata_v1": {
        "0.1.15": """seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k,
            num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr,
            reduce_final_map, reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1,
            uni_seqlen_qo=-1, fast_mode=True, topk=-1, max_split_per_batch=-1,
            intra_batch_mode=False, dtype_q=None, dtype_kv=None""",
        "0.1.17": """seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k,
            num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr,
            reduce_final_map, reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1,
            uni_seqlen_qo=-1, fast_mode=True, topk=-1, max_split_per_batch=-1,
            intra_batch_mode=False, dtype_q=None, dtype_kv=None, is_cp_round_robin=False""",
        "0.1.18": """seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k,
            num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr,
            reduce_final_map, reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1,
            uni_seqlen_qo=-1, fast_mode=True, topk=-1, max_split_per_batch=-1,
            intra_batch_mode=False, is_cp_round_robin=False, mla_version=0, dtype_q_nope=None,
            dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None, dtype_q=None,
            dtype_kv=None""",
    },
    "mla_reduce_v1": {
        "0.1.15": """partial_output, partial_lse, reduce_indptr, reduce_final_map,
            reduce_partial_map, max_seqlen_q, final_output, final_lse=None""",
        "0.1.16": """partial_output, partial_lse, reduce_indptr, reduce_final_map,
            reduce_partial_map, max_seqlen_q, num_kv_splits, final_output, final_lse=None""",
    },
    "get_ps_metadata_info_v1": {"0.1.15": "batch_size, num_head_k, max_qlen, qlen_granularity=256"},
    "get_ps_metadata_v1": {
        "0.1.15": """seqlens_qo_indptr, pages_kv_indptr, context_lens, gqa_ratio, num_heads_k,
            work_metadata_ptrs, work_indptr, work_info, reduce_indptr, reduce_final_map,
            reduce_partial_map, qhead_granularity=1, qlen_granularity=256, kvlen_granularity=16,
            block_size=16, is_causal=True"""
    },
    "mla_prefill_ps_asm_fwd": {
        "0.1.15": """Q, K, V, qo_indptr, kv_indptr, kv_page_indices, work_indptr, work_info_set,
            max_seqlen_q, softmax_scale, is_causal, splitData, splitLse, output, q_scale=None,
            k_scale=None, v_scale=None"""
    },
    "indexer_k_quant_and_cache": {
        "0.1.15": "k, kv_cache, slot_mapping, quant_block_size, scale_fmt, preshuffle=False"
    },
    "cp_gather_indexer_k_quant_cache": {
        "0.1.15": "kv_cache, dst_k, dst_scale, block_table, cu_seq_lens, preshuffle=False"
    },
    "fp8_mqa_logits": {
        "0.1.15": "Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits=True"
    },
    "deepgemm_fp8_paged_mqa_logits": {
        "0.1.15": """q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len,
            Preshuffle=False, KVBlockSize=1, ChunkK=256, TotalCuCount=256, WavePerEU=2,
            VarCtxSchedule=None""",
        "0.1.17": """q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len,
            Preshuffle=False, KVBlockSize=1, ChunkK=256, TotalCuCount=None, WavePerEU=2,
            VarCtxSchedule=None""",
    },
    "top_k_per_row_prefill": {
        "0.1.15": "logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=2048",
        "0.1.20": "logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=2048,"
        " stable=False",
    },
    "top_k_per_row_decode": {
        "0.1.15": "logits, next_n, seqLens, indices, numRows, stride0, stride1, k=2048",
        "0.1.20": "logits, next_n, seqLens, indices, numRows, stride0, stride1, k=2048,"
        " stable=False",
    },
    "biased_grouped_topk": {
        "0.1.15": """gating_output, correction_bias, topk_weights, topk_ids, num_expert_group,
            topk_group, need_renorm, routed_scaling_factor=1.0"""
    },
    "grouped_topk": {
        "0.1.15": """gating_output, topk_weights, topk_ids, num_expert_group, topk_group,
            need_renorm, is_softmax=True, routed_scaling_factor=1.0"""
    },
    "topk_softmax": {
        "0.1.15": """topk_weights, topk_indices, token_expert_indices, gating_output, need_renorm,
            num_shared_experts=0, shared_expert_scoring_func=''"""
    },
    "rmsnorm2d_fwd": {"0.1.15": "input, weight, epsilon, use_model_sensitive_rmsnorm=0"},
    "rmsnorm2d_fwd_with_add": {
        "0.1.15": "out, input, residual_in, residual_out, weight, epsilon,"
        " use_model_sensitive_rmsnorm=0",
        "0.1.17": "out, input, residual_in, residual_out, weight, epsilon, gemma_norm=False,"
        " use_model_sensitive_rmsnorm=0",
    },
    "silu_and_mul": {"0.1.15": "out, input, limit=0.0"},
    "gelu_tanh_and_mul": {"0.1.15": "out, input"},
    "fused_qk_rope_reshape_and_cache": {
        "0.1.15": """q, k, v, key_cache, value_cache, slot_mapping, pos, cos, sin, k_scale, v_scale,
            is_neox, flash_layout, apply_scale=True, offs=None, q_out=None, k_out=None,
            output_zeros=True, zeros_out=None""",
        "0.1.15.post1": """q, k, v, key_cache, value_cache, slot_mapping, pos, cos, sin, k_scale,
            v_scale, is_neox, flash_layout, apply_scale=True, offs=None, q_out=None, k_out=None,
            output_zeros=True, zeros_out=None, upcast_operand=False""",
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
    "concat_and_cache_mla": "ops/cache.py",
    "mla_decode_fwd": "mla.py",
    "get_mla_metadata_info_v1": "ops/attention.py",
    "get_mla_metadata_v1": "ops/attention.py",
    "mla_reduce_v1": "ops/attention.py",
    "get_ps_metadata_info_v1": "ops/attention.py",
    "get_ps_metadata_v1": "ops/attention.py",
    "mla_prefill_ps_asm_fwd": "ops/attention.py",
    "indexer_k_quant_and_cache": "ops/cache.py",
    "cp_gather_indexer_k_quant_cache": "ops/cache.py",
    "fp8_mqa_logits": "ops/triton/attention/fp8_mqa_logits.py",
    "deepgemm_fp8_paged_mqa_logits": "ops/triton/attention/pa_mqa_logits.py",
    "top_k_per_row_prefill": "ops/topk.py",
    "top_k_per_row_decode": "ops/topk.py",
    "biased_grouped_topk": "ops/topk.py",
    "grouped_topk": "ops/topk.py",
    "topk_softmax": "ops/moe_op.py",
    "rmsnorm2d_fwd": "ops/rmsnorm.py",
    "rmsnorm2d_fwd_with_add": "ops/rmsnorm.py",
    "silu_and_mul": "ops/activation.py",
    "gelu_tanh_and_mul": "ops/activation.py",
    "fused_qk_rope_reshape_and_cache": "ops/triton/fusions/fused_kv_cache.py",
}
"""Where AITER defines each function, inside its package."""


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare by; that of a post release comes last.

    >>> version_key("0.1.16") < version_key("0.1.16.post3") < version_key("0.1.20")
    True
    """
    return tuple(map(int, re.findall(r"\d+", version)))


def nearest(versions: Iterable[str], version: str) -> str | None:
    """The newest of `versions` that is not above `version`; None when all are.

    >>> nearest(["0.1.15", "0.1.16", "0.1.20"], "0.1.19.post2")
    '0.1.16'
    """
    return max(
        (v for v in versions if version_key(v) <= version_key(version)),
        key=version_key,
        default=None,
    )


@cache
def signature(name: str, version: str) -> inspect.Signature | None:
    """Signature of `name` in `version`; None when that version lacks the function."""
    known = nearest(SIGNATURES[name], version)
    if known is None:
        return None
    function: object = eval(f"lambda {' '.join(SIGNATURES[name][known].split())}: None", {})
    return inspect.signature(function)  # type: ignore[arg-type]


def signatures(version: str) -> Iterator[tuple[str, inspect.Signature]]:
    """Names and signatures of everything in `version`."""
    for name in SIGNATURES:
        found = signature(name, version)
        if found is not None:
            yield name, found
