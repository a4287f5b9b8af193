"""Whether AITER's own kernels compute what lies between a layer's products: by name alone, and once
they have agreed with torch.

The name is `aiter_layers`; `specdec.layers.aiter.ops` is what it takes.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import get_args

import torch

import specdec.device.device
from specdec.attention.aiter import fa
from specdec.attention.aiter.layout import Layout, read_rows, shuffled
from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.device.deviation import Deviation, deviation, mismatches, normal, worst
from specdec.kernels import aiter
from specdec.kernels.kernel import FLOATS, Kernel
from specdec.kv_cache import KVLayerSpec
from specdec.layers.aiter.kernels import AiterLayers
from specdec.layers.ops.activation import gated
from specdec.layers.ops.norm import Norm, rms_norm
from specdec.layers.rotary.rotary import Angles, rotate

logger = logging.getLogger(__name__)

NAME = "aiter_layers"

EPSILON = 1e-5

STORED_DTYPES = (torch.bfloat16,)
"""Types of a cache that the rotating kernel writes; from 0.1.15.post1 on it takes no float16.
"""


def takes_aiter_layers(backend: AttentionBackend | MlaBackend, *, fused: bool) -> bool:
    """Whether they can run around `backend` and pass their check, once they are named; what keeps
    them from it is logged once.

    Args:
        fused: whether fused layers run around it, of which they take the place.
    """
    device, dtype = backend.spec.device, backend.spec.dtype
    reasons = KERNEL.reasons(device, dtype)
    if not fused:
        what = f"they take the place of fused layers, and there are none around {backend.name}"
        reasons.append(what)
    if reasons:
        _stays_out("; ".join(reasons))
    return not reasons and KERNEL.runs_on(device, dtype)


def unsupported_reasons(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why AITER's layers cannot run on `device` in type `dtype`; empty when they can."""
    architecture = specdec.device.device.rocm_architecture(device)
    if architecture not in fa.CDNA:
        compiled = f"AITER's compiled kernels are for {' and '.join(fa.CDNA)}"
        return [f"{architecture or device} ({compiled})"]
    if fa.tier_of(device) != "full":
        return ["AITER_TRITON_ONLY=1 leaves out AITER's compiled kernels"]
    takes = f"dtype {dtype} (the kernels take bfloat16 and float16)"
    reasons = [] if dtype in fa.DTYPES else [takes]
    return reasons + aiter.unavailable_reasons(AiterLayers)


@cache
def _stays_out(reason: str) -> None:
    logger.warning("%s is left out: %s", NAME, reason)


@cache
def keep_ours(what: str, reason: str) -> None:
    """Says once what our own kernels go on computing beside AITER's."""
    logger.info("%s: %s stays with our own kernels: %s", NAME, what, reason)


def check_aiter_layers(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Norms of one and of many warps with and without a sum, gated activations, RoPE with the cache
    write in both layouts.
    """
    kernels = aiter.load(AiterLayers)
    found = [*_norm_deviations(kernels, device, dtype), *_gated_deviations(kernels, device, dtype)]
    if dtype in STORED_DTYPES:
        for layout in get_args(Layout):
            found += _rope_deviations(kernels, layout, device, dtype)
    return worst(found)


KERNEL = Kernel(NAME, check_aiter_layers, dtypes=FLOATS, reasons=unsupported_reasons)


def _norm_deviations(
    kernels: AiterLayers, device: torch.device, dtype: torch.dtype
) -> Iterator[Deviation]:
    for width in (576, 4096):
        shapes = (5, width), (6, width), (width,)
        x, residual, weight = (normal(*shape).to(dtype) for shape in shapes)
        residual = residual[:5]  # of another shape, so that it is not x again
        norm, wide = Norm(weight, EPSILON), Norm(weight.double(), EPSILON)
        normed = kernels.norm(x.to(device), weight.to(device), EPSILON)
        yield deviation(normed, rms_norm(x, norm), rms_norm(x.double(), wide))
        there = x.to(device), residual.to(device), weight.to(device)
        normed, added = kernels.add_norm(*there, EPSILON)
        total = x.double() + residual.double()
        yield deviation(added, x + residual, total)
        yield deviation(normed, rms_norm(x + residual, norm), rms_norm(total, wide))


def _gated_deviations(
    kernels: AiterLayers, device: torch.device, dtype: torch.dtype
) -> Iterator[Deviation]:
    joined = (3 * normal(5, 2 * 1536)).to(dtype)
    for activation in ("silu", "gelu_tanh"):
        sides = (joined, joined.double())
        (gate, up), (wide_gate, wide_up) = (numbers.chunk(2, dim=-1) for numbers in sides)
        plain, exact = gated(gate, up, activation), gated(wide_gate, wide_up, activation)
        yield deviation(kernels.gated(joined.to(device), activation), plain, exact)


def _rope_deviations(
    kernels: AiterLayers, layout: Layout, device: torch.device, dtype: torch.dtype
) -> Iterator[Deviation]:
    heads, kv_heads, dim = 6, 2, 128
    rows, turns = normal(5, heads + 2 * kv_heads, dim).to(dtype), normal(5, dim // 2)
    angles = Angles(turns.cos().to(dtype), turns.sin().to(dtype))
    there = Angles(angles.cos.to(device), angles.sin.to(device))
    wide = Angles(angles.cos.double(), angles.sin.double())
    slots = torch.tensor([20, 25, 21, 31, 23])
    cache = KVLayerSpec(kv_heads, dim).allocate(2, 16, dtype, device)
    views = shuffled(cache) if layout == "shuffle" else cache
    query, key, value = rows.to(device).split([heads, kv_heads, kv_heads], dim=1)
    query, key = kernels.rotate_and_store(
        query, key, value, views, slots.to(device), there.row_index, there.cos, there.sin
    )
    keys, values = read_rows(cache, slots.to(device), layout, dtype)
    given_query, given_key, given_value = rows.split([heads, kv_heads, kv_heads], dim=1)
    for got, given in ((query, given_query), (key, given_key), (keys, given_key)):
        yield deviation(got, rotate(given, *angles.doubled), rotate(given.double(), *wide.doubled))
    yield mismatches(values, given_value)
