"""`specdec doctor --run`: every kind of kernel once at tiny size, with its error, what is allowed, and the time."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

import specdec.device.device
from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.check import check_attention, tiny_spec, types_of
from specdec.base.config import DEFAULT_BLOCK_SIZE
from specdec.base.errors import SpecDecError
from specdec.base.registry import ATTENTION_BACKENDS, KERNELS, VERIFIERS, resolve
from specdec.device.self_check import Check, Verdict, run, title, verdict_of
from specdec.engine.capture.capture import has_graphs
from specdec.engine.capture.graph_check import check_captured_step
from specdec.engine.engine import SpecEngine
from specdec.kernels.kernel import Kernel


class Kind(NamedTuple):
    """A kind of kernel, under the name and variant that a start on this machine looks its verdict up by.

    Attributes:
        name, variant: see `specdec.device.self_check.reasons_against`.
        reasons: why it cannot run here; empty when it can.
        check: runs it; None where it cannot be made.
    """

    name: str
    variant: tuple[str | torch.dtype, ...]
    reasons: list[str]
    check: Check | None


def run_checks(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> int:
    """Runs everything that can run on `device` in these types, prints a line for each, and keeps the verdicts on AMD's.

    Returns:
        1 when something fails, else 0.
    """
    print(f"\nself-checks\n  {'':<46}{'error':>10}{'allowed':>10}{'ms':>12}")
    failed = False
    for kind in kinds(device, dtype, cache_dtype):
        print(f"  {title(kind.name, *kind.variant):<46}", end="", flush=True)
        if kind.reasons or kind.check is None:
            print(f"  not here: {'; '.join(kind.reasons)}")
            continue
        if specdec.device.device.rocm_architecture(device) is None:
            verdict = run(kind.check)  # nothing asks for it later
        else:
            verdict = verdict_of(kind.name, device, kind.check, *kind.variant, again=True)
        print(_described(verdict))
        failed |= verdict.failure is not None
    return int(failed)


def kinds(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> Iterator[Kind]:
    """What there is to check, in an order in which what a check uses comes before it."""
    spec = tiny_spec(AttentionSpec(device, dtype, 1, 1, 1, DEFAULT_BLOCK_SIZE, cache_dtype=cache_dtype))
    for name in ATTENTION_BACKENDS:
        backend: type[AttentionBackend] = resolve(ATTENTION_BACKENDS, name, "attention backend")
        yield Kind(name, types_of(spec), backend.unsupported_reasons(spec), partial(check_attention, backend, spec))
    for name in KERNELS:
        kernel: Kernel = resolve(KERNELS, name, "kernel")
        variant = kernel.variant(dtype)
        yield Kind(name, variant, kernel.reasons(device, *variant), kernel.check_on(device, *variant))
    yield _captured_step(spec)


def _captured_step(spec: AttentionSpec) -> Kind:
    """A step of the embedded model on the attention that `auto` takes."""
    if not has_graphs(spec.device):
        return Kind("captured_step", (), [f"{spec.device} has no graphs"], None)
    try:
        verifier, _ = resolve(VERIFIERS, "hf", "verifier")("embedded", device=spec.device, dtype=spec.dtype)
    except SpecDecError as error:
        return Kind("captured_step", (), [str(error)], None)
    return Kind("captured_step", (verifier.attention.name,), [], partial(check_captured_step, SpecEngine, verifier))


def _described(verdict: Verdict) -> str:
    """The figures of a line, as far as there are any, and what is wrong."""
    if verdict.error is None or verdict.bound is None or verdict.milliseconds is None:
        return f"  failed: {verdict.failure}"
    figures = f"{verdict.error:>10.1e}{verdict.bound:>10.1e}{verdict.milliseconds:>12,.1f}"
    return f"{figures}  failed" if verdict.failure else figures
