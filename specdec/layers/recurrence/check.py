"""The self-check of the kernels of recurrent layers; see `specdec.layers.ops.fused` for those of
the others.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.deviation import Deviation, deviation, normal, worst
from specdec.kernels.kernel import FLOATS, Kernel
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows

EPSILON = 1e-6
MAX_ROWS = 4
"""Most rows of a step with drafts."""


def check_recurrence(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Prompts row by row and by chunks, steps with drafts and those after them, of all rules; short
    convolutions; gates.
    """
    return worst(
        [
            *_recurrence_deviations(device, dtype),
            *_convolution_deviations(device, dtype),
            *_gate_deviations(device, dtype),
        ]
    )


KERNEL = Kernel("recurrence", check_recurrence, dtypes=FLOATS)


def _recurrence_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.recurrence.triton_recurrence import MAX_SERIAL, recur  # it imports Triton

    for kind, value_dim in (("delta", 128), ("plain", 64), ("keys", 32)):
        here = _layer(kind, value_dim, dtype)
        there = _moved(here, device)
        for prompt in (5, MAX_SERIAL + 6):
            # A prompt, a step of which half is accepted, one that takes that in, and one more.
            steps = ((prompt, prompt), (MAX_ROWS, 2), (MAX_ROWS, 4), (1, 1))
            lengths = prompt + 7, prompt + 7
            inputs = [
                normal(length + i, here.width)[:length].to(dtype)
                for i, length in enumerate(lengths)
            ]
            caches = [_cache(here, dtype, device), _cache(here, dtype, device)]
            done = 0
            for count, accepted in steps:
                x = torch.cat([one[done : done + count] for one in inputs])
                rows = _rows(device, done, count, final=accepted == count and count != MAX_ROWS)
                out = recur(x.to(device), there, caches[0], rows)
                rows.finish(caches[0].lengths)
                for i, one in enumerate(inputs):
                    taken = one[: done + count]
                    plain, exact = (
                        _serially(layer, taken.to(wide))
                        for layer, wide in ((here, dtype), (_doubled(here), torch.float64))
                    )
                    got = out[i * count : (i + 1) * count]
                    yield deviation(got, plain[0][done:], exact[0][done:])
                    if rows.final:
                        got = caches[0].state[2 - i].to(dtype)
                        yield deviation(got, plain[1].to(dtype), exact[1])
                done += accepted


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


def _doubled(one: Recurrence) -> Recurrence:
    return _moved(one, torch.float64)


def _cache(one: Recurrence, dtype: torch.dtype, device: torch.device) -> StateCache:
    """Three slots that hold what is no number."""
    shape = 3, one.num_value_heads, one.key_dim, one.value_dim
    state = torch.full(shape, float("nan"), device=device)
    inputs = torch.full(
        (3, one.taps - 1 + 2 * MAX_ROWS, one.width), float("nan"), dtype=dtype, device=device
    )
    return StateCache(state, inputs, torch.zeros(3, dtype=torch.int64, device=device))


def _rows(device: torch.device, start: int, count: int, *, final: bool) -> RecurrentRows:
    """Two requests, in slots 2 and 1."""
    slots, starts, counts = (
        torch.tensor(pair, device=device) for pair in ((2, 1), (start, start), (count, count))
    )
    first_rows = torch.tensor([0, count, 2 * count], dtype=torch.int32, device=device)
    return RecurrentRows(slots, starts, counts, first_rows, count, MAX_ROWS, final)


def _serially(one: Recurrence, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [length, heads * V] and the state of a sequence, in the type of `x` and float32 at
    least, written down once more.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, keys = len(x), one.num_key_heads * one.key_dim
    padded = F.pad(x[:, : one.channels].to(wide), (0, 0, one.taps - 1, 0))
    mixed = sum(padded[tap : tap + rows] * one.kernel[:, tap].to(wide) for tap in range(one.taps))
    mixed = mixed if one.kernel_bias is None else mixed + one.kernel_bias.to(wide)
    active = F.silu(torch.as_tensor(mixed).to(x.dtype)).to(wide)
    query, key = (
        part.unflatten(1, (one.num_key_heads, -1))
        for part in (active[:, :keys], active[:, keys : 2 * keys])
    )
    if one.rule == "delta":
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        query = query * one.key_dim**-0.5
    query, key = (
        part.repeat_interleave(one.num_value_heads // one.num_key_heads, dim=1)
        for part in (query, key)
    )
    value = active[:, 2 * keys :].unflatten(1, (one.num_value_heads, -1))
    gates = x[:, one.channels :]
    step = F.softplus(gates[:, -one.num_value_heads * one.decays :].to(wide) + one.time_bias)
    beta = (
        gates[:, : one.num_value_heads].sigmoid().to(wide) * one.beta_scale
        if one.rule == "delta"
        else step
    )
    decay = (-one.rate[:, None] * step.unflatten(1, (one.num_value_heads, one.decays))).exp()
    state = torch.zeros(one.num_value_heads, one.key_dim, one.value_dim, dtype=wide)
    outputs = []
    for row in range(rows):
        state = state * decay[row, ..., None]
        v_new = (
            value[row] - (state * key[row, ..., None]).sum(1) if one.rule == "delta" else value[row]
        )
        state = state + key[row, ..., None] * (v_new * beta[row, :, None])[:, None]
        outputs.append((state * query[row, ..., None]).sum(1))
    out = torch.stack(outputs)
    out = out if one.skip is None else out + one.skip[:, None] * value
    return out.flatten(1).to(x.dtype), state


def _convolution_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.recurrence.triton_short_convolution import FEW_ROWS, convolve

    width, taps = 1100, 3
    kernel, bias = (normal(width, taps) / 2).to(dtype), normal(width, 1)[:, 0].to(dtype)
    for prompt in (5, FEW_ROWS + 6):
        inputs = [normal(prompt + 7 + i, 3 * width)[: prompt + 7].to(dtype) for i in range(2)]
        shape = 3, taps - 1 + 2 * MAX_ROWS, width
        ring = torch.full(shape, float("nan"), dtype=dtype, device=device)
        cache = StateCache(
            torch.empty(3, 0, device=device), ring, torch.zeros(3, dtype=torch.int64, device=device)
        )
        done = 0
        for count, accepted in ((prompt, prompt), (MAX_ROWS, 2), (MAX_ROWS, 4), (1, 1)):
            x = torch.cat([one[done : done + count] for one in inputs])
            rows = _rows(device, done, count, final=count == prompt)
            out = convolve(x.to(device), kernel.to(device), bias.to(device), cache, rows)
            for i, one in enumerate(inputs):
                plain, exact = (
                    _gated_convolution(one.to(kind), kernel, bias)[done : done + count]
                    for kind in (dtype, torch.float64)
                )
                yield deviation(out[i * count : (i + 1) * count], plain, exact)
            done += accepted


def _gated_convolution(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """The convolution of a whole sequence, in the type of `x`; sums in float32 at least."""
    before, after, value = x.chunk(3, dim=1)
    wide, taps = torch.promote_types(x.dtype, torch.float32), kernel.shape[1]
    padded = F.pad((before * value).to(wide), (0, 0, taps - 1, 0))
    mixed = sum(
        padded[tap : tap + len(x)] * kernel[:, tap].to(wide) for tap in range(taps)
    ) + bias.to(wide)
    return after * mixed.to(x.dtype)


def _gate_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.ops.triton_gated_norm import gated_norm, sigmoid_gate

    for groups, width in ((32, 128), (2, 2048)):
        x, joined, weight = (
            normal(5, groups * width),
            normal(6, 2 * groups * width)[:5],
            normal(groups * width),
        )
        x, joined, weight = x.to(dtype), joined.to(dtype), weight.to(dtype)
        gate, near = joined[:, groups * width :], joined.to(device)[:, groups * width :]
        for first, sigmoid in ((False, False), (True, False), (False, True)):
            gain = weight if first else weight[:width]
            got = gated_norm(
                x.to(device),
                near,
                gain.to(device),
                EPSILON,
                width=width,
                gate_first=first,
                sigmoid=sigmoid,
            )
            plain = _gated_norm(x, gate, gain, width, first, sigmoid)
            yield deviation(
                got,
                plain,
                _gated_norm(x.double(), gate.double(), gain.double(), width, first, sigmoid),
            )
        yield deviation(
            sigmoid_gate(x.to(device), near),
            x * gate.sigmoid(),
            x.double() * gate.double().sigmoid(),
        )


def _gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, width: int, gate_first: bool, sigmoid: bool
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    opened = gate.to(wide).sigmoid() if sigmoid else F.silu(gate.to(wide))
    rows = (x.to(wide) * opened if gate_first else x.to(wide)).unflatten(1, (-1, width))
    normed = (rows * (rows.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype)
    out = (weight.view(-1, width) * normed).flatten(1)
    return (out if gate_first else out * opened).to(x.dtype)
