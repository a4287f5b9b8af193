"""A whole DeepSeek model on AITER's latent attention, emulated: tokens equal to torch_ref's, and
nothing waits within a step.
"""

from typing import Any

import pytest

from drafters.ngram import NGramDrafter
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.model.scratch import next_token_logits
from tests.helpers.aiter_generation import generate, wide_dflash
from tests.helpers.rocm import Install
from tests.helpers.tiny_configs import TOPK
from tests.helpers.tiny_models import paged_verifier, plain_model


@pytest.mark.parametrize("indexed", [False, True])
def test_logits_of_a_long_prompt_take_lists_no_longer_than_it(rocm: Install, indexed: bool) -> None:
    """Outside an engine, a prompt is a prefill, too: decoded at once, each of its rows would list
    its whole context.
    """
    if indexed:
        machine = rocm(tiny=True, num_compute_units=8)
        verifier = paged_verifier(
            plain_model("deepseek_v32", index_head_dim=16), 16, backend=RocmAiterMlaSparseBackend
        )
    else:
        machine = rocm(tiny=True, num_compute_units=8)
        verifier = paged_verifier(plain_model("deepseek_v3"), 16, backend=RocmAiterMlaBackend)
    lists: list[int] = []

    def watch(function: Any, arguments: dict[str, Any], result: Any) -> None:
        if function.__name__ == "mla_decode_fwd":
            lists.append(len(arguments["kv_indices"]))

    machine.watch = watch
    next_token_logits(verifier, [*range(3, 90), 0])
    assert verifier.num_layers == 4
    assert lists == ([88 * TOPK] * 4 if indexed else [])


def test_whole_generations_equal_torch_ref(rocm: Install) -> None:
    """Token for token in float32, plain, with n-gram and with DFlash drafts, whose own heads run
    beside the latent ones.

    DeepSeek-V3 is in `test_generation`.
    """
    machine = rocm(tiny=True, num_compute_units=8)
    model = plain_model("deepseek_v2")
    want = generate(paged_verifier(model, 16), None)
    for make in (lambda v: None, lambda v: NGramDrafter(max_draft_tokens=4), wide_dflash):
        verifier = paged_verifier(model, 16, backend=RocmAiterMlaBackend)
        assert generate(verifier, make(verifier), guard=True) == want
    assert {
        "mla_decode_fwd",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    } <= machine.names()
