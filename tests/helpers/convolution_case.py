"""Gated convolutions of requests that are run through in pieces and with drafts."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kv_cache import StateCache, StateLayerSpec
from tests.helpers.bounds import assert_as_exact
from tests.helpers.recurrence_case import NAN, forward_rows

MAX_ROWS = 8
WIDTH, TAPS = 12, 3
Convolve = Callable[..., Tensor]


def at_once(joined: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Of a whole sequence, in its own type."""
    before, after, value = joined.chunk(3, dim=1)
    return (
        after
        * F.conv1d(
            (before * value).mT[None], kernel[:, None], bias, padding=TAPS - 1, groups=WIDTH
        )[0, :, : len(joined)].mT
    )


def empty_cache(num_slots: int, dtype: torch.dtype, device: torch.device | str) -> StateCache:
    """A cache in which others have left what is no number."""
    spec = StateLayerSpec(WIDTH, TAPS, 0, 0, 0, dtype)
    cache = spec.allocate_slots(MAX_ROWS, torch.full((num_slots,), 7, device=device))
    cache.inputs.fill_(NAN)
    return cache


def weights(
    biased: bool, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """Random ones."""
    kernel, bias = (torch.randn(shape).to(device, dtype) for shape in ((WIDTH, TAPS), (WIDTH,)))
    return kernel, bias if biased else None


def check_steps(
    convolve: Convolve,
    device: Any,
    *,
    biased: bool,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> None:
    """Pieces of prompts, longer than the ring and not, and steps, as over the whole sequence at
    once; so many rows only pad.
    """
    torch.manual_seed(0)
    kernel, bias = weights(biased, dtype, device)
    texts = torch.randn(2, 160, 3 * WIDTH).to(device, dtype)
    doubles = kernel.double(), None if bias is None else bias.double()
    plain = [at_once(text, kernel, bias) for text in texts]
    exact = [at_once(text.double(), *doubles) for text in texts]
    cache, slots, done, chance = empty_cache(3, dtype, device), [2, 0], [0, 0], random.Random(0)
    some = [([k, k], [chance.randint(1, k) for _ in slots]) for k in (4, 1, 8, 8, 2, 5)]
    outputs: list[list[Tensor]] = [[], []]
    for counts, accepted in [
        ([9, 1], None),
        ([2, 20], None),
        *some,
        ([100, 1], None),
        ([8, 8], [3, 8]),
        ([1, 70], None),
    ]:
        kept = accepted or counts
        # so are rejected rows
        x = torch.full((sum(counts) + 2 * padding, 3 * WIDTH), NAN, dtype=dtype, device=device)
        rows = forward_rows(
            slots,
            done,
            counts,
            torch.device(device),
            max_pending=MAX_ROWS,
            final=accepted is None,
            padding=padding,
        )
        firsts = rows.first_rows.tolist()
        for text, first, start, count in zip(texts, firsts, done, kept, strict=False):
            x[first : first + count] = text[start : start + count]
        out = convolve(x, kernel, bias, cache, rows)
        rows.finish(cache.lengths)
        for parts, first, count in zip(outputs, firsts, kept, strict=False):
            parts.append(out[first : first + count])
        if padding:
            assert not any(out[end - padding : end].any() for end in firsts[1:]), (
                "rows that pad are zeros"
            )
        done = [start + count for start, count in zip(done, kept, strict=True)]
    for i, parts in enumerate(outputs):
        assert_as_exact(torch.cat(parts), plain[i][: done[i]], exact[i][: done[i]])
        for position in range(done[i] - TAPS + 1, done[i]):
            before, _, value = texts[i][position].chunk(3)
            assert cache.inputs[slots[i], position % cache.inputs.shape[1]].equal(before * value)
