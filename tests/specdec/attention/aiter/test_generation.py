"""Whole models on emulated AITER, over its versions, batch sizes and caches: drafts and backends
change no token.

Three runs of prompts that are prefilled in chunks, while others decode:

    float32      plain and with drafts on AITER, plain on torch_ref: equal tokens
    8-bit cache  plain and with drafts on AITER: equal, as both read the same rounded keys;
                 torch_ref has no such cache
    bfloat16     with DFlash on AITER: every token is the float32 model's choice, up to the
                 rounding of bfloat16

Covered in pairs rather than as a product: model and backend, version 0.1.15, 0.1.16 and 0.1.20,
batch of 1 and of 4, gfx942 and gfx950, DFlash and drafts that are mostly right. AITER 0.1.15 has
neither the shuffled layout nor bidirectional blocks: there DFlash drafts with causal layers, and
that version refuses the others. Models, layouts and drafters beside these are in `test_fa` and its
neighbors.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafters.dflash.drafter import DFlashDrafter
from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.mla import IndexerRows
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.base.errors import BackendError
from specdec.kv_cache import LatentCache
from specdec.model.core import Drafter, Verifier
from specdec.model.scratch import next_token_logits
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.guards import guard_steps
from tests.helpers.rocm import FP8, Install
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.sparse_case import rounded
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts
from verifiers.config.shape import backend_spec
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME

pytestmark = pytest.mark.slow

MAX_TOKENS = 6
BACKENDS: dict[str, Any] = {
    "plain": RocmAiterFaBackend,
    "shuffle": RocmAiterFaShuffleBackend,
    "mla": RocmAiterMlaBackend,
    "sparse": RocmAiterMlaSparseBackend,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64},
    "deepseek_v3": {},
    "deepseek_v32": {"index_head_dim": 16},
}
"""Heads wide enough for the paged kernels, and index keys wide enough to be moved 16 bytes at a
time.
"""

PARAMETERS = ("name", "backend", "version", "architecture", "batch", "drafter")
CASES = [
    ("llama", "plain", "0.1.15", "gfx942", 4, "scripted"),
    ("llama", "shuffle", "0.1.16", "gfx950", 4, "dflash"),
    ("qwen3", "plain", "0.1.16", "gfx942", 4, "scripted"),
    ("qwen3", "shuffle", "0.1.20", "gfx950", 4, "scripted"),
    ("gpt_oss", "plain", "0.1.20", "gfx942", 4, "dflash"),
    ("gpt_oss", "shuffle", "0.1.20", "gfx942", 1, "dflash"),
    ("deepseek_v3", "mla", "0.1.15", "gfx942", 4, "scripted"),
    ("deepseek_v3", "mla", "0.1.16", "gfx950", 1, "dflash"),
    ("deepseek_v3", "mla", "0.1.20", "gfx950", 4, "dflash"),
    ("deepseek_v32", "sparse", "0.1.15", "gfx950", 4, "scripted"),
    ("deepseek_v32", "sparse", "0.1.16", "gfx942", 4, "scripted"),
    ("deepseek_v32", "sparse", "0.1.20", "gfx942", 1, "dflash"),
]
"""Model, backend, version, architecture, batch, drafter."""

EIGHT_BIT = [
    ("llama", "plain", "0.1.15", "gfx950", 4, "dflash"),
    ("qwen3", "shuffle", "0.1.20", "gfx950", 4, "dflash"),
    ("gpt_oss", "plain", "0.1.20", "gfx942", 4, "scripted"),
    ("deepseek_v3", "mla", "0.1.15", "gfx950", 1, "scripted"),
    ("deepseek_v3", "mla", "0.1.16", "gfx942", 4, "dflash"),
    ("deepseek_v3", "mla", "0.1.20", "gfx950", 4, "scripted"),
    ("deepseek_v32", "sparse", "0.1.16", "gfx950", 4, "scripted"),
    ("deepseek_v32", "sparse", "0.1.20", "gfx942", 4, "dflash"),
]
"""The same, on an 8-bit cache."""


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """In float32, on small latents, unless told otherwise."""
    return partial(rocm, tiny=True, num_compute_units=8)


def rounding_reference(fp8: torch.dtype) -> type[TorchRefMlaBackend]:
    """torch_ref with an indexer that rounds as AITER's does."""

    class RoundingReference(TorchRefMlaBackend):
        def select(self, rows: IndexerRows, cache: LatentCache, plan: Any) -> Tensor:
            query, key = (rounded(t, fp8) for t in (rows.query, rows.key))
            return super().select(IndexerRows(query, key, rows.weights), cache, plan)

    return RoundingReference


def dflash_of(verifier: Verifier, version: str) -> DFlashDrafter:
    """A random DFlash drafter with heads of 16, bidirectional where that version of AITER has such
    blocks.
    """
    causal = (True, True, True) if version == "0.1.15" else (False, True, False)
    return random_dflash(verifier, causal=causal, head_dim=16, seed=1)


def prompts_for(batch: int) -> list[list[int]]:
    """One prompt more than run at once."""
    return random_prompts(batch + 1, longest=20)


def generate(verifier: Verifier, drafter: Drafter | None, max_num_seqs: int) -> list[list[int]]:
    """Tokens of more prompts than run at once, prefilled 13 tokens at a time, while nothing may
    wait between draft and commit.
    """
    engine = tiny_engine(
        verifier,
        drafter,
        num_draft_tokens=None,
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=13,
        cache_bytes=2**23,
    )
    guard_steps(engine)
    return run_all(engine, prompts_for(max_num_seqs), max_tokens=MAX_TOKENS)


def drafter_of(
    kind: str, verifier: Verifier, version: str, want: list[list[int]], batch: int
) -> Drafter:
    """DFlash, or one that is right but for a draft in every third request's second place."""
    if kind == "dflash":
        return dflash_of(verifier, version)
    outputs = {
        tuple(prompt): tokens for prompt, tokens in zip(prompts_for(batch), want, strict=True)
    }
    return ScriptedDrafter(outputs, 4, (set(), set(), {1}))


@pytest.mark.parametrize(PARAMETERS, CASES)
def test_tokens_equal_torch_ref(
    rocm: Install,
    name: str,
    backend: str,
    version: str,
    architecture: str,
    batch: int,
    drafter: str,
) -> None:
    """A version's own paths, rows of other requests, chunks that meet decoding, rejected and
    accepted drafts.
    """
    model = plain_model(name, **CHANGES[name])
    reference = rounding_reference(FP8[architecture]) if backend == "sparse" else None
    want = generate(paged_verifier(model, 16, backend=reference), None, batch)
    assert len({tuple(tokens) for tokens in want}) == len(want)
    rocm(version, architecture)
    verifier = paged_verifier(model, 16, backend=BACKENDS[backend])
    assert generate(verifier, None, batch) == want
    assert generate(verifier, drafter_of(drafter, verifier, version, want, batch), batch) == want


@pytest.mark.parametrize(PARAMETERS, EIGHT_BIT)
def test_drafts_change_nothing_on_an_eight_bit_cache(
    rocm: Install,
    name: str,
    backend: str,
    version: str,
    architecture: str,
    batch: int,
    drafter: str,
) -> None:
    """Verification reads what plain decoding reads: the draft block's own keys are rounded, too."""
    model = plain_model(name, **CHANGES[name])
    rocm(version, architecture)
    verifier = paged_verifier(
        model, 16, backend=lambda s: BACKENDS[backend](replace(s, cache_dtype=FP8[architecture]))
    )
    want = generate(verifier, None, batch)
    # Beside the engine, with a cache of its own, whose type the kernels insist on.
    assert next_token_logits(verifier, prompts_for(batch)[0]).argmax() == want[0][0]
    assert generate(verifier, drafter_of(drafter, verifier, version, want, batch), batch) == want


@pytest.mark.parametrize(
    ("name", "backend", "version", "architecture", "batch"),
    [case[:5] for case in CASES if case[0] in ("llama", "qwen3")],
)
def test_bfloat16_chooses_as_float32_does(
    rocm: Install, name: str, backend: str, version: str, architecture: str, batch: int
) -> None:
    """Real types and limits: a token may miss the best by what plain torch's logits in bfloat16 are
    off, twice, on both sides.
    """
    exact = plain_model(name, **CHANGES[name])
    exact.load_state_dict(
        {key: value.bfloat16().float() for key, value in exact.state_dict().items()}
    )
    half = copy.deepcopy(exact).bfloat16()
    machine = rocm(version, architecture, tiny=False, num_compute_units=304)
    paged: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(exact.config), attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
    )
    paged.load_state_dict(half.state_dict())
    spec = backend_spec(
        paged.config, device=torch.device("cpu"), dtype=torch.bfloat16, block_size=16
    )
    assert BACKENDS[backend].unsupported_reasons(spec) == []
    verifier = verifier_for(paged, name=name, backend=BACKENDS[backend](spec))
    outputs = generate(verifier, dflash_of(verifier, version), batch)
    missed, error = [], 0.0
    for prompt, tokens in zip(prompts_for(batch), outputs, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            logits, rough = (m(ids).logits[0, len(prompt) - 1 : -1].float() for m in (exact, half))
        missed.append(logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        error = max(error, float((rough - logits).abs().max()))
    assert float(torch.cat(missed).max()) <= 4 * error
    assert machine.names() >= {"flash_attn_varlen_func", "unified_attention"}


@pytest.mark.parametrize(
    ("name", "backend"), [("llama", "plain"), ("deepseek_v3", "mla"), ("deepseek_v32", "sparse")]
)
def test_bidirectional_drafts_are_refused_on_0_1_15(rocm: Install, name: str, backend: str) -> None:
    """Before the first step, with the version that has them; causal drafts of the same drafter are
    what the tests above run.
    """
    rocm("0.1.15", "gfx942")
    verifier = paged_verifier(plain_model(name, **CHANGES[name]), 16, backend=BACKENDS[backend])
    with pytest.raises(BackendError, match=r"0\.1\.16"):
        generate(verifier, dflash_of(verifier, "0.1.20"), 1)
