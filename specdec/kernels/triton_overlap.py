"""Programmatic dependent launch: what a kernel does before it touches what the one before it wrote or reads."""

import triton
import triton.language as tl


@triton.jit
def await_previous(OVERLAP: tl.constexpr) -> None:
    """Waits until the kernel before has ended and its writes are seen.

    Most kernels do not call for the next one early, see `release_next`. Only NVIDIA's chips have these instructions; elsewhere
    kernels simply follow each other.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next(OVERLAP: tl.constexpr) -> None:
    """Lets the kernel behind be set up now, after `await_previous`: so what came before this kernel has ended when that one starts.

    It pays where a program has asked for most of what it reads. Elsewhere programs that wait take room from those that work: called
    by all products it made forwards of an 8 B model slower.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
