"""Writers of the paged cache, and the layouts that the kernels read."""

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import Machine, host, refuse_unless, tensor_scale


def shuffle_width(tensor: Tensor) -> int:
    """Elements in 16 bytes: the innermost dimension of the shuffled layout."""
    return 16 // tensor.element_size()


def plain_view(
    name: str, key_cache: Tensor, value_cache: Tensor, *, shuffled: bool
) -> tuple[Tensor, Tensor]:
    """Copies of both caches as [blocks, block_size, kv_heads, D], whatever the layout."""
    if not shuffled:
        refuse_unless(
            key_cache.dim() == 4 and key_cache.shape == value_cache.shape,
            f"{name} reads [blocks, tokens, heads, D]",
        )
        return key_cache, value_cache
    refuse_unless(
        key_cache.dim() == value_cache.dim() == 5, f"{name} reads the 5-dimensional shuffled layout"
    )
    x = shuffle_width(key_cache)
    blocks, heads, dim_x, size, last = key_cache.shape
    refuse_unless(last == x, f"{name}: innermost dimension {last}, not {x}")
    refuse_unless(
        value_cache.shape == (blocks, heads, size // x, dim_x * x, x),
        f"{name}: values {tuple(value_cache.shape)} do not fit keys {tuple(key_cache.shape)}",
    )
    key = key_cache.permute(0, 3, 1, 2, 4).reshape(blocks, size, heads, dim_x * x)
    value = value_cache.permute(0, 2, 4, 1, 3).reshape(blocks, size, heads, dim_x * x)
    return key, value


def _rows(
    machine: Machine,
    name: str,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    kind: str,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Key and value rows in the cache's type."""
    machine.needs_cdna(name)
    dtype = machine.activation(name, key, value)
    for tensor in (key, value):
        refuse_unless(
            tensor[0].is_contiguous() if len(tensor) else True,
            f"{name} walks each row as one dense [heads, D]",
        )
    if not machine.kv_is_fp8(name, dtype, cache):
        refuse_unless(
            kind == "auto", f"{name}: kv_cache_dtype {kind!r} on a cache of {cache.dtype}"
        )
        return key, value
    refuse_unless(kind in ("fp8", "fp8_e4m3"), f"{name}: kv_cache_dtype {kind!r} on an fp8 cache")
    stored = []
    for tensor, scale in zip((key, value), scales, strict=True):
        scaled = tensor.float() / tensor_scale(f"{name} scale", scale)
        if len(scaled):
            most = host(scaled.abs().amax().reshape(1))[0]
            refuse_unless(
                most <= torch.finfo(machine.fp8).max, f"{name}: {most} overflows {machine.fp8}"
            )
        stored.append(scaled.to(machine.fp8))
    return stored[0], stored[1]


def _slots(name: str, slot_mapping: Tensor, num_rows: int, num_slots: int) -> list[int]:
    refuse_unless(
        slot_mapping.dtype == torch.int64, f"{name}: slots are {slot_mapping.dtype}, not int64"
    )
    refuse_unless(
        slot_mapping.numel() <= num_rows,
        f"{name}: {slot_mapping.numel()} slots for {num_rows} rows",
    )
    slots: list[int] = host(slot_mapping)
    refuse_unless(all(slot < num_slots for slot in slots), f"{name}: slot past the cache")
    return slots


def reshape_and_cache_flash(
    machine: Machine,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Plain layout; both scales are read whatever the type."""
    name = "reshape_and_cache_flash"
    machine.record(name)
    refuse_unless(
        key_cache.stride(0) == value_cache.stride(0), f"{name} uses the keys' block stride for both"
    )
    refuse_unless(
        key_cache[0].is_contiguous() and value_cache[0].is_contiguous(),
        f"{name} needs dense blocks",
    )
    tensor_scale("k_scale", k_scale), tensor_scale("v_scale", v_scale)
    rows = _rows(machine, name, key, value, key_cache, kv_cache_dtype, (k_scale, v_scale))
    size = key_cache.shape[1]
    for row, slot in enumerate(_slots(name, slot_mapping, len(key), key_cache.shape[0] * size)):
        if slot >= 0:
            key_cache[slot // size, slot % size] = rows[0][row]
            value_cache[slot // size, slot % size] = rows[1][row]


def reshape_and_cache(
    machine: Machine,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    asm_layout: bool = False,
) -> None:
    """Keys [blocks, heads, D/x, size, x]; values the same way round with `asm_layout`, else
    [blocks, heads, D, size].
    """
    name = "reshape_and_cache"
    machine.record(name, asm_layout=asm_layout)
    x = shuffle_width(key_cache)
    blocks, heads, dim_x, size, last = key_cache.shape
    dim = dim_x * x
    value_shape = (blocks, heads, size // x, dim, x) if asm_layout else (blocks, heads, dim, size)
    refuse_unless(
        last == x and value_cache.shape == value_shape, f"{name}: cache shapes do not fit together"
    )
    refuse_unless(
        key_cache[0].is_contiguous() and value_cache[0].is_contiguous(),
        f"{name} needs dense blocks",
    )
    rows = _rows(machine, name, key, value, key_cache, kv_cache_dtype, (k_scale, v_scale))
    for row, slot in enumerate(_slots(name, slot_mapping, len(key), blocks * size)):
        if slot < 0:
            continue
        block, token = divmod(slot, size)
        key_cache[block, :, :, token] = rows[0][row].view(heads, dim_x, x)
        if asm_layout:
            value_cache[block, :, token // x, :, token % x] = rows[1][row]
        else:
            value_cache[block, :, :, token] = rows[1][row]
