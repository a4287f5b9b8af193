"""Whole DeepSeek models on AITER's latent attention, emulated: tokens equal to torch_ref's, and nothing waits within a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters.ngram import NGramDrafter
from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.attention.aiter.mla import RocmAiterMlaBackend
from specdec.core import Verifier
from tests.helpers.aiter_generation import generate, wide_dflash
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.specdec.attention.aiter.test_mla import FP8, Install, pretend_rocm


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """See `pretend_rocm`; the drafter's ordinary heads are taken in float32, too."""
    monkeypatch.setattr(rocm_aiter_fa, "DTYPES", (torch.float32, *rocm_aiter_fa.DTYPES))
    return pretend_rocm(monkeypatch, tmp_path)


def on_aiter(model: PreTrainedModel, **changes: Any) -> Verifier:
    """The target on AITER's latent attention."""
    verifier: Any = paged_verifier(model, block_size=16)
    verifier.attention = RocmAiterMlaBackend(replace(verifier.attention.spec, **changes))
    return verifier


@pytest.mark.parametrize(("name", "architecture"), [("deepseek_v2", "gfx942"), ("deepseek_v3", "gfx950")])
def test_whole_generations_equal_torch_ref(rocm: Install, name: str, architecture: str) -> None:
    """Token for token in float32, plain, with n-gram and with DFlash drafts, whose own heads run beside the latent ones."""
    machine = rocm(architecture=architecture, tiny=True)
    model = plain_model(name)
    want = generate(paged_verifier(model, block_size=16), None)
    for make in (lambda v: None, lambda v: NGramDrafter(max_draft_tokens=4), wide_dflash):
        verifier = on_aiter(model)
        assert generate(verifier, make(verifier), guard=True) == want
    assert {"mla_decode_fwd", "flash_attn_varlen_func", "flash_attn_with_kvcache"} <= machine.names()


def test_drafts_change_nothing_on_a_rounded_cache(rocm: Install) -> None:
    """Float32 rows on an 8-bit cache: speculation reads the same rounded latents as plain decoding, and nothing waits."""
    rocm(architecture="gfx950", tiny=True)
    model = plain_model("deepseek_v3")
    outputs = []
    for make in (lambda v: None, lambda v: NGramDrafter(max_draft_tokens=4)):
        verifier = on_aiter(model, cache_dtype=FP8["gfx950"])
        outputs.append(generate(verifier, make(verifier), guard=True))
    assert outputs[0] == outputs[1]
