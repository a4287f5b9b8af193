"""What is asked of an installed AITER before it is used: its version, its functions and their
keywords, and whether it imports.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.library import Library

from specdec.attention.selector import refusals, select_backend
from specdec.cli.main import main
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterFa, AiterIndexer, AiterMla, AiterRouter, AiterTriton
from specdec.layers.aiter.kernels import AiterLayers
from tests.helpers.aiter_emulation import Machine, install
from tests.helpers.aiter_emulation.signatures import VERSIONS, version_key
from tests.helpers.attention_case import spec

FAMILIES: list[Any] = [AiterTriton, AiterFa, AiterMla, AiterIndexer, AiterRouter, AiterLayers]
Install = Callable[..., Machine]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """A function that installs the emulation."""
    return lambda **machine: install(monkeypatch, tmp_path, Machine(**machine))


@pytest.mark.parametrize("signatures", ["schemas", "hidden"])
@pytest.mark.parametrize("version", VERSIONS)
def test_functions_that_hide_their_arguments(
    emulated: Install, version: str, signatures: str
) -> None:
    """As AITER's do; torch's operators tell them, or else the version."""
    emulated(version=version, signatures=signatures)
    import aiter as package

    assert (
        aiter._parameters("reshape_and_cache", package.reshape_and_cache_flash) is None
        or signatures == "schemas"
    )
    for family in FAMILIES:
        assert aiter.unavailable_reasons(family) == []
    number = version_key(version)
    assert aiter.load(AiterMla).reduce_options == (
        {"num_kv_splits": 0} if number >= (0, 1, 16) else {}
    )
    assert aiter.load(AiterIndexer).top_k_options == (
        {"stable": True} if number >= (0, 1, 20) else {}
    )
    assert aiter.load(AiterLayers).rope_options == (
        {"upcast_operand": True} if number > (0, 1, 15) else {}
    )


@pytest.mark.parametrize(("signatures", "stable"), [("schemas", {}), ("hidden", {"stable": True})])
def test_development_builds(
    emulated: Install, monkeypatch: pytest.MonkeyPatch, signatures: str, stable: dict[str, bool]
) -> None:
    """A build on the way to a version may lack what came late to it: what torch knows goes before
    the number.
    """
    emulated(version="0.1.16", signatures=signatures)
    monkeypatch.setattr(aiter, "installed_version", lambda: "0.1.20.dev3+g0123456")
    assert aiter.load(AiterIndexer).top_k_options == stable
    emulated(version="0.1.15", signatures=signatures)
    assert aiter.load(AiterMla).reduce_options == (
        {"num_kv_splits": 0} if signatures == "hidden" else {}
    )


def test_an_operator_without_a_keyword_is_a_reason(
    emulated: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error in the first forward."""
    emulated()
    schema = torch._C.parse_schema(
        "aiter::reshape_and_cache(Tensor key, Tensor slot_mapping, str kv_cache_dtype) -> ()"
    )
    monkeypatch.setattr(
        torch.ops.aiter,
        "reshape_and_cache",
        SimpleNamespace(default=SimpleNamespace(_schema=schema)),
    )
    assert aiter.unavailable_reasons() == [
        "amd-aiter 0.1.20 cannot be used: reshape_and_cache of aiter takes no k_scale, v_scale,"
        " asm_layout"
    ]
    assert aiter.unavailable_reasons(AiterMla) == []


def test_arguments_of_a_registered_operator() -> None:
    """Of torch's own making, as AITER's wrapper registers it; a name that nobody registered tells
    nothing.
    """

    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    library = Library("aiter", "FRAGMENT")
    try:
        library.define(
            "specdec_probe(Tensor(a!) out, Tensor? scale=None, SymInt size=16, *, float eps=1.0) ->"
            " ()"
        )
        assert aiter._parameters("specdec_probe", wrapper) == {"out", "scale", "size", "eps"}
    finally:
        library._destroy()
    assert aiter._parameters("specdec_nothing", wrapper) is None
    assert aiter._parameters("specdec_probe", lambda out, scale: None) == {"out", "scale"}


BROKEN: list[tuple[Exception, str]] = [
    (KeyError("gfx1300"), "KeyError: 'gfx1300'"),
    (AssertionError(), "AssertionError"),
    (
        AssertionError("GPUs of two kinds:\n  gfx942\n  gfx1100"),
        "AssertionError: GPUs of two kinds: gfx942 gfx1100",
    ),
    (ValueError("invalid literal for int()"), "ValueError: invalid literal for int()"),
    (
        TypeError("'NoneType' object is not iterable"),
        "TypeError: 'NoneType' object is not iterable",
    ),
    (IndexError("list index out of range"), "IndexError: list index out of range"),
    (
        subprocess.CalledProcessError(1, ["rocminfo"]),
        "CalledProcessError: Command '['rocminfo']' returned non-zero exit status 1.",
    ),
    (RuntimeError("no ROCm " * 100), "RuntimeError: no ROCm no ROCm"),
    (
        ImportError("libamdhip64.so.7: cannot open shared object file"),
        "libamdhip64.so.7: cannot open shared object file",
    ),
]
"""What AITER's import has been seen to raise, or may, and the reason that is said."""


@pytest.mark.parametrize(
    ("error", "reason", "architecture"),
    [*((*broken, "gfx942") for broken in BROKEN), (*BROKEN[0], "gfx1100")],
)
def test_whatever_the_import_raises_is_a_reason(
    emulated: Install,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    reason: str,
    architecture: str,
) -> None:
    """In one line; `doctor` and `auto` go on without AITER, for both kinds of attention."""
    emulated(architecture=architecture)

    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(aiter, "import_module", broken)
    monkeypatch.setattr("specdec.device.device.rocm_architecture", lambda device: architecture)
    for family in FAMILIES:
        (said,) = aiter.unavailable_reasons(family)
        assert (
            said.startswith(f"amd-aiter 0.1.20 cannot be used: {reason}")
            and "\n" not in said
            and len(said) < 250
        )
    assert any(reason in why for why in refusals(spec())["rocm_aiter_fa"])
    assert select_backend("auto", spec()).name == "torch_ref"
    for options in ([], ["--mla"]):
        assert main(["doctor", "--device", "cpu", "--dtype", "bfloat16", *options]) == 0
        printed = capsys.readouterr()
        assert reason in printed.out and "torch_ref" in printed.out and printed.err == ""
