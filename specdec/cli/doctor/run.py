"""`specdec doctor --run`: every kind of kernel once at tiny size, with error and time."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

import specdec.device.device
from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.check import check_attention, times_of_backends, variant_of
from specdec.attention.latent_check import check_latent, latent_variant
from specdec.attention.mla import IndexerSpec, MlaBackend, MlaSpec
from specdec.base.config import DEFAULT_BLOCK_SIZE
from specdec.base.errors import SpecDecError
from specdec.base.registry import ATTENTION_BACKENDS, KERNELS, MLA_BACKENDS, VERIFIERS, resolve
from specdec.device.self_check import LATENT, Check, Verdict, races, run, title, verdict_of
from specdec.engine.capture.capture import has_graphs
from specdec.engine.capture.graph_check import check_captured_step
from specdec.engine.engine import SpecEngine
from specdec.kernels.kernel import Kernel

SHAPES = ((32, 8, 128), (9, 3, 64), (16, 2, 256))
"""Query heads, key heads and their size: of most models, of the embedded one, and the largest."""


INDEXER = IndexerSpec(64, 128, 2048)
"""The indexer of DeepSeek-V3.2, as are the heads of latent attention."""


class Kind(NamedTuple):
    """A kind of kernel, by the name and variant that its verdict is looked up by.

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
    """Runs all that `device` can in these types, prints a line for each, and keeps AMD's verdicts.

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
    for line in _times(device, dtype, cache_dtype):
        print(f"  {line}")
    return int(failed)


def _times(device: torch.device, dtype: torch.dtype, cached: torch.dtype | None) -> Iterator[str]:
    """Ways of doing the same that were timed once more; of each kind a start takes the fastest."""
    if not races(device):
        return
    found = {}
    for spec in _specs(device, dtype, cached):
        right = [backend for backend in _backends() if not _against(backend, spec)]
        found[title("attention", *variant_of(spec))] = times_of_backends(right, spec, again=True)
    for name in KERNELS:
        kernel: Kernel = resolve(KERNELS, name, "kernel")
        variant = kernel.variant(dtype)
        if not kernel.reasons(device, *variant):
            found[name] = kernel.times(device, *variant, again=True)
    for what, times in found.items():
        if times:
            yield f"{what:<46}{', '.join(f'{way} {spent:,.0f} us' for way, spent in times.items())}"


def _specs(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> list[AttentionSpec]:
    shapes = ((*shape, DEFAULT_BLOCK_SIZE) for shape in SHAPES)
    return [AttentionSpec(device, dtype, *shape, cache_dtype=cache_dtype) for shape in shapes]


def _backends() -> list[type[AttentionBackend]]:
    return [resolve(ATTENTION_BACKENDS, name, "attention backend") for name in ATTENTION_BACKENDS]


def _against(backend: type[AttentionBackend], spec: AttentionSpec) -> list[str]:
    return backend.reasons_against_auto(spec) or backend.unsupported_reasons(spec)


def kinds(device: torch.device, dtype: torch.dtype, cached: torch.dtype | None) -> Iterator[Kind]:
    """What there is to check, in an order in which what a check uses comes before it."""
    for spec in _specs(device, dtype, cached):
        for backend in _backends():
            check = partial(check_attention, backend, spec)
            reasons = backend.unsupported_reasons(spec)
            yield Kind(backend.name, variant_of(spec), reasons, check)
    for sparse in (False, True):
        latent = MlaSpec(device, dtype, 128, 512, 128, 64, 128, DEFAULT_BLOCK_SIZE)
        latent = replace(latent, indexer=INDEXER if sparse else None, cache_dtype=cached)
        name = LATENT[sparse]
        other: type[MlaBackend] = resolve(MLA_BACKENDS, name, "latent attention backend")
        variant, reasons = latent_variant(latent), other.unsupported_reasons(latent)
        yield Kind(name, variant, reasons, partial(check_latent, other, latent))
    for name in KERNELS:
        kernel: Kernel = resolve(KERNELS, name, "kernel")
        variant = kernel.variant(dtype)
        reasons = kernel.reasons(device, *variant)
        yield Kind(name, variant, reasons, kernel.check_on(device, *variant))
    yield _captured_step(spec)


def _captured_step(spec: AttentionSpec) -> Kind:
    """A step of the embedded model on the attention that `auto` takes."""
    if not has_graphs(spec.device):
        return Kind("captured_step", (), [f"{spec.device} has no graphs"], None)
    try:
        verifier, _ = resolve(VERIFIERS, "hf", "verifier")(
            "embedded", device=spec.device, dtype=spec.dtype
        )
    except SpecDecError as error:
        return Kind("captured_step", (), [str(error)], None)
    check = partial(check_captured_step, SpecEngine, verifier)
    return Kind("captured_step", (verifier.attention.name,), [], check)


def _described(verdict: Verdict) -> str:
    """The figures of a line, as far as there are any, and what is wrong."""
    if verdict.error is None or verdict.bound is None or verdict.milliseconds is None:
        return f"  failed: {verdict.failure}"
    figures = f"{verdict.error:>10.1e}{verdict.bound:>10.1e}{verdict.milliseconds:>12,.1f}"
    return f"{figures}  failed" if verdict.failure else figures
