"""Kernels have one home each: what is forgotten is named."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import specdec.device.device
from drafters.dflash import edges
from specdec.base.registry import KERNELS, resolve
from specdec.device.deviation import Deviation
from specdec.engine.engine import SpecEngine
from specdec.kernels import kernel
from specdec.kernels.kernel import HALF, Kernel
from specdec.kernels.triton_launch import shared_memory
from tests.helpers.tiny_models import paged_verifier, plain_model
from tests.test_house import house

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ATTENTION = "specdec.attention.triton"  # backends have a table of their own


def homes() -> dict[str, Kernel]:
    return {name: resolve(KERNELS, name, "kernel") for name in KERNELS}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Those that the test makes are forgotten afterwards."""
    monkeypatch.setattr(Kernel, "made", [*Kernel.made])
    yield Kernel.made


def test_every_kernel_stands_in_the_table() -> None:
    assert {name: one.name for name, one in homes().items()} == {name: name for name in KERNELS}
    makers = {file for file in sources() if " = Kernel(" in file.read_text()}
    tabled = {
        ROOT / (home.partition(":")[0].replace(".", "/") + ".py") for home in KERNELS.values()
    }
    assert makers == tabled
    assert sum(file.read_text().count(" = Kernel(") for file in makers) == len(KERNELS)


def sources() -> Iterator[Path]:
    for package in ("specdec", "drafters", "verifiers", "evals"):
        yield from (ROOT / package).rglob("*.py")


def test_every_file_of_kernels_has_a_home() -> None:
    """Whoever takes a kernel first is the file that makes its `Kernel`, or attention."""
    tabled = {home.partition(":")[0] for home in KERNELS.values()}
    users: dict[str, set[str]] = {}
    for importer, imported in house().imports:
        users.setdefault(imported, set()).add(importer)
    for module in [module for module in users if is_kernel(module)]:
        reached, ends = [module], set()
        for one in reached:
            reached += [
                user for user in users.get(one, ()) if is_kernel(user) and user not in reached
            ]
            ends |= {user for user in users.get(one, ()) if not is_kernel(user)}
        assert ends & tabled or any(end.startswith(ATTENTION) for end in ends), module


@cache
def is_kernel(module: str) -> bool:
    """Whether a file imports Triton for kernels of its own."""
    if module == "specdec.kernels.triton_compile":  # it compiles those of others
        return False
    file = (ROOT / module.replace(".", "/")).with_suffix(".py")
    return file.is_file() and "\nimport triton\n" in file.read_text()


def test_docs_name_all() -> None:
    page = (ROOT / "docs" / "rocm-kernels.md").read_text()
    assert [name for name in KERNELS if f"`{name}`" not in page] == []


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Names and types of the checks that are asked for, all of which pass."""
    asked: list[tuple[object, ...]] = []

    def passes(name: str, device: object, check: object, *variant: object) -> bool:
        asked.append((name, *variant))
        return True

    monkeypatch.setattr(kernel, "passes", passes)
    return asked


def test_what_a_step_may_meet_is_decided_when_the_engine_is_built(
    made: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter's kernels as well, for a check within a captured step would fail."""
    monkeypatch.setattr(kernel, "unavailable_reasons", lambda device: [])
    asked = noted(monkeypatch)
    made[:] = [
        edges.KERNEL,
        Kernel("fused_layers", lambda device, dtype: Deviation(0, 0), dtypes=HALF),
    ]
    edges.KERNEL.forget()
    SpecEngine(paged_verifier(plain_model("llama"), 16), None)
    edges.KERNEL.forget()
    assert asked == [("edges",)]


def test_a_kernel_is_asked_for_a_device_and_a_type(
    made: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noted(monkeypatch)
    one = Kernel(
        "argmax", lambda device, dtype: Deviation(0, 0), dtypes=HALF, reasons=lambda *where: []
    )
    for _ in range(2):
        assert one.runs_on(CPU, torch.float16) and not one.runs_on(CPU, torch.float32)
    assert asked == [("argmax", torch.float16)] * 2
    assert one.reasons(CPU, torch.float64) == ["it takes bfloat16 and float16"]
    two = Kernel("argmax", lambda device: Deviation(0, 0), reasons=lambda device: [])
    assert two.runs_on(CPU) and two.runs_on(CPU) and asked[2:] == [("argmax",)]
    two.forget()
    assert two.runs_on(CPU) and len(asked) == 4


def test_memory_of_a_program_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tiles are made for: one of them has more than the others."""
    gpu = torch.device("cuda", 0)
    found = {}
    for name in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"):
        monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device, n=name: n)
        shared_memory.cache_clear()
        found[name] = shared_memory(gpu) // 1024
    shared_memory.cache_clear()
    assert found == {"gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1201": 64}
