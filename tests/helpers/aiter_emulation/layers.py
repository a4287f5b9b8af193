"""Norms, gated activations, and RoPE with the cache write.

The HIP kernels compute in float32 and write once; on gfx942 they cut a bfloat16 off, as AITER is
built unless told otherwise. The Triton kernel rounds, after every operation unless it is told to
compute in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.aiter_emulation.cache import _slots, shuffle_width
from tests.helpers.aiter_emulation.machine import Machine, host, refuse_unless

_VECTOR = 8
_WIDEST_NORM = 8192


def _written(machine: Machine, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 in the type that a HIP kernel writes."""
    if dtype == torch.bfloat16 and machine.architecture == "gfx942":
        numbers = (numbers.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)
    return numbers.to(dtype)


def _rows(machine: Machine, name: str, *tensors: Tensor) -> None:
    """Dense rows of one type whose starts a vector may be loaded from."""
    machine.needs_cdna(name)
    machine.activation(name, *tensors)
    for tensor in tensors:
        refuse_unless(
            tensor.dim() == 2 and tensor.is_contiguous(),
            f"{name} walks dense rows, not {tuple(tensor.shape)}",
        )
        refuse_unless(
            tensor.shape[1] % _VECTOR == 0,
            f"{name}: rows of {tensor.shape[1]}, no multiple of {_VECTOR}",
        )


def _normed(name: str, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    width = rows.shape[1]
    refuse_unless(width <= _WIDEST_NORM, f"{name}: not emulated: rows of {width}")
    refuse_unless(
        weight.shape == (width,) and weight.is_contiguous(),
        f"{name}: weight {tuple(weight.shape)} for rows of {width}",
    )
    return rows * (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.float()


def rmsnorm2d_fwd(
    machine: Machine,
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    use_model_sensitive_rmsnorm: int = 0,
) -> Tensor:
    """Weighted before it is written."""
    name = "rmsnorm2d_fwd"
    machine.record(name)
    _rows(machine, name, input, weight[None])
    refuse_unless(use_model_sensitive_rmsnorm == 0, f"{name}: not emulated: T5's rounding")
    machine.compile(name, input.dtype)
    return _written(machine, _normed(name, input.float(), weight, epsilon), input.dtype)


def rmsnorm2d_fwd_with_add(
    machine: Machine,
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    """The sum is normed as it was before it was written."""
    name = "rmsnorm2d_fwd_with_add"
    machine.record(name)
    _rows(machine, name, out, input, residual_in, residual_out, weight[None])
    refuse_unless(
        not gemma_norm and use_model_sensitive_rmsnorm == 0,
        f"{name}: not emulated: other weights and roundings",
    )
    shapes = {tuple(tensor.shape) for tensor in (out, input, residual_in, residual_out)}
    refuse_unless(len(shapes) == 1, f"{name}: shapes {sorted(shapes)}")
    machine.compile(name, input.dtype)
    total = input.float() + residual_in.float()
    normed = _normed(name, total, weight, epsilon)
    residual_out.copy_(_written(machine, total, input.dtype))
    out.copy_(_written(machine, normed, input.dtype))


def silu_and_mul(machine: Machine, out: Tensor, input: Tensor, limit: float = 0.0) -> None:
    """`silu` of the first half of a row times the second."""
    refuse_unless(limit == 0, "silu_and_mul: not emulated: a limit")
    _gated(machine, "silu_and_mul", out, input, "silu")


def gelu_tanh_and_mul(machine: Machine, out: Tensor, input: Tensor) -> None:
    """The tanh approximation of `gelu` of the first half of a row times the second."""
    _gated(machine, "gelu_tanh_and_mul", out, input, "gelu_tanh")


def _gated(machine: Machine, name: str, out: Tensor, input: Tensor, activation: str) -> None:
    machine.record(name)
    _rows(machine, name, out, input)
    refuse_unless(
        input.shape == (len(out), 2 * out.shape[1]),
        f"{name}: {tuple(input.shape)} to {tuple(out.shape)}",
    )
    machine.compile(name, input.dtype)
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(
        _written(
            machine,
            (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up,
            out.dtype,
        )
    )


def fused_qk_rope_reshape_and_cache(
    machine: Machine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    is_neox: bool,
    flash_layout: bool,
    apply_scale: bool = True,
    offs: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    output_zeros: bool = True,
    zeros_out: Tensor | None = None,
    upcast_operand: bool = False,
) -> tuple[Tensor, ...]:
    """Plain layout with `flash_layout`, else keys [blocks, heads, D/x, size, x] and values [blocks,
    heads, size/x, D, x].
    """
    name = "fused_qk_rope_reshape_and_cache"
    machine.record(name, flash_layout=flash_layout)
    dtype = machine.activation(name, q, k, v)
    stored = (torch.bfloat16, torch.float32) if machine.allow_float32 else (torch.bfloat16,)
    ours = key_cache.dtype == value_cache.dtype == dtype and dtype in stored
    refuse_unless(
        ours, f"{name}: not emulated, or refused from 0.1.15.post1 on: {dtype} to {key_cache.dtype}"
    )
    others = (k_scale, v_scale, offs, q_out, k_out, zeros_out)
    refuse_unless(
        is_neox and all(other is None for other in others), f"{name}: not emulated: other options"
    )
    rows, heads, dim = q.shape
    refuse_unless(
        k.shape == v.shape and k.shape[::2] == (rows, dim) and heads % k.shape[1] == 0,
        f"{name}: shapes do not fit",
    )
    assert dim & (dim - 1) == 0, "D dimension should be power of 2"
    refuse_unless(
        slot_mapping.shape == (rows,), f"{name}: {tuple(slot_mapping.shape)} slots for {rows} rows"
    )
    refuse_unless(
        pos.dtype == torch.int64 and pos.shape == (rows,),
        f"{name}: positions {pos.dtype} {tuple(pos.shape)}",
    )
    refuse_unless(
        cos.stride() == sin.stride() and cos.shape == sin.shape,
        f"{name} walks sines with the strides of cosines",
    )
    refuse_unless(
        cos.shape[1:] == (dim // 2,), f"{name}: angles {tuple(cos.shape)} for heads of {dim}"
    )
    refuse_unless(
        all(0 <= position < len(cos) for position in host(pos)),
        f"{name}: position outside the table of angles",
    )
    machine.compile(name, dtype, heads, k.shape[1], dim, key_cache.shape)
    wide = torch.float32 if upcast_operand else dtype
    c, s = (torch.cat([part, part], dim=-1)[:, None].to(wide) for part in (cos[pos], sin[pos]))

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return (x * c + torch.cat([-high, low], dim=-1) * s).to(dtype)

    query, key = rotated(q), torch.full_like(k, torch.nan, memory_format=torch.contiguous_format)
    turned, kv_heads = rotated(k), k.shape[1]
    x = shuffle_width(key_cache)
    if flash_layout:
        blocks, size, _, _ = key_cache.shape
    else:
        blocks, _, _, size, _ = key_cache.shape
    shapes = (
        ((blocks, size, kv_heads, dim),) * 2
        if flash_layout
        else ((blocks, kv_heads, dim // x, size, x), (blocks, kv_heads, size // x, dim, x))
    )
    refuse_unless(
        (key_cache.shape, value_cache.shape) == shapes,
        f"{name}: the cache is {tuple(key_cache.shape)}",
    )
    for row, slot in enumerate(_slots(name, slot_mapping, rows, blocks * size)):
        if slot < 0:  # of such a row the key is not even returned
            continue
        key[row] = turned[row]
        block, token = divmod(slot, size)
        if flash_layout:
            key_cache[block, token], value_cache[block, token] = turned[row], v[row]
        else:
            key_cache[block, :, :, token] = turned[row].view(kv_heads, dim // x, x)
            value_cache[block, :, token // x, :, token % x] = v[row]
    zeros = (torch.empty_like(q),) if output_zeros else ()
    return query, key, key_cache, value_cache, *zeros
