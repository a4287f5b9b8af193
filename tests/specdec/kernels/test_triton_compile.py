"""Triton's compiler accepts the kernels for NVIDIA and AMD, which it does without either; the interpreter would let more pass."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import torch

from specdec.kernels import triton_argmax, triton_attention, triton_embedding, triton_fused, triton_linear
from tests.helpers.triton_interpreter import compile_for

pytestmark = pytest.mark.slow

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_90": ("cuda", 90, 32),
    "sm_89": ("cuda", 89, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
SHARED_MEMORY = {"sm_90": 227 * 1024, "sm_89": 99 * 1024, "gfx942": 64 * 1024, "gfx1100": 64 * 1024}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles anew each time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield


def attention(target: str, dtype: str, *, head_dim: int, group: int, width: int, splits: int, **constants: Any) -> Any:
    """The attention kernel, compiled with the tile it would be launched with."""
    tile = triton_attention.tile_for(
        group, width, head_dim, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], SHARED_MEMORY[target]
    )
    values: dict[str, Any] = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "SPLITS": splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": triton_attention.padded(head_dim),
        "CAUSAL": True,
        "WINDOW": None,
        "SOFTCAP": False,
        "OVERLAP": target == "sm_90",
        "sinks": None,
    }
    types = {"query": dtype, "key_cache": dtype, "value_cache": dtype, "output": "fp32" if splits > 1 else dtype, "sinks": dtype}
    return compile_for(
        triton_attention._attention_kernel,
        TARGETS[target],
        pointers=types | {"log_sums": "fp32", "block_table": "i32", "seq_lens": "i32", "query_start_loc": "i32"},
        floats=("score_scale", "softcap"),
        constants=values | constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_attention(target: str) -> None:
    """The shapes that matter fit the target's memory and use its matrix instructions."""
    shapes: list[dict[str, Any]] = [
        {"head_dim": 128, "group": 4, "width": 16, "splits": 8},
        {"head_dim": 64, "group": 3, "width": 1, "splits": 1, "CAUSAL": False, "WINDOW": 128, "SOFTCAP": True},
    ]
    for options in shapes:
        kernel = attention(target, "bf16", **options)
        assert kernel.metadata.shared <= SHARED_MEMORY[target]
        assembly = kernel.asm["ptx" if target.startswith("sm_") else "amdgcn"]
        assert any(name in assembly for name in ("wgmma", "mma.sync", "v_mfma", "v_wmma"))
    if target == "sm_90":
        attention(target, "fp32", head_dim=64, group=3, width=5, splits=1)


@pytest.mark.parametrize("target", TARGETS)
def test_the_rest(target: str) -> None:
    """All but attention; on sm_90 they wait for the kernel before them."""
    machine, overlap = TARGETS[target], {"OVERLAP": target == "sm_90"}
    compile_for(
        triton_embedding._embed_kernel,
        machine,
        pointers={"table": "bf16", "token_ids": "i64", "output": "bf16"},
        constants={"BLOCK": 1024} | overlap,
    )
    silent: dict[str, Any] = {"ahead": None, "AHEAD": None}
    compile_for(
        triton_attention._merge_kernel,
        machine,
        pointers={"parts": "fp32", "log_sums": "fp32", "output": "bf16"},
        constants={"HEAD_DIM": 128, "SPLITS": 2, "ROWS": 8, "BLOCK_D": 128} | overlap,
    )
    rows = {"x": "bf16", "residual": "bf16", "weight": "bf16", "normed": "bf16", "added": "bf16"}
    for parts, kind in ((1, "bf16"), (4, "fp32")):
        constants = {"WIDTH": 576, "PARTS": parts, "BLOCK": 1024} | overlap | silent
        norm = compile_for(
            triton_fused._rms_norm_kernel, machine, pointers=rows | {"x": kind}, floats=("epsilon",), constants=constants
        )
    assert target != "sm_90" or "griddepcontrol.wait" in norm.asm["ptx"]
    activation = {"gate_up": "bf16", "output": "bf16"}
    compile_for(triton_fused._silu_mul_kernel, machine, pointers=activation, constants={"BLOCK": 1024} | overlap)
    for gated, splits, width in ((False, 2, 64), (True, 1, 16)):
        plan = triton_linear.divide(12288 if gated else 4096, 4096, gated=gated, may_split=not gated, processors=132)
        assert plan is not None and plan.splits == splits
        product = compile_for(
            triton_linear._few_rows_kernel,
            machine,
            pointers={"x": "bf16", "weight": "bf16", "output": "fp32" if splits > 1 else "bf16"},
            constants={
                "WIDTH": 12288 if gated else 4096,
                "INPUTS": 4096,
                "GATED": gated,
                "ROWS": width,
                "COLUMNS": plan.columns,
                "DEPTH": plan.depth,
                "SPLITS": splits,
            }
            | overlap
            | silent,
            num_stages=triton_linear.stages_of(plan, width, gated=gated, memory=SHARED_MEMORY[target]),
        )
        assert product.metadata.shared <= SHARED_MEMORY[target]
    heads = dict.fromkeys(("query", "key", "value", "rotated", "key_cache", "value_cache", "cos", "sin"), "bf16")
    heads |= {"query_norm": "bf16", "key_norm": "bf16", "slot_mapping": "i64"}
    scalars = ("epsilon", "limit")
    shape = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 64} | overlap | silent
    kernel = triton_fused._rope_store_kernel
    compile_for(kernel, machine, pointers=heads, floats=scalars, constants=shape)
    eight_bits = "fp8e4b8" if target == "gfx942" else "fp8e4nv"
    absent = dict.fromkeys(("query", "cos", "sin", "query_norm", "key_norm"))
    compile_for(
        kernel,
        machine,
        pointers=heads | {"key_cache": eight_bits, "value_cache": eight_bits},
        floats=scalars,
        constants=shape | absent | {"NUM_HEADS": 0},
    )


def test_hints() -> None:
    """Surplus programs send them before anything waits, one piece per thread; without a weight nothing is left of them."""
    rows = {"x": "bf16", "residual": "bf16", "weight": "bf16", "normed": "bf16", "added": "bf16", "ahead": "bf16"}
    constants: dict[str, Any] = {"WIDTH": 4096, "PARTS": 1, "BLOCK": 4096, "OVERLAP": True}
    for hints in ({"AHEAD": 3 * 2**20 + 16}, {"AHEAD": None, "ahead": None}):
        norm = compile_for(
            triton_fused._rms_norm_kernel,
            TARGETS["sm_90"],
            pointers=rows,
            floats=("epsilon",),
            constants=constants | hints,
            num_warps=8,
        )
        assembly = norm.asm["ptx"]
        assert assembly.count("cp.async.bulk.prefetch.L2.global") == ("ahead" not in hints)
        if "ahead" not in hints:
            sending, _, working = assembly.partition("griddepcontrol.wait")
            assert "prefetch" in sending and "st.global" not in sending and "st.global" in working


@pytest.mark.parametrize("target", TARGETS)
def test_argmax(target: str) -> None:
    """Every type of logits; a thread has all of its loads under way at once, each of 16 bytes where the vocabulary allows."""
    overlap = {"OVERLAP": target == "sm_90"}
    for dtype, loads in (("bf16", 4), ("fp16", 4), ("fp32", 8)):
        kernel = compile_for(
            triton_argmax._slice_max_kernel,
            TARGETS[target],
            pointers={"logits": dtype, "best": "i64"},
            constants={"SLICE": triton_argmax.SLICE, "vocab_size": 49152, "group_stride": 16 * 49152, "row_stride": 49152}
            | overlap,
        )
        if target.startswith("sm_"):
            before, _, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
            assert bool(after) == overlap["OVERLAP"] and (after or before).count("ld.global.v4") == loads
            assert not after or "ld.global" not in before
        compile_for(
            triton_argmax._row_max_kernel,
            TARGETS[target],
            pointers={"best": "i64", "indices": "i64", "finite": "i1"},
            constants={"SLICES": 38} | overlap,
            num_warps=1,
        )
