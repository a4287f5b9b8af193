"""Rotary position embedding in Triton, in one launch with the norms of heads before it and the
cache write after it.

Inputs may be views of a joined product. All arithmetic is float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_norm import weighted
from specdec.kernels.triton_overlap import await_previous, release_next
from specdec.kernels.triton_prefetch import (
    hint_options,
    hint_program,
    prefetch_programs,
    send_hints,
)
from specdec.kv_cache import LayerCache


@triton.jit
def _move_heads(
    source: tl.tensor,
    target: tl.tensor,
    norm: tl.tensor,  # [HEAD_DIM] or None
    cos: tl.tensor,  # [HEAD_DIM / 2] of this row, or None
    sin: tl.tensor,
    epsilon: tl.tensor,
    limit: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Copies adjacent heads of one row, normed and rotated; bounded when the target has 8 bits."""
    HALF: tl.constexpr = HEAD_DIM // 2
    source_type: tl.constexpr = source.dtype.element_ty
    target_type: tl.constexpr = target.dtype.element_ty
    half = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    head = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    in_half = half < HALF
    exists = (head < NUM_HEADS) & in_half
    place = head * HEAD_DIM + half
    low = tl.load(source + place, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(source + place + HALF, mask=exists, other=0.0).to(tl.float32)
    if norm is not None:
        root = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + epsilon)[
            :, None
        ]
        low_gain = tl.load(norm + half, mask=in_half, other=0.0).to(tl.float32)
        high_gain = tl.load(norm + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        LATE: tl.constexpr = norm.dtype.element_ty == tl.float32
        low = weighted(low * root, low_gain, source_type, LATE).to(tl.float32)
        high = weighted(high * root, high_gain, source_type, LATE).to(tl.float32)
    if cos is not None:
        c = tl.load(cos + half, mask=in_half, other=0.0).to(tl.float32)
        s = tl.load(sin + half, mask=in_half, other=0.0).to(tl.float32)
        low, high = low * c - high * s, high * c + low * s
    if target_type.primitive_bitwidth == 8:
        low = tl.minimum(tl.maximum(low, -limit), limit)
        high = tl.minimum(tl.maximum(high, -limit), limit)
    tl.store(target + place, low.to(target_type), mask=exists)
    tl.store(target + place + HALF, high.to(target_type), mask=exists)


@triton.jit
def _rope_store_kernel(
    query: tl.tensor,  # [num_tokens, NUM_HEADS, HEAD_DIM], or None
    key: tl.tensor,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value: tl.tensor,  # the same
    rotated: tl.tensor,  # like query, contiguous
    key_cache: tl.tensor,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    value_cache: tl.tensor,  # the same
    slot_mapping: tl.tensor,  # int64 [num_tokens], or None: rows in their order
    cos: tl.tensor,  # [num_tokens, HEAD_DIM / 2] or None
    sin: tl.tensor,  # the same
    query_norm: tl.tensor,  # [HEAD_DIM] or None
    key_norm: tl.tensor,  # [HEAD_DIM] or None
    value_norm: tl.tensor,  # [HEAD_DIM] or None
    epsilon: tl.tensor,
    limit: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    angle_stride: tl.tensor,
    prefetch: tl.tensor,  # weight to send hints about, or None
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if prefetch is not None:
        program = hint_program(PREFETCH)
        if program >= 0:
            send_hints(prefetch, program, PREFETCH)
            return
    await_previous(OVERLAP)
    release_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # key, value, query
    if cos is not None:
        cos += token * angle_stride
        sin += token * angle_stride
    if part == 2:
        if query is not None:
            rows, kept = query + token * query_stride, rotated + token * (NUM_HEADS * HEAD_DIM)
            _move_heads(rows, kept, query_norm, cos, sin, epsilon, limit, NUM_HEADS, HEAD_DIM)
    else:
        place = (token if slot_mapping is None else tl.load(slot_mapping + token)) * (
            NUM_KV_HEADS * HEAD_DIM
        )
        if part == 0:
            keys = key + token * key_stride
            _move_heads(
                keys, key_cache + place, key_norm, cos, sin, epsilon, limit, NUM_KV_HEADS, HEAD_DIM
            )
        else:
            values = value + token * value_stride
            _move_heads(
                values,
                value_cache + place,
                value_norm,
                None,
                None,
                epsilon,
                limit,
                NUM_KV_HEADS,
                HEAD_DIM,
            )


def rope_store(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor | None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    value_norm: Tensor | None = None,
    epsilon: float = 0.0,
    prefetch: Tensor | None = None,
) -> Tensor:
    """Norms and rotates query and key, and writes key and value to the cache.

    Args:
        query: [num_tokens, num_heads, head_dim]; None has nothing to rotate. Heads are adjacent, as
            in a joined product.
        key, value: [num_tokens, num_kv_heads, head_dim], likewise.
        cache: contiguous, in the model's type or 8-bit floats.
        slot_mapping: int64 [num_tokens]; None writes the rows in their order.
        cos, sin: [num_tokens, head_dim / 2] with equal strides; None does not rotate.
        query_norm, key_norm, value_norm: [head_dim], weights of a norm, of queries and keys before
            the rotation, or None.
        epsilon: of those norms.
        prefetch: a weight to send hints about.

    Returns:
        The rotated query, contiguous; empty without one.
    """
    num_heads = 0 if query is None else query.shape[1]
    rotated = key.new_empty(len(key), num_heads, key.shape[2])
    parts = 2 if query is None else 3
    norms = query_norm, key_norm, value_norm
    _launch(
        query, key, value, rotated, cache, slot_mapping, cos, sin, norms, epsilon, prefetch, parts
    )
    return rotated


def rotated_rows(
    query: Tensor | None, key: Tensor, value: Tensor, **rotation: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What `rope_store` would write, and the query, each as contiguous rows of their own, in the
    model's type.
    """
    rows = LayerCache(*(torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in "kv"))
    return rope_store(query, key, value, rows, None, **rotation), rows.key, rows.value


def rope(
    query: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """What `rope_store` makes of a query alone."""
    rotated = query.new_empty(query.shape)
    # As if it were keys, for a cache in the order of the rows.
    cache, norms = LayerCache(rotated, rotated), (None, query_norm, None)
    _launch(None, query, query, rotated, cache, None, cos, sin, norms, epsilon, None, parts=1)
    return rotated


def _launch(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    rotated: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norms: tuple[Tensor | None, Tensor | None, Tensor | None],
    epsilon: float,
    prefetch: Tensor | None,
    parts: int,
) -> None:
    """The first `parts` of keys, values and queries."""
    num_tokens, num_kv_heads, head_dim = key.shape
    for rows in (key, value) if query is None else (query, key, value):
        # The stride of an only head means nothing, and transformers' views leave there what they
        # like.
        assert rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == head_dim), (
            "heads are adjacent"
        )
    assert head_dim % 2 == 0 and all(tensor.is_contiguous() for tensor in cache)
    assert cos is None or (sin is not None and cos.stride() == sin.stride() and cos.stride(-1) == 1)
    with on_device(key):
        _rope_store_kernel[(num_tokens + prefetch_programs(prefetch, 4), parts)](
            query,
            key,
            value,
            rotated,
            *cache,
            slot_mapping,
            cos,
            sin,
            *norms,
            epsilon,
            torch.finfo(cache.key.dtype).max,
            0 if query is None else query.stride(0),
            key.stride(0),
            value.stride(0),
            0 if cos is None else cos.stride(0),
            NUM_HEADS=0 if query is None else query.shape[1],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            num_warps=4,
            **hint_options(prefetch),
            **overlap_options(key.device),
        )
