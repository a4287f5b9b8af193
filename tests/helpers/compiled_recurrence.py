"""The kernels of recurrent layers, compiled for machines that need not be here; see
`tests.helpers.compiled_kernels`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specdec.layers.ops import triton_gated_norm
from specdec.layers.recurrence import (
    triton_recurrence,
    triton_recurrence_inputs,
    triton_recurrence_ring,
    triton_short_convolution,
)
from specdec.layers.recurrence import triton_recurrence_chunks as chunks
from specdec.layers.recurrence import triton_recurrence_key_systems as key_systems
from specdec.layers.recurrence import triton_recurrence_systems as systems
from tests.helpers.triton_interpreter import compile_for

if TYPE_CHECKING:
    from tests.helpers.compiled_kernels import Target

DELTA = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "DELTA": True}
PLAIN = {"KEY_HEADS": 8, "VALUE_HEADS": 128, "KEY_DIM": 128, "VALUE_DIM": 64, "DELTA": False}
BY_KEY = {"KEY_HEADS": 32, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "DELTA": True}
"""Of Kimi Linear, with as many decays as keys."""
INTEGERS = dict.fromkeys(("slots", "starts", "counts", "lengths"), "i64") | {"first_rows": "i32"}
FLOATS = {
    "factors": "fp32", "gates": "fp32", "state": "fp32", "skip": "fp32", "rate": "fp32",
    "sums": "fp32",
}  # fmt: skip


def recurrence_kernels(
    target: "Target", *, whole: bool, every_shape: bool
) -> Iterator[tuple[str, Any]]:
    """Layers of Qwen3.5-9B, of a Mamba-2 hybrid and of Kimi Linear: steps, prompts, and what gates
    their output.

    Or just those that multiply matrices. Without `every_shape` each layer either keeps states of
    steps or has the final one alone.
    """
    if not whole:
        yield from chunk_kernels(target, whole=False, every_shape=every_shape)
        return
    for title, sizes in (("delta rule", DELTA), ("Mamba-2", PLAIN), ("decays by key", BY_KEY)):
        if every_shape or sizes is not DELTA:  # whose prompts have the same
            yield f"inputs of a recurrence, {title}", inputs(target, sizes)
        for final in (False, True) if every_shape else (sizes is PLAIN,):
            yield (
                f"recurrence, {title}" + (", final" if final else ""),
                serial(target, sizes, FINAL=final),
            )
    yield (
        "inputs of a recurrence, prompts",
        inputs(target, DELTA, ROWS=triton_recurrence_inputs.ROWS_PER_PROGRAM, KEEPS=False),
    )
    yield "recurrence, float32", serial(target, DELTA, "fp32", FINAL=False)
    yield (
        "last inputs of prompts",
        compile_for(
            triton_recurrence_ring._keep_kernel,
            target.compiler,
            pointers=INTEGERS | {"x": "bf16", "ring": "bf16"},
            constants={
                "WIDTH": 8256,
                "BLOCK": triton_recurrence_ring.BLOCK,
                "OVERLAP": target.overlaps,
            },
        ),
    )
    yield "short convolution", short_convolution(target, ROWS=1, given=None)
    yield (
        "short convolution, prompts",
        short_convolution(target, ROWS=triton_short_convolution.ROWS_PER_PROGRAM),
    )
    gates = dict.fromkeys(("x", "gate", "weight", "output"), "bf16")
    for width, groups, first, title in (
        (128, 32, False, ""),
        (128, 32, False, ", sigmoid"),
        (1024, 8, True, " before it"),
    ):
        sizes = {
            "GROUPS": groups,
            "WIDTH": width,
            "SHARED": not first,
            "GATE_FIRST": first,
            "TOGETHER": 1024 // width,
        }
        sizes["SIGMOID"] = title == ", sigmoid"
        norm = compile_for(
            triton_gated_norm._gated_norm_kernel,
            target.compiler,
            pointers=gates,
            floats=("epsilon",),
            constants=sizes | {"OVERLAP": target.overlaps},
        )
        yield f"norm with a gate{title}", norm
    constants = {"BLOCK": triton_gated_norm.BLOCK, "OVERLAP": target.overlaps}
    yield from chunk_kernels(target, whole=True, every_shape=every_shape)
    yield (
        "sigmoid gate",
        compile_for(
            triton_gated_norm._sigmoid_gate_kernel,
            target.compiler,
            pointers=gates,
            constants=constants,
        ),
    )


def inputs(target: "Target", sizes: dict[str, Any], **constants: Any) -> Any:
    """Convolution, norms and gates."""
    values = {"TAPS": 4, "KEEPS": True, "ROWS": 1, "KEYS": 8, "VALUES": 1024 // sizes["VALUE_DIM"]}
    values |= {"OVERLAP": target.overlaps, "DECAYS": decays(sizes)}
    return compile_for(
        triton_recurrence_inputs._inputs_kernel,
        target.compiler,
        pointers=INTEGERS
        | FLOATS
        | dict.fromkeys(("x", "ring", "kernel", "bias", "time_bias", "convolved"), "bf16"),
        floats=("query_scale", "beta_scale", "min_step", "max_step"),
        constants=sizes | values | ({"bias": None} if sizes["DELTA"] else {}) | constants,
    )


def decays(sizes: dict[str, Any]) -> int:
    """Of a value head."""
    return sizes["KEY_DIM"] if sizes is BY_KEY else 1


def short_convolution(target: "Target", **constants: Any) -> Any:
    """A layer of LFM2 1.2B."""
    sizes = {
        "WIDTH": 2048,
        "TAPS": 3,
        "BLOCK": triton_short_convolution.CHANNELS_PER_PROGRAM,
        "OVERLAP": target.overlaps,
    }
    return compile_for(
        triton_short_convolution._convolution_kernel,
        target.compiler,
        pointers=INTEGERS
        | dict.fromkeys(("joined", "kernel", "bias", "ring", "output", "given"), "bf16"),
        constants=sizes | {"bias": None} | constants,
    )


def serial(target: "Target", sizes: dict[str, Any], dtype: str = "bf16", **constants: Any) -> Any:
    """Row after row."""
    tile = triton_recurrence.tile_for(sizes["KEY_DIM"], sizes["VALUE_DIM"])
    more = {"COLUMNS": tile.columns, "OVERLAP": target.overlaps, "DECAYS": decays(sizes)} | (
        {"skip": None} if sizes["DELTA"] else {}
    )
    return compile_for(
        triton_recurrence._serial_kernel,
        target.compiler,
        pointers=INTEGERS | FLOATS | {"channels": dtype, "output": dtype},
        constants=sizes | more | constants,
        num_warps=tile.num_warps,
    )


def chunk_kernels(target: "Target", *, whole: bool, every_shape: bool) -> Iterator[tuple[str, Any]]:
    """Those of prompts, or those of them that multiply matrices in half precision."""
    cases = (
        ("delta rule", DELTA, "bf16"),
        ("Mamba-2", PLAIN, "bf16"),
        ("decays by key", BY_KEY, "bf16"),
        ("float32", DELTA, "fp32"),
    )
    for title, sizes, dtype in cases:
        if (dtype == "fp32" or sizes is BY_KEY) and not (target.overlaps or target.is_cdna):
            continue  # it takes a compiler long
        if not whole and (dtype == "fp32" or sizes is (DELTA if target.follows else PLAIN)):
            continue  # another of its maker's has it
        types = (
            INTEGERS
            | FLOATS
            | {
                "channels": dtype,
                "output": dtype,
                "scores": dtype,
                "systems": "fp32",
                "inverses": "fp32",
            }
        )
        constants: dict[str, Any] = sizes | {"KEYS": 128, "OVERLAP": target.overlaps}
        # CDNA has them at full size, in less memory
        if dtype == "fp32" and target.overlaps and not every_shape:
            constants |= {"KEY_DIM": 32, "VALUE_DIM": 32, "KEYS": 32}
        if sizes is BY_KEY:
            within = {name: value for name, value in constants.items() if name != "DELTA"}
            kernel = compile_for(
                key_systems._within_kernel,
                target.compiler,
                pointers=types,
                constants=within,
                num_warps=key_systems.NUM_WARPS,
            )
        else:
            within = constants | ({} if sizes["DELTA"] else {"systems": None, "factors": None})
            kernel = compile_for(
                systems._within_kernel, target.compiler, pointers=types, constants=within
            )
        yield f"chunks of a recurrence, {title}", kernel
        walk = (
            constants
            | ({"skip": None} if sizes["DELTA"] else {"inverses": None})
            | ({} if sizes is BY_KEY else {"sums": None})
        )
        tile = chunks.KEY_TILE if sizes is BY_KEY else chunks.TILE
        yield (
            f"walk over chunks, {title}",
            compile_for(
                chunks._walk_kernel,
                target.compiler,
                pointers=types,
                constants=walk | {"COLUMNS": tile.columns, "SPLIT": tile.split and dtype == "bf16"},
                num_warps=tile.num_warps,
                num_stages=chunks.stages_for(target.shared_memory),
            ),
        )
    if not whole:
        return
    yield (
        "inverses of a recurrence's chunks",
        compile_for(
            systems._invert_kernel,
            target.compiler,
            pointers=INTEGERS | {"systems": "fp32"},
            constants={"VALUE_HEADS": 32, "OVERLAP": target.overlaps},
            num_warps=1,
        ),
    )
