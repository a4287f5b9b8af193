"""The self-check of latent attention: right backends pass it, and what is wrong does not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.latent_check import check_latent, latent_variant
from specdec.attention.mla import IndexerSpec, MlaBackend, MlaSpec
from specdec.attention.selector import refusals
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.device.self_check import run
from tests.helpers.aiter_emulation import Machine, install

CPU = torch.device("cpu")
DENSE = MlaSpec(CPU, torch.bfloat16, 16, 512, 128, 64, 128, 16)
SPARSE = replace(DENSE, indexer=IndexerSpec(32, 128, 64))
SMALL = MlaSpec(CPU, torch.float32, 2, 24, 16, 8, 12, 16)
INDEXED = replace(SMALL, indexer=IndexerSpec(4, 16, 64))


def passes(backend: type[MlaBackend], spec: MlaSpec) -> bool:
    """Whether the whole check does; what it raises counts as a failure."""
    return run(partial(check_latent, backend, spec)).failure is None


@pytest.mark.parametrize(("architecture", "fp8"), [("gfx942", False), ("gfx950", True)])
@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_aiter_passes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    spec: MlaSpec,
    architecture: str,
    fp8: bool,
) -> None:
    """The emulation, in its own types; `auto` asks, and the verdict decides."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    install(monkeypatch, tmp_path, Machine(architecture=architecture))
    if fp8:
        spec = replace(spec, cache_dtype=specdec.device.device.float8_dtype(CPU))
    backend = RocmAiterMlaSparseBackend if spec.indexer else RocmAiterMlaBackend
    assert passes(backend, spec)
    wrong = backend.run
    monkeypatch.setattr(backend, "run", lambda *args, **options: 1.5 * wrong(*args, **options))
    reasons = refusals(spec, auto=True)
    assert "self-check failed" in reasons[backend.name][0]
    assert fp8 or reasons["torch_ref"] == []


def broken(**changes: Callable[[Any], Any]) -> type[TorchRefMlaBackend]:
    """torch_ref with options or choices that are changed by these functions."""

    def same(value: Any) -> Any:
        return value

    class Broken(TorchRefMlaBackend):
        def plan(self, metadata: Any) -> Any:
            wrong = {n: f(getattr(metadata, n)) for n, f in changes.items() if hasattr(metadata, n)}
            return super().plan(replace(metadata, **wrong))

        def select(self, *args: Any) -> Tensor:
            return changes.get("select", same)(super().select(*args))

        def run(self, *args: Any, scale: float, **options: Any) -> Tensor:
            return super().run(*args, scale=changes.get("scale", same)(scale), **options)

    return Broken


def first_ones(selected: Tensor) -> Tensor:
    """The first positions in place of the best."""
    places = torch.arange(selected.shape[1]).expand_as(selected)
    return places.where(selected >= 0, -1).int()


def twice_one(selected: Tensor) -> Tensor:
    """A position that is chosen twice."""
    return torch.cat([selected[:, :1], selected[:, :1], selected[:, 2:]], dim=1)


@pytest.mark.parametrize("spec", [SMALL, INDEXED], ids=["dense", "sparse"])
def test_what_is_wrong_does_not(spec: MlaSpec) -> None:
    """The reference passes; one mistake at a time does not."""
    assert passes(TorchRefMlaBackend, spec)
    for change in (
        {"scale": lambda scale: 1.01 * scale},
        {"visibility": lambda sight: "full"},
        {"slot_mapping": lambda slots: slots.roll(1)},
        {"block_table": lambda table: table.flip(1)},
    ):
        assert not passes(broken(**change), spec)


def test_what_is_chosen_counts() -> None:
    """Other positions than the best, and a position twice."""
    assert not passes(broken(select=first_ones), INDEXED)
    assert not passes(broken(select=twice_one), INDEXED)


def test_a_verdict_is_for_one_shape() -> None:
    """Heads, cache, indexer and the type of prompts."""
    others = (
        replace(DENSE, num_heads=32),
        replace(DENSE, cache_dtype=torch.float8_e4m3fn),
        replace(DENSE, fp8_prefill=False),
        SPARSE,
    )
    assert len({latent_variant(one) for one in (DENSE, *others)}) == 5
