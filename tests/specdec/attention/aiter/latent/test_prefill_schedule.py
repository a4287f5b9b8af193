"""The lists of the 8-bit prefill: by hand, and equal to those of AITER's planner as the emulation
has it.
"""

import itertools
import random
from typing import Any

import pytest
import torch

from specdec.attention.aiter.latent.prefill_schedule import schedule
from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation.prefill_ps import get_ps_metadata_info_v1, get_ps_metadata_v1


def test_by_hand() -> None:
    """Two heads on four compute units, two for each: five units of keys, three of them for the
    first; the second tile is cut.
    """
    lists = schedule([300], num_heads=2, num_units=4)
    tile = [
        [0, -1, 0, 256, 0, 256, 0],
        [0, 0, 256, 300, 0, 128, 172],
        [0, 256, 256, 300, 128, 300, 0],
    ]
    assert lists.work_info_set.tolist() == [
        [*work, (head + 1) << 16 | head] for head in range(2) for work in tile
    ]
    assert lists.work_indptr.tolist() == [0, 2, 3, 5, 6]
    assert (lists.reduce_indptr.tolist(), lists.reduce_final_map.tolist()) == ([0, 2], [[256, 300]])
    assert lists.reduce_partial_map.tolist() == [0, 256]


def test_nothing_is_split() -> None:
    """One tile for each compute unit: no parts, and nothing to merge."""
    lists = schedule([128, 128], num_heads=16, num_units=32)
    assert len(lists.work_info_set) == 32 and set(lists.work_info_set[:, 1]) == {-1}
    assert (
        lists.reduce_indptr.tolist() == [0]
        and lists.reduce_final_map.shape == (0, 2)
        and lists.reduce_partial_map.shape == (0,)
    )


@pytest.mark.parametrize("seed", range(40))
def test_equal_to_aiters(seed: int) -> None:
    """Random prompts, heads and devices: every number, and none beyond what AITER says its buffers
    hold.
    """
    chance = random.Random(seed)
    num_units, num_heads = (
        chance.choice([1, 3, 8, 48, 80, 256, 304]),
        chance.choice([16, 32, 64, 128]),
    )
    lengths = [
        chance.choice([1, 128, 256, chance.randint(1, 300), chance.randint(1, 3000)])
        for _ in range(chance.randint(1, 6))
    ]
    machine = Machine(num_compute_units=num_units, architecture="gfx950")
    sizes = get_ps_metadata_info_v1(machine, len(lengths), num_heads, max(lengths))
    outputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in sizes]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    sizes_and_outputs: list[Any] = [num_heads, *outputs, 1, 256, 128, 1]
    get_ps_metadata_v1(machine, starts, starts, lens, 1, *sizes_and_outputs)
    lists = schedule(lengths, num_heads, num_units)
    names = (
        "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map",
    )  # fmt: skip
    for name, want in zip(names, outputs[1:], strict=True):
        found = torch.from_numpy(getattr(lists, name))
        assert len(found) <= len(want) and found.equal(want[: len(found)]), name
    assert (
        len(lists.work_info_set) == outputs[1][-1]
        and len(lists.reduce_partial_map) == outputs[3][-1]
    )
