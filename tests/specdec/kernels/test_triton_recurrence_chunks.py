"""Prompts of recurrent layers by chunks, against row after row; see
`tests.helpers.triton_interpreter`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.recurrence.recurrence import Recurrence
from tests.helpers.bounds import assert_as_exact
from tests.helpers.recurrence_case import EXPONENTIALS, World, at_once, exactly, layer
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.layers.recurrence import triton_recurrence  # noqa: E402 (only where Triton can run)
from specdec.layers.recurrence.triton_recurrence import recur  # noqa: E402

LAYERS: dict[str, dict[str, Any]] = {
    "delta": {"heads": (1, 2), "sizes": (16, 24)},
    "delta, odd sizes, reflecting": {
        "heads": (2, 2),
        "sizes": (12, 40),
        "taps": 2,
        "beta_scale": 2.0,
    },
    "plain": {"rule": "plain", "heads": (1, 2), "sizes": (20, 8)},
    "decays by key": {"heads": (1, 2), "sizes": (12, 24), "decays_by_key": True},
    "decays by key, one head": {"heads": (1, 1), "sizes": (16, 24), "decays_by_key": True},
    "delta, one head": {"heads": (1, 1), "sizes": (16, 24)},
    "plain, one head": {"rule": "plain", "heads": (1, 1), "sizes": (20, 8)},
}
LENGTHS = {
    "delta": (1, 64, 150),
    "delta, odd sizes, reflecting": (65,),
    "plain": (63, 150),
    "decays by key": (64, 65),
}


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What final steps of any number of rows were taken in by."""
    taken = []
    for name in ("take_in_chunks", "take_serially"):
        take = getattr(triton_recurrence, name)

        def noted(*args: Any, take: Any = take, name: str = name) -> None:
            taken.append(name)
            take(*args)

        monkeypatch.setattr(triton_recurrence, name, noted)
    monkeypatch.setattr(triton_recurrence, "MAX_SERIAL", 0)
    return taken


def made(name: str, dtype: torch.dtype = torch.float32) -> Recurrence:
    """A layer of `LAYERS` on the device."""
    return layer(**LAYERS[name], dtype=dtype, device=DEVICE)


def random(one: Recurrence, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs of so many rows, some of which are alike, which makes triangular systems hard."""
    x = torch.randn(length, one.width)
    x[length // 3 : length // 2] = x[length // 3]
    return x.to(DEVICE, dtype)


def check(one: Recurrence, x: Tensor, out: Tensor, state: Tensor) -> None:
    """As exact as plain torch."""
    plain, exact = at_once(one, x), exactly(one, x)
    assert_as_exact(out, plain[0], exact[0], factor=EXPONENTIALS)
    # States are float32, of inputs that are rounded.
    assert_as_exact(state.to(x.dtype), plain[1].to(x.dtype), exact[1], factor=EXPONENTIALS)


@pytest.mark.parametrize(
    ("name", "length"), [(name, length) for name, lengths in LENGTHS.items() for length in lengths]
)
def test_any_length(name: str, length: int, chunked: list[str]) -> None:
    """Full chunks and others."""
    torch.manual_seed(length)
    one = made(name)
    x = random(one, length)
    check(one, x, *at_once(one, x, recur))
    assert chunked == ["take_in_chunks"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["delta", "decays by key", "plain"])
def test_half_precision(
    name: str, dtype: torch.dtype, chunked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States keep the digits of float32, which a product of numbers in the model's type alone would
    not.
    """
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not round to bfloat16")
    torch.manual_seed(0)
    one = made(name, dtype)
    x = random(one, 70, dtype)
    out, state = at_once(one, x, recur)
    check(one, x, out, state)
    monkeypatch.setattr(triton_recurrence, "MAX_SERIAL", 70)
    by_rows = at_once(one, x, recur)[1]
    assert (state - by_rows).norm() < 2**-14 * by_rows.norm() * (
        8 if dtype == torch.bfloat16 else 0.25
    )


@pytest.mark.parametrize("name", ["decays by key, one head", "plain, one head"])
def test_ragged_prompts_behind_drafts(name: str, chunked: list[str]) -> None:
    """Requests of several lengths, cut anywhere, with rows that wait from a step with drafts, rows
    that pad and whole requests.
    """
    torch.manual_seed(1)
    one = made(name)
    inputs = [random(one, length) for length in (40, 110, 40)]
    world = World(recur, one, inputs, max_rows=4, num_padding=1, padding=3)
    world.step([3, 70, 1])
    world.step([4, 4, 4], [3, 1, 4])
    world.step([30, 34, 0])
    world.step([4, 4, 4], [4, 1, 2])
    world.step([0, 4, 33])
    assert chunked.count("take_in_chunks") == 3 and world.done == [40, 110, 40]
    # its last four wait
    check(one, inputs[0], torch.cat(world.outputs[0]), at_once(one, inputs[0])[1])
    for i in (1, 2):
        check(one, inputs[i], torch.cat(world.outputs[i]), world.cache.state[world.slots[i]])


@pytest.mark.parametrize(
    ("pieces", "others"),
    [([(140, 0)], [(64, 9), (76, 31)]), ([(70, 0), (70, 9)], [(70, 0), (58, 30), (12, 10)])],
)
def test_cut_between_chunks(
    pieces: list[tuple[int, int]], others: list[tuple[int, int]], chunked: list[str]
) -> None:
    """A prompt that is cut at a multiple of 64 has the same bits, whatever is beside it and
    wherever it was cut before.
    """
    torch.manual_seed(2)
    one = made("delta, one head")
    inputs = [random(one, 140), random(one, 40)]
    worlds = [World(recur, one, inputs, max_rows=2) for _ in "ab"]
    for world, cuts in zip(worlds, (pieces, others), strict=True):
        for counts in cuts:
            world.step(list(counts))
    first, second = (torch.cat(world.outputs[0]) for world in worlds)
    assert first.equal(second)
    first, second = (world.cache.state[world.slots[0]] for world in worlds)
    assert first.equal(second)


def test_which_steps_are_chunked(chunked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Final ones of many rows, and no others; both agree."""
    monkeypatch.setattr(triton_recurrence, "MAX_SERIAL", 64)
    torch.manual_seed(3)
    one = made("delta")
    x = random(one, 70)
    by_chunks = at_once(one, x, recur)
    monkeypatch.setattr(triton_recurrence, "MAX_SERIAL", 70)
    by_rows = at_once(one, x, recur)
    assert chunked == ["take_in_chunks", "take_serially"]
    for got, expected, exact in zip(by_chunks, by_rows, exactly(one, x), strict=True):
        assert_as_exact(got, expected, exact, factor=4)
    world = World(recur, one, [x], max_rows=70)
    world.step([70], [3])
    assert chunked[2:] == ["take_serially"]


def test_decays_that_leave_nothing(chunked: list[str]) -> None:
    """Catches an exponential that grows with the rows of a chunk, which no float32 holds then."""
    torch.manual_seed(5)
    one = made("decays by key, one head")
    one = replace(one, rate=one.rate * 40)
    x = random(one, 70)
    check(one, x, *at_once(one, x, recur))


def test_real_size(chunked: list[str]) -> None:
    """Heads of 128, several programs per head."""
    torch.manual_seed(4)
    one = layer(heads=(1, 1), sizes=(128, 128), device=DEVICE)
    x = random(one, 100)
    check(one, x, *at_once(one, x, recur))
