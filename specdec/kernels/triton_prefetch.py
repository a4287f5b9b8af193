"""Asking for the weight of a coming product while small kernels leave the memory idle.

In a small model a product is over before its weight has come from memory at full speed. So the
launch before it gets surplus programs, which send the L2 cache hints about that weight, and end. A
weight depends on no kernel, so hints do not wait for the one before; they change no value. Only
NVIDIA's chips from Hopper on have the instruction; elsewhere there are no such programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import overlap_options

MAX_BYTES = 8 * 2**20
"""Largest weight to ask for. Products of larger ones use the whole memory anyway; hints made a step
of an 8 B model 3 % slower.
"""
_PIECE = tl.constexpr(1024)
"""Bytes of one hint."""


@triton.jit
def hint_program(NUM_BYTES: tl.constexpr) -> tl.tensor:
    """Number of this program among the surplus ones, which are the last of axis 0; negative for one
    with work to do.
    """
    return (
        tl.program_id(0)
        - tl.num_programs(0)
        + tl.cdiv(NUM_BYTES, _PIECE * tl.extra.cuda.num_threads())
    )


@triton.jit
def send_hints(prefetch: tl.tensor, program: tl.tensor, NUM_BYTES: tl.constexpr) -> None:
    """Asks for this program's share of the bytes from `prefetch` on, a piece per thread, if it is
    the first along other axes.
    """
    # as many elements as threads, or threads would repeat each other's hints
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    start = (program * THREADS + tl.arange(0, THREADS)) * _PIECE
    wanted = (start < NUM_BYTES) & (tl.program_id(1) == 0)
    size = tl.where(wanted, tl.minimum(NUM_BYTES - start, _PIECE), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.u32 wanted, $2, 0; @wanted cp.async.bulk.prefetch.L2.global"
        " [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [prefetch.to(tl.uint64) + start, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def beginning(weight: Tensor) -> Tensor:
    """As many bytes of a contiguous weight as are asked for at most."""
    return weight if weight.nbytes <= MAX_BYTES else weight.view(torch.uint8).view(-1)[:MAX_BYTES]


def worth_prefetching(weight: Tensor) -> bool:
    """Whether it pays to ask for the weight of a product, and the device has hints."""
    fits = (
        weight.is_contiguous()
        and weight.nbytes <= MAX_BYTES
        and weight.nbytes % 16 == weight.data_ptr() % 16 == 0
    )
    return fits and bool(overlap_options(weight.device)["OVERLAP"])


def hint_options(prefetch: Tensor | None) -> dict[str, Any]:
    """Options of a launch that sends hints about `prefetch`; its grid needs `prefetch_programs`
    more programs in axis 0.
    """
    return {"prefetch": prefetch, "PREFETCH": None if prefetch is None else prefetch.nbytes}


def prefetch_programs(prefetch: Tensor | None, num_warps: int) -> int:
    """Programs of so many warps that hints about `prefetch` take."""
    return 0 if prefetch is None else triton.cdiv(prefetch.nbytes, _PIECE.value * 32 * num_warps)
