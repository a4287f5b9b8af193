"""Single-token attention on the paged cache: HIP on the plain layout, HIP or assembly on the
shuffled one.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.cache import plain_view
from tests.helpers.aiter_emulation.machine import (
    Machine,
    blocks_of,
    host,
    int32,
    refuse_unless,
    tensor_scale,
)
from tests.helpers.aiter_emulation.reference import attend
from tests.helpers.aiter_emulation.signatures import version_key

_PARTITION = 256
ASSEMBLY_BLOCKS = 2**16
"""Of a cache, which the assembly kernel tells apart."""


def _partitions(max_context_len: int) -> int:
    return -(-max_context_len // _PARTITION)


def _room(machine: Machine, ok: bool, message: str) -> None:
    """From 0.1.16 on AITER's host code measures scratch and block tables; before, the kernel runs
    past them.
    """
    if not ok and version_key(machine.version) >= version_key("0.1.16"):
        raise ValueError(message)
    refuse_unless(ok, message)


def _apart(name: str, **tensors: Tensor) -> None:
    """No two of them share memory: each is written while the others are read."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, key) for key, t in tensors.items())
    for (_, end, first), (start, _, second) in pairwise(spans):
        refuse_unless(end <= start, f"{name}: {first} and {second} share memory")


def _table(
    machine: Machine, name: str, block_tables: Tensor, block_size: int, max_context_len: int
) -> None:
    """Rows of the table lie as far apart as it is wide, whatever its strides say."""
    _room(
        machine,
        block_tables.shape[1] * block_size >= max_context_len,
        f"{name}: block table narrower than {max_context_len}",
    )
    refuse_unless(
        block_tables.is_contiguous(),
        f"{name} takes the table's width for its row stride: {block_tables.stride()}",
    )


def _decode(
    name: str,
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    factors: tuple[float, float] = (1.0, 1.0),
    extra: float = 0.0,
) -> Tensor:
    """One query per request, on caches [blocks, size, kv_heads, D]."""
    num_blocks, size = keys.shape[:2]
    num_reqs = block_tables.shape[0]
    int32("block_tables", block_tables, num_reqs, None)
    lengths: list[int] = host(int32("context_lens", context_lens, num_reqs))
    tables = host(block_tables)
    refuse_unless(out.shape == query.shape, f"{name}: out has shape {tuple(out.shape)}")
    refuse_unless(
        out.is_contiguous() and query.stride()[1:] == (query.shape[2], 1),
        f"{name}: rows are dense [heads, D]",
    )
    refuse_unless(
        min(lengths) >= 1 and max(lengths) <= max_context_len,
        f"{name}: max_context_len below {max(lengths)}",
    )
    for i, length in enumerate(lengths):
        blocks = blocks_of(name, tables[i], length, size, num_blocks)
        cached = [
            side[blocks].flatten(0, 1)[:length].float() * f
            for side, f in zip((keys, values), factors, strict=True)
        ]
        left = window - 1 if window else -1
        result, _ = attend(
            query[i : i + 1],
            *cached,
            scale=scale,
            causal=True,
            window=(left, -1),
            softcap=softcap,
            extra=extra,
        )
        out[i] = result[0].to(out.dtype)
    return out


def paged_attention_v1(
    machine: Machine,
    out: Tensor,
    workspace_buffer: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    cu_query_lens: Tensor | None,
    context_lens: Tensor,
    max_context_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: Tensor,
    v_scale: Tensor,
    fp8_out_scale: Tensor | None = None,
    partition_size: int = 256,
    mtp: int = 1,
    sliding_window: int = 0,
) -> Tensor:
    """Plain layout."""
    name = "paged_attention_v1"
    machine.needs_cdna(name)
    machine.record(name, window=sliding_window, num_reqs=len(query))
    if kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
        raise ValueError(f"Unsupported kv_cache_dtype: {kv_cache_dtype}")
    refuse_unless(
        alibi_slopes is None and fp8_out_scale is None and kv_cache_layout == "NHD",
        f"{name}: not emulated",
    )
    refuse_unless(
        partition_size == _PARTITION and mtp == 1,
        f"{name}: partitions of {partition_size}, mtp {mtp}",
    )
    dtype = machine.activation(name, query, out)
    fp8 = machine.kv_is_fp8(name, dtype, key_cache, value_cache)
    refuse_unless(
        fp8 == (kv_cache_dtype != "auto"),
        f"{name}: kv_cache_dtype {kv_cache_dtype!r} on {key_cache.dtype}",
    )
    keys, values = plain_view(name, key_cache, value_cache, shuffled=False)
    num_reqs, (rows, heads, dim) = block_tables.shape[0], query.shape
    _check_shape(name, heads, dim, keys)
    if cu_query_lens is None:
        refuse_unless(
            rows == num_reqs,
            f"{name}: {rows} rows of {num_reqs} requests; only the first of each is computed",
        )
    else:
        room = cu_query_lens.untyped_storage().nbytes() // 4 - cu_query_lens.storage_offset()
        refuse_unless(room >= num_reqs + 1, f"{name} reads one entry past the end of cu_query_lens")
        starts = host(cu_query_lens.as_strided((num_reqs + 1,), (1,)))
        widths = {b - a for a, b in pairwise(starts)}
        refuse_unless(widths == {1}, f"{name} skips requests with more than one row")
    _table(machine, name, block_tables, keys.shape[1], max_context_len)
    partitions = _partitions(max_context_len)
    needed = num_reqs * mtp * heads * partitions * (dim * query.element_size() + 8)
    refuse_unless(
        workspace_buffer.dtype == torch.uint8 and workspace_buffer.is_contiguous(),
        f"{name}: workspace is not bytes",
    )
    _room(
        machine,
        workspace_buffer.numel() >= needed,
        f"{name}: workspace of {workspace_buffer.numel()} bytes, not {needed}",
    )
    workspace_buffer.fill_(255)  # NaN: whoever keeps something there loses it
    machine.compile(
        name,
        heads // keys.shape[2],
        dim,
        -(-partitions // 64),
        keys.shape[1],
        fp8,
        logits_soft_cap,
        sliding_window > 0,
    )
    factors = (tensor_scale("k_scale", k_scale), tensor_scale("v_scale", v_scale))
    return _decode(
        name,
        out,
        query,
        keys,
        values,
        block_tables,
        context_lens,
        max_context_len,
        scale=scale,
        softcap=logits_soft_cap,
        window=sliding_window,
        factors=factors if fp8 else (1.0, 1.0),
        extra=1e-6,
    )


def _check_shape(name: str, heads: int, dim: int, keys: Tensor) -> None:
    # A warp sums 16 numbers at once, four warps a head: what is left over is not summed.
    refuse_unless(dim > 0 and dim % 64 == 0 and keys.shape[3] == dim, f"{name}: head size {dim}")
    refuse_unless(
        heads % keys.shape[2] == 0 and heads // keys.shape[2] <= 16,
        f"{name}: {heads} heads on {keys.shape[2]}",
    )
    refuse_unless(keys.shape[1] in (16, 32), f"{name}: block size {keys.shape[1]}")


def paged_attention_rocm(
    machine: Machine,
    out: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    context_lens: Tensor,
    block_size: int,
    max_context_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    fp8_out_scale: Tensor | None = None,
    partition_size: int = 256,
    mtp: int = 1,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Shuffled layout, HIP."""
    name = "paged_attention_rocm"
    machine.needs_cdna(name)
    machine.record(name, num_reqs=len(query))
    refuse_unless(
        alibi_slopes is None and fp8_out_scale is None and q_scale is None, f"{name}: not emulated"
    )
    refuse_unless(
        partition_size == _PARTITION and mtp == 1,
        f"{name}: partitions of {partition_size}, mtp {mtp}",
    )
    dtype = machine.activation(name, query, out)
    fp8 = machine.kv_is_fp8(name, dtype, key_cache, value_cache)
    refuse_unless(
        fp8 == (kv_cache_dtype != "auto"),
        f"{name}: kv_cache_dtype {kv_cache_dtype!r} on {key_cache.dtype}",
    )
    keys, values = plain_view(name, key_cache, value_cache, shuffled=True)
    rows, heads, dim = query.shape
    _check_shape(name, heads, dim, keys)
    refuse_unless(
        rows == block_tables.shape[0], f"{name}: {rows} rows of {block_tables.shape[0]} requests"
    )
    refuse_unless(
        num_kv_heads == keys.shape[2] and block_size == keys.shape[1],
        f"{name}: sizes do not fit the cache",
    )
    _table(machine, name, block_tables, keys.shape[1], max_context_len)
    partitions = _partitions(max_context_len)
    for scratch in (exp_sums, max_logits, tmp_out):
        room = scratch.dim() >= 3 and scratch.shape[2] >= partitions
        _room(machine, room, f"{name}: scratch {tuple(scratch.shape)} for {partitions} partitions")
    _apart(name, exp_sums=exp_sums, max_logits=max_logits, tmp_out=tmp_out, out=out)
    for scratch in (exp_sums, max_logits):
        refuse_unless(
            scratch.dtype == torch.float32 and scratch.is_contiguous(),
            f"{name}: scratch is dense float32",
        )
        refuse_unless(
            tuple(scratch.shape) == (rows, heads, partitions),
            f"{name}: scratch {tuple(scratch.shape)}",
        )
        scratch.fill_(torch.nan)
    refuse_unless(
        tmp_out.dtype == dtype and tuple(tmp_out.shape) == (rows, heads, partitions, dim),
        f"{name}: tmp_out",
    )
    tmp_out.fill_(torch.nan)
    factors = (
        (tensor_scale("k_scale", k_scale), tensor_scale("v_scale", v_scale)) if fp8 else (1.0, 1.0)
    )
    machine.compile(name, heads // keys.shape[2], dim, -(-partitions // 64), keys.shape[1], fp8)
    return _decode(
        name,
        out,
        query,
        keys,
        values,
        block_tables,
        context_lens,
        max_context_len,
        scale=scale,
        factors=factors,
        extra=1e-6,
    )


def pa_fwd_asm(
    machine: Machine,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    block_tables_stride0: int,
    max_qlen: int = 1,
    K_QScale: Tensor | None = None,
    V_QScale: Tensor | None = None,
    out_: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    high_precision: int = 1,
    kernelName: str | None = None,
) -> Tensor:
    """Shuffled layout, assembly: heads of 128 with their own softmax scale, whatever the caller
    wants.
    """
    name = "pa_fwd_asm"
    machine.needs_cdna(name)
    machine.record(name, num_reqs=len(Q))
    refuse_unless(
        max_qlen == 1 and qo_indptr is None and kernelName is None, f"{name}: not emulated"
    )
    out = torch.empty_like(Q) if out_ is None else out_
    dtype = machine.activation(name, Q, out)
    fp8 = machine.kv_is_fp8(name, dtype, K, V)
    keys, values = plain_view(name, K, V, shuffled=True)
    num_blocks, size, kv_heads, dim = keys.shape
    refuse_unless(
        dim == 128 and size == 16 and Q.shape[1] // kv_heads <= 16,
        f"{name}: head size {dim}, block size {size}",
    )
    refuse_unless(
        num_blocks <= ASSEMBLY_BLOCKS, f"{name} cuts the numbers of {num_blocks} blocks to 16 bits"
    )
    if fp8 and machine.architecture == "gfx950" and Q.shape[1] // kv_heads > 8:
        short = [length for length in host(context_lens) if 240 < length < 256]
        refuse_unless(not short, f"{name}: contexts of {short} tokens are NaN")
    for side in (K, V):
        refuse_unless(
            side.is_contiguous(), f"{name} needs one dense plane for keys and one for values"
        )
    refuse_unless(
        len(Q) == context_lens.shape[0] and block_tables_stride0 == block_tables.stride(0),
        f"{name}: batch or stride",
    )
    if fp8:
        for scale in (K_QScale, V_QScale):
            fits = (
                scale is not None
                and tuple(scale.shape) == (num_blocks, kv_heads, size)
                and scale.is_contiguous()
            )
            refuse_unless(
                fits and scale is not None and scale.dtype == torch.float32,
                f"{name} reads a scale per slot and head",
            )
        assert K_QScale is not None and V_QScale is not None
        keys = keys.float() * K_QScale.transpose(1, 2)[..., None]
        values = values.float() * V_QScale.transpose(1, 2)[..., None]
    most = block_tables.shape[1] * size
    return _decode(name, out, Q, keys, values, block_tables, context_lens, most, scale=128**-0.5)


def paged_attention_common(
    machine: Machine,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    block_tables_stride0: int,
    scale: float,
    max_qlen: int = 1,
    max_seq_len: int = 1,
    K_QScale_hip: Tensor | None = None,
    V_QScale_hip: Tensor | None = None,
    K_QScale_asm: Tensor | None = None,
    V_QScale_asm: Tensor | None = None,
    out_: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    high_precision: int = 1,
    kernelName: str | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_tensor_dtype: torch.dtype | None = None,
) -> Tensor:
    """Shuffled layout: assembly for many rows of heads of 128, else HIP."""
    name = "paged_attention_common"
    dim, asm_rows = Q.shape[2], 2 * machine.num_compute_units
    asm = dim == 128 and (high_precision == 2 or Q.shape[0] * Q.shape[1] > asm_rows)
    machine.record(name, asm=asm)
    if asm:
        refuse_unless(
            abs(scale - 128**-0.5) < 1e-9, f"{name}: the assembly kernel ignores the scale {scale}"
        )
        scales = (K_QScale_asm, V_QScale_asm)
        return pa_fwd_asm(
            machine,
            Q,
            K,
            V,
            block_tables,
            context_lens,
            block_tables_stride0,
            max_qlen,
            *scales,
            out_,
            qo_indptr,
            high_precision,
        )
    refuse_unless(
        version_key(machine.version) >= version_key("0.1.12") or dim == 128,
        f"{name}: head size {dim} goes to assembly",
    )
    refuse_unless(max_qlen == 1, f"{name}: the HIP kernel computes one row per request")
    out = torch.empty_like(Q) if out_ is None else out_
    return paged_attention_rocm(
        machine,
        out,
        exp_sums,
        max_logits,
        tmp_out,
        Q,
        K,
        V,
        K.shape[1],
        scale,
        block_tables,
        context_lens,
        K.shape[3],
        max_seq_len,
        None,
        kv_cache_dtype,
        K_QScale_hip,
        V_QScale_hip,
    )
