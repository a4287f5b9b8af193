"""Kernels that an engine needs, compiled while it goes on getting ready."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specdec.base.errors import one_line
from specdec.device import self_check
from specdec.engine.engine import SpecEngine
from specdec.kernels.triton_launch import unavailable_reasons

if TYPE_CHECKING:
    from specdec.kernels.triton_compile import CompileAhead

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], object]
"""Called with what is being done, and how many of how many are."""


class Compiled:
    """Kernels that launches need, compiled by other processes, unless they were before. What fails
    is told of in one line, and compiled when it is launched.

    Attributes:
        waited: seconds spent waiting.
    """

    def __init__(self, engine: SpecEngine, progress: Progress) -> None:
        self._engine, self._progress, self.waited = engine, progress, 0.0
        self._ahead: CompileAhead | None = None
        self._jobs = list[int]()  # how many were noted up to each launch

    def look(self, launches: Collection[tuple[str, Callable[[], None]]]) -> None:
        """Launches what is given with its titles, without its kernels; these begin to be
        compiled, the first ones first.
        """
        device = self._engine.verifier.device
        if device.type != "cuda" or torch.version.hip or unavailable_reasons(device):
            return
        from specdec.kernels.triton_compile import CompileAhead, is_known  # it imports Triton

        if is_known(needs(self._engine)):
            return
        self._ahead = CompileAhead()
        with self._ahead as ahead:
            for done, (title, launch) in enumerate(launches, start=1):
                try:
                    launch()
                except Exception as error:  # of what computes on nothing
                    ahead.failures.append(f"{title}: {one_line(error)}")
                self._jobs.append(ahead.num_jobs)
                self._progress("looking what to compile", done, len(launches))
        self._engine.reset()  # what it holds was computed without kernels

    def wait(self, index: int) -> None:
        """Waits for the kernels of a launch, and of those before it."""
        if self._ahead:
            began = perf_counter()
            self._ahead.wait(jobs=self._jobs[index])
            self.waited += perf_counter() - began

    def finish(self) -> None:
        """Waits for all, and notes that they are compiled."""
        if (ahead := self._ahead) is None:
            return
        from specdec.kernels.triton_compile import remember

        began = perf_counter()
        ahead.wait(partial(self._progress, "compiling"))
        self.waited += perf_counter() - began
        if failed := ahead.failures:
            compiled = "what could not be compiled beforehand is compiled when it is launched"
            others = f", and {len(failed) - 1} more" if failed[1:] else ""
            logger.warning("%s: %s%s", compiled, failed[0], others)
        else:
            remember(needs(self._engine), ahead.kernels)

    def close(self) -> None:
        """Ends the processes."""
        if self._ahead:
            self._ahead.close()


def needs(engine: SpecEngine) -> str:
    """What decides which kernels an engine needs, in words."""
    target, config = engine.verifier, replace(engine.config, seed=None)
    drafter: Any = engine.drafter
    if drafter is not None:
        drafter = type(drafter), drafter.weight_bytes, drafter.kv_specs, engine.planner.shapes
    about: tuple[Any, ...] = (
        os.environ.get(self_check.VARIABLE), target.name, target.weight_bytes, target.dtype,
        target.kv_specs, type(target.attention), target.attention.spec, drafter, config,
    )  # fmt: skip
    return repr(about)
