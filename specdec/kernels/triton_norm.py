"""Root mean square norms in Triton, with what surrounds them in a decoder layer: sums of parts and
ranks, a residual, hints.

Between the matrix products of a verify forward a plain torch layer launches some twenty small
kernels, each of which costs more to start than to run. All arithmetic is float32; a norm rounds to
the model's type before its weight, as transformers does, unless that weight is in float32: then
their product is what is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_exchange import sum_over_ranks
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous, release_next
from specdec.kernels.triton_prefetch import (
    hint_options,
    hint_program,
    prefetch_programs,
    send_hints,
)
from specdec.parallel.shared_rows import MAX_ROWS, SharedRows

MANY_ROWS = 512
"""Rows from which on they fill a device several times over."""


@triton.jit
def weighted(
    scaled: tl.tensor, gain: tl.tensor, dtype: tl.constexpr, LATE: tl.constexpr
) -> tl.tensor:
    """Float32 numbers times a norm's weight, rounded to `dtype` before it too unless LATE."""
    if not LATE:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * gain).to(dtype)


@triton.jit(do_not_specialize=["max_tries"])
def _rms_norm_kernel(
    x: tl.tensor,  # [rows, WIDTH], or float32 [PARTS, rows, WIDTH] whose sum counts
    residual: tl.tensor,  # [rows, WIDTH] or None
    after: tl.tensor,  # [WIDTH] or None: weight of a norm of x before the sum
    weight: tl.tensor,  # [WIDTH] or None: weight of the norm of the sum
    normed: tl.tensor,  # [rows, WIDTH]
    added: tl.tensor,  # [rows, WIDTH] or None, x + residual
    x_stride: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,  # factor of x in the sum
    part_stride: tl.tensor,
    factor: tl.tensor,  # [1], of the sum, or None
    prefetch: tl.tensor,  # weight to send hints about, or None
    places: tl.tensor,  # memory of all ranks, over which x is added up, or None
    epochs: tl.tensor,
    max_tries: tl.tensor,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,  # whether the factor is not 1
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if prefetch is not None:
        program = hint_program(PREFETCH)
        if program >= 0:
            send_hints(prefetch, program, PREFETCH)
            return
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    dtype = normed.dtype.element_ty
    if weight is not None:  # depends on no kernel
        gain = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    await_previous(OVERLAP)
    release_next(OVERLAP)
    rows = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            rows += tl.load(
                x + part * part_stride + row * x_stride + column, mask=exists, other=0.0
            )
        rows = rows.to(dtype).to(tl.float32)  # as a whole product would be
    if places is not None:
        rows = sum_over_ranks(
            rows, row, column, exists, places, epochs, max_tries, WIDTH, MOST, RANK, SIZE, dtype
        )
    if after is not None:
        after_gain = tl.load(after + column, mask=exists, other=0.0).to(tl.float32)
        scaled = rows * tl.rsqrt(tl.sum(rows * rows, 0) / WIDTH + epsilon)
        rows = weighted(scaled, after_gain, dtype, after.dtype.element_ty == tl.float32).to(
            tl.float32
        )
    if SCALED:
        rows = (rows * scale).to(dtype).to(tl.float32)
    if residual is not None:
        rows += tl.load(residual + row * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        stored = rows.to(added.dtype.element_ty)
        if factor is not None:
            stored = (stored.to(tl.float32) * tl.load(factor).to(tl.float32)).to(
                added.dtype.element_ty
            )
        tl.store(added + row * WIDTH + column, stored, mask=exists)
        rows = stored.to(tl.float32)
    if weight is not None:
        scaled = rows * tl.rsqrt(tl.sum(rows * rows, 0) / WIDTH + epsilon)
        tl.store(
            normed + row * WIDTH + column,
            weighted(scaled, gain, dtype, weight.dtype.element_ty == tl.float32),
            mask=exists,
        )


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, *, prefetch: Tensor | None = None
) -> Tensor:
    """Root mean square norm of rows [rows, H] (arXiv 1910.07467); meanwhile hints about `prefetch`
    are sent.
    """
    return add_rms_norm(x, None, weight, epsilon, prefetch=prefetch)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    *,
    after: Tensor | None = None,
    scale: float = 1.0,
    factor: Tensor | None = None,
    prefetch: Tensor | None = None,
    ranks: SharedRows | None = None,
    max_tries: int = -1,
) -> tuple[Tensor, Tensor]:
    """The norm of `factor * (scale * x + residual)`, and that stream; the sum is rounded once.

    Args:
        x: [rows, H], or float32 [parts, rows, H]: its sum over the parts counts, rounded to the
            type of `residual`.
        residual: [rows, H]; None of a norm of `x` alone, which is in both places then.
        weight: [H], of the norm; None gives the sum in its place.
        epsilon: of both norms.
        after: [H], weight of a norm of `x` before the sum, or None.
        scale: factor of `x` in the sum.
        factor: [1], of the sum, or None.
        prefetch: a weight to send hints about meanwhile.
        ranks: `x` is what this rank gives to a sum over all ranks, of at most `MAX_ROWS` rows;
            each part is rounded before.
        max_tries: see `specdec.kernels.triton_exchange`; then the sum may be wrong.
    """
    like = x if residual is None else residual
    normed = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    added = normed if weight is None or residual is None else torch.empty_like(residual)
    rows, width = x.shape[-2:]
    assert ranks is None or (
        rows <= MAX_ROWS and width == ranks.width and normed.dtype == ranks.dtype
    )
    parts = len(x) if x.ndim == 3 else 1
    assert x.stride(-1) == 1 and (residual is None or residual.is_contiguous())
    block = triton.next_power_of_2(width)
    # A few rows are over sooner with more warps each, many with more rows at a time.
    num_warps = max(4, block // 1024) if rows >= MANY_ROWS else 16 if block > 2048 else 8
    with on_device(x):
        _rms_norm_kernel[(rows + prefetch_programs(prefetch, num_warps),)](
            x,
            residual,
            after,
            weight,
            normed,
            None if residual is None else added,
            x.stride(-2),
            epsilon,
            scale,
            x.stride(0),
            factor,
            **hint_options(prefetch),
            places=None if ranks is None else ranks.places,
            epochs=None if ranks is None else ranks.epochs,
            max_tries=max_tries,
            WIDTH=width,
            PARTS=parts,
            MOST=MAX_ROWS,
            RANK=ranks.rank if ranks else 0,
            SIZE=ranks.size if ranks else 1,
            SCALED=scale != 1,
            BLOCK=block,
            num_warps=num_warps,
            **overlap_options(x.device),
        )
    return normed, added
