"""Triton's kernel for prompts against the definition, on a CUDA device or interpreted; see
`tests.helpers.triton_interpreter`.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, AttentionSpec, Visibility
from specdec.attention.triton import context, libraries
from specdec.attention.triton import fa as triton_fa
from specdec.attention.triton.fa import PREFILL_ROWS, TritonFaBackend
from specdec.kv_cache import LayerCache
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.attention.triton import triton_prefill  # noqa: E402 (only where Triton can run)
from specdec.attention.triton.triton_attention import Tile  # noqa: E402
from tests.specdec.kernels.test_triton_fa import (  # noqa: E402
    BLOCK,
    check_attention,
    compare,
    scenario,
    spec,
)

REQUESTS = [(40, 40), (75, 33), (33, 1), (60, 20)]
"""(seq_len, query_len): a prompt of partial blocks, a chunk behind a context, a single row, and
another chunk.
"""
SMALL = Tile(32, 16, 4, 1)


def attend(
    query: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    tile: Tile | None = SMALL,
    **options: Any,
) -> Tensor:
    """The kernel alone, on a cache that is written."""
    return triton_prefill.prefill_attention(
        query,
        cache,
        block_table=metadata.block_table,
        seq_lens=metadata.seq_lens,
        query_start_loc=metadata.query_start_loc,
        max_query_len=metadata.max_query_len,
        scale=0.2,
        tile=tile,
        **options,
    )


def check(
    requests: list[tuple[int, int]],
    wanted: AttentionSpec,
    *,
    tile: Tile | None = SMALL,
    sinks: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """The kernel is as exact as the definition."""
    torch.manual_seed(0)
    metadata, cache = scenario(requests, wanted, host_lengths=True)
    query = torch.randn(
        metadata.num_tokens, wanted.num_heads, wanted.head_dim, dtype=wanted.dtype, device=DEVICE
    )
    options = {
        "window": window,
        "softcap": softcap,
        "sinks": torch.randn(wanted.num_heads).to(DEVICE) if sinks else None,
    }
    check_attention(
        attend(query, cache, metadata, tile=tile, **options), query, cache, metadata, **options
    )


@pytest.mark.parametrize(
    ("window", "extra"),
    [
        (None, "plain"),
        (None, "sinks"),
        (1, "softcap"),
        (3, "plain"),
        (20, "sinks"),
        (50, "softcap"),
    ],
)
def test_masks_and_scores(window: int | None, extra: str) -> None:
    """Windows within a block of keys, across several, and with blocks that every row sees between
    the two ends.
    """
    check(
        REQUESTS,
        spec(head_dim=16),
        window=window,
        sinks=extra == "sinks",
        softcap=0.7 if extra == "softcap" else None,
    )


@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 1), Tile(64, 16, 4, 1), Tile(128, 64, 8, 1)])
def test_tiles(tile: Tile) -> None:
    """Fewer rows than keys in a tile, and more; tiles without rows."""
    for window in (None, 20):
        check(REQUESTS, spec(head_dim=16), tile=tile, window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    """Groups of 3 leave lanes empty."""
    check(REQUESTS, spec(num_heads=heads, num_kv_heads=kv_heads, head_dim=16))


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(80, 16), (256, 32), (512, 16), (20, 12), (16, 1)]
)
def test_head_and_block_sizes(head_dim: int, block_size: int) -> None:
    """Sizes that are padded, and blocks of the cache that do not divide those of keys."""
    check([(75, 33), (21, 21)], spec(head_dim=head_dim, block_size=block_size))


def test_half_precision_with_the_tile_of_a_launch() -> None:
    """Accumulation is float32, rows are more than a tile's, and blocks that every row sees come
    before the diagonal.
    """
    check([(200, 200), (130, 40)], spec(dtype=torch.float16, head_dim=32), tile=None)


def test_a_row_has_the_same_bits_in_any_chunk_and_company() -> None:
    """Blocks of keys do not move with the tiles of rows."""
    torch.manual_seed(0)
    wanted = spec(head_dim=16)
    metadata, cache = scenario([(90, 90), (50, 50)], wanted, host_lengths=True)
    query = torch.randn(140, 4, 16, device=DEVICE)
    for window in (None, 20):
        together = attend(query, cache, metadata, window=window)
        for start in (0, 7, 55):
            chunk = AttentionMetadata.packed(
                [90 - start], [90], metadata.block_table[:1], metadata.slot_mapping[start:90]
            )
            assert attend(query[start:90], cache, chunk, window=window).equal(together[start:90])


def test_nothing_outside_the_table_is_read() -> None:
    """Slots past a sequence's end may hold NaN, and blocks past its own may be anybody's."""
    torch.manual_seed(0)
    metadata, cache = scenario([(45, 45), (18, 7)], spec(head_dim=16), host_lengths=True)
    keep = torch.zeros(cache.key.shape[0] * BLOCK, dtype=torch.bool, device=DEVICE)
    for table, length in zip(metadata.block_table.long(), (45, 18), strict=True):
        positions = torch.arange(length, device=DEVICE)
        keep[table[positions // BLOCK] * BLOCK + positions % BLOCK] = True
    for tensor in cache:
        tensor.flatten(0, 1)[~keep] = torch.nan
    query = torch.randn(metadata.num_tokens, 4, 16, device=DEVICE)
    for window in (None, 10):
        assert attend(query, cache, metadata, window=window).isfinite().all()


def test_8_bit_cache() -> None:
    """Keys and values are widened to the type of the query."""
    torch.manual_seed(0)
    metadata, cache = scenario([(40, 40)], spec(head_dim=16))
    eight = LayerCache(*(tensor.to(torch.float8_e4m3fn) for tensor in cache))
    query = torch.randn(40, 4, 16, device=DEVICE)
    check_attention(
        attend(query, eight, metadata),
        query,
        LayerCache(*(tensor.float() for tensor in eight)),
        metadata,
    )


def test_prompts_go_through_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written, then attended to by the kernel for prompts; fewer rows, and blocks that are
    not causal, by the other.
    """
    torch.manual_seed(0)
    wanted = spec(head_dim=16)
    backend = TritonFaBackend(wanted)
    taken: list[int] = []
    kernel = triton_prefill.prefill_attention

    def count(query: Tensor, *args: Any, **options: Any) -> Tensor:
        taken.append(len(query))
        return kernel(query, *args, **options)

    monkeypatch.setattr(triton_prefill, "prefill_attention", count)
    for causal, requests in itertools.product(
        (True, False),
        ([(PREFILL_ROWS, PREFILL_ROWS), (30, 20)], [(PREFILL_ROWS, PREFILL_ROWS - 1)]),
    ):
        metadata, cache = scenario(requests, wanted, causal=causal, host_lengths=True)
        rows = tuple(
            torch.randn(metadata.num_tokens, heads, 16, device=DEVICE) for heads in (4, 2, 2)
        )
        compare(backend, rows, cache, metadata, window=50)
    assert taken == [PREFILL_ROWS + 20]


def test_few_programs_over_many_keys_are_left_to_the_kernel_that_divides_them() -> None:
    """A short chunk behind a long context, unless a window hides it, or others fill the device."""
    backend = TritonFaBackend(
        spec(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    )
    backend.num_processors = 132

    def is_prefill(
        num_reqs: int,
        width: int,
        max_seq_len: int,
        window: int | None = None,
        *,
        causal: bool = True,
    ) -> bool:
        empty = torch.empty(0)
        seen: Visibility = "causal" if causal else "full"
        metadata = AttentionMetadata(
            empty, empty, empty, empty, num_reqs, num_reqs * width, width, max_seq_len, seen
        )
        return backend.is_prefill(metadata, window)

    assert is_prefill(1, 2048, 2**17) and is_prefill(1, 128, 128) and is_prefill(16, 128, 2**17)
    assert not is_prefill(1, 128, 2**17) and is_prefill(1, 128, 2**17, window=32)
    assert not is_prefill(1, 2048, 2048, causal=False) and not is_prefill(64, 127, 127)


@pytest.mark.parametrize("extra", ["plain", "sinks", "window", "softcap"])
def test_long_contexts_through_a_library(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    """Pieces begin where their context is whole, chunks where they like; windows and softcaps are
    not the library's.
    """
    monkeypatch.setattr(context, "PIECE", 32)
    monkeypatch.setattr(context, "SQUARES", (64, 32))
    monkeypatch.setattr(triton_fa, "PREFILL_ROWS", 16)
    monkeypatch.setattr(triton_prefill, "prefill_tile", lambda *args: SMALL)
    torch.manual_seed(0)
    # cuDNN has no float32
    wanted = spec(head_dim=16, dtype=torch.float16 if DEVICE.type == "cuda" else torch.float32)
    backend = TritonFaBackend(wanted)
    shapes: list[tuple[int, int, bool]] = []

    def rectangle(
        query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        shapes.append((len(query), len(key), causal))
        return libraries.through_torch(query, key, value, scale, causal)

    backend.rectangle = rectangle
    requests = [(20, 20), (150, 150), (107, 70), (75, 3), (64, 32)]
    metadata, cache = scenario(requests, wanted, host_lengths=True)
    rows = tuple(
        torch.randn(metadata.num_tokens, heads, 16, device=DEVICE, dtype=wanted.dtype)
        for heads in (4, 2, 2)
    )
    options: dict[str, Any] = {
        # above and below what the keys add up to
        "sinks": 4 * torch.randn(4).to(DEVICE) + 4 if extra == "sinks" else None,
        "window": 50 if extra == "window" else None,
        "softcap": 0.7 if extra == "softcap" else None,
    }
    compare(backend, rows, cache, metadata, **options)
    behind_pieces, behind_others = (
        [(32, 32, False), (32, 32, True)],
        [(32, 64, False), (32, 32, False)],
    )
    whole_prompt = [(64, 64, False), (64, 64, True), (64, 64, True)]
    assert shapes == (
        [] if extra in ("window", "softcap") else behind_pieces + behind_others + whole_prompt
    )
