"""Attention within chunks (Llama 4): a row sees its own chunk alone, which begins where its
position is a multiple of a number.

A chunk is to a backend a request of its own, whose blocks are those of the chunk; so every backend
serves chunks, and none has to know of them. Rows of a prompt are divided where chunks end, which
the host knows. In a step whose lengths the device alone knows, each row is a request:

    chunks of 4, rows 2 to 8 of a prompt      2 3 | 4 5 6 7 | 8
    rows 7 and 8 of a step                    7 | 8

Known gap: rows of a step that share a chunk read its keys once each. That is so beyond the first
chunk alone.
"""

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.attention.ragged import owners_of
from specdec.device.host import to_device


def in_chunks(metadata: AttentionMetadata, chunk: int, block_size: int) -> AttentionMetadata:
    """The same rows as layers see them that attend within chunks; the host does not wait.

    Args:
        metadata: of causal rows.
        chunk: tokens of a chunk, a multiple of `block_size`.
        block_size: tokens of a block.
    """
    assert metadata.visibility == "causal" and chunk % block_size == 0
    if metadata.max_seq_len <= chunk:
        return metadata
    blocks = chunk // block_size
    if metadata.query_lens is None or metadata.seq_lens_host is None:
        owners, positions = owners_of(metadata)
        table = _table(metadata.block_table, owners, positions // chunk * blocks, blocks)
        lengths = (positions % chunk + 1).int()
        slots = metadata.slot_mapping
        return AttentionMetadata.uniform(1, lengths, table, slots, max_seq_len=chunk)
    pieces = []
    numbered = enumerate(zip(metadata.query_lens, metadata.seq_lens_host, strict=True))
    for request, (query_len, end) in numbered:
        start = end - query_len
        while start < end:
            stop = min(end, (start // chunk + 1) * chunk)
            pieces.append((request, start, stop))
            start = stop
    numbers = [
        [request for request, _, _ in pieces],
        [start // chunk * blocks for _, start, _ in pieces],
    ]
    owners, first_blocks = to_device(numbers, torch.int64, metadata.block_table.device)
    return AttentionMetadata.packed(
        [stop - start for _, start, stop in pieces],
        [stop - start // chunk * chunk for _, start, stop in pieces],
        _table(metadata.block_table, owners, first_blocks, blocks),
        metadata.slot_mapping,
    )


def _table(block_table: Tensor, owners: Tensor, first_blocks: Tensor, count: int) -> Tensor:
    """int32 [n, count]: of the requests `owners` int64 [n] the blocks from `first_blocks` [n] on;
    past the last one that again.
    """
    widest = block_table.shape[1]
    columns = first_blocks[:, None] + torch.arange(count, device=block_table.device)
    return block_table.take(owners[:, None] * widest + columns.clamp(max=widest - 1))
