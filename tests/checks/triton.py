"""Checks the Triton kernels on this machine's GPU at real sizes, and times them:
`python -m tests.checks.triton [--part NAME]`.

Prints, for each case, the relative error against float64, microseconds (median of graph replays
over rotating caches, so that neither launches nor the L2 cache flatter it), the same for torch_ref,
and the time that the bytes alone would take at the bandwidth measured first. Parts: attention
and fused. Exit status 1 when an error is too large.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kv_cache import KVLayerSpec, LayerCache, blocks_for
from tests.helpers.card import BLOCK, DEVICE, TOLERANCE, bandwidth, failures, metadata, microseconds

CASES: dict[str, dict[str, Any]] = {
    "decode, 8B, 1 x 1,024": {"lengths": [1024], "width": 1},
    "verify 16, 8B, 1 x 1,024": {"lengths": [1024], "width": 16},
    "verify 16, 8B, 1 x 32,768": {"lengths": [32768], "width": 16},
    "verify 16, 8B, 8 x 4,096": {"lengths": [4096] * 8, "width": 16},
    "verify 8, 8B, 32 x 1,024": {"lengths": [1024] * 32, "width": 8},
    "draft 16, 8B, 1 x 1,024": {"lengths": [1024], "width": 16, "causal": False},
    "draft 16, 8B, window 512, 1 x 32,768": {
        "lengths": [32768],
        "width": 16,
        "causal": False,
        "window": 512,
    },
    "decode, 135M, 1 x 512": {
        "lengths": [512],
        "width": 1,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
    },
    "verify 16, 135M, 1 x 512": {
        "lengths": [512],
        "width": 16,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
    },
    "verify 8, 135M, 256 x 512": {
        "lengths": [512] * 256,
        "width": 8,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
    },
    "prefill 2,048, 8B": {"lengths": [2048], "width": 2048, "prefill": True},
    "extend 512 at 32,768, 8B": {"lengths": [32768], "width": 512, "prefill": True},
    "sinks and window, 64/8 heads of 64": {
        "lengths": [4096] * 4,
        "width": 8,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "window": 128,
        "sinks": True,
    },
    "softcap, 16/8 heads of 256": {
        "lengths": [4096],
        "width": 8,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 256,
        "softcap": 50.0,
    },
    "decode, 32/4 heads of 512, 1 x 1,024": {
        "lengths": [1024],
        "width": 1,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 512,
    },
    "verify 8, 32/4 heads of 512, 1 x 32,768": {
        "lengths": [32768],
        "width": 8,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 512,
    },
    "verify 8, 16/1 heads of 512, 32 x 1,024": {
        "lengths": [1024] * 32,
        "width": 8,
        "heads": 16,
        "kv_heads": 1,
        "head_dim": 512,
    },
    "prefill 2,048, 32/4 heads of 512": {
        "lengths": [2048],
        "width": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 512,
        "prefill": True,
    },
    "float32, verify 8, 8/1 heads of 512, 2 x 1,000": {
        "lengths": [1000] * 2,
        "width": 8,
        "heads": 8,
        "kv_heads": 1,
        "head_dim": 512,
        "dtype": torch.float32,
    },
    "float32, prefill 300, 8/1 heads of 512": {
        "lengths": [300],
        "width": 300,
        "heads": 8,
        "kv_heads": 1,
        "head_dim": 512,
        "dtype": torch.float32,
        "prefill": True,
    },
    "8-bit cache, verify 8, 32/4 heads of 512": {
        "lengths": [4096] * 4,
        "width": 8,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 512,
        "cache": torch.float8_e4m3fn,
    },
    "8-bit cache, verify 16, 8B, 1 x 32,768": {
        "lengths": [32768],
        "width": 16,
        "cache": torch.float8_e4m3fn,
    },
    "float16, verify 16, 8B, 8 x 1,000": {
        "lengths": [1000] * 8,
        "width": 16,
        "dtype": torch.float16,
    },
    "float32, verify 16, 8B, 8 x 1,000": {
        "lengths": [1000] * 8,
        "width": 16,
        "dtype": torch.float32,
    },
    "float32, head size 80": {
        "lengths": [300, 45],
        "width": 7,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 80,
        "dtype": torch.float32,
    },
}


def check_attention(name: str, case: dict[str, Any], bytes_per_us: float) -> None:
    """One line of the attention table."""
    dtype, cache_dtype = case.get("dtype", torch.bfloat16), case.get("cache")
    heads, kv_heads, dim = case.get("heads", 32), case.get("kv_heads", 8), case.get("head_dim", 128)
    causal, window, prefill = (
        case.get("causal", True),
        case.get("window"),
        case.get("prefill", False),
    )
    spec = AttentionSpec(
        DEVICE, dtype, heads, kv_heads, dim, BLOCK, non_causal=not causal, cache_dtype=cache_dtype
    )
    if reasons := TritonFaBackend.unsupported_reasons(spec):
        print(f"{name:<42} refused: {'; '.join(reasons)}")
        return
    lengths, width = case["lengths"], case["width"]
    view = metadata(lengths, [width] * len(lengths), causal=causal, prefill=prefill)
    blocks = sum(blocks_for(length, BLOCK) for length in lengths) + 1
    seen = [min(n, width + window) if window else n for n in lengths]
    moved = (
        2 * sum(seen) * kv_heads * dim * spec.kv_dtype.itemsize
        + 2 * view.num_tokens * heads * dim * dtype.itemsize
    )
    variants = max(1, min(16, 2 * 10**8 // max(moved, 1)))

    def fresh(kind: torch.dtype) -> LayerCache:
        cache = KVLayerSpec(kv_heads, dim).allocate(blocks, BLOCK, dtype, DEVICE)
        return LayerCache(*(tensor.normal_().to(kind) for tensor in cache))

    caches = [fresh(spec.kv_dtype) for _ in range(variants)]
    rows = torch.randn(view.num_tokens, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    query, key, value = rows.split([heads, kv_heads, kv_heads], dim=1)
    sinks = torch.randn(heads, device=DEVICE) if case.get("sinks") else None
    options: dict[str, Any] = {
        "scale": dim**-0.5,
        "window": window,
        "softcap": case.get("softcap"),
        "sinks": sinks,
    }
    ours, oracle = (
        TritonFaBackend(spec),
        TorchRefBackend(AttentionSpec(DEVICE, dtype, heads, kv_heads, dim, BLOCK)),
    )
    got = ours.run(query, key, value, caches[0], ours.plan(view), **options)
    exact = TorchRefBackend(AttentionSpec(DEVICE, torch.float64, heads, kv_heads, dim, BLOCK))
    wide = LayerCache(*(tensor.double() for tensor in caches[0]))
    stored = [tensor.flatten(0, 1)[view.slot_mapping] for tensor in wide]
    doubles = {**options, "sinks": None if sinks is None else sinks.double()}
    want = exact.run(query.double(), stored[0], stored[1], wide, exact.plan(view), **doubles)
    error = float((got.double() - want).norm() / want.norm())
    del wide, want, stored
    if not error < TOLERANCE[dtype]:
        failures.append(f"{name}: error {error:.1e}")
    splits = ours.num_splits(view, window, ours.tile(view))
    spent = microseconds(lambda i: ours.read(query, caches[i], view, **options), variants)
    reference = float("nan")
    if spec.kv_dtype == dtype:
        plan = oracle.plan(view)
        try:
            reference = microseconds(
                lambda i: oracle.run(query, key, value, caches[i], plan, **options), variants
            )
        except RuntimeError as problem:  # its time is for comparison only
            print(f"torch_ref cannot be timed: {str(problem).splitlines()[0]}")
    times = f"{spent:>10.1f}{reference:>12.1f}{moved / bytes_per_us:>10.1f}"
    print(f"{name:<42}{error:>10.1e}{times}{splits:>8}", flush=True)


def check_fused(rows: int, bytes_per_us: float) -> None:
    """Lines for the kernels around attention with the 8B shape, beside plain torch in a graph."""
    from specdec.kernels.triton_norm import add_rms_norm
    from specdec.kernels.triton_rope import rope_store
    from specdec.layers.ops.triton_activation import gated

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16()

    x, residual, weight, norm, joined = (
        random(rows, 4096),
        random(rows, 4096),
        random(4096),
        random(128),
        random(rows, 24576),
    )
    heads = random(rows, 48, 128)
    query, key, value = heads.split([32, 8, 8], dim=1)
    cache = KVLayerSpec(8, 128).allocate(rows, BLOCK, torch.bfloat16, DEVICE)
    slots, angles = (
        torch.randperm(rows * BLOCK, device=DEVICE)[:rows],
        torch.rand(rows, 64, device=DEVICE),
    )
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def plain_rope() -> Tensor:
        low, high = F.rms_norm(query.float(), (128,), norm.float(), 1e-6).chunk(2, dim=-1)
        c, s = cos.float()[:, None], sin.float()[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1)

    def fused_rope() -> Tensor:
        return rope_store(
            query,
            key,
            value,
            cache,
            slots,
            cos=cos,
            sin=sin,
            query_norm=norm,
            key_norm=norm,
            epsilon=1e-6,
        )

    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], int]] = {
        "norm+residual": (
            lambda: add_rms_norm(x, residual, weight, 1e-6)[0],
            lambda: F.rms_norm((x + residual).float(), (4096,), weight.float(), 1e-6),
            8 * x.numel(),
        ),
        "SwiGLU": (
            lambda: gated(joined, "silu"),
            lambda: F.silu(joined[:, :12288].float()) * joined[:, 12288:].float(),
            3 * joined.numel(),
        ),
        "norm+RoPE+write": (fused_rope, plain_rope, 4 * heads.numel()),
    }
    for name, (ours, plain, moved) in pairs.items():
        error = float((ours().float() - plain()).norm() / plain().norm())
        if not error < TOLERANCE[torch.bfloat16]:
            failures.append(f"{name}: error {error:.1e}")
        spent = microseconds(lambda _, call=ours: call())  # type: ignore[misc]
        reference = microseconds(lambda _, call=plain: call())  # type: ignore[misc]
        times = f"{spent:>10.1f}{reference:>12.1f}{moved / bytes_per_us:>10.1f}"
        print(f"{f'{name}, {rows} rows':<42}{error:>10.1e}{times}", flush=True)


def attempt(name: str, check: Callable[[], None]) -> None:
    """One failing case does not keep the others from being seen."""
    try:
        check()
    except Exception:  # reported at the end, with exit status 1
        traceback.print_exc()
        failures.append(f"{name}: raised")
        torch.cuda.empty_cache()


def main() -> int:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=["attention", "fused"], help="only this one")
    part = parser.parse_args().part
    if not torch.cuda.is_available():
        print("no CUDA or ROCm device here")
        return 2
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    rate = bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')},"
        f" copy {rate / 1e6:.2f} TB/s"
    )
    print(f"{'':<42}{'error':>10}{'us':>10}{'torch_ref':>12}{'floor us':>10}{'splits':>8}")
    if part in (None, "attention"):
        for name, case in CASES.items():
            attempt(name, partial(check_attention, name, case, rate))
    if part in (None, "fused"):
        for rows in (16, 512):
            attempt("fused", lambda rows=rows: check_fused(rows, rate))  # type: ignore[misc]
    print("\n".join(failures) or "all errors within tolerance")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
