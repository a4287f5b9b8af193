"""Our Triton kernels as they are launched, compiled for machines that need not be here, and what
each takes of a machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from specdec.attention.triton import triton_merge
from specdec.kernels import triton_argmax, triton_norm, triton_rope
from specdec.kernels.triton_launch import AMD_SHARED_MEMORY
from specdec.layers import triton_linear
from specdec.layers.ops import triton_activation, triton_embedding, triton_grouped_convolution
from specdec.layers.ops.activation import ACTIVATIONS
from specdec.sampling import triton_filters, triton_sampler
from tests.helpers.compiled_attention import DTYPES, attention_kernels
from tests.helpers.compiled_experts import expert_kernels
from tests.helpers.compiled_matches import match_kernels
from tests.helpers.compiled_packed import packed_kernels
from tests.helpers.compiled_recurrence import recurrence_kernels
from tests.helpers.compiled_trees import tree_kernels
from tests.helpers.triton_interpreter import compile_for


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
        compiler: what Triton calls it: library, architecture, and threads of a warp.
        shared_memory: bytes that one program can have.
        eight_bits: Triton's name of the 8-bit float it computes with; None when there is none.
        is_cdna: AMD's for computing, which `auto` serves.
        leads: stands for the others of its maker in all that multiplies no matrices and has no tile
            that depends on the memory.
        follows: another target has the same memory and threads of a warp, so that one of them
            stands for both in the kernels that take a compiler longest.
    """

    compiler: tuple[str, int | str, int]
    shared_memory: int
    eight_bits: str | None = "fp8e4nv"
    is_cdna: bool = False
    leads: bool = False
    follows: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether kernels wait for the one before them, see `specdec.kernels.triton_overlap`."""
        return self.compiler[1] == 90

    @property
    def assembly(self) -> str:
        """What Triton calls its assembly."""
        return "amdgcn" if self.compiler[0] == "hip" else "ptx"


def _amd(name: str, threads: int, **options: Any) -> Target:
    return Target(("hip", name, threads), AMD_SHARED_MEMORY.get(name, 64 * 1024), **options)


TARGETS = {
    "sm_90": Target(("cuda", 90, 32), 227 * 1024, leads=True),
    "sm_89": Target(("cuda", 89, 32), 99 * 1024),
    "gfx942": _amd("gfx942", 64, eight_bits="fp8e4b8", is_cdna=True, leads=True),
    "gfx950": _amd("gfx950", 64, is_cdna=True),
    "gfx1100": _amd("gfx1100", 32, eight_bits=None, follows=True),
    "gfx1201": _amd("gfx1201", 32),
}

AMD_TARGETS = {name: target for name, target in TARGETS.items() if target.assembly == "amdgcn"} | {
    "gfx90a": _amd("gfx90a", 64, eight_bits=None, is_cdna=True),
    "gfx1030": _amd("gfx1030", 32, eight_bits=None),
    "gfx1151": _amd("gfx1151", 32, eight_bits=None),
    "gfx1200": _amd("gfx1200", 32),
    "gfx1250": _amd("gfx1250", 32),
}
"""Every kind of AMD GPU that `auto` serves; tests compile for those that `TARGETS` has."""


class Use(NamedTuple):
    """What a kernel takes of an AMD machine: vector registers of a thread, spilled ones, and bytes
    of shared memory.
    """

    registers: int
    spilled: int
    shared: int


def use_of(kernel: Any) -> Use:
    """Read from the metadata of the assembly."""
    counts = {
        name: int(number)
        for name, number in re.findall(r"\.(vgpr_\w*count):\s+(\d+)", kernel.asm["amdgcn"])
    }
    return Use(counts["vgpr_count"], counts["vgpr_spill_count"], kernel.metadata.shared)


def kernels(target: Target, *, every_shape: bool = True) -> Iterator[tuple[str, Any]]:
    """Name and compiled form of every kernel, in shapes of an 8 B model and of the embedded one.

    Without `every_shape` a target that leads has every kernel, and each of what it is compiled for
    once or twice; any other just one or two of every kernel whose code its matrix instructions and
    its memory decide.
    """
    whole = every_shape or target.leads
    yield from attention_kernels(target, every_shape=every_shape)
    if whole:
        yield from other_kernels(target)
        yield from argmax_kernels(target)
        yield from sampler_kernels(target)
    yield from product_kernels(target)
    yield from expert_kernels(target, whole=whole, every_shape=every_shape)
    yield from packed_kernels(target, whole=whole, every_shape=every_shape)
    yield from recurrence_kernels(target, whole=whole, every_shape=every_shape)
    if whole:
        yield from tree_kernels(target)
        yield from match_kernels(target)


def other_kernels(target: Target) -> Iterator[tuple[str, Any]]:
    """What surrounds attention in a layer."""
    overlap, silent = {"OVERLAP": target.overlaps}, {"prefetch": None, "PREFETCH": None}
    compiled = partial(compile_for, target=target.compiler)
    lookup = {"table": "bf16", "token_ids": "i64", "output": "bf16"}
    yield (
        "embedding",
        compiled(
            triton_embedding._embed_kernel,
            pointers=lookup,
            floats=("scale",),
            constants={"BLOCK": 1024, "SCALED": True} | overlap,
        ),
    )
    merged = dict.fromkeys(("first", "second", "sinks", "output"), "bf16") | dict.fromkeys(
        ("first_sums", "second_sums"), "fp32"
    )
    of_heads: dict[str, Any] = {
        "HEAD_DIM": 128,
        "BLOCK_D": 128,
        "ROWS": triton_merge.ROWS,
        **overlap,
    }
    yield (
        "merge of two sets of keys",
        compiled(triton_merge._merge_two_kernel, pointers=merged, constants=of_heads),
    )
    rows = {"x": "bf16", "residual": "bf16", "weight": "bf16", "normed": "bf16", "added": "bf16"}
    alone: dict[str, Any] = {"places": None, "epochs": None, "MOST": 64, "RANK": 0, "SIZE": 1}
    for width, parts, kind, warps, around in (
        (576, 1, "bf16", 8, False),
        (576, 4, "fp32", 8, False),
        (4096, 1, "bf16", 16, True),
    ):
        constants: dict[str, Any] = (
            {
                "WIDTH": width,
                "PARTS": parts,
                "SCALED": around,
                "BLOCK": 1024 if width == 576 else 4096,
            }
            | overlap
            | silent
        )
        constants |= alone | ({} if around else {"after": None, "factor": None})
        kernel = compiled(
            triton_norm._rms_norm_kernel,
            pointers=rows | {"x": kind} | ({"after": "fp32", "factor": "bf16"} if around else {}),
            floats=("epsilon", "scale"),
            constants=constants,
            num_warps=warps,
        )
        yield (
            f"norm of {width:,}"
            + (" over partial sums" if parts > 1 else " twice" if around else ""),
            kernel,
        )
    ranks = {
        "WIDTH": 4096, "PARTS": 4, "SCALED": False, "BLOCK": 4096, "after": None, "factor": None,
        "MOST": 64, "RANK": 1, "SIZE": 2,
    }  # fmt: skip
    yield (
        "norm over ranks",
        compiled(
            triton_norm._rms_norm_kernel,
            pointers=rows | {"x": "fp32", "places": "i64", "epochs": "i32"},
            floats=("epsilon", "scale"),
            constants=ranks | overlap | silent,
            num_warps=16,
        ),
    )
    activation = {"gate_up": "bf16", "output": "bf16"}
    for name in ACTIVATIONS:
        of_kind: dict[str, Any] = {"BLOCK": 1024, "KIND": name, **overlap}
        yield (
            f"activation {name}",
            compiled(triton_activation._activation_kernel, pointers=activation, constants=of_kind),
        )
    sizes: dict[str, Any] = {"SIDE": 1, "CHANNELS": 5120, "TAPS": 2, "GROUP": 16, "ROWS": 8}
    yield (
        "convolution of blocks",
        compiled(
            triton_grouped_convolution._mix_kernel,
            pointers=dict.fromkeys(("x", "dynamic", "base", "output"), "bf16"),
            constants=sizes | {"BLOCK": triton_grouped_convolution.CHANNELS_PER_PROGRAM, **overlap},
        ),
    )
    heads = dict.fromkeys(
        ("query", "key", "value", "rotated", "key_cache", "value_cache", "cos", "sin"), "bf16"
    )
    heads |= {"query_norm": "bf16", "key_norm": "bf16", "value_norm": "fp32", "slot_mapping": "i64"}
    rope = partial(compiled, triton_rope._rope_store_kernel, floats=("epsilon", "limit"))
    shape = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 64} | overlap | silent
    yield "RoPE and cache write", rope(pointers=heads, constants=shape)
    yield "RoPE alone", rope(pointers=heads, constants=shape | {"slot_mapping": None})
    absent = dict.fromkeys(("query", "cos", "sin", "query_norm", "key_norm", "value_norm")) | {
        "NUM_HEADS": 0
    }
    if target.eight_bits:
        eight = dict.fromkeys(("key_cache", "value_cache"), target.eight_bits)
        yield "8-bit cache write", rope(pointers=heads | eight, constants=shape | absent)


def product_kernels(target: Target) -> Iterator[tuple[str, Any]]:
    """Split and gated."""
    for gated, splits, count in ((False, 2, 64), (True, 1, 16)):
        yield (
            f"product of {count} rows" + (" with SwiGLU" if gated else ""),
            few_rows(target, gated, splits, count),
        )


def few_rows(target: Target, gated: bool, splits: int, count: int) -> Any:
    """The product of few rows with the weights of an 8 B model,
    as it would be divided on Hopper.
    """
    width = 12288 if gated else 4096
    plan = triton_linear.divide(width, 4096, gated=gated, may_split=not gated, processors=132)
    assert plan is not None and plan.splits == splits
    sizes = {
        "WIDTH": width,
        "INPUTS": 4096,
        "ACTIVATION": "silu" if gated else None,
        "ROWS": count,
        "SPLITS": splits,
    }
    sizes["SMALL"] = triton_linear.is_small(width, 4096, gated=gated)
    tile = {
        "COLUMNS": plan.columns,
        "DEPTH": plan.depth,
        "OVERLAP": target.overlaps,
        "prefetch": None,
        "PREFETCH": None,
    }
    stages = (
        1
        if target.assembly == "amdgcn"
        else triton_linear.stages_of(plan, count, gated=gated, memory=target.shared_memory)
    )
    return compile_for(
        triton_linear._few_rows_kernel,
        target.compiler,
        pointers={
            "x": "bf16",
            "weight": "bf16",
            "bias": "bf16",
            "output": "fp32" if splits > 1 else "bf16",
        },
        constants=sizes | tile,
        num_stages=stages,
    )


def argmax_kernels(target: Target) -> Iterator[tuple[str, Any]]:
    """Slices of logits of every type, and what chooses among them."""
    sizes = {
        "SLICE": triton_argmax.SLICE,
        "vocab_size": 49152,
        "group_stride": 16 * 49152,
        "row_stride": 49152,
    }
    for dtype in DTYPES:
        kernel = compile_for(
            triton_argmax._slice_max_kernel,
            target.compiler,
            pointers={"logits": dtype, "best": "i64"},
            constants=sizes | {"OVERLAP": target.overlaps},
        )
        yield f"arg max of a slice, {dtype}", kernel
    pointers = {"best": "i64", "indices": "i64", "finite": "i1"}
    constants = {"SLICES": 38, "OVERLAP": target.overlaps}
    yield (
        "arg max of slices",
        compile_for(
            triton_argmax._row_max_kernel,
            target.compiler,
            pointers=pointers,
            constants=constants,
            num_warps=1,
        ),
    )


def sampler_kernels(target: Target) -> Iterator[tuple[str, Any]]:
    """What filters and what draws, from logits in bfloat16."""
    numbers = {"logits": "bf16", "floats": "fp32", "ints": "i64", "least": "fp32"}
    found, group = (
        {"highest": "bf16", "parts": "fp32", "listed": "i32"},
        triton_filters.SMALLEST_GROUP,
    )
    sizes = {"GROUP": group, "OVERLAP": target.overlaps}
    yield (
        "highest logits of groups",
        compile_for(
            triton_filters._group_max_kernel,
            target.compiler,
            pointers=numbers | found,
            constants=sizes | {"SLICE": triton_argmax.SLICE},
        ),
    )
    search = {"HELD": triton_filters.HELD, "TILE": triton_filters.TILE, "UNIT": 2**16}
    yield (
        "least logit that filters keep",
        compile_for(
            triton_filters._min_kept_kernel,
            target.compiler,
            pointers=numbers | found,
            constants=sizes | search | {"GROUPS": triton_filters.MAX_GROUPS, "SLICES": 16},
            num_warps=triton_filters.WARPS,
        ),
    )
    yield (
        "draw from a slice",
        compile_for(
            triton_sampler._draw_kernel,
            target.compiler,
            pointers=numbers | {"positions": "i64", "keys": "i64"},
            constants={"FILTERED": True, "SLICE": triton_argmax.SLICE, "OVERLAP": target.overlaps},
        ),
    )
