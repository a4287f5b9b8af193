"""An 8-bit cache of a target some of whose keys are too large for it."""

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from drafters.draft_model.drafter import load_draft_model
from drafters.eagle3.config import parse_config
from drafters.eagle3.drafter import eagle3_drafter
from drafters.suffix.drafter import SuffixDrafter
from evals.roofline import step_bytes
from specdec.attention.backend import AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.registry import ATTENTION_BACKENDS
from specdec.engine.engine import SpecEngine
from specdec.kv_cache import LayerCache
from specdec.model.scratch import ScratchCache
from tests.drafters.eagle3.heads import SPECULATORS, head_tensors
from tests.helpers.tiny_models import plain_model, random_dflash, tiny_tokenizer
from verifiers.load import load_verifier

E4M3 = torch.float8_e4m3fn
LAYER = 0


class Mixed(TorchRefBackend):
    """The reference, on caches of any type."""

    name = "mixed"
    mixes_cache_types = True

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        return []

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        for stored, new in ((cache.key, key), (cache.value, value)):
            kept = new.clamp(-448, 448).to(stored.dtype)
            words = torch.uint8 if stored.dtype == E4M3 else stored.dtype
            stored.flatten(0, 1).view(words)[slot_mapping] = kept.view(words)

    def read(self, query: Tensor, cache: LayerCache, plan: Any, **how: Any) -> Tensor:
        numbers = LayerCache(*(side.to(query.dtype) for side in cache))
        return super().read(query, numbers, plan, **how)


class Uniform(Mixed):
    """The same, all of one type."""

    name = "uniform"
    mixes_cache_types = False


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes both known by name."""
    for backend in (Mixed, Uniform):
        place = f"{backend.__module__}:{backend.__qualname__}"
        monkeypatch.setitem(ATTENTION_BACKENDS, backend.name, place)


def loaded(folder: Path, bias: float, **how: Any) -> Any:
    """A target whose keys have a bias of so much in one layer; random in the others."""
    if not folder.exists():
        model = plain_model("qwen2")
        with torch.no_grad():
            projection = model.model.layers[LAYER].self_attn
            projection.k_proj.bias.fill_(bias)
            projection.q_proj.bias.normal_()
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    device = torch.device("cpu")
    return load_verifier(folder, device=device, dtype=torch.float32, block_size=4, **how)[0]


@torch.inference_mode()
def keys_of(verifier: Any) -> Tensor:
    """What a target stores of a prompt in that layer, as float32."""
    tokens = list(range(3, 23))
    cache = ScratchCache(verifier, [len(tokens)])
    verifier.forward(cache.rows([(0, 0, tokens)]), cache.layers)
    return cast("Tensor", cache.layers[LAYER].key.float())


@pytest.mark.parametrize("bias", [300.0, -300.0, 20.0])
def test_large_keys_keep_their_type(
    bias: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches layers that lose what their scores depend on, memory spent on all others, and a
    choice that nobody is told of.
    """
    caplog.set_level(logging.WARNING)
    exact, eight_bits, fitting = (
        loaded(tmp_path / "target", bias, attention=name, cache_dtype=dtype)
        for name, dtype in (("mixed", None), ("uniform", E4M3), ("mixed", E4M3))
    )
    kept = [n for n, spec in enumerate(fitting.kv_specs) if spec.dtype == torch.float32]
    assert kept == ([LAYER] if abs(bias) > 100 else [])
    assert not any(spec.dtype for spec in [*exact.kv_specs, *eight_bits.kv_specs])
    lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if f"keys of layer {LAYER} are" in line]
    assert len(said) == 2 * len(kept), lines
    if kept:
        assert "--kv-dtype auto" in said[0] and "float32" in said[1]
        exact_keys, rounded, stored = (keys_of(one) for one in (exact, eight_bits, fitting))
        assert torch.equal(stored, exact_keys)
        assert (rounded - exact_keys).abs().max() > 1
    size = [sum(one.bytes_per_token(E4M3) for one in each.kv_specs) for each in (exact, fitting)]
    assert size[1] == size[0] * (1 + 3 * len(kept) / len(exact.kv_specs))


def drafter_of(kind: str, verifier: Any, size: float, folder: Path) -> Any:
    """A drafter one of whose layers has keys as large as that; its number among all layers."""
    if kind == "draft model":
        loaded(folder / "draft", size, attention="mixed")
        return load_draft_model(folder / "draft", verifier=verifier), LAYER
    if kind == "eagle3":
        raw = {**SPECULATORS, "target_hidden_size": verifier.hidden_size}
        raw["embed_requires_grad"] = True
        tensors = head_tensors(raw)
        tensors["layers.0.self_attn.k_proj.weight"] *= size / 3
        return eagle3_drafter(parse_config(raw), tensors, verifier), 0
    dflash = random_dflash(verifier)
    with torch.no_grad():
        dflash.network._norms[1].weight.fill_(size)
    if kind == "dflash":
        return dflash, 1
    return ComposedDrafter([SuffixDrafter(), dflash]), 1


@pytest.mark.parametrize("size", [300.0, 10.0])
@pytest.mark.parametrize("kind", ["dflash", "eagle3", "draft model", "composed"])
def test_large_keys_of_drafters(
    kind: str, size: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches drafts that are made of rounded keys, and memory spent on the drafter's others."""
    verifier = loaded(tmp_path / "target", 0.0, attention="mixed", cache_dtype=E4M3)
    drafter, large = drafter_of(kind, verifier, size, tmp_path)
    cache = CacheConfig(memory_bytes=2**20)
    engine = SpecEngine(verifier, drafter, EngineConfig(max_num_seqs=2, cache=cache))
    of_drafter = engine.kv_cache.layers[len(verifier.kv_specs) :]
    kept = [n for n, layer in enumerate(of_drafter) if layer.key.dtype == torch.float32]
    assert kept == [large] * (size > 100) and len(of_drafter) > large
    said = [line for line in caplog.messages if "keys of" in line and "stays in float32" in line]
    assert len(said) == len(kept), caplog.messages
    more = (step_bytes(engine, k=k, num_reqs=1, context=8) for k in (1, 0))
    types = [torch.float32 if n in kept else E4M3 for n in range(len(of_drafter))]
    each = zip(drafter.kv_specs, types, strict=True)
    own = sum(spec.bytes_per_token(dtype) for spec, dtype in each)
    assert next(more) - next(more) == drafter.weight_bytes + 8 * own
