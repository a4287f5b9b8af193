"""What layers keep of requests: paged keys and values, whose blocks have owners, and states with a
slot each.
"""

from specdec.kv_cache.block_pool import NULL_BLOCK, BlockPool, Snapshot, blocks_for
from specdec.kv_cache.cache import (
    KVLayerSpec,
    LatentCache,
    LatentLayerSpec,
    LayerCache,
    LayerSpec,
    PagedKVCache,
    SharedLayerSpec,
    bytes_per_slot,
    num_blocks_in_budget,
)
from specdec.kv_cache.prefix import PrefixCounts, prefix_hashes, prefix_root
from specdec.kv_cache.state import StateCache, StateLayerSpec, copy_states

__all__ = [
    "NULL_BLOCK", "BlockPool", "KVLayerSpec", "LatentCache", "LatentLayerSpec", "LayerCache",
    "LayerSpec", "PagedKVCache", "PrefixCounts", "SharedLayerSpec", "Snapshot", "StateCache",
    "StateLayerSpec", "blocks_for", "bytes_per_slot", "copy_states", "num_blocks_in_budget",
    "prefix_hashes", "prefix_root",
]  # fmt: skip
