"""The self-check of attention: right backends pass it in every phase, and what is wrong in any of them does not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec.device.device
from specdec.attention import check
from specdec.attention.aiter.fa import RocmAiterFaBackend, RocmAiterFaShuffleBackend
from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from specdec.attention.check import PHASES, check_attention, reasons_against_kernels, tiny_spec, types_of
from specdec.attention.torch_ref.fa import TorchRefBackend
from tests.helpers.aiter_emulation import Machine, install

SPEC = AttentionSpec(torch.device("cpu"), torch.bfloat16, 32, 8, 64, 16)


def passes(backend: type[AttentionBackend], spec: AttentionSpec) -> bool:
    """Whether the whole check does."""
    error, bound = check_attention(backend, spec)
    return error <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_passes(dtype: torch.dtype) -> None:
    """In every type, draft blocks included."""
    assert passes(TorchRefBackend, tiny_spec(replace(SPEC, dtype=dtype)))


@pytest.mark.parametrize("backend", [RocmAiterFaBackend, RocmAiterFaShuffleBackend])
@pytest.mark.parametrize(("architecture", "eight_bits"), [("gfx942", False), ("gfx942", True), ("gfx950", True)])
def test_aiter_passes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: type[RocmAiterFaBackend],
    architecture: str,
    eight_bits: bool,
) -> None:
    """The emulation, in its own types; the check calls the kernels of every phase."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    machine = install(monkeypatch, tmp_path, Machine(architecture=architecture))
    cache = specdec.device.device.float8_dtype(SPEC.device) if eight_bits else None
    assert passes(backend, tiny_spec(replace(SPEC, cache_dtype=cache)))
    called = {"flash_attn_varlen_func", "unified_attention", "flash_attn_with_kvcache"}
    called |= {"paged_attention_v1", "reshape_and_cache_flash"} if backend.layout == "plain" else {"paged_attention_common"}
    assert machine.names() >= called


def test_an_aiter_without_draft_blocks_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are left out where the version has none."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    machine = install(monkeypatch, tmp_path, Machine(version="0.1.15"))
    assert passes(RocmAiterFaBackend, tiny_spec(SPEC)) and "flash_attn_with_kvcache" not in machine.names()


def broken(**changes: Callable[[Any], Any]) -> type[TorchRefBackend]:
    """torch_ref with metadata or options that are changed by these functions."""

    class Broken(TorchRefBackend):
        def plan(self, metadata: AttentionMetadata) -> Any:
            wrong = {name: change(getattr(metadata, name)) for name, change in changes.items() if hasattr(metadata, name)}
            return super().plan(replace(metadata, **wrong))

        def run(self, *args: Any, **options: Any) -> Any:
            return super().run(*args, **{name: changes.get(name, lambda same: same)(value) for name, value in options.items()})

        def write(self, cache: Any, key: Any, value: Any, slot_mapping: Any) -> None:
            super().write(cache, key, changes.get("value", lambda same: same)(value), slot_mapping)

    return Broken


@pytest.mark.parametrize(
    "change",
    [
        {"visibility": lambda visibility: "causal"},
        {"visibility": lambda visibility: "full"},
        {"window": lambda window: None},
        {"window": lambda window: window and window - 1},
        {"scale": lambda scale: scale * 1.01},
        {"block_table": lambda table: table.flip(1)},
        {"slot_mapping": lambda slots: slots.roll(1)},
        {"value": lambda value: value * 1.01},
    ],
    ids=["causal", "not causal", "no window", "a narrower window", "scale", "blocks", "slots", "values"],
)
def test_what_is_wrong_does_not(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """One mistake at a time. The reference itself must not share it."""
    backend = broken(**change)
    assert not passes(backend, tiny_spec(replace(SPEC, dtype=torch.float32)))


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_every_phase_counts(monkeypatch: pytest.MonkeyPatch, phase: check.Phase) -> None:
    """A scale that is off is noticed in each alone."""
    monkeypatch.setattr(check, "PHASES", (phase,))
    spec = tiny_spec(replace(SPEC, dtype=torch.float32))
    assert passes(TorchRefBackend, spec) and not passes(broken(scale=lambda scale: scale * 1.01), spec)


def test_what_cannot_serve_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reasons are enough; a verdict is kept by type."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    monkeypatch.setattr(check, "check_attention", lambda *args: pytest.fail("not to be run"))
    assert RocmAiterFaBackend.unsupported_reasons(SPEC) and reasons_against_kernels(RocmAiterFaBackend, SPEC) == []
    assert types_of(SPEC) == (torch.bfloat16,)
    assert types_of(replace(SPEC, cache_dtype=torch.float8_e4m3fn)) == (torch.bfloat16, torch.float8_e4m3fn)
