"""Which library takes long contexts beside `triton_fa`, how prompts are cut for it, and what it has
to get right.
"""

import itertools
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, AttentionSpec
from specdec.attention.triton import libraries
from specdec.attention.triton.context import PIECE, PrefillPlan, plan_rectangles
from specdec.attention.triton.libraries import Rectangle, check_rectangle, library, through_torch

BLOCK = 16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This CPU counts as one of the devices on which libraries are taken; torch's own kernel stands
    in for cuDNN's.
    """
    monkeypatch.setattr(libraries, "_is_hopper", lambda device: True)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it were not installed
    library.cache_clear()
    yield
    library.cache_clear()


def spec(**changes: Any) -> AttentionSpec:
    """What cuDNN serves."""
    values: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 128,
        "block_size": BLOCK,
    }
    return AttentionSpec(**values | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_passes_its_check(dtype: torch.dtype) -> None:
    """Grouped heads and denominators, in both types."""
    error, bound = check_rectangle(through_torch, spec(dtype=dtype))
    assert error <= bound


def spoiled(part: int, factor: float, only_causal: bool) -> Rectangle:
    """Torch's kernel with an output, or with denominators, that are off, in rectangles or in
    squares.
    """

    def rectangle(
        query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        results = list(through_torch(query, key, value, scale, causal))
        if causal == only_causal:
            results[part] = results[part] * factor
        return results[0], results[1]

    return rectangle


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_a_library_that_is_off_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: int, causal: bool
) -> None:
    """By 2 % in what it returns, whichever part it is."""
    assert library(spec()) is through_torch
    monkeypatch.setattr(libraries, "LIBRARIES", {"cuDNN": spoiled(part, 1.02, causal)})
    library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert library(spec()) is None
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
        "cuDNN is left out for long contexts: its error is"
    )


@pytest.mark.parametrize("returns_on_request", [True, False])
def test_flash_attention_3_goes_before_cudnn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, returns_on_request: bool
) -> None:
    """Where the package can be imported and is right; its releases differ in how denominators are
    asked for.
    """

    def old(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        output, log_sums = through_torch(q[0], k[0], v[0], softmax_scale, causal)
        return output[None], log_sums[None]

    def new(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,
        return_attn_probs: bool = False,
    ) -> Any:
        results = old(q, k, v, softmax_scale, causal)
        return results if return_attn_probs else results[0]

    module = SimpleNamespace(
        flash_attn_func=new if returns_on_request else old, __spec__=SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert library(spec()) is libraries.through_flash_attention_3
    library.cache_clear()

    def broken(*sides: Tensor, **options: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    module.flash_attn_func = broken
    with caplog.at_level(logging.WARNING):
        assert library(spec()) is through_torch
    assert caplog.messages == [
        "flash-attention 3 is left out for long contexts: RuntimeError: no kernel image is"
        " available"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"cache_dtype": torch.float8_e4m3fn},
        {"softcap": 30.0},
        {"windows": frozenset({1024})},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        {"head_dim": 132},
    ],
)
def test_what_no_library_has(caplog: pytest.LogCaptureFixture, changes: dict[str, Any]) -> None:
    """Or where it is no faster; none is tried."""
    assert library(spec()) is not None and library(spec(**changes)) is None and not caplog.messages


def metadata(requests: list[tuple[int, int]]) -> AttentionMetadata:
    """Prompts, whose blocks are numbered by request."""
    most = max(end for _, end in requests)
    table = torch.arange(len(requests), dtype=torch.int32)[:, None] * 10_000 + torch.arange(
        -(-most // BLOCK), dtype=torch.int32
    )
    counts, ends = zip(*requests, strict=True)
    return AttentionMetadata.packed(counts, ends, table, torch.arange(sum(counts)))


def test_rows_are_cut_once_each() -> None:
    """Whole pieces go to the library, as large as they may be where their context is whole; the
    others stay together.
    """
    requests = [
        (700, 700),
        (3 * PIECE + 5, 3 * PIECE + 5),
        (PIECE, PIECE),
        (9, PIECE),
        (2 * PIECE, 3 * PIECE + 100),
        (4, 9),
    ]
    plan = plan_rectangles(metadata(requests), BLOCK)
    assert isinstance(plan, PrefillPlan)
    summary = [
        (run.num_keys // PIECE, run.square, run.metadata.num_reqs, run.rows.stop - run.rows.start)
        for run in plan.runs
    ]
    assert summary == [
        (0, False, 1, 700),
        (0, True, 1, 2 * PIECE),
        (2, True, 1, PIECE),
        (0, False, 1, 5),
        (0, True, 1, PIECE),
        (0, False, 1, 9),
        (1, False, 1, PIECE),
        (2, False, 1, PIECE),
        (0, False, 1, 4),
    ]
    positions = [
        torch.arange(end - count, end) + 10**6 * request
        for request, (count, end) in enumerate(requests)
    ]
    found, last = [], 0
    for run in plan.runs:
        assert run.rows.start == last and run.metadata.num_tokens == run.rows.stop - last
        last = run.rows.stop
        starts, ends = run.metadata.query_start_loc.tolist(), run.metadata.seq_lens.tolist()
        counts = [b - a for a, b in itertools.pairwise(starts)]
        assert (starts[0], starts[-1], max(counts), max(ends)) == (
            *(0, run.metadata.num_tokens, run.metadata.max_query_len),
            run.metadata.max_seq_len,
        )
        for count, end, table in zip(counts, ends, run.metadata.block_table.tolist(), strict=True):
            found.append(torch.arange(end - count, end) + 10**6 * (table[0] // 10_000))
        assert not run.num_gathered or (
            run.request == table[0] // 10_000 and run.num_keys <= end - count
        )
        assert not run.square or (run.num_keys, run.num_gathered) == (end - count, end)
    assert torch.cat(found).equal(torch.cat(positions))


def test_metadata_without_a_piece_stay_as_they_are() -> None:
    """Short rows, rows of which none has a whole context, lengths that only the device knows, and
    blocks that divide no piece.
    """
    for requests in ([(PIECE - 1, 9 * PIECE)], [(PIECE - 1, PIECE - 1)], [(PIECE, 2 * PIECE - 1)]):
        plan = metadata(requests)
        assert plan_rectangles(plan, BLOCK) is plan
    whole = metadata([(PIECE, 2 * PIECE)])
    assert plan_rectangles(whole, BLOCK) is not whole and plan_rectangles(whole, 12) is whole
    unknown = AttentionMetadata.uniform(
        PIECE, whole.seq_lens, whole.block_table, whole.slot_mapping, max_seq_len=9 * PIECE
    )
    assert plan_rectangles(unknown, BLOCK) is unknown
