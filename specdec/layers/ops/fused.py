"""Which of our Triton kernels compute a model's layers; self-checks of those around attention."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.deviation import Deviation, deviation, mismatches, normal, worst
from specdec.device.self_check import Ways
from specdec.kernels.kernel import FLOATS, HALF, OURS, TORCH, Kernel
from specdec.kv_cache import KVLayerSpec
from specdec.layers.ops.activation import activate
from specdec.layers.ops.grouped_convolution import Side
from specdec.layers.ops.grouped_convolution import mix_rows as plainly_mix_rows
from specdec.layers.ops.norm import Norm, rms_norm
from specdec.layers.rotary.rotary import Angles, rotate

EPSILON = 1e-5


def check_fused_layers(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Norms of one and of many warps, partial sums, SwiGLU, and RoPE with and without the cache
    write.
    """
    deviations = [
        *_norm_deviations(device, dtype),
        _swiglu_deviation(device, dtype),
        *_rope_deviations(device, dtype),
    ]
    return worst(deviations)


def norms(device: torch.device, dtype: torch.dtype) -> Ways:
    """A sum, its norm and a gated activation of eight rows."""
    from specdec.kernels.triton_norm import add_rms_norm  # it imports Triton
    from specdec.layers.ops.triton_activation import gated

    shapes = (8, 4096), (8, 4096), (4096,)
    x, residual, weight = (torch.randn(*shape, device=device, dtype=dtype) for shape in shapes)
    joined = torch.randn(8, 2 * 12288, device=device, dtype=dtype)
    return {
        OURS: lambda: (add_rms_norm(x, residual, weight, EPSILON), gated(joined, "silu")),
        TORCH: lambda: (_norm(x + residual, weight), activate(joined, "silu")),
    }


FUSED_LAYERS = Kernel("fused_layers", check_fused_layers, dtypes=FLOATS, ways=norms)


def check_few_rows(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Products whose inputs are split among programs, that are gated, and plain ones, of one row
    and of several.
    """
    from specdec.layers.triton_linear import few_rows  # it imports Triton

    def off(rows: int, width: int, gated: bool, may_split: bool) -> Deviation:
        x, weight = normal(rows, 576).to(dtype), (normal(width * (1 + gated), 576) / 24).to(dtype)
        activation = "silu" if gated else None
        got = few_rows(x.to(device), weight.to(device), activation=activation, may_split=may_split)
        assert got is not None, "the kernel takes this shape"
        exact = x.double() @ weight.double().T
        exact = activate(exact, activation) if activation else exact
        return deviation((got.sum(0) if got.ndim == 3 else got).to(dtype), exact.to(dtype), exact)

    cases = ((1, 64, False, True), (5, 64, False, False), (33, 960, True, False))
    return worst(off(*case) for case in cases)


def products(device: torch.device, dtype: torch.dtype) -> Ways:
    """Products of a model of 8 B parameters, of one row and of a block of eight drafts."""
    from specdec.layers.triton_linear import few_rows  # it imports Triton

    weight = torch.randn(4096, 4096, device=device, dtype=dtype)
    blocks = [torch.randn(rows, 4096, device=device, dtype=dtype) for rows in (1, 8)]
    return {
        OURS: lambda: [few_rows(x, weight) for x in blocks],
        TORCH: lambda: [F.linear(x, weight) for x in blocks],
    }


FEW_ROWS = Kernel("few_rows", check_few_rows, dtypes=HALF, ways=products)


def check_embedding(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Rows of more columns than a program takes."""
    from specdec.layers.ops.triton_embedding import embed

    table, ids = normal(9, 1500).to(dtype), torch.tensor([[8, 0, 3], [3, 5, 8]])
    return mismatches(embed(ids.to(device), table.to(device)), F.embedding(ids, table))


EMBEDDING = Kernel("embedding", check_embedding, dtypes=FLOATS)


def check_grouped_convolution(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Blocks of two lengths, more channels than a program takes, and both sides."""
    from specdec.layers.ops.triton_grouped_convolution import mix_rows  # it imports Triton

    def off(width: int, hidden: int, taps: int, side: Side) -> Deviation:
        shapes = (3 * width, hidden), (3 * width, 2 * taps * hidden // 16), (2, taps, hidden)
        x, dynamic, base = (normal(*shape).to(dtype) for shape in shapes)
        got = mix_rows(x.to(device), dynamic.to(device), base.to(device), width, side)
        exact = plainly_mix_rows(x.double(), dynamic.double(), base.double(), width, side)
        return deviation(got, plainly_mix_rows(x, dynamic, base, width, side), exact)

    return worst([off(8, 1056, 2, 0), off(3, 96, 3, 1)])


GROUPED_CONVOLUTION = Kernel("grouped_convolution", check_grouped_convolution, dtypes=FLOATS)


def _norm_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.kernels.triton_norm import add_rms_norm, rms_norm

    for width in (576, 4096):
        shapes = (5, width), (6, width), (width,)
        x, residual, weight = (normal(*shape).to(dtype) for shape in shapes)
        residual = residual[:5]  # of another shape, so that it is not x again
        gain, stream = weight.to(device), residual.to(device)
        yield _deviation(rms_norm(x.to(device), gain, EPSILON), _norm, x, weight)
        normed, added = add_rms_norm(x.to(device), stream, gain, EPSILON)
        yield mismatches(added, x + residual)
        yield _deviation(normed, _norm, x + residual, weight)
    parts = normal(3, 5, width)
    normed, added = add_rms_norm(parts.to(device), stream, gain, EPSILON)
    plain, exact = parts.sum(0).to(dtype) + residual, parts.double().sum(0) + residual.double()
    yield deviation(added, plain, exact)
    yield _deviation(normed, _norm, added.cpu(), weight)


def _swiglu_deviation(device: torch.device, dtype: torch.dtype) -> Deviation:
    from specdec.layers.ops.triton_activation import gated

    joined = (3 * normal(5, 2 * 1536)).to(dtype)
    return _deviation(gated(joined.to(device), "silu"), partial(activate, kind="silu"), joined)


def _rope_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.kernels.triton_rope import rope_store, rotated_rows

    heads, kv_heads, dim = 6, 2, 128
    shapes = (5, heads + 2 * kv_heads, dim), (dim,)
    rows, norm = (normal(*shape).to(dtype) for shape in shapes)
    angles = normal(5, dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([20, 25, 21, 31, 23])
    cache = KVLayerSpec(kv_heads, dim).allocate(2, 16, dtype, device)
    query, key, value = rows.to(device).split([heads, kv_heads, kv_heads], dim=1)
    names = ("cos", "sin", "query_norm", "key_norm")
    tables = zip(names, (cos, sin, norm, norm), strict=True)
    options = {name: table.to(device) for name, table in tables}
    stored = rope_store(query, key, value, cache, slots.to(device), epsilon=EPSILON, **options)
    rotated, new_key, new_value = rotated_rows(query, key, value, epsilon=EPSILON, **options)
    keys, values = (side.cpu().flatten(0, 1)[slots] for side in cache)
    expected_query, expected_key, expected_value = rows.split([heads, kv_heads, kv_heads], dim=1)
    for got in (stored, rotated):
        yield _deviation(got, _rotated, expected_query, cos, sin, norm)
    for got in (keys, new_key):
        yield _deviation(got, _rotated, expected_key, cos, sin, norm)
    for got in (values, new_value):
        yield mismatches(got, expected_value)


def _deviation(actual: Tensor, formula: Callable[..., Tensor], *inputs: Tensor) -> Deviation:
    """How far a kernel is from a formula of plain torch in the type of these inputs."""
    return deviation(actual, formula(*inputs), formula(*(tensor.double() for tensor in inputs)))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, Norm(weight, EPSILON))


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor, norm: Tensor) -> Tensor:
    return rotate(_norm(rows, norm), *Angles(cos, sin).doubled)
