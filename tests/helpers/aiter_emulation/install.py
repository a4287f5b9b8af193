"""Makes the emulation importable as `aiter`, beside distribution metadata that says `amd-aiter`."""

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.helpers.aiter_emulation import (
    cache,
    indexer,
    layers,
    mha,
    mla,
    mla_plan,
    mla_reduce,
    paged,
    prefill_ps,
    routing,
)
from tests.helpers.aiter_emulation.machine import Machine
from tests.helpers.aiter_emulation.signatures import SOURCES, signatures, version_key

_TOP_LEVEL = (
    "ops/mha.py", "ops/attention.py", "ops/cache.py", "ops/topk.py", "ops/moe_op.py",
    "ops/rmsnorm.py", "ops/activation.py",
)  # fmt: skip
"""Modules whose functions AITER exports as `aiter.<name>`."""

COMPILED: dict[str, str | None] = {
    "reshape_and_cache": None, "reshape_and_cache_flash": None, "concat_and_cache_mla": None,
    "get_mla_metadata_v1": "0.1.18", "mla_reduce_v1": None, "get_ps_metadata_v1": None,
    "mla_prefill_ps_asm_fwd": None, "indexer_k_quant_and_cache": None,
    "cp_gather_indexer_k_quant_cache": None, "top_k_per_row_prefill": "0.1.17",
    "top_k_per_row_decode": "0.1.17", "grouped_topk": None, "topk_softmax": "0.1.19",
    "silu_and_mul": None, "gelu_tanh_and_mul": None,
}  # fmt: skip
"""Functions that stand behind a wrapper without a signature, and the version from which they have
one, if any.
"""

GUARDED = {"rmsnorm2d_fwd": "0.1.18", "rmsnorm2d_fwd_with_add": "0.1.18"}
"""The reverse: from which version on."""


def hides_signature(name: str, version: str) -> bool:
    """Whether the Python function shows its arguments as `*args, **kwargs`."""
    if name in GUARDED:
        return version_key(version) >= version_key(GUARDED[name])
    until = COMPILED.get(name)
    return name in COMPILED and (until is None or version_key(version) < version_key(until))


def operator(name: str, signature: inspect.Signature) -> Any:
    """What torch knows of the operator behind such a function. All arguments count as tensors: only
    their names matter here.
    """
    empty = inspect.Parameter.empty
    arguments = [
        f"Tensor {p.name}" if p.default is empty else f"Tensor? {p.name}=None"
        for p in signature.parameters.values()
    ]
    schema = torch._C.parse_schema(f"aiter::{name}({', '.join(arguments)}) -> ()")
    return types.SimpleNamespace(default=types.SimpleNamespace(_schema=schema))


def bind(
    machine: Machine, name: str, signature: inspect.Signature, implementation: Callable[..., Any]
) -> Callable[..., Any]:
    """The function with AITER's own signature; anything outside it is a TypeError, as with the real
    one.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if name == "flash_attn_with_kvcache":
            mha.host_reads_before_016(machine, bound.arguments["cache_seqlens"])
        with _disable_current_modes():  # a kernel may look at values; only the host may not
            result = implementation(machine, **bound.arguments)
        if machine.watch:
            machine.watch(function, bound.arguments, result)
        return result

    function.__name__ = function.__qualname__ = name
    if machine.signatures == "shown" or not hides_signature(name, machine.version):
        function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, machine: Machine | None = None
) -> Machine:
    """Installs the emulation for the time of a test.

    Args:
        monkeypatch: undoes it.
        folder: an empty folder, which gets the distribution's metadata.
        machine: version and hardware to pretend.
    """
    machine = machine or Machine()
    info = folder / f"amd_aiter-{machine.version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {machine.version}\n"
    )
    monkeypatch.syspath_prepend(str(folder))

    modules: dict[str, types.ModuleType] = {}

    def module(name: str) -> types.ModuleType:
        if name not in modules:
            modules[name] = types.ModuleType(name)
            modules[name].__path__ = []
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(module(parent), child, modules[name])
        return modules[name]

    families = (mha, paged, cache, mla, mla_plan, mla_reduce, prefill_ps, indexer, routing, layers)
    implementations = {
        name: function for family in families for name, function in vars(family).items()
    }
    operators = types.SimpleNamespace()
    for name, signature in signatures(machine.version):
        if machine.signatures == "schemas" and hides_signature(name, machine.version):
            setattr(operators, name, operator(name, signature))
        function = bind(machine, name, signature, implementations[name])
        home = "aiter." + SOURCES[name].removesuffix(".py").replace("/", ".")
        setattr(module(home), name, function)
        if SOURCES[name] in _TOP_LEVEL:
            setattr(module("aiter"), name, function)
    monkeypatch.setattr(torch.ops, "aiter", operators)
    module("aiter").dtypes = types.SimpleNamespace(fp8=machine.fp8)  # type: ignore[attr-defined]
    module("aiter").__file__ = str(folder / "aiter" / "__init__.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    for name, built in modules.items():
        monkeypatch.setitem(sys.modules, name, built)
    return machine
