"""Targets with latent attention against plain transformers: same logits, same features, for every
architecture and variant.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.base.config import PrefillDtype
from specdec.kv_cache import LatentCache, LatentLayerSpec, PagedKVCache
from specdec.session.decoder import SpecDecoder
from tests.helpers.bounds import assert_as_exact, in_float64
from tests.helpers.tiny_configs import LATENT_CONFIGS, TOPK
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts, tiny_tokenizer
from tests.verifiers.test_hf import BLOCK, PackedRun, check_logits
from verifiers.config.families import FAMILIES
from verifiers.decoder import DecoderVerifier
from verifiers.load import load_verifier

_TOKENS = [token for prompt in random_prompts(8, seed=2) for token in prompt]
SEQUENCES = [_TOKENS[:45], _TOKENS[45:64], _TOKENS[64:95]]
"""All of them longer than what an indexer chooses."""


@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    """Packed prefill, a chunked extension, a multi-token verify and single tokens, on scattered
    blocks.

    Catches a wrong pairing in any RoPE, a scale without YaRN's factor, a mask that is off by one, a
    lost bias, and a selection of the wrong positions, layer or row.
    """
    model, sequences = plain_model(name), SEQUENCES[1:]
    run = PackedRun(paged_verifier(model, BLOCK), sequences)
    lengths = list(enumerate(map(len, sequences)))
    got = [
        run.forward([(i, 0, n // 2) for i, n in lengths]),
        run.forward([(i, n // 2, n - 8) for i, n in lengths]),
        run.forward([(i, n - 8, n - 3) for i, n in lengths], host_lengths=False),
        *(
            run.forward([(i, n - left, n - left + 1) for i, n in lengths], host_lengths=False)
            for left in (3, 2, 1)
        ),
    ]
    whole = [torch.cat([part[i] for part in got]) for i, _ in lengths]
    check_logits(torch.cat(whole), model, *sequences)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_selection_decides(name: str) -> None:
    """Without this the test above would pass with a selection that is ignored: seeing everything
    gives other logits.
    """
    model = plain_model(name)
    dense = paged_verifier(model, BLOCK)
    assert isinstance(dense.attention, TorchRefMlaBackend)
    sequence = SEQUENCES[0]
    assert len(sequence) > 2 * TOPK
    (sparse,) = PackedRun(dense, [sequence]).forward([(0, 0, len(sequence))])
    run = dense.attention.run
    unselected: Any = lambda *args, **kw: run(*args, **kw | {"selected": None})  # noqa: E731
    dense.attention.run = unselected  # type: ignore[method-assign]
    (full,) = PackedRun(dense, [sequence]).forward([(0, 0, len(sequence))])
    exact = in_float64(model, torch.tensor([sequence])).logits[0]
    assert_as_exact(full[:TOPK], sparse[:TOPK], exact[:TOPK])
    assert (sparse[TOPK:] - full[TOPK:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("name", ["deepseek_v2", "glm_moe_dsa"])
def test_features_are_raw_layer_outputs(name: str) -> None:
    """Taps hold what each decoder layer returned,
    also when it returns its selection along with it.
    """
    model = plain_model(name)
    tokens = torch.tensor([SEQUENCES[0]])
    with torch.inference_mode():
        plain = model(tokens, output_hidden_states=True).hidden_states
    exact = in_float64(model, tokens, output_hidden_states=True).hidden_states
    (features,) = PackedRun(paged_verifier(model, BLOCK), [SEQUENCES[0]]).forward(
        [(0, 0, len(SEQUENCES[0]))], aux=(0, 2)
    )
    for got, layers in zip(features.chunk(2, dim=-1), (1, 3), strict=True):
        assert_as_exact(got, plain[layers][0], exact[layers][0])


def test_every_model_type_is_tried() -> None:
    """What `verifiers.support` lets through is what the tests above run."""
    latent = {name for name, family in FAMILIES.items() if family.latent}
    assert {make().model_type for make in LATENT_CONFIGS.values()} == latent
    assert latent > {name for name, family in FAMILIES.items() if family.indexer} > set()


def test_cached_bytes() -> None:
    """One latent per token; index keys only where a layer has an indexer."""
    verifier = paged_verifier(plain_model("glm_moe_dsa"), BLOCK)
    full, shared = LatentLayerSpec(width=16 + 8, index_bytes=12 * 4), LatentLayerSpec(width=16 + 8)
    assert list(verifier.kv_specs) == [full, shared, full, shared]
    assert list(paged_verifier(plain_model("deepseek_v3"), BLOCK).kv_specs) == [shared] * 4
    cache = PagedKVCache(
        verifier.kv_specs,
        num_blocks=3,
        block_size=BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.layers[0].latent.fill_(torch.nan)
    cache.scrub([0, 1, 2])
    assert isinstance(cache.layers[1], LatentCache)
    assert not cache.layers[0].latent.any()


@pytest.mark.parametrize(("asked", "fp8_prefill"), [("auto", True), ("model", False)])
def test_the_type_of_prompts_reaches_the_backend(
    asked: PrefillDtype, fp8_prefill: bool, tmp_path: Path
) -> None:
    """From the Python API through the loader."""
    plain_model("deepseek_v3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    decoder = SpecDecoder.from_pretrained(
        tmp_path, drafter=None, device="cpu", dtype="float32", prefill_dtype=asked
    )
    assert isinstance(decoder.verifier.attention, TorchRefMlaBackend)
    assert decoder.verifier.attention.spec.fp8_prefill is fp8_prefill


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek_v2_yarn", torch.float32), ("deepseek_v32", torch.bfloat16)]
)
def test_loading_from_a_folder(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From config to logits through the files: the right kind of backend is chosen, and it runs in
    16 bits, too.
    """
    model = plain_model(name)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    verifier, _ = load_verifier(
        str(tmp_path), device=torch.device("cpu"), dtype=dtype, block_size=BLOCK
    )
    assert verifier.attention.name == "torch_ref"
    assert isinstance(verifier.attention, TorchRefMlaBackend)
    assert isinstance(verifier, DecoderVerifier)
    run = PackedRun(verifier, [SEQUENCES[0]])
    run.cache = PagedKVCache(
        verifier.kv_specs, num_blocks=20, block_size=BLOCK, dtype=dtype, device=torch.device("cpu")
    )
    (logits,) = run.forward([(0, 0, len(SEQUENCES[0]))])
    assert logits.dtype == dtype
    if dtype == torch.float32:
        check_logits(logits, model, SEQUENCES[0])
    else:
        with torch.inference_mode():
            expected = model(torch.tensor([SEQUENCES[0]])).logits[0]
        similarity = torch.cosine_similarity(logits[:TOPK].float(), expected[:TOPK], dim=-1)
        assert similarity.min() > 0.9, (
            "before positions are chosen, and experts apart, rounding alone is between the two"
        )
