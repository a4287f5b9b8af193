"""Attention through the kernels of AITER, on ROCm.

Every backend has a list of routes: which kernel takes which rows. The lists choose, and print as
the tables of the docstrings.

    fa               backends for ordinary heads
    fa_routes        their routes
    fa_triton        AITER's Triton kernels
    fa_compiled      its HIP and assembly kernels

    mla              backend for latents, its routes
    mla_sparse       the same behind an indexer
    latents          what those two share
    mla_indexer      the indexer
    mla_entries      lists for decoding
    mla_sparse_plan  lists and cached plans of the sparse backend
    mla_prefill_fp8  prompts in 8 bits

    groups, routes   requests by phase, and the choice of a kernel
    layout, scratch  cache blocks, and memory at fixed addresses
    varlen           rows on packed keys and on gathered context
"""
