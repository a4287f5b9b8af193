"""8-bit prefill of latent attention: AITER's planner on the host, and the kernel that follows any
such work list.

From 0.1.20 on the planner copies through the device's queue, host tensors as well, and waits:
nothing of ours calls it.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import (
    Machine,
    from_host,
    gather,
    host,
    increasing,
    int32,
    refuse_unless,
    tensor_scale,
)
from tests.helpers.aiter_emulation.mla_plan import Sizes

_TILE, _UNIT = 256, 128
"""Queries of one work, and keys by which it is cut."""


class _Tile(NamedTuple):
    """Consecutive queries of one request, and the keys they see."""

    batch: int
    first: int
    last: int
    num_blocks: int
    num_keys: int


def get_ps_metadata_info_v1(
    machine: Machine, batch_size: int, num_head_k: int, max_qlen: int, qlen_granularity: int = 256
) -> Sizes:
    """Shapes and types of the six outputs."""
    machine.record("get_ps_metadata_info_v1")
    units = machine.num_compute_units
    groups = units // math.gcd(num_head_k, units)
    tiles = math.ceil(max_qlen / qlen_granularity)
    return (
        (2, torch.uint64),
        (units + 1, torch.int32),
        (((batch_size + groups - 1) * tiles * num_head_k, 8), torch.int32),
        (batch_size * tiles + 1, torch.int32),
        ((batch_size * tiles, 2), torch.int32),
        (min(batch_size + groups - 1, (groups - 1) * 2) * tiles, torch.int32),
    )


def get_ps_metadata_v1(
    machine: Machine,
    seqlens_qo_indptr: Tensor,
    pages_kv_indptr: Tensor,
    context_lens: Tensor,
    gqa_ratio: int,
    num_heads_k: int,
    work_metadata_ptrs: Tensor,
    work_indptr: Tensor,
    work_info: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    qhead_granularity: int = 1,
    qlen_granularity: int = 256,
    kvlen_granularity: int = 16,
    block_size: int = 16,
    is_causal: bool = True,
) -> None:
    """Fills the outputs by AITER's own algorithm; `work_metadata_ptrs` is never written."""
    name = "get_ps_metadata_v1"
    machine.record(name)
    refuse_unless(not machine.capturing, f"{name} works on the host and cannot be captured")
    outputs = {
        "work_indptr": work_indptr,
        "work_info": work_info,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": reduce_final_map,
        "reduce_partial_map": reduce_partial_map,
    }
    inputs = {
        "seqlens_qo_indptr": seqlens_qo_indptr,
        "pages_kv_indptr": pages_kv_indptr,
        "context_lens": context_lens,
    }
    machine.refuse_on_device(name, **inputs, **outputs)
    assert kvlen_granularity % block_size == 0
    batch = len(seqlens_qo_indptr) - 1
    queries = increasing(
        "seqlens_qo_indptr", host(int32("seqlens_qo_indptr", seqlens_qo_indptr, batch + 1))
    )
    pages = increasing(
        "pages_kv_indptr", host(int32("pages_kv_indptr", pages_kv_indptr, batch + 1))
    )
    lengths: list[int] = host(int32("context_lens", context_lens, batch))
    for i, length in enumerate(lengths):
        held = (pages[i + 1] - pages[i]) * block_size
        refuse_unless(
            held - block_size < length <= held, f"{name}: context_lens {length} in {held} slots"
        )
        refuse_unless(
            length >= queries[i + 1] - queries[i], f"{name}: more queries than keys in request {i}"
        )
    for output, tensor in outputs.items():
        int32(f"{name}: {output}", tensor.reshape(-1) if tensor.is_contiguous() else tensor, None)
    units = machine.num_compute_units
    refuse_unless(
        work_indptr.numel() == units + 1,
        f"{name}: work_indptr of {work_indptr.numel()} for {units} compute units",
    )

    tiles = _tiles(queries, lengths, qlen_granularity, kvlen_granularity, block_size, is_causal)
    clusters = math.gcd(num_heads_k, units)
    starts, works = [0], []
    for cluster in range(clusters):
        heads = range(
            cluster * (num_heads_k // clusters), (cluster + 1) * (num_heads_k // clusters)
        )
        ranges = [
            ((head + 1) * qhead_granularity) << 16 | head * qhead_granularity for head in heads
        ]
        for share in _deal(
            tiles,
            units // clusters,
            pages,
            lengths,
            (qlen_granularity, kvlen_granularity, block_size),
        ):
            works += [[*work, packed] for packed in ranges for work in share]
            starts.append(len(works))
    groups: dict[tuple[int, int], set[int]] = {}
    for _, place, first, last, *_ in works:
        if place >= 0:
            groups.setdefault((first, last), set()).add(place)
    ordered = sorted(groups)
    partials = [place for group in ordered for place in sorted(groups[group])]
    reduced = [0]
    for group in ordered:
        reduced.append(reduced[-1] + len(groups[group]))
    reduced += reduced[-1:] * (reduce_indptr.numel() - len(reduced))
    _write(name, work_indptr, starts)
    _write(name, work_info, [number for work in works for number in work])
    _write(name, reduce_indptr, reduced)
    _write(name, reduce_final_map, [row for group in ordered for row in group])
    _write(name, reduce_partial_map, partials)


def _tiles(
    queries: list[int], lengths: list[int], rows: int, keys: int, block: int, causal: bool
) -> list[_Tile]:
    """Tiles of every request, taken from its head and its tail in turn, so that short and long ones
    alternate.
    """
    tiles = []
    for batch, ((first, last), length) in enumerate(zip(pairwise(queries), lengths, strict=True)):
        width = last - first
        parts = [(start, min(start + rows, width)) for start in range(0, width, rows)]
        for i in range(len(parts)):
            begin, end = parts[i // 2 if i % 2 == 0 else len(parts) - 1 - i // 2]
            seen = min(length - width + end, length) if causal else length
            tiles.append(
                _Tile(
                    batch,
                    first + begin,
                    first + end,
                    math.ceil(seen / keys) * (keys // block),
                    seen,
                )
            )
    return tiles


def _deal(
    tiles: list[_Tile],
    groups: int,
    pages: list[int],
    lengths: list[int],
    granularity: tuple[int, int, int],
) -> list[list[list[int]]]:
    """The works of each thread group for one head: equal shares of the units of keys, cut wherever
    a share ends.
    """
    rows, keys, block = granularity
    units = sum(tile.num_blocks for tile in tiles) // (keys // block)
    average, rest = divmod(units, groups)
    shares, tile, done, partial = [], 0, 0, 0
    for group in range(groups):
        room = (average + (group < rest)) * (keys // block)
        share = []
        while tile < len(tiles) and room > 0:
            batch, first, last, num_blocks, num_keys = tiles[tile]
            begin = pages[batch] + done
            completes = num_keys - done * block <= room * block
            taken = num_blocks - done if completes else room
            end = min(begin + taken, pages[batch + 1])
            behind = 0 if completes else lengths[batch] - (end - pages[batch]) * block
            place = -1
            if not completes or done:
                place, partial = rows * partial, partial + 1
            share.append([batch, place, first, last, begin, end, behind])
            tile, done = (tile + 1, 0) if completes else (tile, done + taken)
            room -= taken
        shares.append(share)
    return shares


def _write(name: str, output: Tensor, values: list[int]) -> None:
    """Overwrites the whole output, zeros behind the values."""
    refuse_unless(
        len(values) <= output.numel(),
        f"{name}: {len(values)} numbers in an output of {output.numel()}",
    )
    output.view(-1).copy_(from_host(values + [0] * (output.numel() - len(values)), torch.int32))


def mla_prefill_ps_asm_fwd(
    machine: Machine,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    work_indptr: Tensor | None,
    work_info_set: Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    is_causal: bool,
    splitData: Tensor,
    splitLse: Tensor,
    output: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Works without a partial row go straight to `output` and leave no logarithm of their
    denominator anywhere.
    """
    name = "mla_prefill_ps_asm_fwd"
    machine.record(name)
    refuse_unless(
        machine.architecture == "gfx950", f"{name} has no kernel for {machine.architecture}"
    )
    refuse_unless(
        is_causal,
        f"{name}: the logarithms of split rows are wrong without a causal mask; call it causal",
    )
    total, heads, width = Q.shape
    dim, batch = V.shape[2], len(qo_indptr) - 1
    kinds = {Q.dtype, K.dtype, V.dtype}
    plain = {torch.float32} if machine.allow_float32 else set()
    refuse_unless(
        kinds == {machine.fp8} or (len(kinds) == 1 and kinds <= plain),
        f"{name} takes {machine.fp8}, not {kinds}",
    )
    machine.size(name, (width, 192), (dim, 128))
    refuse_unless(heads % 16 == 0, f"{name}: {heads} heads, not a multiple of 16")
    refuse_unless(
        K.shape[1:] == (heads, width) and V.shape == (*K.shape[:2], dim),
        f"{name}: every head has its own key",
    )
    refuse_unless(
        all(t.is_contiguous() for t in (Q, K, V, output)), f"{name}: tensors must be dense"
    )
    refuse_unless(
        output.dtype in {torch.bfloat16, *plain},
        f"{name} writes bf16 bits into an output of {output.dtype}",
    )
    refuse_unless(output.shape == (total, heads, dim), f"{name}: output {tuple(output.shape)}")
    refuse_unless(
        work_indptr is not None and work_info_set is not None, f"{name} without a work list"
    )
    assert work_indptr is not None and work_info_set is not None
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    q_factor, k_factor, v_factor = (
        tensor_scale(f"{name} {what}", scale) for what, scale in scales.items()
    )
    queries = increasing("qo_indptr", host(int32("qo_indptr", qo_indptr, batch + 1)))
    keys = increasing("kv_indptr", host(int32("kv_indptr", kv_indptr, batch + 1)))
    slots = host(int32("kv_page_indices", kv_page_indices, None))
    refuse_unless(
        queries[-1] == total and keys[-1] <= len(slots),
        f"{name}: indptr ends at {queries[-1]} and {keys[-1]}",
    )
    refuse_unless(
        all(0 <= slot < len(K) for slot in slots[: keys[-1]]),
        f"{name}: kv_page_indices past the {len(K)} keys",
    )
    longest = max(b - a for a, b in pairwise(queries))
    refuse_unless(longest <= max_seqlen_q, f"{name}: max_seqlen_q {max_seqlen_q} below {longest}")
    fp32 = (
        splitData.dtype == splitLse.dtype == torch.float32
        and splitData.is_contiguous()
        and splitLse.is_contiguous()
    )
    refuse_unless(fp32, f"{name}: partial results are dense float32")
    refuse_unless(
        splitData.shape[1:] == (heads, dim) and splitLse.shape[1:] == (heads,),
        f"{name}: shape of partial results",
    )
    machine.compile(name, is_causal)

    used = increasing("work_indptr", host(work_indptr))[-1]
    refuse_unless(
        len(work_indptr) == machine.num_compute_units + 1,
        f"{name}: work_indptr of {len(work_indptr)} is the grid",
    )
    refuse_unless(
        used <= len(work_info_set), f"{name}: {used} works in a list of {len(work_info_set)}"
    )
    works = host(work_info_set[:used])
    _check_plan(name, works, queries, keys, heads)
    for batch_index, place, first, last, begin, end, _, packed in works:
        own = range(packed & 0xFFFF, packed >> 16)
        rows = slice(own.start, own.stop)
        key, value = (gather(side, slots[begin:end])[:, rows].float() for side in (K, V))
        scores = torch.einsum("ihd,jhd->hij", Q[first:last, rows].float(), key) * (
            softmax_scale * q_factor * k_factor
        )
        to_last_query = queries[batch_index + 1] - 1 - torch.arange(first, last)
        to_last_key = keys[batch_index + 1] - 1 - torch.arange(begin, end)
        scores = scores.masked_fill(to_last_key[None] < to_last_query[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
        result = torch.einsum("hij,jhd->ihd", weights, value) * v_factor
        if place < 0:
            output[first:last, rows] = result.to(output.dtype)
            continue
        fits = place + _TILE <= min(len(splitData), len(splitLse))
        refuse_unless(
            fits, f"{name}: partial tile at {place} past the {len(splitData)} rows of scratch"
        )
        (
            splitData[place : place + last - first, rows],
            splitLse[place : place + last - first, rows],
        ) = result, lse.transpose(0, 1)


def _check_plan(
    name: str, works: list[list[int]], queries: list[int], keys: list[int], heads: int
) -> None:
    """Every head of every tile sees the keys up to its diagonal once, and parts of tiles lie apart
    from each other.
    """
    covered: dict[tuple[int, int, int, int], list[tuple[int, int, int, int]]] = {}
    owners: dict[int, tuple[int, int, int, int]] = {}
    for batch, place, first, last, begin, end, behind, packed in works:
        refuse_unless(
            last - first <= _TILE and batch < len(queries) - 1,
            f"{name}: the plan was made for other lengths",
        )
        if place >= 0:
            owner = owners.setdefault(place, (first, last, begin, end))
            refuse_unless(
                owner == (first, last, begin, end),
                f"{name}: two parts at row {place} of the scratch",
            )
        for head in range(packed & 0xFFFF, packed >> 16):
            covered.setdefault((batch, first, last, head), []).append((begin, end, place, behind))
    for batch, (start, stop) in enumerate(pairwise(queries)):
        for first in range(start, stop, _TILE):
            last = min(first + _TILE, stop)
            seen = keys[batch + 1] - (stop - last)  # end of what its last query sees
            for head in range(heads):
                runs = sorted(covered.pop((batch, first, last, head), []))
                _check_runs(
                    f"{name}: queries {first} to {last} of request {batch}",
                    runs,
                    keys[batch],
                    seen,
                    keys[batch + 1],
                )
    refuse_unless(
        not covered, f"{name}: the plan was made for other lengths: {sorted(covered)} are left"
    )


def _check_runs(
    name: str, runs: list[tuple[int, int, int, int]], start: int, seen: int, stop: int
) -> None:
    """The runs of keys that one head of a tile sees, out of those of its request: begin, end,
    place, keys behind.
    """
    begins, ends = [run[0] for run in runs], [run[1] for run in runs]
    whole = bool(runs) and begins == [start, *ends[:-1]] and ends[-1] >= seen
    refuse_unless(whole, f"{name} see {runs}: the plan was made for other lengths")
    most = min(start + math.ceil((seen - start) / _UNIT) * _UNIT, stop)
    refuse_unless(
        ends[-1] <= most,
        f"{name} see {runs}, beyond the diagonal at {seen}: the plan was not made causal",
    )
    refuse_unless(
        all((begin - start) % _UNIT == 0 for begin in begins),
        f"{name} see {runs}, not cut at multiples of {_UNIT}",
    )
    alone = len(runs) == 1
    refuse_unless(
        all((run[2] < 0) == alone for run in runs),
        f"{name}: {len(runs)} parts at {[run[2] for run in runs]}",
    )
    behind = [*(stop - end for end in ends[:-1]), 0]
    refuse_unless(
        [run[3] for run in runs] == behind,
        f"{name}: {[run[3] for run in runs]} keys behind the parts, not {behind}",
    )
