"""Moving the rows of accepted paths in plain torch; `tests.specdec.kernels.test_triton_cache_rows`
does so on a kernel.
"""

import pytest
import torch

from specdec.kv_cache import (
    KVLayerSpec,
    LatentLayerSpec,
    LayerSpec,
    PagedKVCache,
    SharedLayerSpec,
    StateLayerSpec,
)
from specdec.kv_cache.rows import rows_of, side_by_side
from tests.helpers.cache_rows_case import SPECS, assert_moves, filled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_paths_move_to_the_front(dtype: torch.dtype) -> None:
    """In every layer, a shared one once, and nothing else is touched."""
    assert_moves(filled(SPECS, dtype, torch.device("cpu")))


def test_a_shared_cache_is_there_once() -> None:
    """A second move would take from rows that have been written already."""
    cache = filled(
        [KVLayerSpec(1, 4), SharedLayerSpec(0), LatentLayerSpec(6)],
        torch.float32,
        torch.device("cpu"),
    )
    assert [tuple(tensor.shape) for tensor in rows_of(cache.layers)] == [
        (32, 16),
        (32, 16),
        (32, 24),
    ]


def test_recurrent_layers_have_no_rows() -> None:
    spec = StateLayerSpec(width=4, taps=2, heads=1, key_dim=2, value_dim=2, dtype=torch.float32)
    cache = PagedKVCache(
        [spec],
        num_blocks=2,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_slots=2,
    )
    with pytest.raises(AssertionError, match="no rows"):
        rows_of(cache.layers)


def test_layers_of_a_cpu_lie_side_by_side() -> None:
    """Rows of all layers of a kind move in one operation, in words; so do those behind a layer of
    another kind, once more.
    """
    specs: list[LayerSpec] = [
        *[KVLayerSpec(3, 64)] * 4,
        LatentLayerSpec(5, index_bytes=3),
        *[KVLayerSpec(3, 64)] * 2,
    ]
    cache = filled(specs, torch.bfloat16, torch.device("cpu"))
    joined = side_by_side(rows_of(cache.layers))
    assert [tuple(tensor.shape) for tensor in joined] == [
        (8, 32, 48),
        (1, 32, 5),
        (1, 32, 3),
        (4, 32, 48),
    ]
    assert [tensor.dtype for tensor in joined] == [
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.int64,
    ]
    assert all(tensor.data_ptr() % 64 == 0 for layer in cache.layers for tensor in layer)
    assert_moves(cache)
