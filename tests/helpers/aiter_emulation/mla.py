"""Latent attention: writing latents, and decoding by a work list."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import (
    Machine,
    gather,
    host,
    increasing,
    int32,
    refuse_unless,
    tensor_scale,
)
from tests.helpers.aiter_emulation.mla_objects import code_object
from tests.helpers.aiter_emulation.mla_plan import (
    PlanInputs,
    check_heads,
    check_last_pages,
    kind_of,
)
from tests.helpers.aiter_emulation.mla_reduce import reduce_parts
from tests.helpers.aiter_emulation.signatures import version_key


def concat_and_cache_mla(
    machine: Machine,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> None:
    """Compressed [N, R] and rotated [N, P] parts, one behind the other, into [blocks, size, R + P];
    the scale is always read.
    """
    name = "concat_and_cache_mla"
    machine.needs_cdna(name)
    machine.record(name)
    dtype = machine.activation(name, kv_c, k_pe)
    machine.size(name, (kv_c.shape[1], 512), (k_pe.shape[1], 64))
    rows = torch.cat([kv_c, k_pe], -1)
    refuse_unless(
        kv_cache.dim() == 3 and kv_cache.shape[2] == rows.shape[1],
        f"{name}: cache {tuple(kv_cache.shape)}",
    )
    refuse_unless(kv_cache.stride(2) == 1, f"{name}: strided latents")
    factor = tensor_scale(f"{name} scale", scale)
    if machine.kv_is_fp8(name, dtype, kv_cache):
        refuse_unless(
            kv_cache_dtype in ("fp8", "fp8_e4m3"),
            f"{name}: kv_cache_dtype {kv_cache_dtype!r} on an fp8 cache",
        )
        rows = rows.float() / factor
    else:
        refuse_unless(
            kv_cache_dtype == "auto",
            f"{name}: kv_cache_dtype {kv_cache_dtype!r} on a cache of {kv_cache.dtype}",
        )
    size = kv_cache.shape[1]
    refuse_unless(
        slot_mapping.dtype == torch.int64, f"{name}: slots are {slot_mapping.dtype}, not int64"
    )
    refuse_unless(
        slot_mapping.numel() <= len(rows),
        f"{name}: {slot_mapping.numel()} slots for {len(rows)} rows",
    )
    limit = torch.finfo(machine.fp8).max
    for row, slot in enumerate(host(slot_mapping)):
        if slot < 0:
            continue
        refuse_unless(slot < kv_cache.shape[0] * size, f"{name}: slot past the cache")
        most = host(rows[row].abs().amax().reshape(1))[0]
        refuse_unless(
            kv_cache.dtype != machine.fp8 or not most > limit,
            f"{name}: {most} overflows {machine.fp8}",
        )
        kv_cache[slot // size, slot % size] = rows[row].to(kv_cache.dtype)


def mla_decode_fwd(
    machine: Machine,
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    work_meta_data: Tensor | None = None,
    work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    return_logits: bool = False,
    return_lse: bool = False,
    causal: bool = True,
    **unsupported: Any,
) -> tuple[Tensor, Tensor | None]:
    """Absorbed queries [T, heads, R + P] over latents [slots, 1, 1, R + P] into `o` [T, heads, R].

    A work is a run of keys of one request; its result goes to the partial buffer, or straight to
    `o` when nothing else sees the same queries. With folded heads and several queries, `o` gets a
    new storage.
    """
    name = "mla_decode_fwd"
    machine.needs_cdna(name)
    assert logit_cap <= 0, f"{logit_cap=} is not support yet"
    neutral = {"intra_batch_mode": False, "cp_world_size": 1, "cp_rank": 0}
    for option, value in unsupported.items():
        refuse_unless(value == neutral.get(option), f"{name}: {option} is not emulated")
    refuse_unless(
        page_size == 1 and nhead_kv == 1,
        f"{name}: not emulated: pages of {page_size}, {nhead_kv} latents per token",
    )
    refuse_unless(
        sm_scale is not None,
        f"{name}: without sm_scale it is 1/sqrt of the latent's size, which no model wants",
    )
    assert sm_scale is not None
    kind = kind_of(machine, name, q.dtype, kv_buffer.dtype)
    total, heads, width = q.shape
    rank, batch = o.shape[2], len(qo_indptr) - 1
    check_heads(name, heads)
    machine.size(name, (width, 576), (rank, 512))
    refuse_unless(
        kv_buffer.shape[1:] == (1, 1, width),
        f"{name}: kv_buffer {tuple(kv_buffer.shape)}, not [slots, 1, 1, {width}]",
    )
    refuse_unless(kv_buffer.stride(3) == 1, f"{name}: strided latents")
    refuse_unless(
        q.is_contiguous() and o.is_contiguous(), f"{name}: query and output must be dense"
    )
    plain = (torch.bfloat16, *([torch.float32] if machine.allow_float32 else []))
    refuse_unless(
        o.dtype in plain and o.shape[:2] == q.shape[:2],
        f"{name}: output {tuple(o.shape)} of {o.dtype}",
    )
    factors = _factors(name, kind, q_scale, kv_scale)

    queries = increasing("qo_indptr", host(int32("qo_indptr", qo_indptr, batch + 1)))
    keys = increasing("kv_indptr", host(int32("kv_indptr", kv_indptr, batch + 1)))
    check_last_pages(kv_last_page_lens, batch)
    slots = _slots(name, kv_indices, keys[-1], kv_buffer)
    widths = [b - a for a, b in pairwise(queries)]
    refuse_unless(queries[-1] == total, f"{name}: qo_indptr ends at {queries[-1]} of {total} rows")
    refuse_unless(
        max(widths) <= max_seqlen_q, f"{name}: max_seqlen_q {max_seqlen_q} below {max(widths)}"
    )
    for length, (a, b) in zip(widths, pairwise(keys), strict=True):
        refuse_unless(b == a or b - a >= length, f"{name}: {length} queries on {b - a} keys")

    persistent = work_meta_data is not None and _stays_persistent(
        machine, kind, heads, max_seqlen_q, batch, num_kv_splits
    )
    plan = PlanInputs(kind, heads, max_seqlen_q, causal, page_size, (0, 0))
    fold = plan.fold(machine) if persistent else 1
    machine.record(name, persistent=persistent, fold=fold, query_len=max_seqlen_q, causal=causal)
    options = {"persistent": persistent, "lse": return_lse, "causal": causal}
    found = code_object(machine, kind, heads // fold, max_seqlen_q, **options)
    described = f"{kind}, {heads} heads, {max_seqlen_q} queries, {options}"
    refuse_unless(
        found is not None, f"{name}: no code object on {machine.architecture} for {described}"
    )
    machine.compile(name, kind, heads, max_seqlen_q, persistent, return_lse, causal)

    folded = fold > 1 and max_seqlen_q > 1
    if folded:
        refuse_unless(
            set(widths) == {max_seqlen_q},
            f"{name}: folded heads need {max_seqlen_q} queries of everyone, not {widths}",
        )
    rows = _fold(q, fold, max_seqlen_q if folded else 1)
    final = o.view(-1, heads // fold, rank)
    if folded:
        final = torch.full_like(final, torch.nan)
    lse = torch.full((len(rows), heads // fold), torch.nan) if return_lse else None
    latents = gather(kv_buffer.reshape(-1, width), slots).float()
    ends = list(accumulate(length for length in widths for _ in range(fold)))
    scale = sm_scale * factors[0] * factors[1]
    kernel = _Kernel(rows, latents, rank, scale, factors[1], ends if causal else None)
    if persistent:
        assert work_indptr is not None and work_info_set is not None and work_meta_data is not None
        assert (
            reduce_indptr is not None
            and reduce_final_map is not None
            and reduce_partial_map is not None
        )
        works = _work_list(machine, plan, work_meta_data, work_indptr, work_info_set)
        _check_plan(name, works, queries, keys, fold, causal)
        # of what the library allocates, gigabytes for many rows, as much as the plan names
        used = max((place + last - first for _, place, first, last, *_ in works), default=0)
        num_parts = max(0, min(used, len(reduce_partial_map) * max_seqlen_q))
        logits = torch.full((num_parts, 1, heads // fold, rank), torch.nan)
        partial_lse = torch.full((len(logits), 1, heads // fold, 1), torch.nan)
        kernel.run(works, logits[:, 0], partial_lse[:, 0, :, 0], final, lse)
        reduce_parts(
            logits, partial_lse, reduce_indptr, reduce_final_map, reduce_partial_map, final, lse
        )
    else:
        logits = torch.full((total, 1, heads, rank), torch.nan)
        works = [[i, -1, *queries[i : i + 2], *keys[i : i + 2], 0] for i in range(batch)]
        kernel.run(works, logits, logits, final, lse)
    if folded:
        o.set_(_unfold(final, fold, max_seqlen_q, heads))  # type: ignore[call-overload]
    if lse is not None:
        lse = _unfold(lse[..., None], fold, max_seqlen_q if folded else 1, heads)[..., 0]
    return logits, lse


def _stays_persistent(
    machine: Machine, kind: str, heads: int, query_len: int, batch: int, splits: int | None
) -> bool:
    """From 0.1.18 on, large batches of the plainest case ignore their plan on gfx950."""
    gated = (
        version_key(machine.version) >= (0, 1, 18)
        and machine.architecture == "gfx950"
        and splits is None
    )
    return not (gated and kind == "bf16" and heads == 16 and query_len == 1 and batch >= 32)


def _factors(
    name: str, kind: str, q_scale: Tensor | None, kv_scale: Tensor | None
) -> tuple[float, float]:
    """Scales of query and cache."""
    query = tensor_scale(f"{name} q_scale", q_scale) if kind == "fp8" else 1.0
    return query, tensor_scale(f"{name} kv_scale", kv_scale) if kind != "bf16" else 1.0


def _slots(name: str, kv_indices: Tensor, count: int, kv_buffer: Tensor) -> list[int]:
    int32("kv_indices", kv_indices, None)
    refuse_unless(
        count <= len(kv_indices), f"{name}: kv_indptr ends at {count} of {len(kv_indices)} indices"
    )
    slots: list[int] = host(kv_indices[:count])
    inside = all(0 <= slot < len(kv_buffer) for slot in slots)
    refuse_unless(inside, f"{name}: kv_indices name slots outside the cache of {len(kv_buffer)}")
    furthest = max(slots, default=0) * kv_buffer.stride(0)
    refuse_unless(
        furthest < 2**31,
        f"{name}: slot {max(slots, default=0)} overflows the kernel's 32-bit offsets",
    )
    return slots


def _fold(q: Tensor, fold: int, query_len: int) -> Tensor:
    """[T, heads, D] as [T * fold, heads / fold, D], the queries of one request and group of heads
    in a run.
    """
    total, heads, width = q.shape
    grouped = q.view(total // query_len, query_len, fold, heads // fold, width)
    return grouped.transpose(1, 2).reshape(total * fold, heads // fold, width)


def _unfold(rows: Tensor, fold: int, query_len: int, heads: int) -> Tensor:
    total = len(rows) // fold
    grouped = rows.view(total // query_len, fold, query_len, heads // fold, rows.shape[-1])
    return grouped.transpose(1, 2).reshape(total, heads, rows.shape[-1]).contiguous()


def _work_list(
    machine: Machine, inputs: PlanInputs, pointers: Tensor, work_indptr: Tensor, work_info: Tensor
) -> list[list[int]]:
    """The rows that the kernel finds through the addresses in `pointers`."""
    name = "mla_decode_fwd"
    addresses = work_indptr.data_ptr(), work_info.data_ptr()
    stored = tuple(host(pointers.view(torch.int64)))
    refuse_unless(
        stored == addresses,
        f"{name}: work_meta_data points to another plan than work_indptr and work_info_set",
    )
    made = machine.plans.get(addresses[1])
    refuse_unless(
        made is not None and made.addresses == addresses,
        f"{name}: no plan was made in these buffers",
    )
    assert made is not None
    for part in ("kind", "heads", "query_len", "page_size") + (
        ("causal",) if inputs.query_len > 1 else ()
    ):
        planned, given = getattr(made, part), getattr(inputs, part)
        refuse_unless(
            planned == given, f"{name}: planned for {part} {planned}, called with {given}"
        )
    used = host(work_indptr)[-1]
    works: list[list[int]] = host(work_info[:used])
    return works


def _check_plan(
    name: str, works: list[list[int]], queries: list[int], keys: list[int], fold: int, causal: bool
) -> None:
    """The works cover every key of every tile of queries once; a stale plan does not."""
    covered: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
    for _, _, first, last, begin, end, behind, _ in works:
        if first < last:
            covered.setdefault(first, (last, []))[1].append((begin, end, behind))
    at = 0
    for request in range(len(keys) - 1):
        length = queries[request + 1] - queries[request]
        for _ in range(fold if length else 0):
            group_end = at + length
            while at < group_end:
                last, runs = covered.pop(at, (group_end, []))
                unseen = group_end - last if causal else 0  # keys that its last row need not see
                edges = [keys[request], *(end for _, end, _ in sorted(runs))]
                whole = (
                    at < last <= group_end
                    and [begin for begin, _, _ in sorted(runs)] == edges[:-1]
                    and keys[request + 1] - unseen <= edges[-1] <= keys[request + 1]
                    and all(behind == keys[request + 1] - end for _, end, behind in runs)
                )
                refuse_unless(
                    bool(runs) and whole,
                    f"{name}: the plan was made for other lengths: request {request} has keys"
                    f" {runs} planned",
                )
                at = last
    refuse_unless(
        not covered, f"{name}: the plan was made for other queries: {sorted(covered)} are left"
    )


class _Kernel:
    """Attention of rows [N, heads, R + P] over runs of latents."""

    def __init__(
        self,
        rows: Tensor,
        latents: Tensor,
        rank: int,
        scale: float,
        value_scale: float,
        ends: list[int] | None,
    ) -> None:
        """With the `ends` of each request's rows they are causal."""
        self.rows, self.latents, self.rank = rows.float(), latents, rank
        self.scale, self.value_scale, self.ends = scale, value_scale, ends

    def run(
        self,
        works: list[list[int]],
        partial: Tensor,
        partial_lse: Tensor,
        final: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Every work in turn; rows that no work names stay as they are."""
        for _, place, first, last, begin, end, behind, *_ in works:
            out, out_lse = self._attend(first, last, begin, end, behind)
            if place >= 0:
                refuse_unless(
                    place + last - first <= len(partial),
                    f"mla_decode_fwd: partial row {place} past the buffer",
                )
                partial[place : place + last - first], partial_lse[place : place + last - first] = (
                    out,
                    out_lse,
                )
                continue
            final[first:last] = out.to(final.dtype)
            if lse is not None:
                lse[first:last] = out_lse

    def _attend(
        self, first: int, last: int, begin: int, end: int, behind: int
    ) -> tuple[Tensor, Tensor]:
        latents = self.latents[begin:end]
        scores = torch.einsum("ihd,jd->hij", self.rows[first:last], latents) * self.scale
        if self.ends is not None:
            behind_all = next((end for end in self.ends if end > first), last)
            to_last_query = behind_all - 1 - torch.arange(first, last)
            to_last_key = behind + end - 1 - torch.arange(begin, end)
            scores = scores.masked_fill(to_last_key[None] < to_last_query[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None])
        out = torch.einsum("hij,jd->ihd", weights, latents[:, : self.rank]) * self.value_scale
        return out, lse.transpose(0, 1)
