"""Recurrent layers against plain torch; where the kernels run, see
`tests.helpers.triton_interpreter`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.recurrence.recurrence import Recurrence
from specdec.layers.recurrence.recurrence import recur as oracle
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.recurrence_case import (
    EXPONENTIALS,
    NAN,
    World,
    at_once,
    exactly,
    forward_rows,
    layer,
    spoiled_cache,
)
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.layers.recurrence import triton_recurrence_inputs, triton_recurrence_ring  # noqa: E402
from specdec.layers.recurrence.triton_recurrence import MAX_SERIAL, recur, tile_for  # noqa: E402

LAYERS: dict[str, dict[str, Any]] = {
    "delta": {},
    "delta, odd sizes, reflecting": {
        "heads": (1, 3),
        "sizes": (12, 20),
        "taps": 2,
        "beta_scale": 2.0,
    },
    "decays by key": {"heads": (1, 2), "sizes": (12, 20), "decays_by_key": True},
    "plain": {"rule": "plain", "heads": (1, 2), "sizes": (16, 24)},
    "plain, two groups": {"rule": "plain", "heads": (2, 4), "sizes": (8, 4), "taps": 3},
}


def made(name: str, dtype: torch.dtype = torch.float32) -> Recurrence:
    """A layer of `LAYERS` on the device."""
    return layer(**LAYERS[name], dtype=dtype, device=DEVICE)


def sequences(one: Recurrence, *lengths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Inputs of so many rows each."""
    return [torch.randn(length, one.width).to(DEVICE, dtype) for length in lengths]


def check(one: Recurrence, x: Tensor, out: Tensor, state: Tensor | None = None) -> None:
    """Outputs, and a state that has taken in all rows, are as exact as plain torch's."""
    plain, exact = at_once(one, x), exactly(one, x)
    assert_as_exact(out, plain[0], exact[0], factor=EXPONENTIALS)
    if state is not None:
        assert_as_exact(state, plain[1], exact[1], factor=EXPONENTIALS)


@pytest.mark.parametrize(
    ("name", "seed"), [("delta", 0), ("decays by key", 1), ("plain, two groups", 2)]
)
def test_drafts_leave_no_trace(name: str, seed: int) -> None:
    """Whatever was drafted and rejected, outputs are those of the accepted tokens; slots and
    rejected rows held no numbers.
    """
    torch.manual_seed(seed)
    one = made(name)
    inputs = sequences(one, 15, 9, 18) if seed == 0 else sequences(one, 15, 9)
    most = 8 if seed == 0 else 4
    world = World(recur, one, inputs, max_rows=most, num_padding=seed % 3)
    for x, out in zip(
        inputs, world.finish(seed, max_prompt=11, drafts=(0, 1, 3, most - 1)), strict=True
    ):
        check(one, x, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["delta", "plain"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Rounded where plain torch rounds."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not round to bfloat16")
    torch.manual_seed(0)
    one = made(name, dtype)
    inputs = sequences(one, 17, dtype=dtype)
    (out,) = World(recur, one, inputs, max_rows=4).finish(3, max_prompt=6, drafts=(0, 1, 3))
    check(one, inputs[0], out)


@pytest.mark.parametrize(
    "name", ["delta, odd sizes, reflecting", "decays by key", "plain, two groups"]
)
def test_states_and_rings(name: str) -> None:
    """After a step with drafts a state is that before its rows; after a final one it has all; rings
    hold inputs by position.
    """
    torch.manual_seed(0)
    one = made(name)
    inputs = sequences(one, 22, 18)
    world = World(recur, one, inputs, max_rows=4)
    twin = World(oracle, one, inputs, max_rows=4)
    for counts, kept in (
        ([3, 2], None),
        ([4, 4], [1, 4]),
        ([3, 3], [3, 2]),
        ([1, 1], [1, 1]),
        ([4, 4], [4, 4]),
        ([3, 3], None),
    ):
        before = list(world.done)
        world.step(counts, kept)
        twin.step(counts, kept)
        for i, slot in enumerate(world.slots):
            x, done = inputs[i], world.done[i]
            taken = before[i] if kept else done
            assert int(world.cache.lengths[slot]) == taken
            assert_as_exact(
                world.cache.state[slot],
                at_once(one, x[:taken])[1],
                exactly(one, x[:taken])[1],
                factor=EXPONENTIALS,
            )
            columns = world.cache.inputs.shape[1]
            for position in range(max(0, taken - one.taps + 1), done):
                assert world.cache.inputs[slot, position % columns].equal(x[position])
    assert world.done[0] > world.cache.inputs.shape[1], "the ring has gone round"
    assert world.cache.inputs.nan_to_num().equal(twin.cache.inputs.nan_to_num())


def test_every_number_of_rows_and_of_pending_ones() -> None:
    """Up to the largest step, the oracle's outputs for each; the number that is accepted makes no
    difference to the bits.
    """
    torch.manual_seed(0)
    one = made("delta")
    (x,) = sequences(one, 19)
    alone = World(recur, one, [x], max_rows=1)
    for _ in range(19):
        alone.step([1])
    whole = torch.cat(alone.outputs[0])
    for pending, count in ((1, 8), (5, 1), (8, 8)):
        world = World(recur, one, [x])
        world.step([3])
        world.step([8], [pending])
        world.step([count], [count])
        assert torch.cat(world.outputs[0]).equal(whole[: 3 + pending + count])


@pytest.mark.parametrize("name", ["delta", "plain"])
def test_bits_do_not_depend_on_company(name: str) -> None:
    """A request decoded row by row and alone has the very numbers that it has among others, among
    drafts and in pieces.
    """
    torch.manual_seed(0)
    one = made(name)
    inputs = sequences(one, 12, 7, 9)
    together = World(recur, one, inputs, max_rows=4, num_padding=1)
    outputs = together.finish(7, max_prompt=6, drafts=(0, 1, 3))
    for i, x in enumerate(inputs[:2]):
        alone = World(recur, one, [x], max_rows=4, extra=0)
        for _ in x:
            alone.step([1])
        assert torch.cat(alone.outputs[0]).equal(outputs[i])


@pytest.mark.parametrize(
    ("name", "pieces"),
    [("delta", (1, 2, 3, 33)), ("delta", (39,)), ("plain", (1, 2, 3, 33)), ("plain", (20, 19))],
)
def test_prompts_in_pieces(name: str, pieces: tuple[int, ...]) -> None:
    """Cut anywhere, longer than the ring or not, with rows behind them that only pad."""
    torch.manual_seed(0)
    one = made(name)
    inputs = sequences(one, 39, 50)
    world = World(recur, one, inputs, padding=2, max_rows=4)
    for piece in pieces:
        world.step([piece, piece + 1 if piece > 3 else 0])
    world.step([0, 3], [0, 2])
    for i, x in enumerate(inputs):
        check(one, x[: world.done[i]], torch.cat(world.outputs[i]))
    slot, done = world.slots[0], world.done[0]
    for position in range(done - one.taps + 1, done):
        assert world.cache.inputs[slot, position % world.cache.inputs.shape[1]].equal(
            inputs[0][position]
        )
    check(one, inputs[0], torch.cat(world.outputs[0]), world.cache.state[slot])


def test_request_without_rows_of_its_own() -> None:
    """Rows that only pad take in nothing, and those before them are taken in all the same."""
    torch.manual_seed(0)
    one = made("delta")
    (x,) = sequences(one, 12)
    for final in (False, True):
        world = World(recur, one, [x])
        world.step([5])
        world.step([4], [3])
        rows = forward_rows(
            [world.slots[0]], [8], [0], DEVICE, max_pending=8, final=final, padding=2
        )
        out = recur(torch.full((2, one.width), NAN, device=DEVICE), one, world.cache, rows)
        assert not out.any()
        assert_as_exact(
            world.cache.state[world.slots[0]],
            at_once(one, x[:8])[1],
            exactly(one, x[:8])[1],
            factor=EXPONENTIALS,
        )


def test_real_size() -> None:
    """Heads of 128, with the tile of the table."""
    torch.manual_seed(0)
    one = layer(sizes=(128, 128), device=DEVICE)
    inputs = sequences(one, 5)
    world = World(recur, one, inputs)
    world.step([2])
    world.step([2], [1])
    world.step([2])
    check(one, inputs[0], torch.cat(world.outputs[0]), world.cache.state[world.slots[0]])


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(16, 8), (256, 256), (64, 128), (12, 20), (128, 64)]
)
def test_tiles(key_dim: int, value_dim: int) -> None:
    """A power of two of columns, no more than there are, and not too many numbers per thread."""
    tile = tile_for(key_dim, value_dim)
    assert tile.columns & (tile.columns - 1) == 0 and tile.columns < 2 * value_dim
    assert tile.columns * key_dim <= 2048 * tile.num_warps and MAX_SERIAL >= 32


def test_no_host_wait() -> None:
    """Nothing on the host asks the device for a number."""
    one = made("delta")
    (x,) = sequences(one, 4)
    rows = forward_rows([1], [0], [4], DEVICE, max_pending=4, final=False)
    cache = spoiled_cache(one, 2, 4, x.dtype, DEVICE)
    with no_host_sync() if DEVICE.type == "cuda" else torch.inference_mode():
        recur(x, one, cache, rows)


@pytest.mark.parametrize("count", [1, 4, 8, 9, 40])
def test_what_is_read_is_not_overwritten(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs, which run in any order, put rows into the ring only if none of its columns has two
    of the positions in use.
    """
    kept = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: kept.append(options.get("KEEPS"))

    monkeypatch.setattr(triton_recurrence_inputs, "_inputs_kernel", Recorder())
    monkeypatch.setattr(triton_recurrence_ring, "_keep_kernel", Recorder())
    one = made("delta")
    rows = forward_rows([0], [20], [count], DEVICE, max_pending=4, final=True)
    cache = spoiled_cache(one, 1, 6, torch.float32, DEVICE)
    triton_recurrence_inputs.prepare(torch.zeros(count, one.width, device=DEVICE), one, cache, rows)
    used = [
        position % cache.inputs.shape[1] for position in range(20 - 4 - one.taps + 1, 20 + count)
    ]
    alone = len(used) == len(set(used))
    assert kept == ([True] if alone else [False, None])
