"""Forwards outside any engine: several sequences in one cache, in pieces, in whatever type the
target's attention stores.
"""

from dataclasses import replace

import pytest
import torch

from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.model.scratch import ScratchCache, next_token_logits
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts


@torch.inference_mode()
def test_pieces_equal_whole_sequences() -> None:
    """Catches rows of one sequence in the blocks of another, and pieces that do not see what came
    before.
    """
    verifier = paged_verifier(plain_model("llama"), 4)
    sequences = [tokens for tokens in random_prompts(3, seed=5, longest=30) if len(tokens) > 2]
    cache = ScratchCache(verifier, [len(tokens) for tokens in sequences])
    ends: list[int] = []
    for start, end in ((0, 2), (2, None)):
        rows = cache.rows(
            [(number, start, tokens[start:end]) for number, tokens in enumerate(sequences)]
        )
        logits = verifier.forward(rows, cache.layers).logits
        ends = (rows.metadata.query_start_loc[1:] - 1).tolist()
    for row, tokens in zip(ends, sequences, strict=True):
        torch.testing.assert_close(logits[row], next_token_logits(verifier, tokens))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, None])
def test_the_cache_has_the_type_that_attention_stores(stored: torch.dtype | None) -> None:
    """Kernels that expect 8-bit values would read anything else as noise."""
    verifier = paged_verifier(
        plain_model("llama"),
        4,
        backend=lambda spec: TorchRefBackend(replace(spec, cache_dtype=stored)),
    )
    (layer, *_) = ScratchCache(verifier, [5, 9]).layers
    assert layer.key.dtype == (stored or verifier.dtype)
    assert layer.key.shape[0] == 2 + 3
