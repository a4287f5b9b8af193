"""Attention as it is launched, for `tests.helpers.compiled_kernels`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from specdec.attention.triton import triton_attention, triton_prefill, triton_splits
from tests.helpers.triton_interpreter import compile_for

if TYPE_CHECKING:
    from tests.helpers.compiled_kernels import Target

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention_kernels(target: "Target", *, every_shape: bool) -> Iterator[tuple[str, Any]]:
    """Verification by an 8 B model, of a tree and on an 8-bit cache too; a windowed draft block of
    a small one; float32.

    Without `every_shape` a tree stands for a chain, of which it has all, and on CDNA the tree is
    verified on the 8-bit cache.
    """
    lead = every_shape or target.leads
    wide: dict[str, Any] = {"head_dim": 128, "group": 4, "width": 16, "splits": 8}
    small: dict[str, Any] = {
        "head_dim": 64, "group": 3, "width": 1, "splits": 1, "CAUSAL": False, "WINDOW": 128,
        "SOFTCAP": True,
    }  # fmt: skip
    tree: dict[str, Any] = {**wide, "tree": True}
    if lead or target.follows:
        yield "attention, heads of 128", attention(target, "bf16", **wide)
    if not every_shape and target.is_cdna and target.eight_bits:
        yield (
            "attention of a tree, window, 8-bit cache",
            attention(target, "bf16", cache=target.eight_bits, WINDOW=1024, **tree),
        )
    elif every_shape or not target.follows:
        yield "attention of a tree, window", attention(target, "bf16", WINDOW=1024, **tree)
    if every_shape:
        yield "attention of a tree", attention(target, "bf16", **tree)
    if every_shape or target.is_cdna:
        yield (
            "attention, heads of 512",
            attention(target, "bf16", head_dim=512, group=8, width=8, splits=8),
        )
    if target.eight_bits and every_shape:
        yield "attention, 8-bit cache", attention(target, "bf16", cache=target.eight_bits, **wide)
    if every_shape or target.overlaps:
        yield "attention, heads of 64, window", attention(target, "bf16", **small)
    yield from prefill_kernels(target, every_shape=every_shape)
    if every_shape or target.overlaps:
        yield (
            "attention, float32",
            attention(target, "fp32", head_dim=64, group=3, width=5, splits=1),
        )
    if lead:
        yield (
            "merge of a split context",
            compile_for(
                triton_splits._merge_kernel,
                target.compiler,
                pointers={"parts": "fp32", "log_sums": "fp32", "output": "bf16"},
                constants={
                    "HEAD_DIM": 128,
                    "SPLITS": 2,
                    "ROWS": 8,
                    "BLOCK_D": 128,
                    "OVERLAP": target.overlaps,
                },
            ),
        )


def prefill_kernels(target: "Target", *, every_shape: bool) -> Iterator[tuple[str, Any]]:
    """Prompts of an 8 B model, behind what a library has computed where there is one; wide heads
    with a window; sinks.

    Without `every_shape` heads of 256 are left to where memory is scarcest, and stand there for
    those of 128.
    """
    wide = every_shape or target.compiler[1] in (89, "gfx942", "gfx1201")
    earlier: dict[str, Any] = {} if target.overlaps else {"earlier": None, "earlier_log_sums": None}
    if every_shape or target.leads or not wide:
        yield (
            "attention of prompts, heads of 128",
            prefill(target, head_dim=128, group=4, sinks=None, **earlier),
        )
    absent: dict[str, Any] = {"earlier": None, "earlier_log_sums": None}
    if wide:
        yield (
            "attention of prompts, heads of 256, window",
            prefill(target, head_dim=256, group=2, WINDOW=1024, sinks=None, **absent),
        )
    if every_shape or target.is_cdna:
        yield (
            "attention of prompts, heads of 512",
            prefill(target, head_dim=512, group=8, sinks=None, **absent),
        )
    if every_shape or target.overlaps:
        window: dict[str, Any] = {} if every_shape else {"WINDOW": 128}
        yield (
            "attention of prompts, heads of 64, sinks",
            prefill(target, head_dim=64, group=8, **window, **absent),
        )
    if target.eight_bits and every_shape:
        eight: dict[str, Any] = {"cache": target.eight_bits, "sinks": None, **absent}
        yield "attention of prompts, 8-bit cache", prefill(target, head_dim=128, group=4, **eight)


def prefill(
    target: "Target", *, head_dim: int, group: int, cache: str = "bf16", **constants: Any
) -> Any:
    """The kernel for prompts, with the tile it would be launched with."""
    tile = triton_prefill.prefill_tile(group, head_dim, torch.bfloat16, target.shared_memory)
    values: dict[str, Any] = {
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "BLOCK_D": triton_attention.padded(head_dim), "WINDOW": None,
        "SOFTCAP": False, "OVERLAP": target.overlaps,
    }  # fmt: skip
    types = {
        "query": "bf16", "key_cache": cache, "value_cache": cache, "output": "bf16",
        "sinks": "bf16", "earlier": "bf16",
    }  # fmt: skip
    return compile_for(
        triton_prefill._prefill_kernel,
        target.compiler,
        pointers=types
        | {"earlier_log_sums": "fp32"}
        | dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "i32"),
        floats=("score_scale", "softcap"),
        constants=values | constants,
        num_warps=tile.num_warps,
        num_stages=1 if target.assembly == "amdgcn" else tile.num_stages,
    )


def attention(
    target: "Target",
    dtype: str,
    *,
    head_dim: int,
    group: int,
    width: int,
    splits: int,
    cache: str | None = None,
    tree: bool = False,
    **constants: Any,
) -> Any:
    """The attention kernel, with the tile it would be launched with."""
    tile = triton_attention.tile_for(group, width, head_dim, DTYPES[dtype], target.shared_memory)
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
        "FEW": width * group <= triton_attention.FEW_ROWS,
        "OVERLAP": target.overlaps,
        "sinks": None,
        **({} if tree else {"ancestors": None, "depths": None}),
    }
    types = {
        "query": dtype,
        "key_cache": cache or dtype,
        "value_cache": cache or dtype,
        "sinks": dtype,
    }
    types |= {
        "output": "fp32" if splits > 1 else dtype,
        "log_sums": "fp32",
        "ancestors": "i64",
        "depths": "i64",
    }
    return compile_for(
        triton_attention._attention_kernel,
        target.compiler,
        pointers=types | dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "i32"),
        floats=("score_scale", "softcap"),
        constants=values | constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
