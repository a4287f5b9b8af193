"""How a process finds its group, and what it says where it cannot."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specdec.base.errors import InvalidInputError
from specdec.parallel.group import Group, group_of, join_group, rank_device
from specdec.parallel.one_shot import one_shot

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_without_torchrun_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process stays alone, whatever started it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_group(CPU) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_group(CPU) is None
    assert group_of(object()) is None


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        InvalidInputError,
        match="WORLD_SIZE is 2 and MASTER_ADDR, MASTER_PORT is not set; start the ranks with"
        " torchrun",
    ):
        join_group(CPU)


def test_each_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a user's own choice overrules."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert rank_device(GPU) == GPU
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert rank_device(GPU) == torch.device("cuda", 3)
    assert (
        rank_device(torch.device("cuda", 1)) == torch.device("cuda", 1) and rank_device(CPU) == CPU
    )


def test_shares_are_neighbors() -> None:
    assert [list(Group(rank, 3, None, None).shard(6)) for rank in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_no_shared_memory_on_a_cpu() -> None:
    """Nobody is asked whether it agrees."""
    assert one_shot(2, None, CPU, lambda number: pytest.fail("asked")) is None


def test_a_group_is_left_once(tmp_path: Path) -> None:
    """Catches an end of all groups, the program's own among them, by a second call."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        group = Group(0, 1, dist.group.WORLD, dist.new_group(backend="gloo"))
        group.leave()
        group.leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
