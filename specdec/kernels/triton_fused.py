"""What surrounds attention in a decoder layer, in one Triton kernel each: norm with residual, RoPE with cache write, SwiGLU.

Between the matrix products of a verify forward a plain torch layer launches some twenty small kernels, each of which costs more to
start than to run. Inputs may be views of a joined product. All arithmetic is float32; norms round to the model's type before
their weight, as transformers does. Kernels between a product and the next may send hints about the latter's weight, see
`specdec.kernels.triton_prefetch`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kernels.triton_prefetch import hint_options, hint_program, send_hints, surplus
from specdec.kv_cache import LayerCache


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,  # [rows, WIDTH], or float32 [PARTS, rows, WIDTH] whose sum counts
    residual: tl.tensor,  # [rows, WIDTH] or None
    weight: tl.tensor,  # [WIDTH]
    normed: tl.tensor,  # [rows, WIDTH]
    added: tl.tensor,  # [rows, WIDTH] or None, x + residual
    x_stride: tl.tensor,
    epsilon: tl.tensor,
    part_stride: tl.tensor,
    ahead: tl.tensor,  # weight to send hints about, or None
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if ahead is not None:
        program = hint_program(AHEAD)
        if program >= 0:
            send_hints(ahead, program, AHEAD)
            return
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    dtype = normed.dtype.element_ty
    gain = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)  # depends on no kernel
    await_previous(OVERLAP)
    rows = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            rows += tl.load(x + part * part_stride + row * x_stride + column, mask=exists, other=0.0)
        rows = rows.to(dtype).to(tl.float32)  # as a whole product would be
    if residual is not None:
        rows += tl.load(residual + row * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        stored = rows.to(added.dtype.element_ty)
        tl.store(added + row * WIDTH + column, stored, mask=exists)
        rows = stored.to(tl.float32)
    scaled = rows * tl.rsqrt(tl.sum(rows * rows, 0) / WIDTH + epsilon)
    tl.store(normed + row * WIDTH + column, (scaled.to(dtype).to(tl.float32) * gain).to(dtype), mask=exists)


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor, output: tl.tensor, row_stride: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    await_previous(OVERLAP)
    gate = tl.load(gate_up + row * row_stride + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=exists, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + row * width + column, product.to(output.dtype.element_ty), mask=exists)


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
        root = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + epsilon)[:, None]
        low_gain = tl.load(norm + half, mask=in_half, other=0.0).to(tl.float32)
        high_gain = tl.load(norm + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        low = ((low * root).to(source_type).to(tl.float32) * low_gain).to(source_type).to(tl.float32)
        high = ((high * root).to(source_type).to(tl.float32) * high_gain).to(source_type).to(tl.float32)
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
    epsilon: tl.tensor,
    limit: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    angle_stride: tl.tensor,
    ahead: tl.tensor,  # weight to send hints about, or None
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if ahead is not None:
        program = hint_program(AHEAD)
        if program >= 0:
            send_hints(ahead, program, AHEAD)
            return
    await_previous(OVERLAP)
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
        place = (token if slot_mapping is None else tl.load(slot_mapping + token)) * (NUM_KV_HEADS * HEAD_DIM)
        if part == 0:
            keys = key + token * key_stride
            _move_heads(keys, key_cache + place, key_norm, cos, sin, epsilon, limit, NUM_KV_HEADS, HEAD_DIM)
        else:
            values = value + token * value_stride
            _move_heads(values, value_cache + place, None, None, None, epsilon, limit, NUM_KV_HEADS, HEAD_DIM)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, ahead: Tensor | None = None) -> Tensor:
    """Root mean square norm of rows [rows, H]; meanwhile hints about `ahead` are sent."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, normed, None, epsilon, ahead)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, both [rows, H], and the sum itself, rounded once.

    `x` may also be float32 [parts, rows, H]: its sum over the parts counts, rounded to the type of `residual`.
    Meanwhile hints about `ahead` are sent.
    """
    normed, added = torch.empty_like(residual), torch.empty_like(residual)
    _launch_norm(x, residual, weight, normed, added, epsilon, ahead)
    return normed, added


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    added: Tensor | None,
    epsilon: float,
    ahead: Tensor | None,
) -> None:
    rows, width = x.shape[-2:]
    parts = len(x) if x.ndim == 3 else 1
    assert x.stride(-1) == 1 and (residual is None or residual.is_contiguous())
    block = triton.next_power_of_2(width)
    num_warps = 16 if block > 2048 else 8
    with on_device(x):
        _rms_norm_kernel[(rows + surplus(ahead, num_warps),)](
            x,
            residual,
            weight,
            normed,
            added,
            x.stride(-2),
            epsilon,
            x.stride(0),
            WIDTH=width,
            PARTS=parts,
            BLOCK=block,
            num_warps=num_warps,
            **hint_options(ahead),
            **overlap_options(x.device),
        )


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` [rows, I] of a joined product [rows, 2 * I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(width), 1024)
    with on_device(gate_up):
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](
            gate_up, output, gate_up.stride(0), width, BLOCK=block, num_warps=4, **overlap_options(gate_up.device)
        )
    return output


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
    epsilon: float = 0.0,
    ahead: Tensor | None = None,
) -> Tensor:
    """Norms and rotates query and key, and writes key and value to the cache.

    Args:
        query: [num_tokens, num_heads, head_dim]; None has nothing to rotate. Heads are adjacent, as in a joined product.
        key, value: [num_tokens, num_kv_heads, head_dim], likewise.
        cache: contiguous, in the model's type or 8-bit floats.
        slot_mapping: int64 [num_tokens]; None writes the rows in their order.
        cos, sin: [num_tokens, head_dim / 2] with equal strides; None does not rotate.
        query_norm, key_norm: [head_dim], weights of a norm before the rotation, or None.
        epsilon: of those norms.
        ahead: a weight to send hints about.

    Returns:
        The rotated query, contiguous; empty without one.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    num_heads = 0 if query is None else query.shape[1]
    rotated = key.new_empty(num_tokens, num_heads, head_dim)
    for rows in (key, value) if query is None else (query, key, value):
        # The stride of an only head means nothing, and transformers' views leave there what they like.
        assert rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == head_dim), "heads are adjacent"
    assert head_dim % 2 == 0 and all(tensor.is_contiguous() for tensor in cache)
    assert cos is None or (sin is not None and cos.stride() == sin.stride() and cos.stride(-1) == 1)
    with on_device(key):
        _rope_store_kernel[(num_tokens + surplus(ahead, 4), 2 if query is None else 3)](
            query,
            key,
            value,
            rotated,
            cache.key,
            cache.value,
            slot_mapping,
            cos,
            sin,
            query_norm,
            key_norm,
            epsilon,
            torch.finfo(cache.key.dtype).max,
            0 if query is None else query.stride(0),
            key.stride(0),
            value.stride(0),
            0 if cos is None else cos.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            num_warps=4,
            **hint_options(ahead),
            **overlap_options(key.device),
        )
    return rotated
