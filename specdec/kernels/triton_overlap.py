"""Programmatic dependent launch: what a kernel does before it touches what the one before it wrote or reads."""

import triton
import triton.language as tl


@triton.jit
def await_previous(OVERLAP: tl.constexpr) -> None:
    """Waits until the kernel before has ended and its writes are seen.

    A kernel does not call for the next one early: programs that wait take room from those that work, which made forwards of an 8 B
    model slower. Only NVIDIA's chips have the instruction; elsewhere kernels simply follow each other.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
