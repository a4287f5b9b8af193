"""Ranks of a group as processes of this machine, over gloo."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(
                target=_rank, args=(rank, size, folder, pipes[rank][1], work, args), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            results = []
            for rank, (receiver, sender) in enumerate(pipes):
                sender.close()
                assert receiver.poll(HANG), f"rank {rank} said nothing for {HANG:.0f} s"
                failed, result = pickle.loads(receiver.recv_bytes())
                assert not failed, f"rank {rank}: {result}"
                results.append(result)
            for process in processes:
                process.join(HANG)
        finally:
            for process in processes:
                process.kill()
    return results


def _rank(
    rank: int, size: int, folder: str, sender: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    from specdec.parallel.group import join_group

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size
        )
        # Plain bytes: tensors would be shared with a process that is about to end.
        sender.send_bytes(pickle.dumps((False, work(join_group(torch.device("cpu")), *args))))
        dist.barrier()  # a rank that ends early would take its connections along
        dist.destroy_process_group()
    except BaseException:  # the others wait for this one, so the parent has to be told
        sender.send_bytes(pickle.dumps((True, traceback.format_exc())))
