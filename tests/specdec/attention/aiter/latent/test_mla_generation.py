"""A whole DeepSeek model on AITER's latent attention, emulated: tokens equal to torch_ref's, and
nothing waits within a step.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec.attention.aiter.latent.latents import AiterLatentBackend
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.model.large_keys import fitting_specs
from specdec.model.scratch import ScratchCache, next_token_logits
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize("large", [[], [1], [0, 1, 2, 3]])
def test_large_latents_keep_their_type(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, kind: str, large: list[int]
) -> None:
    """Catches rotated keys that an 8-bit cache rounds by 16 and more or cuts off, memory spent on
    other layers, and a plan that was made for the other type.
    """
    rocm(tiny=True, num_compute_units=8)
    monkeypatch.setattr(AiterLatentBackend, "mixes_cache_types", True)  # not of heads so small
    changes = {"index_head_dim": 16} if kind == "deepseek_v32" else {}
    model = plain_model(kind, **changes)
    with torch.no_grad():
        for layer in large:
            down = model.model.layers[layer].self_attn.kv_a_proj_with_mqa.weight
            down[-model.config.qk_rope_head_dim :] *= 1000
    backend = RocmAiterMlaSparseBackend if changes else RocmAiterMlaBackend
    eight_bits = {"cache_dtype": torch.float8_e4m3fnuz}
    exact = paged_verifier(model, 16, backend=backend)
    fitting: Any = paged_verifier(model, 16, backend=lambda s: backend(replace(s, **eight_bits)))
    specs: list[Any] = fitting_specs(fitting)
    fitting.store(specs)
    assert [n for n, spec in enumerate(specs) if spec.dtype] == large
    drafter = NGramDrafter(max_draft_tokens=4)
    assert generate(fitting, None) == generate(fitting, drafter, guard=True)
    tokens = list(range(3, 80))

    @torch.inference_mode()
    def logits_of(verifier: Any) -> torch.Tensor:
        cache = ScratchCache(verifier, [len(tokens)])
        first, last = (0, 0, tokens[:-1]), (0, len(tokens) - 1, tokens[-1:])
        verifier.forward(cache.rows([first]), cache.layers)
        result: torch.Tensor = verifier.forward(cache.rows([last]), cache.layers).logits
        return result

    assert torch.equal(logits_of(fitting), logits_of(exact)) == (len(large) == 4)
