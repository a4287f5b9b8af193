"""The self-check of attention: right backends pass it in every phase, and what is wrong in any of
them does not.
"""

import logging
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
from specdec.attention.check import (
    PHASES,
    check_attention,
    checked_spec,
    reasons_against_kernels,
    variant_of,
)
from specdec.attention.mla import MlaSpec
from specdec.attention.selector import refusals, select_backend
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.device import self_check
from tests.helpers.aiter_emulation import Machine, install

SPEC = AttentionSpec(torch.device("cpu"), torch.bfloat16, 32, 8, 64, 16)
SLOW = "WARNING on cuda: attention torch_ref in plain torch, which is slow"
LATENT = MlaSpec(torch.device("cpu"), torch.bfloat16, 16, 512, 128, 64, 128, 16)


def passes(backend: type[AttentionBackend], spec: AttentionSpec) -> bool:
    """Whether the whole check does."""
    error, bound = check_attention(backend, spec)
    return error <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_passes(dtype: torch.dtype) -> None:
    """In every type, draft blocks included."""
    assert passes(TorchRefBackend, checked_spec(replace(SPEC, dtype=dtype)))


@pytest.mark.parametrize("backend", [RocmAiterFaBackend, RocmAiterFaShuffleBackend])
@pytest.mark.parametrize(
    ("architecture", "eight_bits"), [("gfx942", False), ("gfx942", True), ("gfx950", True)]
)
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
    assert passes(backend, checked_spec(replace(SPEC, head_dim=128, cache_dtype=cache)))
    called = {"flash_attn_varlen_func", "unified_attention", "flash_attn_with_kvcache"}
    called |= (
        {"paged_attention_v1", "reshape_and_cache_flash"}
        if backend.layout == "plain"
        else {"paged_attention_common"}
    )
    assert machine.names() >= called


def test_an_aiter_without_draft_blocks_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are left out where the version has none."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    machine = install(monkeypatch, tmp_path, Machine(version="0.1.15"))
    assert passes(RocmAiterFaBackend, checked_spec(SPEC))
    assert "flash_attn_with_kvcache" not in machine.names()


@pytest.mark.parametrize(
    ("architecture", "version", "head_dim", "fits"),
    [
        ("gfx1201", "0.1.20", 128, True),
        ("gfx1201", "0.1.21", 64, True),
        ("gfx1201", "0.1.21", 128, False),
        ("gfx1100", "0.1.21", 128, True),
        ("gfx1100", "0.1.22", 256, False),
    ],
)
def test_radeons_whose_shared_memory_a_kernel_exceeds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    architecture: str,
    version: str,
    head_dim: int,
    fits: bool,
) -> None:
    """The check reaches the kernel that splits the keys, before a request does, and says why."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    install(monkeypatch, tmp_path, Machine(version=version, architecture=architecture))
    reasons = refusals(replace(SPEC, head_dim=head_dim), auto=True)["rocm_aiter_fa"]
    assert (reasons == []) == fits
    if not fits:
        (reason,) = reasons
        assert "its self-check failed: RuntimeError: out of resource: shared memory" in reason


def broken(**changes: Callable[[Any], Any]) -> type[TorchRefBackend]:
    """torch_ref with metadata or options that are changed by these functions."""

    class Broken(TorchRefBackend):
        def plan(self, metadata: AttentionMetadata) -> Any:
            wrong = {
                name: change(getattr(metadata, name))
                for name, change in changes.items()
                if hasattr(metadata, name)
            }
            return super().plan(replace(metadata, **wrong))

        def run(self, *args: Any, **options: Any) -> Any:
            return super().run(
                *args,
                **{
                    name: changes.get(name, lambda same: same)(value)
                    for name, value in options.items()
                },
            )

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
    ids=[
        "causal", "not causal", "no window", "a narrower window", "scale", "blocks", "slots",
        "values",
    ],
)  # fmt: skip
def test_what_is_wrong_does_not(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """One mistake at a time. The reference itself must not share it."""
    backend = broken(**change)
    assert not passes(backend, checked_spec(replace(SPEC, dtype=torch.float32)))


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_every_phase_counts(monkeypatch: pytest.MonkeyPatch, phase: check.Phase) -> None:
    """A scale that is off is noticed in each alone."""
    monkeypatch.setattr(check, "PHASES", (phase,))
    spec = checked_spec(replace(SPEC, dtype=torch.float32))
    assert passes(TorchRefBackend, spec) and not passes(
        broken(scale=lambda scale: scale * 1.01), spec
    )


def test_what_cannot_serve_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reasons are enough; a verdict is kept by type."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    monkeypatch.setattr(check, "check_attention", lambda *args: pytest.fail("not to be run"))
    assert (
        RocmAiterFaBackend.unsupported_reasons(SPEC)
        and reasons_against_kernels(RocmAiterFaBackend, SPEC) == []
    )
    assert variant_of(SPEC) == (torch.bfloat16, "32x8x64", "blocks16")
    eight_bits = replace(SPEC, cache_dtype=torch.float8_e4m3fn, sinks=True)
    types = torch.bfloat16, torch.float8_e4m3fn
    assert variant_of(eight_bits) == (*types, "32x8x64", "blocks16", "sinks")


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 256},
        {"num_kv_heads": 4},
        {"sinks": True},
        {"softcap": 30.0},
        {"block_size": 32},
    ],
)
def test_every_shape_has_a_verdict_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
) -> None:
    """A kernel that is wrong for what one model has is left out for it alone."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")
    wrong = replace(SPEC, **changed)

    class Picky(TorchRefBackend):
        name = "triton_fa"

        def run(self, *args: Any, **options: Any) -> Any:
            return super().run(*args, **options) * (1 if self.spec == right else 1.5)

    right = replace(checked_spec(SPEC), non_causal=True)
    assert reasons_against_kernels(Picky, SPEC) == []
    (reason,) = reasons_against_kernels(Picky, wrong)
    assert reason.startswith("its self-check failed: its error is")


def test_it_reaches_what_decoding_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys past 512 tokens in every kind of step; more row-heads than twice the compute units."""
    monkeypatch.setattr(check, "num_processors", lambda device: 304)
    found = check.phases(replace(SPEC, num_heads=9, num_kv_heads=3))
    assert max(len(phase.lengths) for phase in found) * 9 > 2 * 304
    for widths, visibility in (([1, 1, 1], "causal"), ([5, 5, 5], "causal"), ([5, 5, 5], "full")):
        alike = [
            phase for phase in found if (phase.widths, phase.visibility) == (widths, visibility)
        ]
        assert max(max(phase.lengths) for phase in alike) > 512


@pytest.mark.parametrize(
    ("spent", "taken"),
    [(50.0, "triton_fa"), (10.0, "torch_ref"), (40.0, "rocm_aiter_fa")],
)
def test_auto_takes_the_fastest_of_those_that_are_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spent: float, taken: str
) -> None:
    """On an AMD GPU, and says what the others take; measured once; of equal ones the first."""
    device = torch.device("cuda")
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda where: "gfx1100")
    monkeypatch.setattr(self_check, "_card", lambda where: "a card")
    monkeypatch.setattr(specdec.device.device, "describe_device", str)
    monkeypatch.setattr(check, "_work", lambda attention: attention.name)
    ours = 30.0 if taken == "triton_fa" else 40.0
    times = {"rocm_aiter_fa": 40.0, "triton_fa": ours, "torch_ref": spent}
    timed: list[str] = []

    def microseconds(name: str, where: torch.device) -> float:
        timed.append(name)
        return times[name]

    monkeypatch.setattr(self_check, "microseconds", microseconds)
    for backend in (RocmAiterFaBackend, TritonFaBackend):
        monkeypatch.setattr(backend, "unsupported_reasons", lambda spec: [])
        monkeypatch.setattr(backend, "reasons_against_auto", lambda spec: [])
        monkeypatch.setattr(backend, "__init__", AttentionBackend.__init__)
    spec = replace(SPEC, device=device)
    for _ in range(2):
        refused = refusals(spec, auto=True)
        assert [name for name, reasons in refused.items() if not reasons] == [taken]
        self_check._known.clear()
    assert sorted(timed) == sorted(times)
    slow = next(name for name in times if name != taken)
    assert refused[slow] == [f"{times[slow]:.0f} us, where {taken} takes {times[taken]:.0f}"]
    monkeypatch.setenv("SPECDEC_KERNELS", "rocm_aiter_fa")
    assert refusals(spec, auto=True) == {"rocm_aiter_fa": []}


@pytest.mark.parametrize(
    ("architecture", "device", "spec", "line"),
    [
        (None, "cpu", SPEC, "INFO on cpu: attention torch_ref"),
        ("gfx1100", "cuda", SPEC, f"{SLOW} (rocm_aiter_fa: AITER is not"),
        (None, "cuda", SPEC, f"{SLOW} (triton_fa: too old)"),
        (None, "cuda", LATENT, SLOW),
    ],
)
def test_one_line_says_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    architecture: str | None,
    device: str,
    spec: AttentionSpec | MlaSpec,
    line: str,
) -> None:
    """Not why other makers' kernels are left out; plain torch on a GPU is never silent."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    monkeypatch.setattr(specdec.device.device, "describe_device", str)
    monkeypatch.setattr(TritonFaBackend, "unsupported_reasons", lambda spec: ["too old"])
    monkeypatch.setattr(TritonFaBackend, "reasons_against_auto", lambda spec: [])
    with caplog.at_level(logging.INFO):
        select_backend("auto", replace(spec, device=torch.device(device)))
    (record,) = caplog.records
    said = f"{record.levelname} {record.getMessage()}"
    assert said.startswith(line) and (said == line or architecture) and "by name alone" not in said
