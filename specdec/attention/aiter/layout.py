"""The two ways AITER's kernels lay out a cache block, and how rows and blocks are read back from
each.

    plain     key, value  [num_blocks, block_size, num_kv_heads, head_dim]
    shuffle   key         [num_blocks, num_kv_heads, head_dim / x, block_size, x]
              value       [num_blocks, num_kv_heads, block_size / x, head_dim, x]
              x elements are 16 bytes

The shuffled shapes are views of the memory that the plain ones describe: a block holds the same
bytes either way, so allocating, clearing and sharing blocks does not depend on the layout, while
everything that looks inside a block does.
"""

from typing import Literal

import torch
from torch import Tensor

from specdec.kv_cache import LayerCache

Layout = Literal["plain", "shuffle"]


def shuffled(cache: LayerCache) -> LayerCache:
    """The shuffled views of a layer's cache."""
    blocks, size, heads, dim = cache.key.shape
    x = 16 // cache.key.element_size()
    key = cache.key.view(blocks, heads, dim // x, size, x)
    return LayerCache(key, cache.value.view(blocks, heads, size // x, dim, x))


def read_rows(
    cache: LayerCache, slots: Tensor, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [n, num_kv_heads, head_dim] at `slots` int64 [n], in `dtype`."""
    if layout == "plain":
        key, value = (side.flatten(0, 1).index_select(0, slots) for side in cache)
    else:
        views, size = shuffled(cache), cache.key.shape[1]
        blocks, offsets = slots // size, slots % size
        x = views.key.shape[-1]
        key = views.key[blocks, :, :, offsets].flatten(2)
        value = views.value[blocks, :, offsets // x, :, offsets % x]
    return key.to(dtype), value.to(dtype)


def read_blocks(cache: LayerCache, block_table: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Keys and values [num_reqs, width * block_size, num_kv_heads, head_dim] of the blocks in int32
    [num_reqs, width].
    """
    index = block_table.flatten()
    key, value = cache
    heads, dim = key.shape[2:]
    if layout == "shuffle":
        key, value = shuffled(cache)
    key, value = key.index_select(0, index), value.index_select(0, index)
    if layout == "shuffle":
        key, value = key.permute(0, 3, 1, 2, 4), value.permute(0, 2, 4, 1, 3)
    shape = (len(block_table), -1, heads, dim)
    return key.reshape(shape), value.reshape(shape)
