"""The kernels of weights of few bits, compiled for machines that need not be here; see
`tests.helpers.compiled_kernels`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from specdec.layers.experts import triton_expert_products, triton_experts
from specdec.layers.packed import triton_packed, triton_packed_products
from specdec.layers.packed.gguf import BLOCK_SHAPES, GGUF_TYPES, GgufWeight
from specdec.layers.packed.weight import Code, PackedWeight, run_of
from tests.helpers.triton_interpreter import compile_for

if TYPE_CHECKING:
    from tests.helpers.compiled_kernels import Target

GPT_OSS = (2880, 2880, 4, 32)
"""Inputs, width, experts of a row, experts."""


def packed_kernels(
    target: "Target", *, whole: bool, every_shape: bool
) -> Iterator[tuple[str, Any]]:
    """Products of an 8 B model, few rows and many, with each code and in each of GGUF's types;
    experts of gpt-oss and of Qwen3-30B-A3B; numbers in memory.

    Without `every_shape` each code with few rows and with many, but not every number of few ones;
    a type of GGUF's with few rows for one maker and with many for the other.
    Or each code once, with few rows, 64 or many, of two targets with the same memory in one of
    them.
    """
    if not whole:
        if not target.follows:
            yield "product of 64 rows in e4m3", product(target, "e4m3", 128, 64, gated=True)
            yield (
                "product of 64 rows with experts in e2m1",
                experts(target, "e2m1", 32, 64, GPT_OSS, "swiglu_oai"),
            )
        if target.follows or target.is_cdna or target.assembly == "ptx":
            yield "product of 256 rows in int8", product(target, "int8", 4096, 256)
            # of 8 it takes a compiler for NVIDIA's long
            rows = 64 if target.assembly == "ptx" else 8
            yield (
                f"product of {rows} rows in int4",
                product(target, "int4", 128, rows, gated=True, zeros=True),
            )
        if target.is_cdna:
            yield (
                "product of 4,096 rows with experts in e2m1",
                experts(target, "e2m1", 32, 4096, GPT_OSS, "swiglu_oai"),
            )
        return
    nvidia = target.assembly == "ptx"  # int4 for 8 rows takes its compiler twice as long
    left_out = ("e4m3", 8), ("int8", 64), ("int4", 8 if nvidia else 64)
    cases: tuple[tuple[Code, int, bool, bool], ...]
    cases = ("e4m3", 128, True, False), ("int8", 4096, False, False), ("int4", 128, True, True)
    for code, group, gated, zeros in cases:
        for rows in (8, 64, 256):
            if (rows <= 64 or not gated) and (every_shape or (code, rows) not in left_out):
                yield (
                    f"product of {rows} rows in {code}",
                    product(target, code, group, rows, gated=gated, zeros=zeros),
                )
    yield "product of 64 rows in e2m1", product(target, "e2m1", 32, 64, gated=True)
    if every_shape:
        yield "product of 256 rows in int4", product(target, "int4", 128, 256)
    for number, kinds in enumerate((*((kind,) for kind in GGUF_TYPES), ("Q4_K", "Q6_K"))):
        for rows in (1, 64) if every_shape else ((1, 64)[(number + (not nvidia)) % 2],):
            kernel = compiled(target, stored(*kinds), rows, gated=False)
            yield f"product of {rows} rows in {' beside '.join(kinds)}", kernel
    yield "product of 8 rows in e4m3, float16", product(target, "e4m3", 128, 8, dtype="fp16")
    for rows in (1, 64, 4096):
        if every_shape or rows > 1:
            yield (
                f"product of {rows:,} rows with experts in e2m1",
                experts(target, "e2m1", 32, rows, GPT_OSS, "swiglu_oai"),
            )
        if every_shape or rows == 1:
            yield (
                f"product of {rows:,} rows with experts in e4m3",
                experts(target, "e4m3", 128, rows, (2048, 768, 8, 128), "silu"),
            )
    for weight in (shell("int4", 128, 4096, 4096, True), stored("Q4_K", "Q6_K")):
        constants = codes_of(weight, target)
        del constants["ASSEMBLY"]
        pointers = {name: kind for name, kind in tensors_of(weight).items() if kind is not None}
        yield (
            f"numbers of {weight.code}",
            compile_for(
                triton_packed._dequantize_kernel,
                target.compiler,
                pointers=pointers | {"output": "bf16"},
                constants=constants
                | {"OUTS": 16, "OVERLAP": target.overlaps}
                | {"order": None, "SCALED": False, "factor": 1.0},
            ),
        )


def shell(code: Code, group: int, outputs: int, inputs: int, zeros: bool = False) -> PackedWeight:
    """An arranged weight of that shape without numbers."""
    halves = code not in ("e4m3", "int8")
    run = run_of(group, inputs, halves)
    assert run is not None
    padded = -(-inputs // (run * (4 if halves else 2))) * run * (4 if halves else 2)
    kind = torch.uint8 if halves else torch.int8 if code == "int8" else torch.float8_e4m3fn
    codes = torch.empty(outputs, padded // (1 + halves), dtype=kind, device="meta")
    scale = torch.empty(outputs, -(-inputs // group), dtype=torch.bfloat16, device="meta")
    return PackedWeight(
        codes, scale, scale if zeros else None, group, code, torch.bfloat16,
        run=run, padding=padded - inputs, middle=8 if code == "int4" and not zeros else 0,
    )  # fmt: skip


def stored(*kinds: str) -> PackedWeight:
    """The same of 4,096 outputs and inputs as GGUF files have them, outputs of each type."""
    parts = []
    for kind in kinds:
        block = BLOCK_SHAPES[kind]
        shape = 4096 // len(kinds), 4096 // block.inputs * block.size
        raw = torch.empty(shape, dtype=torch.uint8, device="meta")
        parts.append(GgufWeight.from_blocks(raw, kind, torch.bfloat16))
    return GgufWeight.joined(parts).packed().arranged()


def codes_of(weight: PackedWeight, target: "Target") -> dict[str, Any]:
    """What a launch on the target says of a weight, and which of its tensors there are none of."""
    constants = triton_packed.codes_of(weight, weight.device) | {
        "ASSEMBLY": target.assembly == "ptx"
    }
    return constants | {name: None for name, tensor in tensors_of(weight).items() if tensor is None}


def tensors_of(weight: PackedWeight) -> dict[str, str | None]:
    """Types of a kernel's tensors."""
    kinds = {torch.uint16: "u16", torch.int16: "i16", torch.int32: "i32"}
    kinds |= {torch.float16: "fp16", torch.bfloat16: "bf16"}
    names = ("words", "high", "scale", "zero", "outer")
    tensors = zip(names, triton_packed.tensors_of(weight), strict=True)
    return {name: None if tensor is None else kinds[tensor.dtype] for name, tensor in tensors}


def product(
    target: "Target",
    code: Code,
    group: int,
    rows: int,
    *,
    gated: bool = False,
    zeros: bool = False,
    dtype: str = "bf16",
) -> Any:
    """A product with a weight of an 8 B model, as it would be divided on this target."""
    weight = shell(code, group, 24576 if gated else 4096, 4096, zeros)
    return compiled(target, weight, rows, gated=gated, dtype=dtype)


def compiled(
    target: "Target", weight: PackedWeight, rows: int, *, gated: bool, dtype: str = "bf16"
) -> Any:
    """A product with a weight, as it would be divided on this target."""
    tile = triton_packed.MANY_ROWS
    if rows <= triton_packed.MAX_ROWS:
        tile = triton_packed.tile_for(
            weight.code,
            weight.out_features,
            weight.in_features,
            may_split=not gated,
            amd=target.assembly == "amdgcn",
        )
    launch = triton_packed.launch_of(weight, tile, rows, target.shared_memory, gated=gated)
    launch["ROWS"] = max(launch["ROWS"], 16 if target.assembly == "amdgcn" else 8)
    warps, stages = launch.pop("num_warps"), launch.pop("num_stages")
    constants = (
        launch | codes_of(weight, target) | {"prefetch": None, "PREFETCH": None, "bias": None}
    )
    constants |= {"x_stride": weight.in_features, "OVERLAP": target.overlaps}
    constants |= {"ACTIVATION": "silu" if gated else None}
    pointers = {"x": dtype, "output": "fp32" if tile.splits > 1 else dtype}
    return compile_for(
        triton_packed_products.packed_kernel,
        target.compiler,
        pointers=pointers | {name: kind for name, kind in tensors_of(weight).items() if kind},
        constants=constants,
        num_warps=warps,
        num_stages=1 if target.assembly == "amdgcn" else stages,
    )


def experts(
    target: "Target", code: Code, group: int, rows: int, sizes: tuple[int, int, int, int], kind: str
) -> Any:
    """The first product of experts, as it would be divided on this target;
    gpt-oss's with a bias.
    """
    hidden, width, top_k, num_experts = sizes
    weight, few = shell(code, group, 2 * width, hidden), rows <= triton_experts.FEW_ROWS
    bits, memory = 4 if weight.halves else 8, target.shared_memory
    tile = triton_experts.packed_tile(bits, min(rows, 64), few=few, gated=True, memory=memory)
    *codes, lanes, _ = triton_packed.expert_codes(
        weight, tile.num_warps if few else 1, weight.device
    )
    constants: dict[str, Any] = {
        "WIDTH": width, "INPUTS": hidden, "x_stride": hidden, "TOP_K": top_k, "ACTIVATION": kind,
    }  # fmt: skip
    constants |= {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "OVERLAP": target.overlaps,
        "PRECISION": None,
    }
    constants |= {
        "PACKED": (*codes, lanes, target.assembly == "ptx"),
        "zero": None,
        "factors": None,
    }
    constants |= {} if kind == "swiglu_oai" else {"bias": None}
    if few:
        constants |= {"BY_RANK": False, "BY_EXPERT": rows * top_k > num_experts, "ALONE": rows == 1}
    else:
        constants |= {"BESIDE": tile.beside, "DESCRIBED": False}
    types = {"x": "bf16", "weight": "u16", "scale": "bf16", "bias": "bf16", "output": "bf16"}
    return compile_for(
        triton_expert_products.few_rows_kernel if few else triton_expert_products.grouped_kernel,
        target.compiler,
        pointers=types | dict.fromkeys(("ids", "pairs", "experts"), "i32"),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=1 if target.assembly == "amdgcn" else tile.num_stages,
    )
