"""How the ranks of a group come to be: started by rank 0 itself, or all of them by `torchrun`."""

import atexit
import faulthandler
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from specdec.base.errors import CapacityError, InvalidInputError
from specdec.parallel import executor as executors
from specdec.parallel.executor import Executor, Ranks
from specdec.parallel.group import WITHOUT_MULTICAST, begin_group, join_group
from specdec.parallel.processes import workers as watched
from specdec.parallel.processes.process import Settings, one_line, silence
from specdec.parallel.processes.rendezvous import Rendezvous
from specdec.parallel.processes.workers import PATIENCE, Workers
from specdec.parallel.sockets import check_loopback, on_one_machine, rank_sockets

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other at the start, where one may import more than another."""


def torchrun_size() -> int:
    """Processes that `torchrun` has started, this one among them; 1 where it has not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def device_of_rank(device: torch.device, rank: int, size: int) -> torch.device:
    """Where a rank computes: each on an accelerator of its own, all on the CPU if asked for.

    Raises:
        InvalidInputError: one accelerator is asked for.
        CapacityError: there are fewer accelerators than ranks.
    """
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise InvalidInputError(
            f"device is '{device}' and tensor_parallel {size}, whose ranks take cuda:0 to"
            f" cuda:{size - 1}; give cuda, and choose"
            " among devices with CUDA_VISIBLE_DEVICES"
        )
    found = torch.cuda.device_count()
    if size > found:
        what = f"tensor_parallel is {size} and this machine has {found} accelerators"
        raise CapacityError(f"{what}; start at most {found} ranks")
    return torch.device("cuda", rank)


def open_ranks(size: int, device: torch.device) -> Executor:
    """The group of this process, which is rank 0: the one there is, that of `torchrun`, or one that
    is started now.

    On the other ranks of `torchrun` this follows rank 0 and ends the process with it.

    Args:
        size: ranks, at least 2.
        device: "cuda" or "cpu".

    Raises:
        InvalidInputError: there is a group of another size.
        CapacityError: there are fewer accelerators than ranks.
    """
    existing, started = executors.current(), torchrun_size()
    if existing is not None:
        _check_size(size, existing.group.size, "this process has a group of")
        return existing
    if started > 1:
        _check_size(size, started, "torchrun has started")
        return _join_torchrun(device)
    if dist.is_initialized():
        what = f"tensor_parallel is {size} and this process is in a process group of its own"
        raise InvalidInputError(f"{what}; load the target in a process without one")
    return _start(size, device)


def follow_torchrun(size: int | None, device: torch.device) -> int:
    """Joins the group that `torchrun` has started for a command; on ranks but rank 0 this follows
    it and ends the process.

    Args:
        size: ranks that the command asks for, if it does.
        device: "cuda" or "cpu".

    Returns:
        How many ranks there are.

    Raises:
        InvalidInputError: the command asks for another number of ranks.
        CapacityError: there are fewer accelerators than ranks.
    """
    return open_ranks(size or torchrun_size(), device).group.size


def join(settings: Settings) -> Executor:
    """The end of another rank that rank 0 has started."""
    rank, size = settings["rank"], settings["size"]
    where = device_of_rank(torch.device(settings["device"]), rank, size)
    folder, secret = Path(settings["folder"]), bytes.fromhex(settings["secret"])
    return _meet(rank, size, folder, where, None, secret)


def _check_size(size: int, found: int, who: str) -> None:
    if size != found:
        what = f"tensor_parallel is {size} and {who} {found} ranks"
        raise InvalidInputError(f"{what}; give {found}, or leave it out")


def _start(size: int, device: torch.device) -> Executor:
    where = device_of_rank(device, 0, size)
    check_loopback()
    folder, secret = Rendezvous(), secrets.token_hex(16)
    threads = torch.get_num_threads()
    fixed = where.type == "cuda" or "OMP_NUM_THREADS" in os.environ
    each = threads if fixed else max(1, threads // size)
    settings = {
        rank: Settings(
            path=sys.path,
            rank=rank,
            size=size,
            folder=str(folder.path),
            secret=secret,
            device=where.type,
            threads=each,
            parent=os.getpid(),
        )
        for rank in range(1, size)
    }
    workers = Workers(settings)
    try:
        workers.wait()
        torch.set_num_threads(each)
        ranks = Ranks(workers, threads, folder)
        executor = _meet(0, size, folder.path, where, ranks, bytes.fromhex(secret))
    except BaseException:
        workers.end(kill=True)
        folder.remove()
        raise
    workers.on_loss = lambda line: _lost(executor, line)
    return _lead(executor)


def _meet(
    rank: int, size: int, folder: Path, device: torch.device, ranks: Ranks | None, secret: bytes
) -> Executor:
    store = dist.FileStore(str(folder / "store"), size)
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    os.environ.update(WITHOUT_MULTICAST)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with rank_sockets():
        backend = "nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        begin_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
        group = join_group(device)
        assert group is not None, "there are several ranks"
        group.begun = True
        return executors.install(Executor(group, ranks, secret))


def _join_torchrun(device: torch.device) -> Executor:
    size = torchrun_size()
    with rank_sockets():
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        group = join_group(device_of_rank(device, local, size))
        assert group is not None, "torchrun has started several ranks"
        executor = executors.install(Executor(group))
    processes = torch.zeros(size, dtype=torch.int64)
    processes[group.rank] = os.getpid()
    dist.all_reduce(processes, group=group.host_group)
    if executor.leads:
        if on_one_machine():
            given = (executor, processes.tolist())
            threading.Thread(target=_watch, args=given, name="specdec ranks", daemon=True).start()
        return _lead(executor)
    silence()
    try:
        executor.follow()
    except BaseException as error:  # whatever it is, somebody has to be told
        line = f"specdec: error: rank {group.rank} failed: {one_line(error)}"
        print(line, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _lead(executor: Executor) -> Executor:
    atexit.register(_leave, executor)
    return executor


def _leave(executor: Executor) -> None:
    """At the end of the program. A device that waits for a lost rank would keep the process for
    ever, which is ended then.
    """
    executor.end()
    executor.join()
    if executor.failed and torch.cuda.is_initialized():
        # with status 1
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=nowhere)


def _watch(executor: Executor, processes: Sequence[int]) -> None:
    """Ends a rank of `torchrun` that is stopped, as `Workers` does those of rank 0; `torchrun`
    ends the others then.
    """
    looks = [0] * len(processes)
    while executor.ended is None:
        time.sleep(watched.LOOK)
        for rank, process in enumerate(processes):
            looks[rank] = (looks[rank] + 1) * watched.is_stopped(process)
            if looks[rank] == watched.STOPPED:
                os.kill(process, signal.SIGKILL)
                _lost(executor, watched.stopped(rank))


def _lost(executor: Executor, line: str) -> None:
    """A rank has ended unasked: whatever rank 0 waits for will not come. By the thread that has
    found out.
    """
    executor.lose(line)
    limit = time.monotonic() + PATIENCE
    while executor.busy and time.monotonic() < limit:
        time.sleep(0.05)
    if executor.busy:
        print(f"specdec: error: {line}", file=sys.stderr, flush=True)
        os._exit(1)
