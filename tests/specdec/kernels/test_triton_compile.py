"""Triton's compiler accepts the kernels for NVIDIA and AMD, which it does without either; the
interpreter would let more pass.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import torch

import specdec.device.device
from specdec.kernels import triton_norm
from specdec.kernels.triton_launch import shared_memory
from tests.helpers.compiled_kernels import (
    TARGETS,
    Target,
    argmax_kernels,
    kernels,
    use_of,
)
from tests.helpers.triton_interpreter import compile_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kept_kernels")]

MATRIX_INSTRUCTIONS = ("wgmma", "mma.sync", "v_mfma", "v_wmma")
WHOLE = ("attention", "norm over ranks")
"""Beginnings of titles: of these every shape is compiled, for they differ in what is looked for."""


def assert_rows_before_flags(assembly: str) -> None:
    """Catches flags and looks at them that order nothing beyond one device."""
    assert re.search(r"atom\S*\.sys\.release\.exch|atom\S*\.release\.sys\S*exch", assembly)
    assert re.search(r"\.sys\.acquire|\.acquire\.sys", assembly)


def chosen(target: Target) -> Iterator[tuple[str, Any]]:
    """What is compiled for a target: of a kernel's shapes NVIDIA's have the first and AMD's the
    last. `tests.checks.amd_tables` has all of AMD's.
    """
    found = list(kernels(target, every_shape=False))
    one_each = {kernel.name: title for title, kernel in found}
    if target.assembly == "ptx":
        one_each = {kernel.name: title for title, kernel in reversed(found)}
    for title, kernel in found:
        if title == one_each[kernel.name] or title.startswith(WHOLE):
            yield title, kernel


@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel(name: str) -> None:
    """Fits the target's memory, uses its matrix instructions, and on CDNA spills nothing; on sm_90
    waits for the one before it.

    Every kernel for the target that leads its maker's, in one shape, and elsewhere those that its
    matrix instructions and its memory decide.
    """
    target, released = TARGETS[name], set()
    for title, kernel in chosen(target):
        assembly = kernel.asm[target.assembly]
        assert kernel.metadata.shared <= target.shared_memory, title
        if title.startswith(("attention", "product")) and not title.endswith("float32"):
            assert any(instruction in assembly for instruction in MATRIX_INSTRUCTIONS), title
        assert not target.is_cdna or use_of(kernel).spilled == 0, title
        assert ("griddepcontrol.wait" in assembly) == target.overlaps, title
        if "griddepcontrol.launch_dependents" in assembly:
            assert (
                "griddepcontrol.wait" in assembly.partition("griddepcontrol.launch_dependents")[0]
            ), title
            released.add(title)
        if title == "norm over ranks" and target.overlaps:
            assert_rows_before_flags(assembly)
    assert (
        bool(released) == target.overlaps
        and any("RoPE" in title for title in released) == target.overlaps
    )


def test_hints() -> None:
    """Surplus programs send them before anything waits, one piece per thread; without a weight
    nothing is left of them.
    """
    rows = {
        "x": "bf16",
        "residual": "bf16",
        "weight": "bf16",
        "normed": "bf16",
        "added": "bf16",
        "prefetch": "bf16",
    }
    constants: dict[str, Any] = {
        "WIDTH": 4096,
        "PARTS": 1,
        "SCALED": False,
        "BLOCK": 4096,
        "OVERLAP": True,
    }
    constants |= {
        "after": None,
        "factor": None,
        "places": None,
        "epochs": None,
        "MOST": 64,
        "RANK": 0,
        "SIZE": 1,
    }
    for hints in ({"PREFETCH": 3 * 2**20 + 16}, {"PREFETCH": None, "prefetch": None}):
        norm = compile_for(
            triton_norm._rms_norm_kernel,
            TARGETS["sm_90"].compiler,
            pointers=rows,
            floats=("epsilon", "scale"),
            constants=constants | hints,
            num_warps=8,
        )
        assembly = norm.asm["ptx"]
        assert assembly.count("cp.async.bulk.prefetch.L2.global") == ("prefetch" not in hints)
        if "prefetch" not in hints:
            sending, _, working = assembly.partition("griddepcontrol.wait")
            assert "prefetch" in sending and "st.global" not in sending and "st.global" in working


def test_argmax() -> None:
    """Of logits in half and in full precision a thread has all loads under way at once, each of 16
    bytes where the vocabulary allows.
    """
    found = dict(argmax_kernels(TARGETS["sm_90"]))
    for (_, kernel), loads in list(zip(found.items(), (4, 4, 8), strict=False))[1:]:
        before, _, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert after.count("ld.global.v4") == loads and "ld.global" not in before


@pytest.mark.parametrize(
    "name", [name for name, target in TARGETS.items() if target.assembly == "amdgcn"]
)
def test_what_is_compiled_for_is_what_is_launched_on(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A launch reckons with as much shared memory as the compiler was told of."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: name)
    shared_memory.cache_clear()
    assert shared_memory(torch.device("cuda", 0)) == TARGETS[name].shared_memory
    assert TARGETS[name].shared_memory == (160 if name == "gfx950" else 64) * 1024
    shared_memory.cache_clear()
