"""The recurrence of linear attention: what steps leave in a state is what one token after another
would have left.
"""

import random
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from specdec.kv_cache import StateCache, StateLayerSpec
from specdec.layers.recurrence import recurrence as module
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows, recur

MAX_ROWS = 8
Kind = Literal["delta", "keys", "plain"]
# Widths that vectors divide, so that no number is computed by another code for its place in memory.
HEADS, KEY_DIM, VALUE_DIM = (8, 16), 16, 32


def random_recurrence(kind: Kind, dtype: torch.dtype, *, seed: int = 0) -> Recurrence:
    """ "keys" is the delta rule with a decay for each key channel."""
    generator = torch.Generator().manual_seed(seed)
    key_heads, value_heads = HEADS
    channels = 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    by_key, plain = kind == "keys", kind == "plain"
    return Recurrence(
        key_heads,
        value_heads,
        KEY_DIM,
        VALUE_DIM,
        kernel=(normal(channels, 4) / 2).to(dtype),
        kernel_bias=normal(channels).to(dtype) if plain else None,
        rate=normal(value_heads).exp(),
        time_bias=normal(value_heads * (KEY_DIM if by_key else 1)).to(dtype),
        rule="plain" if plain else "delta",
        skip=normal(value_heads) if plain else None,
        decays_by_key=by_key,
    )


def state_cache(one: Recurrence, dtype: torch.dtype, num_slots: int) -> StateCache:
    """A cache in which others have left values that are no numbers."""
    spec = StateLayerSpec(
        one.width, one.taps, one.num_value_heads, one.key_dim, one.value_dim, dtype
    )
    cache = spec.allocate_slots(MAX_ROWS, torch.full((num_slots,), 5))
    cache.state.fill_(float("nan"))
    cache.inputs.fill_(float("nan"))
    return cache


def rows_of(
    slots: list[int], starts: list[int], counts: list[int], *, final: bool, pending: int = MAX_ROWS
) -> RecurrentRows:
    first = torch.tensor([0, *counts]).cumsum(0).int()
    return RecurrentRows(
        torch.tensor(slots),
        torch.tensor(starts),
        torch.tensor(counts),
        first,
        max(counts),
        pending,
        final,
    )


def run(x: Tensor, one: Recurrence, cache: StateCache, rows: RecurrentRows) -> Tensor:
    out = recur(x, one, cache, rows)
    rows.finish(cache.lengths)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["delta", "keys", "plain"])
def test_steps_equal_tokens_one_by_one_to_the_bit(kind: Kind, dtype: torch.dtype) -> None:
    """Outputs and states over steps of 0 to 7 drafts of two requests, of which any number is
    rejected.
    """
    one, length, chance = random_recurrence(kind, dtype), 60, random.Random(1)
    texts = torch.randn(2, length, one.width + 3).to(dtype)
    alone = state_cache(one, dtype, 2)
    states: list[list[Tensor]] = [[], []]
    expected: list[list[Tensor]] = [[], []]
    for text in range(2):
        for place in range(length):
            rows = rows_of([text], [place], [1], final=True)
            expected[text].append(run(texts[text, place : place + 1], one, alone, rows)[0])
            states[text].append(alone.state[text].clone())
    cache, slots, lengths = state_cache(one, dtype, 4), [2, 0], [9, 4]
    prompt = torch.cat([texts[0, :9], texts[1, :4]])
    out = run(prompt, one, cache, rows_of(slots, [0, 0], lengths, final=True, pending=0))
    assert torch.equal(out, torch.stack(expected[0][:9] + expected[1][:4]))
    while max(lengths) < length - MAX_ROWS:
        k = chance.choice([0, 1, 3, 7])
        accepted = [chance.randint(0, k) for _ in slots]
        pieces = []
        for text, (start, kept) in enumerate(zip(lengths, accepted, strict=True)):
            piece = texts[text, start : start + k + 1].clone()
            piece[kept + 1 :] = float("inf")  # rejected rows
            pieces.append(piece)
        out = run(
            torch.cat(pieces), one, cache, rows_of(slots, lengths, [k + 1] * 2, final=k == 0)
        ).view(2, k + 1, -1)
        for text, (slot, start, kept) in enumerate(zip(slots, lengths, accepted, strict=True)):
            assert torch.equal(
                out[text, : kept + 1], torch.stack(expected[text][start : start + kept + 1])
            )
            taken = start + 1 if k == 0 else start
            assert cache.lengths[slot] == taken
            assert torch.equal(cache.state[slot], states[text][taken - 1])
        lengths = [start + kept + 1 for start, kept in zip(lengths, accepted, strict=True)]


@pytest.mark.parametrize("kind", ["delta", "keys", "plain"])
def test_prompts_in_pieces(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and cut anywhere, beside each other, in chunks: as exact as one token after another in
    float32 is.
    """
    monkeypatch.setattr(module, "CHUNK", 16)
    one, length = random_recurrence(kind, torch.float32), 150
    text = torch.randn(length, one.width)

    def serial(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        state, taken = torch.zeros(1, HEADS[1], KEY_DIM, VALUE_DIM, dtype=dtype), inputs(dtype)
        live = torch.ones(1, length, dtype=torch.bool)
        out, end, _ = module._serially(state, taken, live, torch.tensor([-1]), one.rule)
        return out + (0 if one.skip is None else one.skip[:, None] * taken.value), end

    def inputs(dtype: torch.dtype) -> Any:
        window = torch.cat([torch.zeros(3, one.width), text])[None]
        taken = module._inputs(window, one, torch.ones(1, length, dtype=torch.bool))
        return type(taken)(*(part.to(dtype) for part in taken))

    exact, end = serial(torch.float64)
    plain, plain_end = serial(torch.float32)
    for cuts in ([0, 150], [0, 1, 64, 130, 150], [0, 40, 77, 150]):
        cache = state_cache(one, torch.float32, 3)
        outputs = []
        for start, stop in pairwise(cuts):
            beside = torch.randn(37, one.width)
            rows = rows_of([1, 2], [start, 0], [stop - start, 37], final=True, pending=0)
            outputs.append(
                run(torch.cat([text[start:stop], beside]), one, cache, rows)[: stop - start]
            )
        got = torch.cat(outputs).view(exact.shape)
        for actual, reference, truth in ((got, plain, exact), (cache.state[1:2], plain_end, end)):
            error, allowed = (actual - truth).abs().max(), (reference - truth).abs().max()
            assert error <= 8 * allowed + 1e-6 * truth.abs().max()


def test_rows_that_pad_change_nothing() -> None:
    """Catches a prompt's padding that comes into its state."""
    one = random_recurrence("delta", torch.float32)
    text = torch.randn(2, 40, one.width)
    text[0, 25:] = float("nan")
    rows = rows_of([0, 1], [0, 0], [40, 40], final=True, pending=0)._replace(
        counts=torch.tensor([25, 40])
    )
    padded, exact = state_cache(one, torch.float32, 2), state_cache(one, torch.float32, 2)
    out = run(text.flatten(0, 1), one, padded, rows)
    expected = run(
        torch.cat([text[0, :25], text[1]]),
        one,
        exact,
        rows_of([0, 1], [0, 0], [25, 40], final=True, pending=0),
    )
    torch.testing.assert_close(torch.cat([out[:25], out[40:]]), expected)
    torch.testing.assert_close(padded.state, exact.state)
    assert padded.lengths.tolist() == [25, 40]
    columns = padded.inputs.shape[1]
    for place in (22, 23, 24):
        assert torch.equal(padded.inputs[0, place % columns], text[0, place])
