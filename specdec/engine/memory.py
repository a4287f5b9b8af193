"""What an engine will take of the device's memory, said before it is taken."""

import gc
import logging
from collections.abc import Sequence

import torch

from specdec.base.config import CacheConfig
from specdec.base.errors import CapacityError
from specdec.device.device import default_cache_bytes, free_memory
from specdec.kv_cache import LatentLayerSpec, LayerSpec, bytes_per_slot, num_blocks_in_budget
from specdec.model.core import Verifier

logger = logging.getLogger(__name__)

WIDTHS_PER_ROW = 20
"""Hidden widths that a row of prefill takes at once: residual, taps, and a layer's products, gate
and up above all.
"""


def plan_cache(
    verifier: Verifier,
    specs: Sequence[LayerSpec],
    config: CacheConfig,
    *,
    max_total_tokens: int,
    num_slots: int = 0,
    max_rows: int = 1,
    graph_rows: int = 0,
    prefill_rows: int = 0,
) -> int:
    """Blocks of the KV cache, no more than its kernels can address.

    On an accelerator, the whole demand is logged and compared with the free memory.

    Args:
        verifier: the target, already on its device.
        specs: layers of the target and of the drafter.
        config: the budget.
        max_total_tokens: tokens that can be in the cache at once.
        num_slots, max_rows: see `PagedKVCache`.
        graph_rows, prefill_rows: most rows of a captured step and of a captured prefill; 0 when
            none is captured.

    Raises:
        CapacityError: the budget does not pay for two blocks, or the device does not have it.
    """
    if verifier.device.type == "cuda":
        # An engine and its captured steps refer to each other: what the last one took is free only
        # after a collection.
        gc.collect()
        torch.cuda.empty_cache()
    device, dtype, block_size = (
        verifier.device,
        verifier.attention.spec.kv_dtype,
        verifier.attention.spec.block_size,
    )
    num_blocks = num_blocks_in_budget(
        specs,
        memory_bytes=config.memory_bytes or default_cache_bytes(device),
        max_total_tokens=max_total_tokens,
        block_size=block_size,
        dtype=dtype,
        num_slots=num_slots,
        max_rows=max_rows,
    )
    reaches = (
        spec.max_tokens for spec in specs if isinstance(spec, LatentLayerSpec) and spec.max_tokens
    )
    reach = min(reaches, default=None)
    if reach is not None and num_blocks * block_size > reach:
        logger.warning(
            "the KV cache is kept to %s tokens, as many as the kernels of %s address; the budget"
            " pays for %s",
            *(
                f"{reach // block_size * block_size:,}",
                verifier.attention.name,
                f"{num_blocks * block_size:,}",
            ),
        )
        num_blocks = reach // block_size
    if device.type == "cuda":
        cache_bytes = num_blocks * block_size * sum(spec.bytes_per_token(dtype) for spec in specs)
        state_bytes = num_slots * bytes_per_slot(specs, max_rows)
        _check(device, cache_bytes, state_bytes, graph_bytes(verifier, graph_rows, prefill_rows))
    return num_blocks


def graph_bytes(verifier: Verifier, num_rows: int, prefill_rows: int = 0) -> int:
    """Rough prediction of the memory that all captured graphs share.

    Graphs take turns, so they share one pool, which is as large as the largest needs: a step the
    logits of its rows, with one copy in float32; a prefill, which has few logits, what a layer
    computes.
    """
    step = num_rows * verifier.vocab_size * (verifier.dtype.itemsize + torch.float32.itemsize)
    return max(step, prefill_rows * WIDTHS_PER_ROW * verifier.hidden_size * verifier.dtype.itemsize)


def _check(device: torch.device, cache_bytes: int, state_bytes: int, for_graphs: int) -> None:
    """Logs the demand, or refuses it."""
    room = free_memory(device) + torch.cuda.memory_reserved(device)
    free = room - torch.cuda.memory_allocated(device)
    states = f", states of requests {_gib(state_bytes)}" if state_bytes else ""
    demand = (
        f"the KV cache takes {_gib(cache_bytes)}{states} and captured steps about"
        f" {_gib(for_graphs)}"
    )
    if cache_bytes + state_bytes + for_graphs > free:
        what = f"{demand}, and {device} has {_gib(free)} free"
        way_out = "give the cache less memory, decode fewer requests at once, or turn graphs off"
        raise CapacityError(f"{what}; {way_out}")
    in_use = torch.cuda.memory_allocated(device)
    text = "%s: weights and what else is loaded take %s, %s, of %s free"
    logger.info(text, device, _gib(in_use), demand, _gib(free))


def _gib(num_bytes: int) -> str:
    """A size for people.

    >>> _gib(3 * 2**29)
    '1.50 GiB'
    """
    return f"{num_bytes / 2**30:.2f} GiB"
