"""Attention of many queries per request: Triton's two functions on the paged cache, and the varlen
one on packed rows.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.cache import plain_view
from tests.helpers.aiter_emulation.machine import Machine, blocks_of, host, int32, refuse_unless
from tests.helpers.aiter_emulation.reference import attend
from tests.helpers.aiter_emulation.signatures import version_key


def _is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize == 1


def host_reads_before_016(machine: Machine, cache_seqlens: Tensor) -> None:
    """Before 0.1.16 the host code of `flash_attn_with_kvcache` reads the longest sequence."""
    if version_key(machine.version) < version_key("0.1.16"):
        refuse_unless(
            not machine.capturing,
            "flash_attn_with_kvcache waits for the device during capture (before 0.1.16)",
        )
        cache_seqlens.max().item()


def _check_triton_shape(name: str, head_dim: int) -> None:
    refuse_unless(
        head_dim >= 16, f"{name}: a head of {head_dim} is narrower than the matrix instructions"
    )


SHARED_MEMORY = 2**16
"""Of a program, in bytes, on RDNA."""


def _check_shared_memory(machine: Machine, key_bytes: int) -> None:
    """From 0.1.21 on the kernel that splits the keys holds tiles of 64 keys and values, on gfx1201
    two of each, and 256 bytes, whatever the size of a block.
    """
    if machine.is_cdna or version_key(machine.version) < version_key("0.1.21"):
        return
    required = 64 * 2 * key_bytes * (2 if machine.architecture == "gfx1201" else 1) + 256
    if required > SHARED_MEMORY:  # as Triton says it
        raise RuntimeError(
            f"out of resource: shared memory, Required: {required}, Hardware limit:"
            f" {SHARED_MEMORY}. Reducing block sizes or `num_stages` may help."
        )


def flash_attn_with_kvcache(
    machine: Machine,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    **unsupported: Any,
) -> Any:
    """Uniform queries [B, Sq, heads, D] on a paged or dense cache; returns a new tensor."""
    name = "flash_attn_with_kvcache"
    most = (page_table.shape[1] if page_table is not None else 1) * k_cache.shape[1]
    machine.record(
        name,
        keys=most,
        paged=page_table is not None,
        causal=causal,
        window=window_size,
        query_len=q.shape[1],
    )
    neutral = {"attention_chunk": 0, "num_splits": 0, "sm_margin": 0}
    for option, value in unsupported.items():
        if option not in ("q_descale", "max_seqlen_q") and value != neutral.get(option):
            raise NotImplementedError(f"{name}: {option} is not supported")
    if softcap != 0.0:
        raise NotImplementedError(f"{name}: softcap is not supported")
    if len({_is_fp8(t) for t in (q, k_cache, v_cache)}) > 1:
        raise ValueError(f"{name}: mixed precision, {q.dtype} query on a {k_cache.dtype} cache")
    refuse_unless(not _is_fp8(q), "fp8 queries are not emulated")
    machine.kv_is_fp8(name, machine.activation(name, q), k_cache, v_cache)
    refuse_unless(
        q.dim() == 4 and k_cache.dim() == 4 and k_cache.shape == v_cache.shape,
        f"{name}: 4-dimensional tensors",
    )
    num_reqs, num_queries, heads, dim = q.shape
    _check_triton_shape(name, dim)
    refuse_unless(
        k_cache.shape[3] == dim and heads % k_cache.shape[2] == 0,
        f"{name}: heads of query and cache do not fit",
    )
    refuse_unless(
        cache_seqlens is not None, f"{name} without cache_seqlens attends to the whole cache"
    )
    assert cache_seqlens is not None
    int32("cache_seqlens", cache_seqlens, num_reqs)
    if page_table is not None:
        int32("page_table", page_table, num_reqs, None)
    else:
        refuse_unless(
            k_cache.shape[0] == num_reqs, f"{name}: a dense cache has one row per request"
        )
    # From 0.1.16 on the split count is compiled in and follows the width of the page table.
    machine.compile(name, dim, most, num_reqs * heads, num_queries, causal, window_size)
    lengths: list[int] = host(cache_seqlens)
    masks = causal or tuple(window_size) != (-1, -1)
    tables = host(page_table) if page_table is not None else None
    if k is not None and v is not None:
        _append(k, v, k_cache, v_cache, lengths, tables)
        cache_seqlens += k.shape[1]  # the caller's tensor
        lengths = [length + k.shape[1] for length in lengths]
    out, lse = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty(num_reqs, heads, num_queries),
    )
    for i, length in enumerate(lengths):
        # Where a mask depends on positions, what those of queries before the first key see was
        # never read.
        refuse_unless(
            length >= num_queries or not masks, f"{name}: {num_queries} queries on {length} keys"
        )
        keys, values = _request(name, k_cache, v_cache, tables[i] if tables else None, i, length)
        scale = dim**-0.5 if softmax_scale is None else softmax_scale
        rows, lse[i] = attend(q[i], keys, values, scale=scale, causal=causal, window=window_size)
        out[i] = rows.to(q.dtype)
    return (out, lse) if return_softmax_lse else out


def _request(
    name: str, k: Tensor, v: Tensor, table: list[int] | None, row: int, length: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [length, kv_heads, D] of one request."""
    if table is None:
        refuse_unless(length <= k.shape[1], f"{name}: {length} keys in a cache row of {k.shape[1]}")
        return k[row, :length], v[row, :length]
    blocks = blocks_of(name, table, length, k.shape[1], k.shape[0])
    return k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length]


def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: list[int],
    tables: list[list[int]] | None,
) -> None:
    """New tokens written behind the cached ones."""
    size = k_cache.shape[1]
    for i, length in enumerate(lengths):
        for j in range(k.shape[1]):
            block, offset = (
                (tables[i][(length + j) // size], (length + j) % size)
                if tables
                else (i, length + j)
            )
            k_cache[block, offset], v_cache[block, offset] = k[i, j], v[i, j]


def unified_attention(
    machine: Machine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    q_scales: Tensor | None = None,
    skip_reduce: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Packed queries of any lengths on the paged cache, causal only, into `out`."""
    name = "unified_attention"
    machine.record(name, query_len=max_seqlen_q, window=window_size, shuffled=shuffled_kv_cache)
    assert causal, "Only causal attention is supported"
    refuse_unless(
        not any(x is not None for x in (q_scales, alibi_slopes, output_scale, qq_bias, backend))
        and not skip_reduce,
        f"{name}: not emulated",
    )
    refuse_unless(window_size[1] <= 0, f"{name} never reads the right window {window_size[1]}")
    dtype = machine.activation(name, q, out)
    fp8 = machine.kv_is_fp8(name, dtype, k, v)
    keys, values = plain_view(name, k, v, shuffled=shuffled_kv_cache)
    num_blocks, size, kv_heads, dim = keys.shape
    _check_triton_shape(name, dim)
    # A shuffled tile is loaded without a mask, as wide as the next power of two: padding is the
    # next head's numbers.
    refuse_unless(
        not shuffled_kv_cache or dim & (dim - 1) == 0,
        f"{name}: a head of {dim} in the shuffled layout",
    )
    if (
        version_key("0.1.16") <= version_key(machine.version) < version_key("0.1.17")
        and max_seqlen_k > 512
        and window_size[0] < 0
    ):
        assert k.dtype != torch.float16, "float16 caches are not supported where keys are split"
    refuse_unless(
        out.shape == q.shape and q.shape[2] == dim and q.shape[1] % kv_heads == 0,
        f"{name}: shapes do not fit",
    )
    # Tiles of up to 64 keys gather whole blocks, and `min(64, next power of two)` must not exceed a
    # block of another size.
    refuse_unless(
        size >= 16 and (size & (size - 1) == 0),
        f"{name}: block size {size} does not divide the tiles",
    )
    num_reqs = seqused_k.shape[0]
    int32("seqused_k", seqused_k, num_reqs)
    int32("block_table", block_table, num_reqs, None)
    int32("cu_seqlens_q", cu_seqlens_q, num_reqs + 1)
    starts: list[int] = list(range(num_reqs + 1)) if max_seqlen_q == 1 else host(cu_seqlens_q)
    refuse_unless(
        starts[-1] == len(q), f"{name}: {len(q)} rows and {starts[-1]} of them belong to requests"
    )
    lengths, tables = host(seqused_k), host(block_table)
    refuse_unless(
        max(b - a for a, b in pairwise(starts)) <= max_seqlen_q, f"{name}: max_seqlen_q too small"
    )
    refuse_unless(
        max(lengths) <= max_seqlen_k, f"{name}: max_seqlen_k {max_seqlen_k} below {max(lengths)}"
    )
    splits = window_size[0] < 0 and max_seqlen_k > 512
    if splits and num_reqs * kv_heads <= 4 * machine.num_compute_units:
        _check_shared_memory(machine, dim * k.element_size())
    factors = (1.0, 1.0)
    if fp8:
        refuse_unless(
            k_descale is not None and v_descale is not None,
            f"{name}: fp8 cache without both descales",
        )
        assert k_descale is not None and v_descale is not None
        factors = (_first_descale(k_descale), _first_descale(v_descale))
    if sinks is not None:
        assert sinks.shape[0] == q.shape[1], "Sinks must be num_query_heads size"
    machine.compile(
        name,
        dim,
        kv_heads,
        size,
        max_seqlen_q == 1,
        window_size[0],
        sinks is None,
        softcap,
        shuffled_kv_cache,
    )
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        refuse_unless(length >= rows.stop - rows.start, f"{name}: more queries than keys")
        blocks = blocks_of(name, tables[i], length, size, num_blocks)
        whole = [side[blocks].flatten(0, 1).float() for side in (keys, values)]
        # The last block is loaded without a mask, and 0 times NaN is NaN.
        refuse_unless(
            all(host(side.isfinite().all().reshape(1))[0] for side in whole),
            f"{name}: unwritten slots are not finite",
        )
        cached = [side[:length] * factor for side, factor in zip(whole, factors, strict=True)]
        window = (window_size[0], -1)
        result, _ = attend(
            q[rows],
            *cached,
            scale=softmax_scale,
            causal=True,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        out[rows] = result.to(dtype)
    return out


def _first_descale(descale: Tensor) -> float:
    """The kernel reads element 0 alone, whatever else the tensor holds."""
    refuse_unless(descale.dtype == torch.float32, "descales are float32")
    values: list[float] = host(descale.reshape(-1))
    refuse_unless(
        all(value == values[0] for value in values),
        "only the first descale is read, and others differ from it",
    )
    return values[0]


def flash_attn_varlen_func(
    machine: Machine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
    return_lse: bool = False,
    how_v3_bf16_cvt: int = 1,
    out: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    **unsupported: Any,
) -> Any:
    """Packed queries, keys and values of any lengths; returns `out`, and with `return_lse` float32
    [heads, rows] beside it.
    """
    name = "flash_attn_varlen_func"
    machine.needs_cdna(name)
    machine.record(name, causal=causal, window=window_size[:2], lse=return_lse)
    refuse_unless(
        not any(value is not None and value is not False for value in unsupported.values()),
        f"{name}: not emulated",
    )
    refuse_unless(dropout_p == 0, f"{name}: dropout")
    # Wrong in float16, and in bfloat16 for heads of 64 and 256.
    refuse_unless(max_seqlen_q > 1, f"{name}: requests of a single row")
    refuse_unless(
        len(window_size) == 2 or window_size[2] == 0,
        f"{name}: always-visible tokens are not emulated",
    )
    # Kernels differ in whether the returned denominator counts the sink.
    refuse_unless(sink_ptr is None or not return_lse, f"{name}: sinks together with the LSE")
    refuse_unless(sink_ptr is None or sink_ptr.dtype == torch.float32, f"{name}: sinks are float32")
    dtype = machine.activation(name, q, k, v)
    dims, windowed = (
        (q.shape[2], v.shape[2]),
        any(0 < side < max_seqlen_k for side in window_size[:2]),
    )
    assembly = (
        dims in ((128, 128), (192, 128))
        and dtype != torch.float16
        and not windowed
        and not logits_soft_cap
    )
    refuse_unless(
        sink_ptr is None or not assembly,
        f"{name}: the assembly kernel for heads of {dims} drops the sinks",
    )
    refuse_unless(
        q.shape[2] == k.shape[2] <= 256 and q.shape[1] % k.shape[1] == 0,
        f"{name}: shapes do not fit",
    )
    num_reqs = cu_seqlens_q.shape[0] - 1
    q_starts: list[int] = host(int32("cu_seqlens_q", cu_seqlens_q, None))
    k_starts: list[int] = host(int32("cu_seqlens_k", cu_seqlens_k, num_reqs + 1))
    refuse_unless(
        q_starts[-1] == len(q), f"{name}: rows behind the last request are left unwritten"
    )
    refuse_unless(k_starts[-1] <= len(k) == len(v), f"{name}: cu_seqlens_k runs past the keys")
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32)
    for i in range(num_reqs):
        rows, keys = slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i + 1])
        num_queries, num_keys = rows.stop - rows.start, keys.stop - keys.start
        refuse_unless(
            min_seqlen_q <= num_queries <= max_seqlen_q,
            f"{name}: a request has {num_queries} queries",
        )
        refuse_unless(
            num_keys <= max_seqlen_k, f"{name}: max_seqlen_k {max_seqlen_k} below {num_keys}"
        )
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        result, lse[:, rows] = attend(
            q[rows],
            k[keys],
            v[keys],
            scale=scale,
            causal=causal,
            window=(window_size[0], window_size[1]),
            softcap=logits_soft_cap,
            sinks=sink_ptr,
        )
        if not num_keys:
            result, lse[:, rows] = torch.full_like(result, machine.no_keys[0]), machine.no_keys[1]
        out[rows] = result.to(dtype)
    return (out, lse) if return_lse else out
