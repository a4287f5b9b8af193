"""What an engine says of the device's memory before it takes it."""

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.base.config import CacheConfig
from specdec.base.errors import CapacityError
from specdec.engine.memory import plan_cache
from specdec.kv_cache import KVLayerSpec, LatentLayerSpec, LayerSpec
from tests.specdec.engine.capture.test_graphs import Case


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_memory_that_the_device_lacks_is_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Cache and captured steps are added up before either is taken: refused with the figures, or
    logged with them.
    """
    target = SimpleNamespace(
        device=torch.device("cuda:0"),
        dtype=torch.float16,
        vocab_size=2**17,
        hidden_size=2**12,
        attention=case.verifier.attention,
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * 2**30)

    def blocks(budget: int, prefill_rows: int = 0) -> int:
        config = CacheConfig(memory_bytes=budget)
        verifier: Any = target
        return plan_cache(
            verifier,
            case.verifier.kv_specs,
            config,
            max_total_tokens=2**30,
            graph_rows=1024,
            prefill_rows=prefill_rows,
        )

    with caplog.at_level(logging.INFO):
        assert blocks(3 * 2**30) > 2
    assert (
        "weights and what else is loaded take 4.00 GiB, the KV cache takes 3.00 GiB and captured"
        " steps about 0.75 GiB" in caplog.text
    )
    with pytest.raises(
        CapacityError,
        match=r"takes 3.50 GiB and captured steps about 0.75 GiB, and cuda:0 has 4.00 GiB free;"
        r" give",
    ):
        blocks(int(3.5 * 2**30))
    with pytest.raises(
        CapacityError,
        match=r"takes 3.00 GiB and captured steps about 1.25 GiB, and cuda:0 has 4.00 GiB free",
    ):
        blocks(3 * 2**30, prefill_rows=2**13)


def test_the_memory_of_a_dead_engine_counts_as_free(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with captured steps is part of a cycle; without a collection the next engine would
    find its memory taken.
    """
    engine = case.engine("plain", 1, capture=True)
    alive = weakref.ref(engine.runner)
    target: Any = SimpleNamespace(
        device=torch.device("cuda:0"),
        dtype=torch.float32,
        vocab_size=97,
        hidden_size=8,
        attention=case.verifier.attention,
    )
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (2**30 if alive() is None else 0, 2**30)
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    gc.disable()
    try:
        del engine
        assert alive() is not None
        assert plan_cache(target, case.verifier.kv_specs, CacheConfig(), max_total_tokens=256) == 65
    finally:
        gc.enable()


def test_a_cache_is_no_larger_than_its_kernels_address(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """The budget pays for more, and what is too much would raise in the first forward; the log says
    both figures.
    """
    target: Any = SimpleNamespace(device=torch.device("cpu"), attention=case.verifier.attention)
    assert case.verifier.attention.spec.block_size == 4

    def blocks(max_total_tokens: int, max_tokens: int | None) -> int:
        specs: list[LayerSpec] = [
            LatentLayerSpec(width=8, max_tokens=max_tokens),
            LatentLayerSpec(width=8),
            KVLayerSpec(1, 4),
        ]
        return plan_cache(
            target, specs, CacheConfig(memory_bytes=2**20), max_total_tokens=max_total_tokens
        )

    assert blocks(1000, None) == 251 and blocks(1000, 1004) == 251 and not caplog.records
    assert blocks(1000, 1003) == 250
    assert (
        "the KV cache is kept to 1,000 tokens, as many as the kernels of torch_ref address; the"
        " budget pays for 1,004" in caplog.text
    )
