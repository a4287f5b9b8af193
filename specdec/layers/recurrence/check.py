"""The self-check of the kernels of recurrent layers; see `specdec.layers.ops.fused` for those of
the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.device.deviation import Deviation, deviation, normal, worst
from specdec.kernels.kernel import FLOATS, Kernel
from specdec.kv_cache.state import StateCache
from specdec.layers.ops.norm import GroupNorm, gated_norm
from specdec.layers.recurrence.convolution import convolve
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows, recur

EPSILON = 1e-6
MAX_ROWS = 4
"""Most rows of a step with drafts."""


def check_recurrence(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Prompts row by row and by chunks, steps with drafts and those after them, of all rules; short
    convolutions; gates.
    """
    deviations = [
        *_recurrence_deviations(device, dtype),
        *_convolution_deviations(device, dtype),
        *_gate_deviations(device, dtype),
    ]
    return worst(deviations)


KERNEL = Kernel("recurrence", check_recurrence, dtypes=FLOATS)


def _recurrence_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.recurrence import triton_recurrence  # it imports Triton

    for kind, value_dim in (("delta", 128), ("plain", 64), ("keys", 32)):
        here = _layer(kind, value_dim, dtype)
        there, wide = _moved(here, device), _moved(here, torch.float64)
        for prompt in (5, triton_recurrence.MAX_SERIAL + 6):
            inputs = _inputs(prompt, here.width, dtype)
            shapes = (here.num_value_heads, here.key_dim, here.value_dim), here.taps, here.width
            one_by_one = partial(recur, max_serial=inputs.shape[1] + MAX_ROWS)
            yield from _deviations(
                _walk(partial(triton_recurrence.recur, recurrence=there), inputs, shapes, device),
                _walk(partial(one_by_one, recurrence=here), inputs, shapes),
                _walk(partial(one_by_one, recurrence=wide), inputs.double(), shapes),
            )


def _inputs(prompt: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows [2, length, width] of a prompt and of the steps after it, of two requests."""
    pair = (normal(prompt + 7 + i, width)[: prompt + 7] for i in range(2))
    return torch.stack([*pair]).to(dtype)


def _walk(
    run: Callable[..., Tensor],
    inputs: Tensor,
    shapes: tuple[tuple[int, ...], int, int],
    device: torch.device | None = None,
) -> Iterator[Tensor]:
    """What a layer makes of rows step by step, and the states that it leaves where all rows stay: a
    prompt, a step of which half is accepted, one that takes that in, and one more.

    Args:
        run: the layer.
        inputs: see `_inputs`.
        shapes: of a state, and the taps and the width of its ring.
        device: where to run; None for the CPU.
    """
    (state, taps, width), inputs = shapes, inputs.to(device or "cpu")
    wide = torch.promote_types(inputs.dtype, torch.float32)
    cache = StateCache(  # three slots that hold what is no number
        inputs.new_full((3, *state), float("nan"), dtype=wide),
        inputs.new_full((3, taps - 1 + 2 * MAX_ROWS, width), float("nan")),
        inputs.new_zeros(3, dtype=torch.int64),
    )
    done, prompt = 0, inputs.shape[1] - 7
    for count, accepted in ((prompt, prompt), (MAX_ROWS, 2), (MAX_ROWS, 4), (1, 1)):
        rows = _rows(inputs.device, done, count, final=count != MAX_ROWS)
        yield run(inputs[:, done : done + count].flatten(0, 1), cache=cache, rows=rows)
        rows.finish(cache.lengths)
        if rows.final and state:
            yield cache.state[1:].to(inputs.dtype)
        done += accepted


def _deviations(*walks: Iterator[Tensor]) -> Iterator[Deviation]:
    """How far a kernel's results are off, beside those of plain torch and the exact ones."""
    return (deviation(*results) for results in zip(*walks, strict=True))


def _layer(kind: str, value_dim: int, dtype: torch.dtype) -> Recurrence:
    """One key head and two value heads of real size, whose states forget at usual speeds; "keys" is
    "delta" with their decays.
    """
    channels = 2 * 128 + 2 * value_dim
    plain, by_key = kind == "plain", kind == "keys"
    return Recurrence(
        1,
        2,
        128,
        value_dim,
        kernel=(normal(channels, 4) / 2).to(dtype),
        kernel_bias=(normal(channels) / 4).to(dtype) if plain else None,
        rate=normal(2).abs() + 0.1,
        time_bias=(normal(1, 2 * 128 if by_key else 2)[0] - 2).to(dtype),
        rule="plain" if plain else "delta",
        skip=normal(2, 1)[:, 0] if plain else None,
        decays_by_key=by_key,
    )


def _moved(one: Recurrence, where: torch.device | torch.dtype) -> Recurrence:
    names = ("kernel", "kernel_bias", "rate", "time_bias", "skip")
    tensors = {name: value for name in names if (value := getattr(one, name)) is not None}
    moved: dict[str, Any] = {name: value.to(where) for name, value in tensors.items()}
    return replace(one, **moved)


def _rows(device: torch.device, start: int, count: int, *, final: bool) -> RecurrentRows:
    """Two requests, in slots 2 and 1."""
    pairs = ((2, 1), (start, start), (count, count))
    slots, starts, counts = (torch.tensor(pair, device=device) for pair in pairs)
    first_rows = torch.tensor([0, count, 2 * count], dtype=torch.int32, device=device)
    return RecurrentRows(slots, starts, counts, first_rows, count, MAX_ROWS, final)


def _convolution_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.recurrence import triton_short_convolution as kernels  # it imports Triton

    width, taps = 1100, 3
    kernel, bias = (normal(width, taps) / 2).to(dtype), normal(width, 1)[:, 0].to(dtype)

    def bound(
        run: Callable[..., Tensor], where: torch.device | torch.dtype
    ) -> Callable[..., Tensor]:
        return partial(run, kernel=kernel.to(where), bias=bias.to(where))

    for prompt in (5, kernels.FEW_ROWS + 6):
        inputs, shapes = _inputs(prompt, 3 * width, dtype), ((), taps, width)
        yield from _deviations(
            _walk(bound(kernels.convolve, device), inputs, shapes, device),
            _walk(bound(convolve, dtype), inputs, shapes),
            _walk(bound(convolve, torch.float64), inputs.double(), shapes),
        )


def _gate_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.ops import triton_gated_norm as kernels  # it imports Triton

    for groups, width in ((32, 128), (2, 2048)):
        shapes = (5, groups * width), (6, 2 * groups * width), (1, groups * width)
        x, joined, weight = (normal(*shape).to(dtype) for shape in shapes)
        gate, near = (
            part[:5, groups * width :] for part in (joined, joined.to(device))
        )  # of wider rows
        for first, sigmoid in ((False, False), (True, False), (False, True)):
            own = weight[0] if first else weight[0, :width]
            norm = GroupNorm(own, EPSILON, width, first, sigmoid)
            there = norm._replace(weight=norm.weight.to(device))._asdict()
            wide = norm._replace(weight=norm.weight.double())
            yield deviation(
                kernels.gated_norm(x.to(device), near, **there),
                gated_norm(x, gate, norm),
                gated_norm(x.double(), gate.double(), wide),
            )
        opened = kernels.sigmoid_gate(x.to(device), near)
        yield deviation(opened, x * gate.sigmoid(), x.double() * gate.double().sigmoid())
