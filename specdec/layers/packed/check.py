"""The self-check of the kernels that multiply with packed weights; see `specdec.layers.ops.fused`
for those of the others.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.deviation import Deviation, deviation, normal, worst
from specdec.kernels.kernel import HALF, Kernel
from specdec.layers.experts.experts import apply_experts
from specdec.layers.experts.router import route
from specdec.layers.experts.routing import Experts, Routing
from specdec.layers.packed.weight import Code, PackedWeight

_SIZES: dict[Code, float] = {"e4m3": 1.0, "int8": 74.0, "int4": 4.6, "e2m1": 3.0}
"""About how large the values of codes are."""

_OF_EXPERTS: tuple[Code, ...] = ("e4m3", "int4")
"""Of bytes and of halves; the kernels of experts read codes as the others do."""


def keeps_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether quantized weights of a model in this type stay packed: on a CPU codes cost more than the bytes that they save."""
    return device.type != "cpu" and KERNEL.runs_on(device, dtype)


def check_packed(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Every kind of code, in products of few rows, plain, gated and split, of more and of many rows, and in experts."""
    return worst([*_product_deviations(device, dtype), *_expert_deviations(device, dtype)])


KERNEL = Kernel("packed", check_packed, dtypes=HALF)


def _product_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.packed import triton_packed  # it imports Triton

    for code in _SIZES:
        weight = _weight(code, (80, 192), dtype)
        there = weight.to(device).arranged()
        most, tiled = triton_packed.MOST_ROWS, triton_packed.MOST_TILED_ROWS
        for rows in (1, most // 2 + 1, most + 6, tiled + 4):
            x = normal(rows, 192).to(dtype)
            got, exact = triton_packed.product(x.to(device), there), x.double() @ weight.dequantized(torch.float64).T
            yield deviation(got, F.linear(x, weight.dequantized()), exact)
            if rows <= most:
                split, gated = (
                    triton_packed.few_rows(x.to(device), there, activation=activation, may_split=True)
                    for activation in (None, "silu")
                )
                assert split is not None and gated is not None, "the kernel takes this shape"
                whole = (split.sum(0) if split.ndim == 3 else split).to(dtype)
                yield deviation(whole, F.linear(x, weight.dequantized()), exact)
                yield deviation(gated, _swiglu(exact).to(dtype), _swiglu(exact))


def _expert_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.experts import triton_experts  # it imports Triton

    for code in _OF_EXPERTS:
        layer = Experts(_weight(code, (4, 192, 128), dtype), _weight(code, (4, 128, 96), dtype), "silu")
        there = layer.to(device)
        for rows in (1, triton_experts.FEW_ROWS + 6):
            x, (weights, ids) = normal(rows, 128).to(dtype), route(normal(rows, 4), Routing(4, 2))
            got = triton_experts.experts(x.to(device), weights.to(device), ids.int().to(device), there)
            got = got.sum(0).to(dtype) if got.ndim == 3 else got
            exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
            yield deviation(got, apply_experts(x, weights, ids, layer), exact)


def _weight(code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> PackedWeight:
    """[..., out, in] in groups of 32 inputs, whose products with normal rows are about normal; integers have zeros of their own."""
    *outer, inputs = shape
    scale = (normal(*outer, inputs // 32).abs() + 0.5) / (_SIZES[code] * inputs**0.5)
    if code == "e4m3":
        return PackedWeight(normal(*shape).to(torch.float8_e4m3fn), scale, None, 32, code, dtype)
    halves = code != "int8"
    codes = torch.randint(0, 256, (*outer, inputs // (1 + halves)), generator=torch.Generator().manual_seed(inputs))
    zero = (2 * normal(*scale.shape)).round() + 7 if code == "int4" else None
    return PackedWeight(codes.to(torch.uint8) if halves else (codes - 128).to(torch.int8), scale, zero, 32, code, dtype)


def _swiglu(joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up
