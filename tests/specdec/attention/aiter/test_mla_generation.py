"""A whole DeepSeek model on AITER's latent attention, emulated: tokens equal to torch_ref's, and nothing waits within a step."""

from pathlib import Path

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec.attention.aiter import fa as rocm_aiter_fa
from specdec.attention.aiter.mla import RocmAiterMlaBackend
from tests.helpers.aiter_generation import generate, wide_dflash
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.specdec.attention.aiter.test_mla import pretend_rocm


def test_whole_generations_equal_torch_ref(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Token for token in float32, plain, with n-gram and with DFlash drafts, whose own heads run beside the latent ones.

    DeepSeek-V3 is in `test_generation`.
    """
    monkeypatch.setattr(rocm_aiter_fa, "DTYPES", (torch.float32, *rocm_aiter_fa.DTYPES))
    machine = pretend_rocm(monkeypatch, tmp_path)(tiny=True)
    model = plain_model("deepseek_v2")
    want = generate(paged_verifier(model, 16), None)
    for make in (lambda v: None, lambda v: NGramDrafter(max_draft_tokens=4), wide_dflash):
        verifier = paged_verifier(model, 16, backend=RocmAiterMlaBackend)
        assert generate(verifier, make(verifier), guard=True) == want
    assert {"mla_decode_fwd", "flash_attn_varlen_func", "flash_attn_with_kvcache"} <= machine.names()
