"""Ranks of a group as processes of this machine, over gloo."""

import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.helpers.waiting import HANG


def run_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(group, *args)` returns on each rank, in order.

    Args:
        size: processes, each with one thread.
        work: a function of a module, which each process imports.
        args: what can be sent to them.

    Raises:
        AssertionError: a rank failed, with its traceback, or took too long; all have ended then.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(size, _in_group, size, folder, work, args)


def run_command(size: int, arguments: list[str]) -> None:
    """The command line on each rank, with the variables that `torchrun` sets.

    Raises:
        AssertionError: as of `run_ranks`; or a rank's exit status is not 0.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    assert _run(size, _command, size, port, arguments) == [0] * size


def _run(size: int, target: Callable[..., Any], *args: Any) -> list[Any]:
    """What `target(rank, *args)` returns in a process per rank."""
    # Forks of a process that has run nothing: importing takes longer than most of the work.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drafters.training.stages", "tests.helpers.tiny_ranks"])
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(pipe[1], target, rank, *args), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        results: list[Any] = [None] * size
        waiting = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        for _, sender in pipes:
            sender.close()
        while waiting:
            ready: Any = wait([*waiting], HANG)
            assert ready, f"ranks {[*waiting.values()]} said nothing for {HANG:.0f} s"
            rank = waiting.pop(ready[0])
            failed, results[rank] = pickle.loads(ready[0].recv_bytes())
            assert not failed, f"rank {rank}: {results[rank]}"
        for process in processes:
            process.join(HANG)
        return results
    finally:
        for process in processes:
            process.kill()


def _rank(sender: Any, target: Callable[..., Any], rank: int, *args: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the fork began with is no garbage
    try:
        # Plain bytes: tensors would be shared with a process that is about to end.
        sender.send_bytes(pickle.dumps((False, target(rank, *args))))
    except BaseException:  # the others wait for this one, so the parent has to be told
        sender.send_bytes(pickle.dumps((True, traceback.format_exc())))


def _in_group(
    rank: int, size: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    from specdec.parallel.group import join_group

    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size
    )
    result = work(join_group(torch.device("cpu")), *args)
    dist.barrier()  # a rank that ends early would take its connections along
    dist.destroy_process_group()
    return result


def _command(rank: int, size: int, port: int, arguments: list[str]) -> int:
    from specdec.cli.main import main

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status = main(arguments)
    # one that waits for the interpreter at the process's end aborts it
    assert "pt_gloo_runloop" not in threads(), "gloo's threads outlive the command"
    return status


def threads() -> list[str]:
    """The names of this process's threads, as Linux knows them."""
    return [one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")]
