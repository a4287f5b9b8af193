"""How fast decoding could be if nothing but reading memory took time.

A step reads the weights of target and drafter once, of a mixture of experts those that its rows
meet, and the cached keys and values of every request; at the bandwidth that the device shows, this
takes a time that no kernel beats (the roofline model: Williams et al. 2009, doi
10.1145/1498765.1498785).
"""

from __future__ import annotations

import time
from typing import Any

import torch

from specdec.engine.engine import SpecEngine
from specdec.kv_cache import SharedLayerSpec, StateLayerSpec

MEASURED_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Read at once when the bandwidth is measured: far more than the caches hold."""


def measured_bandwidth(device: torch.device, *, repeats: int = 5) -> float:
    """Bytes per second that the device moves, the best of a few sums and copies."""
    source = torch.ones(MEASURED_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    jobs = ((source.sum, source.nbytes), (lambda: target.copy_(source), 2 * source.nbytes))
    best = 0.0
    for job, moved in jobs:
        for repeat in range(repeats + 1):
            synchronize(device)
            started = time.perf_counter()
            job()
            synchronize(device)
            if repeat:  # the first one touches memory for the first time
                best = max(best, moved / (time.perf_counter() - started))
    return best


def step_bytes(engine: SpecEngine, *, k: int, num_reqs: int, context: float) -> int:
    """Bytes that one step has to move: weights and what is cached are read, states written, too.

    Of routed experts this is an expectation, see `RoutedExperts.expected`.

    Args:
        k: drafts per step, so that a request has k + 1 rows; with 0 the drafter only takes notes.
        context: cached tokens per request, on average.
    """
    verifier, drafter = engine.verifier, engine.drafter if k else None
    dtype, weights = verifier.attention.spec.kv_dtype, verifier.weight_bytes
    experts = verifier.routed_experts
    if experts:
        weights += experts.bytes_read(num_reqs * (k + 1)) - experts.weight_bytes
    cached = 0.0
    specs = verifier.kv_specs
    for spec, window in zip(specs, verifier.windows, strict=True):
        if isinstance(spec, SharedLayerSpec):
            spec = specs[spec.layer]  # read once more
        seen = context if window is None else min(context, window)
        cached += spec.bytes_per_token(dtype) * seen
        if isinstance(spec, StateLayerSpec):
            cached += 2 * spec.state_bytes
    if drafter:
        weights += drafter.weight_bytes
        cache = engine.kv_cache  # some of whose layers may have the model's type
        held = sum(side.nbytes for layer in cache.layers[len(specs) :] for side in layer)
        cached += held / (cache.num_blocks * cache.block_size) * context
    return weights + round(num_reqs * cached)


def bound(
    engine: SpecEngine, *, bandwidth: float, tau: float, num_reqs: int, context: float
) -> dict[str, Any]:
    """The bound for a report: bytes of a step, and tokens per second with all requests in each.

    Args:
        bandwidth: bytes per second.
        tau: tokens per verify step of one request.
        context: cached tokens per request, on average.
    """
    k = engine.planner.shapes[-1].drafts
    moved = step_bytes(engine, k=k, num_reqs=num_reqs, context=context)
    return {"bytes_per_step": moved, "tokens_per_second": tau * num_reqs * bandwidth / moved}


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
