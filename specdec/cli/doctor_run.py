"""`specdec doctor --run`: every kind of kernel once at tiny size, with its error, what is allowed, and the time."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

import specdec.device
from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.check import check_attention, tiny_spec, types_of
from specdec.config import DEFAULT_BLOCK_SIZE
from specdec.engine.acceptance import check_acceptance
from specdec.engine.capture import has_graphs
from specdec.engine.graph_check import check_captured_step
from specdec.errors import SpecDecError
from specdec.kernels.triton_launch import unavailable_reasons
from specdec.layers.aiter_layers import check_aiter_layers, unsupported_reasons
from specdec.layers.argmax import check_argmax
from specdec.layers.block_rows import check_block_rows
from specdec.layers.cache_rows import check_cache_rows
from specdec.layers.experts import check_experts
from specdec.layers.fused import check_embedding, check_few_rows, check_fused_layers, check_grouped_convolution
from specdec.layers.packed_check import check_packed
from specdec.layers.recurrence_check import check_recurrence
from specdec.layers.rotary import check_angles
from specdec.registry import ATTENTION_BACKENDS, PARTS, VERIFIERS, resolve
from specdec.sampling.candidates import check_candidates
from specdec.sampling.masks import check_masks
from specdec.sampling.sampler import check_sampler
from specdec.sampling.trees import check_trees
from specdec.sampling.tries import check_tries
from specdec.self_check import Check, Verdict, run, title, verdict_of


class Kind(NamedTuple):
    """A kind of kernel, under the name and variant that a start on this machine looks its verdict up by.

    Attributes:
        name, variant: see `specdec.self_check.reasons_against`.
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
        if specdec.device.rocm_architecture(device) is None:
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
    half = dtype if dtype.itemsize == 2 else torch.float16
    missing = unavailable_reasons(device)
    yield Kind("argmax", (), missing, partial(check_argmax, device))
    yield Kind("sampler", (), missing, partial(check_sampler, device))
    yield Kind("candidates", (), missing, partial(check_candidates, device))
    yield Kind("trees", (), missing, partial(check_trees, device))
    yield Kind("tries", (), missing, partial(check_tries, device))
    for name in ("matches", "forecasts", "edges"):
        yield Kind(name, (), missing, partial(resolve(PARTS, name, "part"), device))
    yield Kind("block_rows", (), missing, partial(check_block_rows, device))
    yield Kind("acceptance", (), missing, partial(check_acceptance, device))
    yield Kind("angles", (), missing, partial(check_angles, device))
    yield Kind("cache_rows", (), missing, partial(check_cache_rows, device))
    yield Kind("masks", (), missing, partial(check_masks, device))
    yield Kind("embedding", (), missing, partial(check_embedding, device))
    yield Kind("few_rows", (half,), missing, partial(check_few_rows, device, half))
    yield Kind("packed", (half,), missing, partial(check_packed, device, half))
    yield Kind("experts", (dtype,), missing, partial(check_experts, device, dtype))
    yield Kind("recurrence", (dtype,), missing, partial(check_recurrence, device, dtype))
    yield Kind("grouped_convolution", (dtype,), missing, partial(check_grouped_convolution, device, dtype))
    yield Kind("fused_layers", (dtype,), missing, partial(check_fused_layers, device, dtype))
    yield Kind("aiter_layers", (dtype,), unsupported_reasons(device, dtype), partial(check_aiter_layers, device, dtype))
    yield _captured_step(spec)


def _captured_step(spec: AttentionSpec) -> Kind:
    """A step of the embedded model on the attention that `auto` takes."""
    if not has_graphs(spec.device):
        return Kind("captured_step", (), [f"{spec.device} has no graphs"], None)
    try:
        verifier, _ = resolve(VERIFIERS, "hf", "verifier")("embedded", device=spec.device, dtype=spec.dtype)
    except SpecDecError as error:
        return Kind("captured_step", (), [str(error)], None)
    return Kind("captured_step", (verifier.attention.name,), [], partial(check_captured_step, verifier))


def _described(verdict: Verdict) -> str:
    """The figures of a line, as far as there are any, and what is wrong."""
    if verdict.error is None or verdict.bound is None or verdict.milliseconds is None:
        return f"  failed: {verdict.failure}"
    figures = f"{verdict.error:>10.1e}{verdict.bound:>10.1e}{verdict.milliseconds:>12,.1f}"
    return f"{figures}  failed" if verdict.failure else figures
