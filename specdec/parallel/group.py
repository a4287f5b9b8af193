"""The processes that compute one target together, each with its share of the weights (tensor
parallel, arXiv 1909.08053).
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specdec.base.errors import InvalidInputError
from specdec.parallel.one_shot import OneShot, one_shot

WITHOUT_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""What keeps every library from NVLink multicast; each reads its own as the first group is made."""


@dataclass(slots=True, eq=False)
class Group:
    """One rank's view of its group; None in the place of a group is a process alone.

    Attributes:
        rank: of this process, from 0.
        size: processes, at least 2.
        device_group: exchanges tensors on the device, also in graphs: NCCL, RCCL, or gloo on a CPU.
        host_group: exchanges what hosts have to say, always by gloo; nothing else goes over it.
        ordered: sums add in the order of ranks whatever the size of a message, so that a row has
            the same bits alone and among others. Otherwise large messages are added in the order
            that the backend likes.
        one_shot: adds small messages up in one kernel, in order; None where the backend alone adds.
        begun: the device group is ours; else the program made it.
        takes_part: exchanges on the device happen; see `alone`.
        rows: memory for sums within norms, by width and type of a row; see
            `specdec.layers.ops.exchange.shared_rows`.
    """

    rank: int
    size: int
    device_group: Any
    host_group: Any
    ordered: bool = False
    one_shot: OneShot | None = None
    begun: bool = False
    takes_part: bool = True
    rows: dict[tuple[int, torch.dtype], Any] = field(default_factory=dict)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers; the hosts exchange it."""
        said = torch.tensor(number)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self.host_group)
        return int(said)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """This rank launches without the others: what it would exchange on the device stays its
        own, so results are wrong, and only what was launched is of use.
        """
        self.takes_part = False
        try:
            yield
        finally:
            self.takes_part = True

    def shard(self, count: int) -> range:
        """Which of `count` things, neighbors that `size` divides, are this rank's."""
        assert count % self.size == 0, "refused before"
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def leave(self) -> None:
        """Ends the process groups that are ours, whose last collective is over.

        This waits for gloo's threads. One of them may be the last to let go of a tensor, for which
        it needs the interpreter; where that ends meanwhile, the process aborts. NCCL's group stays:
        it would wait for captured graphs, which refer to its communicator.
        """
        host, self.host_group = self.host_group, None
        end_group(host)
        if self.begun and dist.is_initialized() and dist.get_backend(self.device_group) == "gloo":
            self.device_group = None
            dist.destroy_process_group()


def begin_group(backend: str, **options: Any) -> None:
    """Makes the process group of this process; `options` are those of
    `torch.distributed.init_process_group`.
    """
    # Imported later, the defaults of its functions would keep the group, and gloo its threads.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(backend, **options)


def end_group(group: Any) -> None:
    """Ends a group that `torch.distributed.new_group` made, unless it has ended: None, or all."""
    if group is not None and dist.is_initialized():  # torch takes None for all groups
        dist.destroy_process_group(group)


def rank_device(device: torch.device) -> torch.device:
    """The accelerator of this process: of several of that type the one that LOCAL_RANK names, as
    torchrun sets it.
    """
    local = os.environ.get("LOCAL_RANK")
    if local is not None and device.type == "cuda" and device.index is None:
        return torch.device(device.type, int(local))
    return device


def join_group(
    device: torch.device, *, ordered: bool = False, timeout: timedelta = timedelta(minutes=10)
) -> Group | None:
    """The group of `torchrun`'s variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    A process group that exists already is taken. All ranks call this, in the same order with other
    collectives.

    Args:
        device: where this rank computes; an accelerator becomes the current one.
        ordered: see `Group`.
        timeout: after which a collective whose other ranks are missing ends in an error.

    Returns:
        None for a group of one, or where nothing names a group.

    Raises:
        InvalidInputError: variables are missing.
    """
    size, begins = os.environ.get("WORLD_SIZE", "1"), not dist.is_initialized()
    if begins and size == "1":
        return None
    os.environ.update(WITHOUT_MULTICAST)
    if begins:
        missing = [one for one in ("RANK", "MASTER_ADDR", "MASTER_PORT") if one not in os.environ]
        if missing:
            what = f"WORLD_SIZE is {size} and {', '.join(missing)} is not set"
            raise InvalidInputError(f"{what}; start the ranks with torchrun")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"  # which on ROCm is RCCL
        begin_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    if dist.get_world_size() == 1:
        return None
    world, host_group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout)
    group = Group(dist.get_rank(), dist.get_world_size(), world, host_group, ordered, begun=begins)
    return replace(group, one_shot=one_shot(group.size, world, device, group.least))


def group_of(target: object) -> Group | None:
    """The ranks that compute a target together; None for a process alone, of whose targets not all
    know of groups.
    """
    group: Group | None = getattr(target, "group", None)
    return group
