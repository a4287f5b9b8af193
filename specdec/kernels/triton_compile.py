"""Triton kernels that are compiled before anybody waits for them, by all processors at once.

What a run launches tells what it needs, so nobody keeps a list: while `CompileAhead` is open,
launches are noted and left out, and processes that never touch the device compile their kernels
into Triton's cache on disk (`$TRITON_CACHE_DIR`). From there the same launch has its kernel in
milliseconds, in this process and in every later one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specdec.base.files import parse_json
from specdec.base.writing import write_text
from specdec.kernels.looking import Looking
from specdec.kernels.triton_launch import alike_keys

logger = logging.getLogger(__name__)

NICE = 5
"""By how much processes that compile give way to the one that goes on launching."""


class CompileAhead:
    """Notes launches of kernels, and has these compiled; what is launched meanwhile computes
    nothing of use.

    No kernel runs while it is open, also none that is compiled: it might read at a place that one
    before it should have told. Torch reads at such places, too, see `_Harmless`. Launches of all
    threads are left out, so only the thread that opened it may work on the device.

    Args:
        processes: that compile; None takes as many as there are processors for this process.

    Attributes:
        kernels: what was left out, as "module:name", with the digest of its source.
        num_jobs: forms of kernels that were left out, each compiled in the order of their launches.
        failures: one line for each that could not be compiled; its launch will say why.
    """

    def __init__(self, processes: int | None = None) -> None:
        self.kernels: dict[str, str] = {}
        self.failures: list[str] = []
        self._processes = processes or len(os.sched_getaffinity(0))
        self._compiler: subprocess.Popen[str] | None = None
        self._left_out: list[tuple[dict[Any, Any], Any]] = []  # places of stand-ins
        self._compiled: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # what was there before
        self.num_jobs = 0
        self._done = set[int]()
        self._sender = ThreadPoolExecutor(1)
        self._harmless = _Harmless()

    def __enter__(self) -> CompileAhead:
        """Begins to leave out launches, and starts the processes, which takes them seconds."""
        paths = os.pathsep.join(path for path in sys.path if path)
        self._compiler = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._compiled = [(table, dict(table)) for table in _tables()]
        self._hook_before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, self._note
        for table, _ in self._compiled:
            table.clear()
        self._harmless.__enter__()
        Looking.now = Looking()
        return self

    def __exit__(self, *_: object) -> None:
        """Launches are launched again; what was left out may still be compiling, see `wait`."""
        Looking.now = None
        self._harmless.__exit__(None, None, None)
        knobs.runtime.jit_cache_hook = self._hook_before
        for table, key in self._left_out:
            del table[key]
        self._left_out.clear()
        for table, kernels in self._compiled:
            table.update(kernels)
        self._compiled.clear()

    def wait(
        self, progress: Callable[[int, int], object] | None = None, jobs: int | None = None
    ) -> None:
        """Waits until the first `jobs` of `num_jobs` are compiled, or all; `progress` is told of
        how many of how many are, as they come.
        """
        jobs = self.num_jobs if jobs is None else jobs
        while self._compiler and not self._done.issuperset(range(jobs)):
            if progress:
                progress(len(self._done), self.num_jobs)
            assert self._compiler.stdout
            answer = self._compiler.stdout.readline()
            if not answer:  # it has ended; what is left is compiled when it is launched
                self.failures.append("the compiling processes have ended early")
                self.close()
                break
            job, failure = json.loads(answer)
            self._done.add(job)
            if failure:
                self.failures.append(failure)
        if progress:
            progress(self.num_jobs, self.num_jobs)

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        if self._compiler is not None:
            os.killpg(self._compiler.pid, signal.SIGKILL)
            self._sender.shutdown(cancel_futures=True)
            self._compiler.communicate()
            self._compiler = None

    def _note(self, *, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Triton's hook before it compiles; True has it leave that and the launch out."""
        kernel, device = fn.jit_function, compile["device"]
        table, _, target, *_ = kernel.device_caches[device]
        table[key] = _Nothing()
        self._left_out.append((table, key))
        self.kernels[f"{fn.module}:{fn.name}"] = kernel.cache_key
        job = [
            [target.backend, target.arch, target.warp_size],
            fn.module,
            fn.name,
            compile["specialization_data"],
        ]
        self._sender.submit(self._send, json.dumps(job))
        self.num_jobs += 1
        return True

    def _send(self, job: str) -> None:
        """In a thread of its own, since the processes read nothing before they have started."""
        assert self._compiler and self._compiler.stdin
        with suppress(BrokenPipeError):  # `wait` tells
            print(job, file=self._compiler.stdin, flush=True)


def _tables() -> Iterator[dict[Any, Any]]:
    """Compiled kernels that this process can launch, of each function in a module."""
    modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    values = (value for names in modules for value in list(names.values()))
    # By type, for what stands in for something else may mind being asked for its class.
    kernels = {id(one): one for one in values if issubclass(type(one), triton.JITFunction)}
    for kernel in kernels.values():
        for table, *_ in kernel.device_caches.values():
            yield table


class _Nothing:
    """Stands for a kernel while it is compiled; a launch of it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """None."""

    def run(self, *_: object) -> None:
        """Launches nothing."""


class _Harmless(TorchDispatchMode):
    """Tensors that are only allocated hold zeros, and a place outside a tensor is the nearest one
    within it: what a kernel should have told may be a place, and a GPU is lost to its process once
    torch has read outside a tensor there.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if within := _PLACES.get(name.rstrip("_")):
            args = within(*args)
        out = func(*args, **(kwargs or {}))
        return out.zero_() if "empty" in name else out


def _along(source: Tensor, dim: int, places: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Arguments of an operation that takes places along one axis."""
    return source, dim, _nearest(places, source.shape[dim]), *rest


def _of_rows(source: Tensor, places: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Arguments of an operation that takes rows."""
    return source, _nearest(places, len(source)), *rest


def _by_axis(source: Tensor, places: list[Tensor | None], *rest: Any) -> tuple[Any, ...]:
    """Arguments of an operation that takes places by axis, some of them as masks."""
    found, axis = list[Tensor | None](), 0
    for one in places:
        is_mask = one is not None and one.dtype in (torch.bool, torch.uint8)
        found.append(one if one is None or is_mask else _nearest(one, source.shape[axis]))
        axis += one.ndim if one is not None and is_mask else 1
    return source, found, *rest


def _nearest(places: Tensor, size: int) -> Tensor:
    return places.clamp(0, max(size - 1, 0))


_PLACES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "embedding": _of_rows,
    "take": lambda source, places, *rest: (source, _nearest(places, source.numel()), *rest),
    **dict.fromkeys(("index", "index_put"), _by_axis),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _along),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill"), _along),
}
"""By operation, without the underscore of one in place: its arguments, places kept within."""


def say_when_compiling() -> None:
    """Has one line logged when a launch compiles its kernel, for whoever waits."""

    def compiled(*, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            knobs.compilation.listener = None
            logger.warning(
                "Triton compiles kernels, up to a minute in all; later runs read them from %s",
                knobs.cache.dir,
            )

    if knobs.compilation.listener is None:
        knobs.compilation.listener = compiled


def is_known(what: str) -> bool:
    """Whether all kernels that `what` needs were compiled, and are the same now; see `remember`."""
    try:
        kernels: dict[str, str] = parse_json(_mark(what).read_text())
        return all(_kernel(*name.split(":")).cache_key == key for name, key in kernels.items())
    except (OSError, ValueError, ImportError, AttributeError):
        return False


def remember(what: str, kernels: dict[str, str]) -> None:
    """Notes beside Triton's cache that these kernels are compiled in every form that `what`
    needs.
    """
    write_text(_mark(what), json.dumps(kernels))


def _mark(what: str) -> Path:
    target = driver.active.get_current_target()
    digest = sha256(f"{triton.__version__} {target} {what}".encode()).hexdigest()
    return Path(knobs.cache.dir) / f"specdec-{digest[:24]}.json"


def _kernel(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _compile(target: list[Any], module: str, name: str, specialization: str) -> None:
    """Compiles one kernel into the cache on disk; in a process that has no device."""
    alike_keys()
    machine = GPUTarget(*target)
    nowhere = {"get_current_target": lambda: machine, "get_current_device": lambda: 0}
    driver.set_active(SimpleNamespace(**nowhere))
    compiled = _kernel(module, name).preload(specialization)
    if machine.backend == "cuda":
        nvidia = import_module("triton.backends.nvidia.driver")
        if hasattr(nvidia, "make_launcher"):  # before 3.7 what launches it is compiled, too
            nvidia.CudaLauncher(compiled.src, compiled.metadata)


def _main(processes: int) -> None:
    """Compiles what lines on standard input tell of; answers with a line for each that is done: its
    number, and the reason of one that failed.
    """

    def done(number: int, name: str, job: Future[None]) -> None:
        error = job.exception()
        failure = error and f"{name}: {' '.join(str(error).split())[:200]}"
        print(json.dumps([number, failure]), flush=True)

    with suppress(OSError):
        os.nice(NICE)
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        for number, line in enumerate(sys.stdin):
            target, module, name, specialization = json.loads(line)
            import_module(module)  # here, so that who forks from this process has what all import
            job = pool.submit(_compile, target, module, name, specialization)
            job.add_done_callback(partial(done, number, name))
        pool.shutdown(cancel_futures=True)  # nobody waits any more


if __name__ == "__main__":
    _main(int(sys.argv[1]))
