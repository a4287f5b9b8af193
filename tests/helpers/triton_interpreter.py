"""Running and compiling Triton kernels in tests where there is no GPU.

Triton decides when it is imported whether its kernels are compiled or interpreted, and other tests import it long before. So files
whose tests need kernels run on CUDA devices as they are, and elsewhere in a process of their own with `TRITON_INTERPRET=1`:
`tests/specdec/kernels/test_triton_interpreted.py` starts it. By hand:
`TRITON_INTERPRET=1 pytest tests/specdec/kernels/test_triton_fa.py`.
"""

import os
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def require_triton() -> torch.device:
    """Where kernels run in this process; skips the calling module when they cannot."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _hasten()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; test_triton_interpreted.py runs this file", allow_module_level=True)
    return torch.device("cuda", torch.cuda.current_device())


@cache
def _hasten() -> None:
    """Leaves out what more than doubles the interpreter's time and adds nothing.

    It makes Triton's language its own at every launch and at every call within a kernel: here once per module, for good. And it
    computes whether integers overflow, which it looks at in its debug mode alone.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "interpreter_builder")):
        return  # another version of Triton, which is as slow as it is
    adapt, builder = interpreter._patch_lang, interpreter.interpreter_builder
    adapted = set()

    def adapt_once(function: Any) -> Any:
        if function.__module__ not in adapted:
            adapt(function)
            adapted.add(function.__module__)
        return interpreter._LangPatchScope()  # of no changes, which restores nothing

    interpreter._patch_lang = adapt_once
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def compile_for(
    kernel: Any,
    target: tuple[str, int | str, int],
    *,
    pointers: dict[str, str],
    floats: tuple[str, ...] = (),
    constants: dict[str, Any],
    descriptors: dict[str, str] | None = None,
    **options: int,
) -> Any:
    """Compiles `kernel` for a machine that need not be here; arguments that are nothing else are 32-bit integers.

    Descriptors are given as type and shape of their tiles, as in "bf16[128, 64]".
    """
    compiler, backends = import_module("triton.compiler"), import_module("triton.backends.compiler")
    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(floats, "fp32")
    types |= {name: f"tensordesc<{tile}>" for name, tile in (descriptors or {}).items()}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*") and name not in constants
    }
    source = compiler.ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    return compiler.compile(source, target=backends.GPUTarget(*target), options=options)
