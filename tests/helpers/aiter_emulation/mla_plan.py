"""The decode plan of latent attention: sizes on the host, content by a kernel on the device."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import (
    Machine,
    from_host,
    host,
    increasing,
    int32,
    refuse_unless,
)
from tests.helpers.aiter_emulation.mla_objects import Kind, is_native

Sizes = tuple[tuple[Any, torch.dtype], ...]

ROW_TILE = 128
"""Rows times heads that one program of the decode kernel computes."""


@dataclass(frozen=True)
class PlanInputs:
    """What a plan depends on, except the lengths, which its work list shows."""

    kind: Kind
    heads: int
    query_len: int
    causal: bool
    page_size: int
    addresses: tuple[int, int]

    def fold(self, machine: Machine) -> int:
        """Groups that the heads of one row are cut into."""
        return 1 if is_native(machine, self.kind, self.heads, self.query_len) else self.heads // 16


def kind_of(machine: Machine, name: str, query: torch.dtype, cache: torch.dtype) -> Kind:
    """The family of kernels for two types."""
    plain = {torch.bfloat16, *([torch.float32] if machine.allow_float32 else [])}
    if query in plain and cache == query:
        return "bf16"
    if query in plain and cache == machine.fp8:
        return "a16w8"
    refuse_unless(
        query == cache == machine.fp8,
        f"{name}: no kernel for a query of {query} and a cache of {cache}",
    )
    return "fp8"


def check_heads(name: str, heads: int) -> None:
    """Heads come in groups of 16; the caller pads."""
    refuse_unless(
        heads % 16 == 0 and 16 <= heads <= 128,
        f"{name}: {heads} heads; pad them to a multiple of 16 up to 128",
    )


def get_mla_metadata_info_v1(
    machine: Machine,
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> Sizes:
    """Shapes and types of the six outputs; `work_indptr` comes before `work_info_set` here."""
    name = "get_mla_metadata_info_v1"
    kind = kind_of(machine, name, q_dtype, kv_dtype)
    machine.record(name, kind=kind)
    refuse_unless(fast_mode and not intra_batch_mode, f"{name}: not emulated")
    assert num_head_qo % 8 == 0
    check_heads(name, num_head_qo)
    units = machine.num_compute_units
    tiles = _tiles_per_batch(machine, kind, num_head_qo, 1 if is_sparse else max_seqlen_qo)
    batch_size = batch_size * max_seqlen_qo if is_sparse else batch_size
    partials = min(batch_size + units - 1, 2 * (units - 1)) * tiles
    if max_split_per_batch > 0:
        partials = max(partials, batch_size * tiles + min(units, max_split_per_batch * batch_size))
    return (
        (2, torch.uint64),
        (units + 1, torch.int32),
        (((batch_size + units - 1) * tiles, 8), torch.int32),
        (batch_size * tiles + 1, torch.int32),
        ((batch_size * tiles, 2), torch.int32),
        (partials, torch.int32),
    )


def _tiles_per_batch(machine: Machine, kind: Kind, heads: int, query_len: int) -> int:
    """Parts that the rows of a request, heads included, are cut into; an upper bound of what any
    partition needs.
    """
    rows = heads * query_len
    if not is_native(machine, kind, heads, query_len):
        return math.ceil(rows / 16)
    return max(math.ceil(rows / 64), query_len if heads in (48, 80, 96, 112, 128) else 1)


def get_mla_metadata_v1(
    machine: Machine,
    seqlens_qo_indptr: Tensor,
    seqlens_kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: Tensor,
    work_info_set: Tensor,
    work_indptr: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
    dtype_q_nope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    **unsupported: Any,
) -> None:
    """Fills the six outputs; `work_info_set` comes before `work_indptr` here.

    Any partition of the keys is admissible. This one cuts all keys into about as many pieces as
    there are compute units, so that even short requests are split and reduced. Rows are cut as
    AITER does it: 128 of them, heads included, are a tile, and each tile reads the context.
    """
    name = "get_mla_metadata_v1"
    machine.needs_cdna(name)
    machine.record(name)
    neutral = {"is_cp_round_robin": False, "mla_version": 0}
    for option, value in unsupported.items():
        refuse_unless(value == neutral.get(option), f"{name}: {option} is not emulated")
    refuse_unless(
        fast_mode and not intra_batch_mode and topk == -1 and page_size == 1,
        f"{name}: not emulated",
    )
    refuse_unless(num_heads_k == 1, f"{name}: one latent per token, not {num_heads_k}")
    known = kv_granularity >= 16 and kv_granularity & (kv_granularity - 1) == 0
    refuse_unless(
        known,
        f"{name}: granularity {kv_granularity}, not a power of two from 16 on, which the kernels"
        f" were made with",
    )
    check_heads(name, num_heads_per_head_k)
    plain = torch.bfloat16
    kind = kind_of(
        machine,
        name,
        dtype_q_nope or dtype_q or plain,
        dtype_kv_nope or dtype_kv or dtype_q or plain,
    )

    batch = len(seqlens_kv_indptr) - 1
    queries = increasing(
        "seqlens_qo_indptr", host(int32("seqlens_qo_indptr", seqlens_qo_indptr, batch + 1))
    )
    keys = increasing(
        "seqlens_kv_indptr", host(int32("seqlens_kv_indptr", seqlens_kv_indptr, batch + 1))
    )
    check_last_pages(kv_last_page_lens, batch)
    widths = {b - a for a, b in pairwise(queries)}
    refuse_unless(
        max(widths) <= max_seqlen_qo, f"{name}: max_seqlen_qo {max_seqlen_qo} below {max(widths)}"
    )
    refuse_unless(
        uni_seqlen_qo < 1 or widths == {uni_seqlen_qo},
        f"{name}: uni_seqlen_qo {uni_seqlen_qo} for queries of {widths}",
    )
    outputs = (
        work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
        reduce_partial_map,
    )  # fmt: skip
    _check_outputs(machine, name, outputs, kind, batch, max_seqlen_qo, num_heads_per_head_k)

    machine.compile(name, num_heads_per_head_k, max_seqlen_qo, kind)
    addresses = work_indptr.data_ptr(), work_info_set.data_ptr()
    inputs = PlanInputs(kind, num_heads_per_head_k, max_seqlen_qo, is_causal, page_size, addresses)
    machine.plans[addresses[1]] = inputs
    splits = machine.num_compute_units
    fold = inputs.fold(machine)
    if max_split_per_batch >= 0:
        splits = min(splits, max_split_per_batch * batch * fold)
    tiles = _row_tiles(num_heads_per_head_k // fold, max_seqlen_qo)
    works, starts, finals, partials = _partition(
        queries, keys, fold, kv_granularity, max(splits, 1), tiles if is_causal else -tiles
    )

    work_metadata_ptrs.view(torch.int64)[:2] = from_host(list(addresses), torch.int64)
    units = machine.num_compute_units
    refuse_unless(
        len(works) <= len(work_info_set), f"{name}: {len(works)} works in {len(work_info_set)} rows"
    )
    work_indptr[: units + 1] = from_host(
        [len(works) * unit // units for unit in range(units + 1)], torch.int32
    )
    work_info_set[: len(works)] = from_host(works, torch.int32)
    reduce_indptr.copy_(
        from_host(starts + starts[-1:] * (len(reduce_indptr) - len(starts)), torch.int32)
    )
    for group, rows in finals.items():
        reduce_final_map[group] = from_host(list(rows), torch.int32)
    reduce_partial_map[: len(partials)] = from_host(partials, torch.int32)


def _row_tiles(heads: int, query_len: int) -> int:
    """Tiles of one request's rows: as many as there are rows of more than 64 heads.

    >>> [_row_tiles(heads, rows) for heads, rows in ((16, 4), (16, 8), (16, 9), (128, 9))]
    [1, 1, 2, 9]
    """
    return query_len if 2 * heads > ROW_TILE else max(1, -(-query_len * heads // ROW_TILE))


def _partition(
    queries: list[int], keys: list[int], fold: int, granularity: int, splits: int, tiles: int
) -> tuple[list[list[int]], list[int], dict[int, tuple[int, int]], list[int]]:
    """Works, starts of the groups to reduce, where each group ends up, and where its partial
    results lie.

    A tile that has others behind it leaves as many of the last keys out, unless rows are not
    causal, which fewer than no tiles mean.
    """
    blocks = [-(-(b - a) // granularity) for a, b in pairwise(keys)]
    budget = max(1, -(-sum(blocks) * fold // splits)) * granularity
    works: list[list[int]] = []
    starts, finals, partials, row, query = [0], {}, [], 0, 0
    for i in range(len(blocks) * fold):
        request = i // fold
        width = queries[request + 1] - queries[request]
        size = max(1, -(-width // abs(tiles)))
        last = query + width
        rows = [(first, min(first + size, last)) for first in range(query, last, size)]
        for tile, (first, behind) in enumerate(rows or [(query, query)]):
            begin, whole = keys[request], keys[request + 1]
            end = whole - max(0, len(rows) - 1 - tile) * (tiles > 0)
            cuts = [*range(begin, end, budget), end] if end > begin else [begin, end]
            split = len(cuts) > 2
            for a, b in pairwise(cuts):
                works.append([i, row if split else -1, first, behind, a, b, whole - b, 0])
                if split:
                    partials.append(row)
                    row += behind - first
            if split:
                finals[len(starts) - 1] = (first, behind)
            starts.append(len(partials))
        query = last
    return works, starts, finals, partials


def check_last_pages(kv_last_page_lens: Tensor, batch: int) -> None:
    """With pages of one token every last page holds one."""
    pages = host(int32("kv_last_page_lens", kv_last_page_lens, batch))
    refuse_unless(
        all(length == 1 for length in pages),
        f"kv_last_page_lens {pages}: with pages of one token they are all 1",
    )


def _check_outputs(
    machine: Machine,
    name: str,
    outputs: tuple[Tensor, ...],
    kind: Kind,
    batch: int,
    query_len: int,
    heads: int,
) -> None:
    query, cache = {
        "bf16": (torch.bfloat16, torch.bfloat16),
        "a16w8": (torch.bfloat16, machine.fp8),
        "fp8": (machine.fp8, machine.fp8),
    }[kind]
    sizes = get_mla_metadata_info_v1(machine, batch, query_len, heads, query, cache, False)
    machine.calls.pop()  # our own call
    for output, (shape, dtype) in zip(outputs, sizes, strict=True):
        wanted = math.prod(shape) if isinstance(shape, tuple) else shape
        refuse_unless(
            output.dtype == dtype and output.is_contiguous(),
            f"{name}: an output is {output.dtype}, not dense {dtype}",
        )
        refuse_unless(
            output.numel() >= wanted,
            f"{name}: an output of {output.numel()} elements, not {wanted}",
        )
    units = machine.num_compute_units
    grid = outputs[1].numel() == units + 1
    refuse_unless(
        grid,
        f"{name}: work_indptr of {outputs[1].numel()} launches more blocks than the plan's {units}",
    )
