"""Paged KV cache: blocks, their owners, and the tensors behind them."""

from specdec.kv_cache.block_pool import NULL_BLOCK, BlockPool, blocks_for, prefix_hashes
from specdec.kv_cache.cache import (
    KVLayerSpec,
    LatentCache,
    LatentLayerSpec,
    LayerCache,
    LayerSpec,
    PagedKVCache,
    num_blocks_in_budget,
)

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "KVLayerSpec",
    "LatentCache",
    "LatentLayerSpec",
    "LayerCache",
    "LayerSpec",
    "PagedKVCache",
    "blocks_for",
    "num_blocks_in_budget",
    "prefix_hashes",
]
