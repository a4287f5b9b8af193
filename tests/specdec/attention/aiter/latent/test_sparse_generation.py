"""Whole models with indexers and experts on emulated AITER: tokens equal to the reference's,
experts chosen by AITER's kernels.
"""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from drafters.ngram import NGramDrafter
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.mla import IndexerRows
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import LatentCache
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.aiter_generation import wide_dflash
from tests.helpers.engines import finish
from tests.helpers.guards import guard_steps
from tests.helpers.rocm import FP8, Install
from tests.helpers.sparse_case import rounded
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts

INDEX_HEAD_DIM = 16
"""Index keys wide enough to be moved 16 bytes at a time."""


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """In float32, on small latents."""
    return partial(rocm, tiny=True)


class RoundedReference(TorchRefMlaBackend):
    """The oracle with an indexer that rounds as AITER's does, in the flavour of gfx942."""

    def select(self, rows: IndexerRows, cache: LatentCache, plan: Any) -> Tensor:
        """See `SparseMlaBackend.select`."""
        query, key = (rounded(t, FP8["gfx942"]) for t in (rows.query, rows.key))
        return super().select(IndexerRows(query, key, rows.weights), cache, plan)


def generate(verifier: Verifier, drafter: Drafter | None) -> list[list[int]]:
    """Tokens of a few prompts, prefilled in chunks and decoded in batches, under the guard between
    draft and commit.

    Each prompt ends with the padding token, whose scores must not tie any more than those of
    others.
    """
    cache = CacheConfig(memory_bytes=2**23)
    engine = SpecEngine(
        verifier,
        drafter,
        EngineConfig(num_draft_tokens=None, max_num_seqs=3, max_prefill_tokens=13, cache=cache),
    )
    guard_steps(engine)
    return finish(
        engine,
        *(
            engine.add_request([*prompt, 0], SamplingParams(max_tokens=7))
            for prompt in random_prompts(4)
        ),
    )


@pytest.mark.parametrize("name", ["glm_moe_dsa"])  # test_generation has deepseek_v32
def test_d5_whole_generations_equal_the_reference_and_drafts_change_nothing(
    rocm: Install, name: str
) -> None:
    """Token for token in float32: plain decoding as on the oracle with the same rounding; n-gram
    and DFlash drafts as plain.

    Far fewer positions are selected than there are, and GLM's layers share selections.
    """
    model = plain_model(name, index_head_dim=INDEX_HEAD_DIM)
    want = generate(paged_verifier(model, 16, backend=RoundedReference), None)
    machine = rocm()
    verifier = paged_verifier(model, 16, backend=RocmAiterMlaSparseBackend)
    assert generate(verifier, None) == want
    for make in (lambda v: NGramDrafter(max_draft_tokens=4), wide_dflash):
        verifier = paged_verifier(model, 16, backend=RocmAiterMlaSparseBackend)
        assert generate(verifier, make(verifier)) == want
    assert machine.names() >= {
        "deepgemm_fp8_paged_mqa_logits",
        "fp8_mqa_logits",
        "flash_attn_with_kvcache",
    }


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("deepseek_v2", "topk_softmax"),
        ("deepseek_v2_yarn", "grouped_topk"),
        ("deepseek_v3", "biased_grouped_topk"),
        ("glm_moe_dsa", "biased_grouped_topk"),
        ("glm4_moe_lite", "biased_grouped_topk"),
    ],
)
def test_experts_are_chosen_by_aiter(rocm: Install, name: str, kernel: str) -> None:
    """A model loaded on an AMD GPU calls the kernel in each of its three expert layers, and answers
    as elsewhere.
    """
    model = plain_model(name)
    want = generate(paged_verifier(model, 16), None)
    machine = rocm()
    verifier: Any = paged_verifier(model, 16)
    assert generate(verifier, None) == want
    machine.calls.clear()  # its kernels are checked when they are met first
    forwards: list[Any] = []
    forward = verifier.forward

    def counted(*args: Any) -> Any:
        forwards.append(args)
        return forward(*args)

    verifier.forward = counted
    assert generate(verifier, None) == want
    assert len(forwards) > 5
    assert [call.name for call in machine.calls] == [kernel] * 3 * len(forwards)
