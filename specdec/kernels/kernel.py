"""A kernel that has a plain version: where it is used, and the check that compares the two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from specdec.device.deviation import Deviation
from specdec.device.self_check import Check, Ways, passes, slower, times_of, title
from specdec.kernels.triton_launch import unavailable_reasons

logger = logging.getLogger(__name__)

OURS, TORCH = "our kernel", "torch"
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


class Kernel:
    """What a plain function asks before it takes its kernel; all are in `registry.KERNELS`.

    Args:
        name: of its verdicts, in messages and in `SPECDEC_KERNELS`.
        check: compares it with plain torch: `check(device)`, or `check(device, dtype)`.
        dtypes: types of rows that it takes, each with its own verdict; none: one for all.
        reasons: why it cannot run, `reasons(device)` or `reasons(device, dtype)`; that of Triton's.
        ways: of a kernel that may be slower than torch, `ways(device, dtype)`: both launches, as
            `OURS` and `TORCH`; see `specdec.device.self_check.times_of`.

    Attributes:
        made: all kernels whose modules have been imported.
    """

    made: ClassVar[list[Kernel]] = []

    def __init__(
        self,
        name: str,
        check: Callable[..., Deviation],
        *,
        dtypes: tuple[torch.dtype, ...] = (),
        reasons: Callable[..., list[str]] | None = None,
        ways: Callable[..., Ways] | None = None,
    ) -> None:
        self.name, self.check, self.dtypes = name, check, dtypes
        self._reasons, self._ways = reasons, ways
        self._runs: dict[torch.device, bool] = {}
        Kernel.made.append(self)

    def runs_on(self, device: torch.device, *dtype: torch.dtype) -> bool:
        """Whether it is used on a device, and for rows of a type where there are `dtypes`.

        Those without are asked in every step, and the answer of the first time is kept.
        """
        if dtype:
            return self._asked(device, *dtype)
        if device not in self._runs:
            self._runs[device] = self._asked(device)
        return self._runs[device]

    def reasons(self, device: torch.device, *dtype: torch.dtype) -> list[str]:
        """Why it cannot run there, whatever its check says; empty when it can."""
        if dtype and dtype[0] not in self.dtypes:
            return [
                f"it takes {' and '.join(str(one).removeprefix('torch.') for one in self.dtypes)}"
            ]
        return self._reasons(device, *dtype) if self._reasons else unavailable_reasons(device)

    def variant(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """What tells its verdict for a model of that type; of one that it does not take,
        float16's.
        """
        return () if not self.dtypes else (dtype if dtype in self.dtypes else torch.float16,)

    def check_on(self, device: torch.device, *dtype: torch.dtype) -> Check:
        """The kernel's check for one device and type."""
        return partial(self.check, device, *dtype)

    def times(
        self,
        device: torch.device,
        *dtype: torch.dtype,
        again: bool = False,
    ) -> dict[str, float]:
        """Microseconds of both ways; empty where nothing is timed."""
        if self._ways is None:
            return {}
        return times_of(self.name, device, partial(self._ways, device, *dtype), *dtype, again=again)

    def forget(self) -> None:
        """Asks again from here on, as another process would."""
        self._runs.clear()

    def _asked(self, device: torch.device, *dtype: torch.dtype) -> bool:
        check = self.check_on(device, *dtype)
        if self.reasons(device, *dtype) or not passes(self.name, device, check, *dtype):
            return False
        if late := slower(OURS, self.times(device, *dtype)):
            logger.warning("%s is left out on %s: %s", title(self.name, *dtype), device, late[0])
        return not late


def check_all(device: torch.device) -> None:
    """Decides now about every kernel that a step may meet, for no check may run within a step."""
    for kernel in Kernel.made:
        if not kernel.dtypes:
            kernel.runs_on(device)
