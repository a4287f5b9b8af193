"""The self-check of the kernels that multiply with packed weights; see `specdec.layers.ops.fused`
for those of the others.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from specdec.device.deviation import Deviation, deviation, normal, worst
from specdec.device.device import resolve_dtype
from specdec.kernels.kernel import HALF, Kernel
from specdec.layers.experts.experts import expert_deviation
from specdec.layers.experts.routing import Experts
from specdec.layers.ops.activation import activate
from specdec.layers.packed.cpu import multiplies_in
from specdec.layers.packed.gguf import BLOCK_SHAPES, GgufWeight
from specdec.layers.packed.weight import Code, PackedWeight

_SIZES: dict[Code, float] = {"e4m3": 1.0, "int8": 74.0, "int4": 4.6, "e2m1": 3.0}
"""About how large the values of codes are."""

_OF_EXPERTS: tuple[Code, ...] = ("e4m3", "int4")
"""Codes of bytes and of halves; the kernels of experts read codes as the others do."""


def keeps_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether quantized weights of a model in this type stay packed: on a CPU codes cost more than
    the bytes that they save.
    """
    return device.type != "cpu" and KERNEL.runs_on(device, dtype)


def keeps_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """The same of weights in GGUF's blocks, which our own products on a CPU take, too."""
    if device.type == "cpu":
        return multiplies_in(dtype)
    return BLOCKS.runs_on(device, dtype)


def fastest_dtype(device: torch.device, *, blocks: bool) -> torch.dtype:
    """What "auto" is of a target, which may be in GGUF's `blocks`: our own products take these on
    any CPU, in bfloat16 alone.
    """
    if device.type == "cpu" and blocks and keeps_blocks(device, torch.bfloat16):
        return torch.bfloat16
    return resolve_dtype("auto", device)


def kernels_take(weight: PackedWeight) -> bool:
    """Whether our kernels run where an arranged weight is, are right, and take it."""
    if not (KERNEL if weight.plain else BLOCKS).runs_on(weight.device, weight.dtype):
        return False
    from specdec.layers.packed.triton_packed import suits  # it imports Triton

    return suits(weight)


def check_packed(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Every kind of code, in products of few rows, plain, gated and split, of more and of many
    rows, and in experts.
    """
    weights = (_weight(code, (80, 192), dtype) for code in _SIZES)
    deviations = (one for weight in weights for one in _product_deviations(weight, device))
    return worst([*deviations, *_expert_deviations(device, dtype)])


def check_blocks(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Checks products of GGUF's types, two of which are joined; and rows of a table."""
    found: list[Deviation] = []
    for kind in ("Q4_K", "Q5_K", "Q6_K", "Q5_1", "IQ4_NL"):
        weight = random_blocks(kind, (80, 512), dtype)
        if kind == "Q6_K":
            weight = GgufWeight.joined([random_blocks("Q4_K", (32, 512), dtype), weight])
        found += _product_deviations(weight.packed(), device, each=kind == "Q4_K")
        found.append(_table_deviation(weight.packed(), device))
    return worst(found)


KERNEL = Kernel("packed", check_packed, dtypes=HALF)
BLOCKS = Kernel("blocks", check_blocks, dtypes=HALF)


def _table_deviation(weight: PackedWeight, device: torch.device) -> Deviation:
    from specdec.layers.packed.triton_packed import dequantized  # it imports Triton

    order = torch.tensor([[7, 79], [0, 7]])
    got = dequantized(weight.to(device).arranged(), weight.dtype, order.to(device), 1.5)
    exact = weight.dequantized(torch.float64)[order] * 1.5
    return deviation(got, weight.dequantized()[order] * 1.5, exact)


def _product_deviations(
    weight: PackedWeight, device: torch.device, *, each: bool = True
) -> Iterator[Deviation]:
    """Few rows in every way, and, unless `each` is false, more rows and many."""
    from specdec.layers.packed import triton_packed  # it imports Triton

    there, dtype = weight.to(device).arranged(), weight.dtype
    most = triton_packed.MAX_ROWS
    tiled = triton_packed.MAX_TILED_ROWS if weight.plain else most
    for rows in (1, most // 2 + 1, most + 6, tiled + 7) if each else (1, most + 6):
        x = normal(rows, weight.in_features).to(dtype)
        exact = x.double() @ weight.dequantized(torch.float64).T
        plain = F.linear(x, weight.dequantized())
        got = triton_packed.product(x.to(device), there, max_tiled_rows=tiled)
        yield deviation(got, plain, exact)
        if rows <= most:
            split, gated = (
                triton_packed.few_rows(x.to(device), there, activation=kind, may_split=True)
                for kind in (None, "silu")
            )
            assert split is not None and gated is not None, "the kernel takes this shape"
            whole = (split.sum(0) if split.ndim == 3 else split).to(dtype)
            yield deviation(whole, plain, exact)
            opened = activate(exact, "silu")
            yield deviation(gated, opened.to(dtype), opened)


def _expert_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.experts import triton_experts  # it imports Triton

    for code in _OF_EXPERTS:
        gate_up, down = (_weight(code, shape, dtype) for shape in ((4, 192, 128), (4, 128, 96)))
        layer = Experts(gate_up, down, "silu")
        for rows in (1, triton_experts.FEW_ROWS + 6):
            yield expert_deviation(layer, rows, device)


def _weight(code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> PackedWeight:
    """[..., out, in] in groups of 32 inputs, whose products with normal rows are about normal;
    integers have zeros of their own.
    """
    *outer, inputs = shape
    scale = (normal(*outer, inputs // 32).abs() + 0.5) / (_SIZES[code] * inputs**0.5)
    if code == "e4m3":
        return PackedWeight(normal(*shape).to(torch.float8_e4m3fn), scale, None, 32, code, dtype)
    halves = code != "int8"
    shape_of_codes = (*outer, inputs // (1 + halves))
    codes = torch.randint(0, 256, shape_of_codes, generator=torch.Generator().manual_seed(inputs))
    zero = (2 * normal(*scale.shape)).round() + 7 if code == "int4" else None
    stored = codes.to(torch.uint8) if halves else (codes - 128).to(torch.int8)
    return PackedWeight(stored, scale, zero, 32, code, dtype)


def random_blocks(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> GgufWeight:
    """[out, in] of any codes, whose products with normal rows are about normal."""
    generator = torch.Generator().manual_seed(shape[1])
    block = BLOCK_SHAPES[kind]
    whole = (shape[0], shape[1] // block.inputs, block.size)
    raw = torch.randint(0, 256, whole, generator=generator).to(torch.uint8)
    scales = normal(*raw.shape[:2], len(block.floats)).abs() + 0.5
    scales /= block.typical * shape[1] ** 0.5
    for place, start in enumerate(block.floats):
        raw[..., start : start + 2] = scales[..., place, None].half().view(torch.uint8)
    return GgufWeight.from_blocks(raw.flatten(1), kind, dtype)
