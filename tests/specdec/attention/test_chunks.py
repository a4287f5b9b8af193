"""Attention within chunks: the definition of it, on metadata in which every chunk is a request."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.attention.chunks import in_chunks
from specdec.attention.selector import refusals
from specdec.attention.torch_ref.fa import TorchRefBackend
from tests.helpers.attention_case import Case, spec
from tests.helpers.guards import no_host_sync

CHUNK = 8
SHAPE: dict[str, Any] = {"dtype": torch.float32, "block_size": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("lengths", "widths", "uniform"),
    [
        ([30, 8, 9, 3], [30, 8, 9, 3], False),  # prompts
        ([30, 16, 17, 25], [13, 8, 1, 9], False),  # chunks of prompts that begin and end anywhere
        ([30, 16, 17, 4], [4, 4, 4, 4], True),  # steps
        ([30, 16, 17, 1], [1, 1, 1, 1], True),
        ([30, 16, 17, 4], [4, 1, 3, 2], True),  # of which the device alone knows whose they are
        ([7, 8, 3], [2, 2, 2], True),  # all within the first chunk
    ],
)
def test_rows_see_their_own_chunk_alone(
    lengths: list[int], widths: list[int], uniform: bool
) -> None:
    """With the table of a request that ends within a chunk, and behind whose blocks are others."""
    case = Case(spec(**SHAPE), lengths, widths, uniform=uniform)
    seen = copy.copy(case)
    # a step's; what the host knows of a prompt it has to copy
    with no_host_sync() if uniform else nullcontext():
        seen.metadata = in_chunks(case.metadata, CHUNK, 4)
    case.check(seen.attend(TorchRefBackend(case.spec), scale=0.3), scale=0.3, chunk=CHUNK)


def test_what_lies_in_the_first_chunk_stays_as_it_is() -> None:
    """Steps of short requests share keys among their rows, and prompts are not divided."""
    case = Case(spec(**SHAPE), [5, 3], [2, 2], uniform=True)
    metadata = replace(case.metadata, max_seq_len=CHUNK)
    assert in_chunks(metadata, CHUNK, 4) is metadata


def test_rows_of_a_prompt_stay_together() -> None:
    """As many requests as there are chunks, not as many as there are rows."""
    case = Case(spec(**SHAPE), [30, 9], [28, 9], uniform=False)
    metadata = in_chunks(case.metadata, CHUNK, 4)
    assert metadata.query_lens == [6, 8, 8, 6, 8, 1] and metadata.seq_lens_host == [
        8, 8, 8, 6, 8, 1,
    ]  # fmt: skip


def test_blocks_that_do_not_divide_chunks_are_refused() -> None:
    """Before anything is allocated, by every backend."""
    for reasons in refusals(spec(**SHAPE | {"block_size": 12}, chunk=CHUNK)).values():
        assert "blocks of 12 tokens do not divide chunks of 8" in reasons
    assert refusals(spec(**SHAPE, chunk=CHUNK))["torch_ref"] == []
