"""Caches whose rows are moved, and what has to come of it, row by row in Python."""

from collections.abc import Sequence

import torch

from specdec.kv_cache import KVLayerSpec, LatentLayerSpec, LayerSpec, PagedKVCache, SharedLayerSpec
from specdec.model.cache_rows import CacheRows

SPECS: list[LayerSpec] = [
    KVLayerSpec(2, 8),
    LatentLayerSpec(12, index_bytes=4),
    SharedLayerSpec(0),
    KVLayerSpec(3, 40),
]
BLOCKS, BLOCK_SIZE = 8, 4


def filled(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> PagedKVCache:
    """Caches of random bytes."""
    cache = PagedKVCache(
        specs, num_blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=device
    )
    for layer in cache.layers:
        for tensor in layer:
            tensor.view(torch.uint8).random_(256)
    return cache


def assert_moves(cache: PagedKVCache) -> None:
    """Three requests whose blocks lie scattered: one with gaps, one that is a chain, one that jumps
    far.
    """
    block_table = [[5, 1, 7], [2, 6, 0], [3, 4, 0]]
    starts = [2, 1, 0]
    paths = [[0, 2, 3, 4, 7, 5], [0, 1, 2, 3, 4, 5], [0, 6, 7, 3, 4, 5]]
    num_rows = 8
    slots = [
        [
            blocks[(start + row) // BLOCK_SIZE] * BLOCK_SIZE + (start + row) % BLOCK_SIZE
            for row in range(num_rows)
        ]
        for blocks, start in zip(block_table, starts, strict=True)
    ]
    tensors = {id(tensor): tensor for layer in cache.layers for tensor in layer}.values()
    before = [tensor.view(torch.uint8).flatten(0, 1).clone() for tensor in tensors]
    device = cache.layers[0][0].device
    CacheRows(cache.layers).move(
        torch.tensor(slots, device=device), torch.tensor(paths, device=device)
    )
    for tensor, rows in zip(tensors, before, strict=True):
        expected = rows.clone()
        for own, path in zip(slots, paths, strict=True):
            for depth, row in enumerate(path):
                expected[own[depth]] = rows[own[row]]
        assert torch.equal(tensor.view(torch.uint8).flatten(0, 1), expected)
