"""Merging the parts of rows whose keys were split."""

from itertools import pairwise

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import Machine, host, increasing, int32, refuse_unless
from tests.helpers.aiter_emulation.signatures import version_key

_REDUCED: dict[int, dict[str, tuple[int, ...]]] = {
    64: {"0.1.17": (64,)},
    128: {"0.1.15": (1, 2, 4, 8, 10, 16, 32, 40, 64, 128), "0.1.20": (48, 96)},
    512: {"0.1.15": (8, 16, 32, 48, 64, 80, 96, 112, 128), "0.1.20": (24,)},
}
"""Heads by the size of a value, and from which version on the reduction is compiled for them."""


def _is_reduced(heads: int, dim: int, version: str) -> bool:
    return any(
        heads in counts and version_key(version) >= version_key(since)
        for since, counts in _REDUCED.get(dim, {}).items()
    )


def mla_reduce_v1(
    machine: Machine,
    partial_output: Tensor,
    partial_lse: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor | None,
    reduce_partial_map: Tensor,
    max_seqlen_q: int,
    final_output: Tensor,
    final_lse: Tensor | None = None,
    num_kv_splits: int = 0,
) -> None:
    """Merges normalized parts by the logarithms of their denominators; groups of fewer than two
    parts are left alone.
    """
    name = "mla_reduce_v1"
    machine.needs_cdna(name)
    machine.record(name)
    refuse_unless(reduce_final_map is not None, f"{name}: not emulated without reduce_final_map")
    assert reduce_final_map is not None
    plain = (torch.bfloat16, torch.float16, *([torch.float32] if machine.allow_float32 else []))
    refuse_unless(final_output.dtype in plain, f"{name}: output of {final_output.dtype}")
    heads, dim = final_output.shape[-2:]
    known = _is_reduced(heads, dim, machine.version) or machine.any_shape
    refuse_unless(known, f"{name} is not compiled for {heads} heads of {dim}")
    machine.compile(name, heads, dim)
    longest = max((b - a for a, b in pairwise(host(reduce_indptr))), default=0)
    widest = max((b - a for a, b in host(reduce_final_map)), default=0)
    refuse_unless(
        widest <= max_seqlen_q, f"{name}: {max_seqlen_q} rows of a group of {widest} are merged"
    )
    limit = max(machine.num_compute_units, num_kv_splits)
    refuse_unless(longest <= limit, f"{name}: {longest} parts of one group, room for {limit}")
    reduce_parts(
        partial_output,
        partial_lse,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
        final_output,
        final_lse,
    )


def reduce_parts(
    partial_output: Tensor,
    partial_lse: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    final_output: Tensor,
    final_lse: Tensor | None,
) -> None:
    """The kernel itself, for any number of heads and size of value."""
    name = "mla_reduce_v1"
    heads, dim = final_output.shape[-2:]
    fp32 = partial_output.dtype == partial_lse.dtype == torch.float32
    refuse_unless(
        fp32 and partial_output.is_contiguous() and partial_lse.is_contiguous(),
        f"{name}: parts are dense float32",
    )
    refuse_unless(
        partial_output.shape[-2:] == (heads, dim),
        f"{name}: parts {tuple(partial_output.shape)} for {heads} x {dim}",
    )
    parts, logs = partial_output.view(-1, heads, dim), partial_lse.view(-1, heads)
    starts = increasing("reduce_indptr", host(int32("reduce_indptr", reduce_indptr, None)))
    places = host(int32("reduce_partial_map", reduce_partial_map, None))
    targets = host(int32("reduce_final_map", reduce_final_map, None, 2))
    refuse_unless(
        starts[-1] <= len(places), f"{name}: {starts[-1]} parts in a map of {len(places)}"
    )
    for group, (a, b) in enumerate(pairwise(starts)):
        if b - a < 2:
            continue
        refuse_unless(group < len(targets), f"{name}: group {group} has no target")
        first, last = targets[group]
        refuse_unless(
            0 <= first <= last <= len(final_output),
            f"{name}: rows {first} to {last} of {len(final_output)}",
        )
        rows = [range(place, place + last - first) for place in places[a:b]]
        refuse_unless(
            all(r.start >= 0 and r.stop <= min(len(parts), len(logs)) for r in rows),
            f"{name}: parts past the buffer",
        )
        weights = torch.stack([logs[r.start : r.stop] for r in rows])  # [parts, rows, heads]
        values = torch.stack([parts[r.start : r.stop] for r in rows])
        merged = weights.logsumexp(0)
        shares = torch.exp(weights - merged.clamp(min=torch.finfo(torch.float32).min))
        final_output[first:last] = (shares[..., None] * values).sum(0).to(final_output.dtype)
        if final_lse is not None:
            final_lse[first:last] = merged
