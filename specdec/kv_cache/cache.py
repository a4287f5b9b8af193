"""The paged KV cache: the tensors of every layer, all sharing the same block ids."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.base.errors import CapacityError
from specdec.kv_cache.block_pool import blocks_for
from specdec.kv_cache.state import StateCache, StateLayerSpec

_ALIGNED = 64
"""Bytes at whose multiples a tensor of a CPU's caches begins."""


class PagedLayerSpec(ABC):
    """What one attention layer stores per token."""

    @abstractmethod
    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token in a cache of `dtype`."""

    @abstractmethod
    def cut(self, size: tuple[int, int], dtype: torch.dtype, memory: "Memory") -> Any:
        """The layer's cache, zeroed: a named tuple of tensors `[num_blocks, block_size, ...]`."""

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """The same in memory of its own."""
        memory = Memory([self], num_blocks * block_size, dtype, device)
        return self.cut((num_blocks, block_size), dtype, memory)


@dataclass(frozen=True, slots=True)
class SharedLayerSpec:
    """A layer that stores nothing, since it reads what an earlier one has stored.

    Attributes:
        layer: which, counted from the first of the target.
    """

    layer: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """See `PagedLayerSpec.bytes_per_token`."""
        return 0


LayerSpec = PagedLayerSpec | StateLayerSpec | SharedLayerSpec
"""What one layer of a model stores."""


@dataclass(frozen=True, slots=True)
class KVLayerSpec(PagedLayerSpec):
    """What one attention layer stores per token: `num_kv_heads` keys and values of `head_dim`
    numbers each.

    Attributes:
        dtype: of these, where it is not that of the other layers.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value.

        >>> KVLayerSpec(num_kv_heads=3, head_dim=64).bytes_per_token(torch.bfloat16)
        768
        """
        return 2 * self.num_kv_heads * self.head_dim * (self.dtype or dtype).itemsize

    def cut(self, size: tuple[int, int], dtype: torch.dtype, memory: "Memory") -> "LayerCache":
        """See `PagedLayerSpec.cut`."""
        shape, dtype = (*size, self.num_kv_heads, self.head_dim), self.dtype or dtype
        return LayerCache(key=memory.zeros(shape, dtype), value=memory.zeros(shape, dtype))


@dataclass(frozen=True, slots=True)
class LatentLayerSpec(PagedLayerSpec):
    """What one layer of latent attention stores per token: one vector for all heads, and what its
    indexer needs.

    Attributes:
        width: numbers of the vector, the compressed key and value followed by the rotated key.
        index_bytes: bytes of the indexer's key in the backend's form; 0 without an indexer.
        max_tokens: slots that the backend's kernels can address; None is no limit.
        dtype: of the vector, where it is not that of the other layers.
    """

    width: int
    index_bytes: int = 0
    max_tokens: int | None = None
    dtype: torch.dtype | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token.

        >>> LatentLayerSpec(width=576).bytes_per_token(torch.bfloat16)
        1152
        """
        return self.width * (self.dtype or dtype).itemsize + self.index_bytes

    def cut(self, size: tuple[int, int], dtype: torch.dtype, memory: "Memory") -> "LatentCache":
        """See `PagedLayerSpec.cut`."""
        return LatentCache(
            latent=memory.zeros((*size, self.width), self.dtype or dtype),
            index_key=memory.zeros((*size, self.index_bytes), torch.uint8),
        )


class LayerCache(NamedTuple):
    """A layer's cache in the plain layout; slot `s` lies at `[s // block_size, s % block_size]`."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]


class LatentCache(NamedTuple):
    """Cache of one layer of latent attention; slot `s` lies at
    `[s // block_size, s % block_size]`.
    """

    latent: Tensor  # [num_blocks, block_size, width]
    # uint8 [num_blocks, block_size, index_bytes]; within a block, laid out as the backend likes
    index_key: Tensor


class PagedKVCache:
    """The caches of the layers of the target, then of the drafter.

    A block id means the same tokens in every layer, so one block table per request serves all of
    them, and a block shared between requests carries the drafter's context along with the target's.
    Recurrent layers have no blocks; a slot is theirs. The cache of a layer that reads another's is
    that very one.

    Args:
        specs: one per layer.
        num_blocks: blocks per layer, the null block included.
        block_size: tokens per block.
        dtype: element type of what is paged.
        device: where the tensors live.
        num_slots: requests whose states are kept, the one that pads batches included.
        max_rows: of a request in a step whose rows may be rejected.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = 0,
        max_rows: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.layers: list[Any] = []
        paged = [spec for spec in specs if not isinstance(spec, StateLayerSpec)]
        memory = Memory(paged, num_blocks * block_size, dtype, device)
        for spec in specs:
            if isinstance(spec, SharedLayerSpec):
                self.layers.append(self.layers[spec.layer])
            elif isinstance(spec, StateLayerSpec):
                self.layers.append(spec.allocate_slots(max_rows, lengths))
            else:
                self.layers.append(spec.cut((num_blocks, block_size), dtype, memory))

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks whose content is not finite, before anyone else reads them."""
        if not blocks:
            return
        index = torch.tensor(blocks, device=self.layers[0][0].device)
        for layer in self.layers:
            # A state is never read by another request: every sequence begins with nothing.
            for tensor in () if isinstance(layer, StateCache) else layer:
                # as bytes, since 8-bit floats have no index_fill_
                tensor.view(torch.uint8).index_fill_(0, index, 0)


class Memory:
    """Where tensors of caches come from: zeros, not uninitialized memory, as a masked key weighs 0,
    and 0 times NaN is still NaN.

    On a CPU all are pieces of one, in the order in which they are asked for, so that one operation
    can move rows of many layers. Its pages come from the system as zeros when they are first
    touched, so a large cache costs neither time nor memory before it is used.

    Args:
        specs: of the layers, with up to two tensors each.
        num_tokens: slots of each.
        dtype: element type of what is cached.
        device: of the tensors.
    """

    def __init__(
        self,
        specs: Sequence[PagedLayerSpec | SharedLayerSpec],
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device, self._free = device, torch.empty(0)
        if device.type == "cpu":
            size = sum(num_tokens * spec.bytes_per_token(dtype) + 2 * _ALIGNED for spec in specs)
            self._free = torch.from_numpy(np.zeros(size, dtype=np.uint8))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor."""
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._device)
        first = -self._free.data_ptr() % _ALIGNED
        end = first + math.prod(shape) * dtype.itemsize
        piece, self._free = self._free[first:end], self._free[end:]
        return piece.view(dtype).view(shape)


def num_blocks_in_budget(
    specs: Sequence[LayerSpec],
    *,
    memory_bytes: int,
    max_total_tokens: int,
    block_size: int,
    dtype: torch.dtype,
    num_slots: int = 0,
    max_rows: int = 1,
) -> int:
    """Blocks that `memory_bytes` pays for beside the states of requests, never more than
    `max_total_tokens` can fill, the null block included.

    Raises:
        CapacityError: the budget does not pay for two blocks.

    >>> spec = [KVLayerSpec(num_kv_heads=3, head_dim=64)] * 30
    >>> most = {"memory_bytes": 2**20, "max_total_tokens": 10**6}
    >>> num_blocks_in_budget(spec, **most, block_size=16, dtype=torch.bfloat16)
    2
    """
    block_bytes = block_size * sum(spec.bytes_per_token(dtype) for spec in specs)
    state_bytes = num_slots * bytes_per_slot(specs, max_rows)
    affordable = max(memory_bytes - state_bytes, 0) // max(block_bytes, 1)
    if affordable < 2:
        beside = ""
        if state_bytes:
            beside = f" beside {num_slots} states of {bytes_per_slot(specs, max_rows):,} bytes"
        fewer = " or decode fewer requests at once" if state_bytes else ""
        raise CapacityError(
            f"the KV cache budget of {memory_bytes:,} bytes pays for {affordable} blocks of"
            f" {block_bytes:,} bytes{beside};"
            f" give it at least {2 * block_bytes + state_bytes:,} bytes{fewer}"
        )
    return min(affordable, blocks_for(max_total_tokens, block_size) + 1)


def bytes_per_slot(specs: Sequence[LayerSpec], max_rows: int) -> int:
    """Bytes that recurrent layers among `specs` keep of one request, whose steps have at most so
    many rows.
    """
    return sum(spec.bytes_per_slot(max_rows) for spec in specs if isinstance(spec, StateLayerSpec))
