"""What checks of kernels on a card share: times, bandwidth, and requests on scattered blocks."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from specdec.attention.backend import AttentionMetadata
from specdec.kv_cache import blocks_for

DEVICE = torch.device("cuda")
BLOCK = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
failures: list[str] = []


def microseconds(call: Callable[[int], Any], variants: int = 1, repeats: int = 15) -> float:
    """Median device time of `call(i)` for i in rotation, each captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(variants):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    inner = max(variants, 8)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(inner):
            call(i % variants)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per microsecond of a large copy, read plus written."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda _: target.copy_(source))


def metadata(
    lengths: list[int], widths: list[int], *, causal: bool, prefill: bool
) -> AttentionMetadata:
    """Requests on scattered blocks; past its own, a table names block 0."""
    counts = [blocks_for(length, BLOCK) for length in lengths]
    parts = (torch.randperm(sum(counts)) + 1).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots = []
    for i, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        table[i, : counts[i]] = parts[i]
        positions = torch.arange(length - width, length)
        slots.append(parts[i][positions // BLOCK] * BLOCK + positions % BLOCK)
    starts = torch.tensor([0, *widths]).cumsum(0).int()
    return AttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=torch.cat(slots).to(DEVICE),
        num_reqs=len(lengths),
        num_tokens=sum(widths),
        max_query_len=max(widths),
        max_seq_len=max(lengths),
        visibility="causal" if causal else "full",
        query_lens=widths if prefill else None,
        seq_lens_host=lengths if prefill else None,
    )
