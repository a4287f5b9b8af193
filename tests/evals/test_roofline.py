"""The bound that reading memory sets."""

import pytest
import torch

from drafters.ngram import NGramDrafter
from evals import roofline
from evals.roofline import bound, measured_bandwidth, step_bytes
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.model.core import RoutedExperts
from tests.helpers.tiny_configs import CONFIGS, WINDOW
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash

SMALL = EngineConfig(
    num_draft_tokens=None, max_num_seqs=2, max_model_len=64, cache=CacheConfig(memory_bytes=2**22)
)


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "qwen3_moe", "gemma2", "gemma4_moe", "gemma4_shared"]
)
def test_every_weight_that_a_product_reads_counts_once(name: str) -> None:
    """Catches input embeddings counted beside a head of their own, and a tied head left out. Norms
    may count or not.
    """
    model = plain_model(name)
    matrices = sum(
        p.nbytes for n, p in model.named_parameters() if p.ndim > 1 and "embed_tokens" not in n
    )
    if CONFIGS[name]().tie_word_embeddings and not name.startswith("gemma"):
        matrices += model.get_input_embeddings().weight.nbytes
    norms = sum(p.nbytes for p in model.parameters() if p.ndim == 1) + sum(
        b.nbytes for b in model.buffers()
    )
    for fuse in (True, False):
        assert 0 <= paged_verifier(model, fuse=fuse).weight_bytes - matrices <= norms


def test_a_step_reads_weights_once_and_the_cache_per_request() -> None:
    """Catches a drafter that counts although it does not draft, and keys without values."""
    verifier = paged_verifier(plain_model("llama"))
    drafter = random_dflash(verifier)
    engine = SpecEngine(verifier, drafter, SMALL)
    target_token = 4 * 2 * 2 * 16 * 4  # layers, key and value, heads, head size, float32
    draft_token = 3 * 2 * 2 * 8 * 4
    assert (
        step_bytes(engine, k=0, num_reqs=3, context=10) == verifier.weight_bytes + 30 * target_token
    )
    drafting = verifier.weight_bytes + drafter.weight_bytes + 30 * (target_token + draft_token)
    assert step_bytes(engine, k=4, num_reqs=3, context=10) == drafting
    own = sum(parameter.nbytes for parameter in drafter.model.parameters())
    assert drafter.weight_bytes == own + verifier.vocab_size * verifier.hidden_size * 4
    limit = bound(engine, bandwidth=2.0 * drafting, tau=1.5, num_reqs=3, context=10)
    assert limit == {"bytes_per_step": drafting, "tokens_per_second": 1.5 * 3 * 2.0}


@pytest.mark.parametrize("fuse", [True, False])
def test_a_layer_with_a_window_reads_no_more_than_it(fuse: bool) -> None:
    """Catches long contexts that count in full for every layer of Gemma or gpt-oss."""
    verifier = paged_verifier(plain_model("gemma3"), fuse=fuse)
    engine = SpecEngine(verifier, None, SMALL)
    layer_token = 2 * 2 * 16 * 4  # key and value, heads, head size, float32
    for context, windowed in ((5, 5), (40, WINDOW)):
        cached = step_bytes(engine, k=0, num_reqs=3, context=context) - verifier.weight_bytes
        assert cached == 3 * layer_token * (2 * context + 2 * windowed)  # every other of 4 layers


def test_a_layer_counts_what_it_reads() -> None:
    """Catches layers that all count like the first, and those left out that read what others have
    stored.
    """
    verifier = paged_verifier(plain_model("gemma4_shared"))
    engine = SpecEngine(verifier, None, SMALL)
    sliding, full = 2 * 2 * 16 * 4, 2 * 2 * 24 * 4  # key and value, heads, head size, float32
    cached = step_bytes(engine, k=0, num_reqs=3, context=40) - verifier.weight_bytes
    assert cached == 3 * 3 * (sliding * WINDOW + full * 40)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "llama", "youtu"]
)
def test_routed_experts_are_told_apart(name: str, fuse: bool) -> None:
    """Catches shared experts, routers or dense layers that count as routed experts, and biases that
    do not.
    """
    model = plain_model(name)
    experts = paged_verifier(model, fuse=fuse).routed_experts
    weights = [
        p.nbytes for n, p in model.named_parameters() if "experts." in n and "shared" not in n
    ]
    if not weights:
        assert experts is None
        return
    assert experts is not None
    config = model.config
    each = (
        getattr(config, "num_local_experts", None)
        or getattr(config, "n_routed_experts", None)
        or config.num_experts
    )
    assert (experts.num_experts, experts.top_k, experts.weight_bytes) == (
        each,
        config.num_experts_per_tok,
        sum(weights),
    )


def test_experts_met_are_counted_by_drawing() -> None:
    """The formula against rows that choose evenly; a single row reads just its own."""
    experts, generator = RoutedExperts(16, 4, 1600), torch.Generator().manual_seed(0)
    for rows in (1, 2, 7, 40):
        drawn = [
            torch.rand(rows, 16, generator=generator).topk(4).indices.unique().numel()
            for _ in range(2000)
        ]
        assert experts.expected(rows) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
        assert experts.bytes_read(rows) == pytest.approx(100 * experts.expected(rows), abs=1)
    assert experts.bytes_read(1) == 400
    assert experts.bytes_read(10**6) == 1600


def test_a_step_reads_the_experts_that_its_rows_meet() -> None:
    """Catches drafts that are no rows, and a step of a few rows that counts every expert."""
    verifier = paged_verifier(plain_model("qwen3_moe"))
    engine = SpecEngine(verifier, NGramDrafter(), SMALL)
    experts = verifier.routed_experts
    assert experts is not None
    dense = verifier.weight_bytes - experts.weight_bytes
    assert step_bytes(engine, k=0, num_reqs=1, context=0) == dense + experts.weight_bytes // 2
    for k, num_reqs in ((0, 2), (4, 2)):
        assert step_bytes(engine, k=k, num_reqs=num_reqs, context=0) == dense + experts.bytes_read(
            num_reqs * (k + 1)
        )


def test_the_bandwidth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.MEASURED_BYTES, "cpu", 2**22)
    assert 1e8 < measured_bandwidth(torch.device("cpu"), repeats=2) < 1e13
