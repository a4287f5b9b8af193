"""Running and compiling Triton kernels in tests where there is no GPU.

Triton decides when a kernel is imported whether it is compiled or interpreted, and other tests
import kernels to compile them. So files whose tests run kernels use a CUDA device where there is
one, and skip themselves elsewhere, but with `TRITON_INTERPRET=1`: `make check` runs them so, after
all others. Where files or cases of them alone are named, `tests/conftest.py` sets it.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray


def require_triton() -> torch.device:
    """Where kernels run in this process; skips the calling module when they cannot."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if version("triton") < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(
            "the interpreter of Triton before 3.7 needs numpy before 2.4", allow_module_level=True
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        _fix_order_of_products()
        _hasten()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run this file alone, or make check", allow_module_level=True)
    return torch.device("cuda", torch.cuda.current_device())


def product(left: NDArray[Any], right: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """`left [..., M, K] @ right [..., K, N]`, each element summed over K from its beginning,
    rounded at every term.

    NumPy's own goes to a BLAS: its order depends on the processor, M and N, and bits would say
    nothing about our kernels.
    """
    out = np.zeros((*left.shape[:-1], right.shape[-1]), dtype)
    left, right, term = left.astype(dtype), right.astype(dtype), np.empty_like(out)
    for k in range(left.shape[-1]):
        np.multiply(left[..., k, None], right[..., k, None, :], out=term)
        out += term
    return out


@cache
def _fix_order_of_products() -> None:
    """The interpreter multiplies with `product`."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    interpreter.np = _Numpy()


class _Numpy:
    """NumPy with another `matmul`."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        setattr(self, name, value)
        return value

    def matmul(self, left: NDArray[Any], right: NDArray[Any], dtype: Any) -> NDArray[Any]:
        return product(left, right, dtype)


@cache
def _hasten() -> None:
    """Leaves out what takes most of the interpreter's time and adds nothing.

    It makes Triton's language its own at every launch and at every call in a kernel: here once per
    module, for good. It computes whether integers overflow, which it looks at in its debug mode
    alone. And it works out the same types of NumPy, of blocks and of tensors at every operation,
    and the same operands: here once each.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    if not all(
        hasattr(interpreter, name)
        for name in ("_patch_lang", "_LangPatchScope", "interpreter_builder")
    ):
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
    interpreter._patch_attr = _call_directly
    _remember_types(interpreter)
    _remember_operands(interpreter.interpreter_semantic)


def _call_directly(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language with the interpreter's meaning, past the wrapper that only asks
    whether there is one.
    """
    semantic = import_module("triton.runtime.interpreter").interpreter_semantic
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    scope.set_attr(place, name, call)


def _remember_types(interpreter: Any) -> None:
    """Attributes of a type of blocks follow from its elements and shape, and the sizes of a tensor
    from its type's shape.

    A key is what an object is, and not what it equals: the attributes that are kept for it keep it
    alive.
    """
    core = import_module("triton.language.core")
    numpy_type, make_type, make_tensor = (
        interpreter._get_np_dtype,
        core.block_type.__init__,
        core.tensor.__init__,
    )
    numpy_types: dict[int, tuple[Any, Any]] = {}
    types: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[Any, ...], Any] = {}
    sizes: dict[int, tuple[Any, Any, Any]] = {}

    def numpy_type_once(kind: Any) -> Any:
        kind = kind.scalar
        if (known := numpy_types.get(id(kind))) is None:
            known = numpy_types[id(kind)] = kind, numpy_type(kind)
        return known[1]

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), tuple(shape)
        if (known := types.get(key)) is None:
            make_type(self, element_ty, shape)
            shape = shapes.setdefault(key[1], self.shape)
            known = types[key] = vars(self) | {"shape": shape}
        self.__dict__.update(known)

    def make_tensor_once(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if (known := sizes.get(id(shape))) is None:
            make_tensor(self, handle, type)
            known = sizes[id(shape)] = shape, self.shape, self.numel
        self.handle, self.type, self.dtype, (_, self.shape, self.numel) = (
            handle,
            type,
            type.scalar,
            known,
        )

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = (
        numpy_type_once,
        make_type_once,
        make_tensor_once,
    )


def _remember_operands(semantic: Any) -> None:
    """Operands of the same shape and type stay as they are, as do a pointer and how far it moves;
    and a number beside a tensor of its kind becomes the same block each time.
    """
    core = import_module("triton.language.core")
    kinds = core.float32, core.float64, core.int1, core.uint8, core.int32, core.uint32, core.int64
    kept = {id(kind) for kind in kinds}
    numbers: dict[int, tuple[type, ...]] = {id(core.float32): (float, int), id(core.int32): (int,)}
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    blocks: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    joined: dict[tuple[int, int], tuple[Any, list[int]]] = {}
    handle: Any = import_module("triton.runtime.interpreter").TensorHandle

    def check_once(left: Any, right: Any, *rest: Any, **named: Any) -> tuple[Any, Any]:
        if not named and all(rest[2:3]):  # what is told otherwise is looked at otherwise
            if not isinstance(left, core.tensor):
                if isinstance(right, core.tensor) and fits(left, right):
                    return block(left, right), right
            elif not isinstance(right, core.tensor):
                if fits(right, left):
                    return left, block(right, left)
            elif stay(left.type.scalar, right.type.scalar, rest):
                return broadcast_once(left, right)
        return check(left, right, *rest, **named)

    def stay(left: Any, right: Any, rest: tuple[Any, ...]) -> bool:
        if left is right:
            return id(left) in kept
        return rest[:1] == (True,) and left.is_ptr() and right.is_int()

    def fits(value: Any, tensor: Any) -> bool:
        types = numbers.get(id(tensor.type.scalar), ())
        return type(value) in types and abs(value) < 2**31

    def block(value: Any, beside: Any) -> Any:
        key = type(value), value, id(beside.type.scalar), id(beside.shape)
        if (known := blocks.get(key)) is None:
            made = broadcast(beside, semantic.scalar_constant(value, beside.type.scalar))[1]
            made.handle.data.flags.writeable = False
            known = blocks[key] = made, beside.shape
        return known[0]

    def broadcast_once(left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:  # as of two scalars
            return left, right
        if (known := joined.get(key := (id(left.shape), id(right.shape)))) is None:
            shape = broadcast(left, right)[0].type.shape
            known = joined[key] = shape, list(shape)
        return stretched(left, *known), stretched(right, *known)

    def stretched(one: Any, shape: Any, sizes: list[int]) -> Any:
        if one.type.is_block() and one.type.shape is shape:
            return one
        data = np.broadcast_to(one.handle.data, sizes)
        kind = core.block_type(one.type.scalar, shape)
        return semantic.tensor(handle(data, one.handle.dtype.scalar), kind)

    semantic.binary_op_type_checking_impl = check_once
    semantic.broadcast_impl_value = broadcast_once


def compile_for(
    kernel: Any,
    target: tuple[str, int | str, int],
    *,
    pointers: dict[str, str],
    floats: tuple[str, ...] = (),
    constants: dict[str, Any],
    descriptors: dict[str, str] | None = None,
    **options: int,
) -> "Compiled":
    """`kernel` for a machine that need not be here; arguments that are nothing else are 32-bit
    integers.

    Descriptors are given as type and shape of their tiles, as in "bf16[128, 64]".
    """
    compiler, backends = import_module("triton.compiler"), import_module("triton.backends.compiler")
    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(floats, "fp32")
    types |= {name: f"tensordesc<{tile}>" for name, tile in (descriptors or {}).items()}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*") and name not in constants
    }
    source = compiler.ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    machine = backends.GPUTarget(*target)
    name = kernel.fn.__name__
    return Compiled(name, lambda: compiler.compile(source, target=machine, options=options))


class Compiled:
    """A kernel that is compiled when somebody first looks into it.

    Attributes:
        name: of its function.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self._make = name, make

    @cached_property
    def _made(self) -> Any:
        return self._make()

    @property
    def asm(self) -> Any:
        """Its forms, by their names."""
        return self._made.asm

    @property
    def metadata(self) -> Any:
        """What Triton notes of it."""
        return self._made.metadata
