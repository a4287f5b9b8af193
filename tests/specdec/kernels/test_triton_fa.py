"""triton_fa against the definition, on a CUDA device or in Triton's interpreter; see
`tests.helpers.triton_interpreter`.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.backend import AttentionMetadata, AttentionSpec, Visibility
from specdec.attention.chunks import in_chunks
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kv_cache import KVLayerSpec, LayerCache, blocks_for
from tests.helpers.attention_case import Case, attention
from tests.helpers.bounds import assert_as_exact
from tests.helpers.pairs import pairs
from tests.helpers.rocm import pretend_rocm
from tests.helpers.trees import random_trees
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.attention.triton import triton_splits  # noqa: E402 (only where Triton can run)

BLOCK = 16
UNIFORM = [(21, 5), (64, 5), (5, 5)]
"""(seq_len, query_len) of three requests: a verify step over a partial block, a full one, and no
context at all.
"""


def spec(**changes: Any) -> AttentionSpec:
    """A small request to a backend."""
    values: dict[str, Any] = {
        "device": DEVICE,
        "dtype": torch.float32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": BLOCK,
    }
    return AttentionSpec(**values | changes)


def scenario(
    requests: list[tuple[int, int]],
    wanted: AttentionSpec,
    *,
    causal: bool = True,
    host_lengths: bool = False,
) -> tuple[AttentionMetadata, LayerCache]:
    """Requests on scattered blocks, whose cache is random wherever their own rows will not
    write.
    """
    counts = [blocks_for(length, wanted.block_size) for length, _ in requests]
    blocks = torch.randperm(sum(counts)) + 1
    bound = max(length for length, _ in requests) + 9
    # past its own: any valid one
    table = torch.randint(0, sum(counts) + 1, (len(requests), blocks_for(bound, wanted.block_size)))
    slots = []
    for i, (length, width) in enumerate(requests):
        mine, blocks = blocks[: counts[i]], blocks[counts[i] :]
        table[i, : counts[i]] = mine
        positions = torch.arange(length - width, length)
        slots.append(
            mine[positions // wanted.block_size] * wanted.block_size + positions % wanted.block_size
        )
    cache = KVLayerSpec(wanted.num_kv_heads, wanted.head_dim).allocate(
        sum(counts) + 1, wanted.block_size, wanted.dtype, torch.device("cpu")
    )
    lengths, widths = [length for length, _ in requests], [width for _, width in requests]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(
            [0, *itertools.accumulate(widths)], dtype=torch.int32, device=DEVICE
        ),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_table=table.int().to(DEVICE),
        slot_mapping=torch.cat(slots).to(DEVICE),
        num_reqs=len(requests),
        num_tokens=sum(widths),
        max_query_len=max(widths),
        max_seq_len=bound,
        visibility="causal" if causal else "full",
        query_lens=widths if host_lengths else None,
        seq_lens_host=lengths if host_lengths else None,
    )
    return metadata, LayerCache(cache.key.normal_().to(DEVICE), cache.value.normal_().to(DEVICE))


def check(
    requests: list[tuple[int, int]],
    wanted: AttentionSpec,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    splits: int = 1,
    ragged: bool = False,
) -> None:
    """triton_fa, with `splits` programs per row, is as exact as the definition, and writes
    torch_ref's cache.
    """
    torch.manual_seed(0)
    metadata, cache = scenario(requests, wanted, causal=causal, host_lengths=ragged)
    joined = torch.randn(
        metadata.num_tokens,
        wanted.num_heads + 2 * wanted.num_kv_heads,
        wanted.head_dim,
        dtype=wanted.dtype,
    )
    rows = joined.to(DEVICE).split(
        [wanted.num_heads, wanted.num_kv_heads, wanted.num_kv_heads], dim=1
    )
    logits = torch.randn(wanted.num_heads).to(DEVICE) if sinks else None
    backend = TritonFaBackend(wanted)
    backend.num_splits = lambda *_: splits  # type: ignore[method-assign]
    compare(backend, rows, cache, metadata, window=window, softcap=softcap, sinks=logits)


def compare(
    backend: TritonFaBackend,
    rows: Sequence[Tensor],
    cache: LayerCache,
    metadata: AttentionMetadata,
    **options: Any,
) -> None:
    """Query, key and value of the rows through `backend` and through the definition, on a cache
    that torch_ref has written.
    """
    written = LayerCache(cache.key.clone(), cache.value.clone())
    query, key, value = rows
    TorchRefBackend(backend.spec).write(written, key, value, metadata.slot_mapping)
    got = backend.run(query, key, value, cache, backend.plan(metadata), scale=0.2, **options)
    for ours, theirs in zip(cache, written, strict=True):
        assert ours.equal(theirs)
    check_attention(got, query, written, metadata, **options)


def check_attention(
    got: Tensor, query: Tensor, cache: LayerCache, metadata: AttentionMetadata, **options: Any
) -> None:
    """`got` is as exact as the definition computed in float32."""
    plain, exact = (
        attention(query, cache, metadata, dtype=dtype, scale=0.2, **options)
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_exact(got, plain.to(got.dtype), exact)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "causal", "splits"),
    [
        (heads, kv_heads, width, *[(True, 1), (False, 4)][(i + j) % 2])
        for i, (heads, kv_heads) in enumerate([(2, 2), (3, 1), (8, 2)])
        for j, width in enumerate([1, 5, 16])
    ],
)
def test_blocks_of_every_width_and_group(
    heads: int, kv_heads: int, width: int, causal: bool, splits: int
) -> None:
    """Decoding, verifying and drafting; groups of 3 leave lanes empty, and 16 rows of 8 heads fill
    a whole tile.
    """
    requests = [(width + context, width) for context in (0, 17, 100)]
    check(requests, spec(num_heads=heads, num_kv_heads=kv_heads), causal=causal, splits=splits)


@pytest.mark.parametrize(
    ("causal", "window", "extra", "splits"),
    [
        (causal, window, extra, 4 if causal == (extra != "plain") else 1)
        for causal, window, extra in pairs(
            [True, False], [None, 3, 30], ["plain", "sinks", "softcap"]
        )
    ],
)
def test_masks_and_scores(causal: bool, window: int | None, extra: str, splits: int) -> None:
    """Windows on both sides, sinks counted once however many splits there are,
    and bounded scores.
    """
    check(
        UNIFORM,
        spec(head_dim=16),
        causal=causal,
        window=window,
        splits=splits,
        sinks=extra == "sinks",
        softcap=0.7 if extra == "softcap" else None,
    )


@pytest.mark.parametrize(("causal", "splits"), [(True, 4), (False, 1)])
def test_ragged_prefill_and_extension(causal: bool, splits: int) -> None:
    """New prompts, a chunk of one, a single row among them, more rows than a tile holds, and tiles
    without rows.
    """
    requests = [(40, 40), (35, 3), (33, 1), (60, 20)]
    check(
        requests,
        spec(num_kv_heads=1, head_dim=16),
        causal=causal,
        window=25,
        ragged=True,
        splits=splits,
    )


@pytest.mark.parametrize("requests", [UNIFORM, [(70, 40), (33, 33), (40, 1)]])
def test_chunks(requests: list[tuple[int, int]]) -> None:
    """A step and prompts, of which every chunk is a request."""
    torch.manual_seed(0)
    wanted, uniform = spec(chunk=32), requests is UNIFORM
    metadata, cache = scenario(requests, wanted, host_lengths=not uniform)
    rows = torch.randn(metadata.num_tokens, 8, 64).to(DEVICE).split([4, 2, 2], dim=1)
    backend = TritonFaBackend(wanted)
    backend.write(cache, rows[1], rows[2], metadata.slot_mapping)
    got = backend.read(rows[0], cache, backend.plan(in_chunks(metadata, 32, BLOCK)), scale=0.2)
    check_attention(got, rows[0], cache, metadata, chunk=32)
    assert not backend.captures_prefill and TritonFaBackend(spec()).captures_prefill


def test_an_only_key_head_with_any_stride() -> None:
    """Transformers' keys [1, 1, T, D], turned around, have a stride at the only head that is not
    its size.
    """
    torch.manual_seed(0)
    wanted = spec(num_kv_heads=1, head_dim=16)
    metadata, cache = scenario(UNIFORM, wanted)
    rows = tuple(
        torch.randn(1, heads, metadata.num_tokens, 16, device=DEVICE)[0].transpose(0, 1)
        for heads in (4, 1, 1)
    )
    assert rows[1].is_contiguous() and rows[1].stride(1) != 16
    compare(TritonFaBackend(wanted), rows, cache, metadata)


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256, 512])
def test_head_sizes(head_dim: int) -> None:
    """Sizes that matrix instructions do not take are padded."""
    check([(37, 4), (9, 4)], spec(head_dim=head_dim))


@pytest.mark.parametrize("block_size", [1, 12, 32])
def test_block_sizes(block_size: int) -> None:
    """Any block size, also no power of two."""
    check([(37, 4), (9, 4)], spec(block_size=block_size), splits=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Accumulation is float32: the error is the rounding of inputs and weights, not of sums."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16 products")
    check([(150, 5), (64, 5)], spec(dtype=dtype, head_dim=32), splits=2)


def test_8_bit_cache() -> None:
    """Clamped to what the type holds when it is written."""
    torch.manual_seed(0)
    wanted = spec(cache_dtype=torch.float8_e4m3fn, head_dim=16)
    metadata, _ = scenario([(20, 20)], wanted)
    cache = KVLayerSpec(2, 16).allocate(9, BLOCK, torch.float8_e4m3fn, DEVICE)
    query = torch.randn(20, 4, 16, device=DEVICE)
    key, value = torch.randn(20, 2, 16, device=DEVICE), torch.randn(20, 2, 16, device=DEVICE)
    value[0, 0, 0] = 3000.0
    backend = TritonFaBackend(wanted)
    got = backend.run(query, key, value, cache, backend.plan(metadata), scale=0.2)
    stored = [tensor.flatten(0, 1)[metadata.slot_mapping].float() for tensor in cache]
    assert stored[1][0, 0, 0] == 448
    for ours, rows in zip(stored, (key, value), strict=True):
        want = rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        # The interpreter loses the carry of numbers that round up to a power of two.
        assert (ours != want).float().mean() < 0.05
    read = KVLayerSpec(2, 16).allocate(9, BLOCK, torch.float32, DEVICE)
    TorchRefBackend(spec(head_dim=16)).write(read, stored[0], stored[1], metadata.slot_mapping)
    check_attention(got, query, read, metadata)


def test_a_layer_that_keeps_its_own_type_beside_an_8_bit_cache() -> None:
    """The same bits as without 8 bits; catches large keys that are clamped or rounded."""
    torch.manual_seed(0)
    metadata, _ = scenario([(20, 20), (9, 3)], spec(head_dim=16))
    query = torch.randn(23, 4, 16, device=DEVICE)
    key, value = (torch.randn(23, 2, 16, device=DEVICE) for _ in range(2))
    key[:, 0, 0] += 1000.0
    found = []
    for asked in (spec(head_dim=16), spec(cache_dtype=torch.float8_e4m3fn, head_dim=16)):
        layer = KVLayerSpec(2, 16, dtype=torch.float32)
        cache = layer.allocate(9, BLOCK, asked.kv_dtype, DEVICE)
        backend = TritonFaBackend(asked)
        plan = backend.plan(metadata)
        found.append((backend.run(query, key, value, cache, plan, scale=0.2), *cache))
    assert all(map(torch.equal, *found))
    assert cache.key.abs().max() > 900


@pytest.mark.parametrize("splits", [1, 8])
def test_launch_serves_any_lengths_below_its_bound(splits: int) -> None:
    """What a captured graph does: the same host counts, other lengths on the device. Programs past
    the end add nothing.
    """
    wanted = spec(head_dim=16)
    for context in (0, 1, 130):
        check([(context + 3, 3), (200, 3)], wanted, splits=splits)


def test_many_rows_are_merged_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows past the last program's share; 36 rows do not fill five programs of 8."""
    monkeypatch.setattr(triton_splits, "MANY_ROWS", 8)
    check([(150, 4), (64, 4), (9, 4)], spec(num_heads=3, num_kv_heads=1, head_dim=20), splits=2)


def test_nothing_outside_the_table_is_read() -> None:
    """Slots past a sequence's end may hold NaN, and blocks past its own may be anybody's."""
    torch.manual_seed(0)
    wanted = spec(head_dim=16)
    metadata, cache = scenario([(18, 2), (5, 2)], wanted)
    own = [metadata.block_table[0, :2].long(), metadata.block_table[1, :1].long()]
    keep = torch.zeros(cache.key.shape[:2], dtype=torch.bool, device=DEVICE).flatten()
    for blocks, length in zip(own, (18, 5), strict=True):
        positions = torch.arange(length, device=DEVICE)
        keep[blocks[positions // BLOCK] * BLOCK + positions % BLOCK] = True
    for tensor in cache:
        tensor.flatten(0, 1)[~keep] = torch.nan
    query, key, value = (torch.randn(4, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    backend = TritonFaBackend(wanted)
    assert backend.run(query, key, value, cache, backend.plan(metadata), scale=0.2).isfinite().all()


def test_tiles_and_splits_fill_the_device_and_need_no_device_value() -> None:
    """One long request is divided, a full batch is not, a window or a short context leaves little
    to divide.

    Few requests get the tiles of plain decoding.
    """
    backend = TritonFaBackend(
        spec(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    )
    backend.num_processors = 132

    def splits(
        num_reqs: int,
        max_seq_len: int,
        window: int | None = None,
        width: int = 16,
        visibility: Visibility = "causal",
    ) -> int:
        empty = torch.empty(0)
        counts = num_reqs, num_reqs * width, width, max_seq_len
        metadata = AttentionMetadata(empty, empty, empty, empty, *counts, visibility)
        tile = backend.tile(metadata)
        rows.append(tile.block_m)
        return backend.num_splits(metadata, window, tile)

    rows: list[int] = []
    assert (
        splits(1, 512) == 4
        and splits(1, 100) == 1
        and splits(1, 1024, width=1) == 8
        and splits(1, 32768, width=1) == 32
    )
    assert set(rows) == {16}
    rows.clear()
    assert splits(1, 32768) == 32
    assert splits(1, 1024) == splits(1, 32768, window=1024) == 8
    assert splits(1, 32768, window=1024, visibility="full") == 16  # a window on both sides
    assert splits(8, 32768) == splits(2, 512) == 4
    assert splits(64, 32768) == splits(1, 32768, window=128) == 1
    assert set(rows) == {64}
    rows.clear()
    assert splits(4, 4096, width=512) == splits(1, 128, width=128) == 1
    assert rows == [128, 128]


def test_refusals() -> None:
    """Every reason at once, and none for odd sizes that are padded."""
    assert (
        TritonFaBackend.unsupported_reasons(
            spec(head_dim=80, num_heads=9, num_kv_heads=3, non_causal=True, sinks=True)
        )
        == []
    )
    assert TritonFaBackend.unsupported_reasons(spec(head_dim=512)) == []
    bad = TritonFaBackend.unsupported_reasons(spec(dtype=torch.float64, head_dim=514, num_heads=5))
    assert [reason.split(" (")[0] for reason in bad] == [
        "dtype torch.float64",
        "head size 514",
        "5 query heads do not share 2 key heads evenly",
    ]
    assert (
        "256 query heads per key head"
        in TritonFaBackend.unsupported_reasons(spec(num_heads=256, num_kv_heads=1))[0]
    )
    assert (
        "float8_e5m2 cache"
        in TritonFaBackend.unsupported_reasons(spec(cache_dtype=torch.float8_e5m2))[0]
    )


@pytest.mark.parametrize(("trees", "passes", "lone"), pairs(*[[False, True]] * 3))
def test_aiter_leaves_blocks_on_an_eight_bit_cache_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trees: bool, passes: bool, lone: bool
) -> None:
    """And reads them in place; where its check has failed, AITER's kernel is given a gathered
    context, in either tier.
    """
    if DEVICE.type != "cpu":
        pytest.skip("this machine's own GPU is no AMD GPU")
    if lone:
        monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    against = [] if passes else ["its self-check failed"]
    monkeypatch.setattr(TritonFaBackend, "reasons_against_auto", lambda spec: against)
    machine = pretend_rocm(monkeypatch, tmp_path)(architecture="gfx950")
    asked = spec(dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    parents = random_trees(3, 4) if trees else ()
    case = Case(asked, [40, 5, 33], [5, 5, 5], uniform=True, causal=trees, trees=parents)
    for window in (None, *(() if trees else (9,))):
        got = case.attend(RocmAiterFaBackend(asked), scale=0.2, window=window)
        case.check(got, scale=0.2, window=window)
    assert ("flash_attn_with_kvcache" in machine.names()) != passes


def test_a_lone_row_stays_with_aiter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Causal or not, it sees the same keys; and so do causal rows."""
    if DEVICE.type != "cpu":
        pytest.skip("this machine's own GPU is no AMD GPU")
    monkeypatch.setattr(TritonFaBackend, "reasons_against_auto", lambda spec: [])
    machine = pretend_rocm(monkeypatch, tmp_path)(architecture="gfx950")
    asked = spec(dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    for widths, causal, name in (
        ([1, 1], False, "paged_attention_v1"),
        ([5, 5], True, "unified_attention"),
    ):
        case = Case(asked, [40, 33], widths, uniform=True, causal=causal)
        case.attend(RocmAiterFaBackend(asked), scale=0.2)
        assert name in machine.names()
