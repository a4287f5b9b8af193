"""A drafter bound to a target, and its hidden states by plain torch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import BoundDFlash
from drafters.dflash.model import DFlashModel
from tests.drafters.tiny import (
    TINY,
    FakeVerifier,
    Rig,
    tiny_drafter,
)

REDUCED = replace(TINY, draft_vocab_size=30)


def bound(
    config: DFlashConfig = TINY, verifier: FakeVerifier | None = None, **options: Any
) -> tuple[BoundDFlash, FakeVerifier, Rig]:
    """A drafter on a rig with random context features for 2 requests of 9 and 14 tokens."""
    verifier = verifier or FakeVerifier()
    rig = Rig(tiny_drafter(verifier, config), verifier, **options)
    generator = torch.Generator().manual_seed(2)
    for request, length in enumerate((9, 14)):
        rig.prefill(
            request,
            torch.randn(length, config.feature_size, generator=generator).to(verifier.dtype),
            0,
        )
    assert isinstance(rig.bound, BoundDFlash)
    return rig.bound, verifier, rig


def dense_hidden(model: DFlashModel, features: Tensor, embeddings: Tensor) -> Tensor:
    """Hidden states of one block over contiguous context: what paged drafters reproduce."""
    start, width = features.shape[0], embeddings.shape[0]
    causal = torch.ones(width, start + width, dtype=torch.bool).tril(start)
    keys, values = model.context_kv(features, torch.arange(start))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k, v = (
            torch.cat(pair).transpose(0, 1)
            for pair in ((keys[:, layer], key), (values[:, layer], value))
        )
        mask = causal if model.config.causal[layer] else None
        return F.scaled_dot_product_attention(
            query.transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True
        ).transpose(0, 1)

    return model.block_forward(embeddings, torch.arange(start, start + width), attend)
