"""The kernels of mixtures of experts, compiled for machines that need not be here; see
`tests.helpers.compiled_kernels`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specdec.layers.experts import (
    triton_expert_groups,
    triton_expert_products,
    triton_experts,
    triton_router,
)
from specdec.layers.experts.routing import Routing
from tests.helpers.triton_interpreter import compile_for

if TYPE_CHECKING:
    from tests.helpers.compiled_kernels import Target


def expert_kernels(
    target: "Target", *, whole: bool, every_shape: bool
) -> Iterator[tuple[str, Any]]:
    """Routers of Qwen3-30B-A3B, DeepSeek-V2 and DeepSeek-V3; products of the first, and of gpt-oss;
    or just two.
    """
    if not whole:
        yield "product of 8 rows with experts, gated", expert_product(target, 8, True)
        yield "product of 4,096 rows with experts", expert_product(target, 4096, False)
        return
    softmax, groups = (
        Routing(128, 8),
        Routing(160, 6, num_groups=8, topk_groups=3, renormalized=False),
    )
    sigmoid = Routing(256, 8, "sigmoid", biased=True, num_groups=8, topk_groups=4)
    for title, routing, parts in (
        ("softmax", softmax, 4),
        ("softmax in groups", groups, 1),
        ("sigmoid in groups", sigmoid, 1),
    ):
        yield f"router, {title}", router(target, routing, parts)
    yield "router, with a shared expert", router(target, Routing(256, 8), 4, shared=1)
    pointers = dict.fromkeys(("ids", "counts", "pairs", "experts"), "i32")
    sizes = {
        "BINS": 128,
        "CHUNK": 4096,
        "TILE": triton_expert_groups.TILE,
        "OVERLAP": target.overlaps,
    }
    for title, kernel, more in (
        ("counted", triton_expert_groups._count_kernel, {}),
        (
            "sorted",
            triton_expert_groups._place_kernel,
            {"EXPERTS": 128, "CHUNKS": 64, "TOGETHER": 4, "ROWS": 128},
        ),
    ):
        yield (
            f"pairs {title} by expert",
            compile_for(kernel, target.compiler, pointers=pointers, constants=sizes | more),
        )
    for rows in (1, 8, 64, 4096):
        for gated in (True, False):
            if not every_shape and (rows, gated) in ((1, False), (8, True), (64, False)):
                continue  # in each of these two the other has it, or one with other experts
            title = f"product of {rows:,} row{'s' * (rows > 1)} with experts" + (
                ", gated" if gated else ""
            )
            yield title, expert_product(target, rows, gated)
    yield "product of 8 rows with experts, float32", expert_product(target, 8, True, "fp32")
    yield (
        "product of 8 rows with gpt-oss's experts",
        expert_product(target, 8, True, sizes=(2880, 2880, 4, 32), kind="swiglu_oai"),
    )
    yield (
        "product of 8 rows with experts without gates",
        expert_product(target, 8, True, kind="relu2"),
    )
    for gated in (True, False):
        title = f"product of 32 rows with experts and a shared one{', gated' if gated else ''}"
        yield title, expert_product(target, 32, gated, sizes=(2048, 512, 9, 256), shared=1)
    yield (
        "sum over experts",
        compile_for(
            triton_expert_products.combine_kernel,
            target.compiler,
            pointers={"parts": "bf16", "output": "bf16"},
            constants={"WIDTH": 2048, "TOP_K": 8, "BLOCK": 2048, "OVERLAP": target.overlaps},
        ),
    )


def router(target: "Target", routing: Routing, parts: int, shared: int = 0) -> Any:
    """The kernel for logits in float32, which are split in so many parts, with so many shared
    experts that have a gate.
    """
    constants = {
        "EXPERTS": routing.num_experts, "TOP_K": routing.top_k, "GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.topk_groups, "SIGMOID": routing.scores == "sigmoid",
        "RENORMALIZED": routing.renormalized, "PARTS": parts, "SHARED": shared,
        "SHARED_GATE": shared > 0, "OVERLAP": target.overlaps, "gate_bias": None,
    }  # fmt: skip
    return compile_for(
        triton_router._route_kernel,
        target.compiler,
        pointers={"logits": "fp32", "bias": "fp32", "weights": "fp32", "ids": "i32"},
        floats=("scaling", "epsilon"),
        constants=constants if routing.biased else constants | {"bias": None},
        num_warps=1,
    )


def expert_product(
    target: "Target",
    rows: int,
    gated: bool,
    dtype: str = "bf16",
    sizes: tuple[int, int, int, int] = (2048, 768, 8, 128),
    kind: str = "silu",
    shared: int = 0,
) -> Any:
    """A product of so many rows, as it would be divided on Hopper; gpt-oss's with a bias. Shared
    ones are among the top_k.
    """
    hidden, middle, top_k, num_experts = sizes
    width, inputs = (middle, hidden) if gated else (hidden, middle)
    itemsize, memory = {"bf16": 2, "fp32": 4}[dtype], target.shared_memory
    more: dict[str, Any]
    described, few = False, rows <= triton_experts.FEW_ROWS
    if few:
        tile = triton_experts.few_rows_tile(
            width, top_k, rows, itemsize, gated=gated, processors=132, memory=memory
        )
        more = {
            "BY_RANK": not gated,
            "BY_EXPERT": rows * top_k > num_experts + shared,
            "ALONE": rows == 1,
        }
        more |= {"EXPERTS": num_experts, "SHARED": shared}
    else:
        tile = triton_experts.many_rows_tile(
            rows * top_k, num_experts, itemsize, gated=gated, memory=memory
        )
        described = target.overlaps and tile.num_warps == 8
        more = {"BESIDE": tile.beside, "DESCRIBED": described}
    types = dict.fromkeys(("x", "weight", "shared", "bias"), dtype) | {
        "output": dtype if gated or not few else "fp32",
        "factors": "fp32",
    }
    constants = {
        "WIDTH": width,
        "INPUTS": inputs,
        "x_stride": inputs,
        "TOP_K": top_k,
        "ACTIVATION": kind if gated else None,
    }
    constants |= {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "OVERLAP": target.overlaps,
    }
    constants |= {
        "PRECISION": "ieee" if itemsize == 4 else None,
        "PACKED": None,
        "scale": None,
        "zero": None,
        **more,
    }
    constants |= {"factors": None} if gated else {}
    constants |= {} if kind == "swiglu_oai" else {"bias": None}
    constants |= {} if shared or not few else {"shared": None}
    return compile_for(
        triton_expert_products.few_rows_kernel if few else triton_expert_products.grouped_kernel,
        target.compiler,
        pointers=types | dict.fromkeys(("ids", "pairs", "experts"), "i32"),
        constants=constants,
        descriptors={"weight": f"{dtype}[{tile.columns},{tile.depth}]"} if described else None,
        num_warps=tile.num_warps,
        num_stages=1 if target.assembly == "amdgcn" else tile.num_stages,
    )
