"""Numbers on their way to an accelerator are in pinned memory, of whatever kind they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.device.host import CPU, host_tensor, to_device


@pytest.mark.parametrize(
    "values", [[3, 4], [[3], [4]], np.array([3, 4]), np.array([3.0, 4.0]), np.arange(8)[3:5]]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_numbers_of_any_kind_are_pinned(
    values: Sequence[Any] | np.ndarray, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.tensor` pins no array of numpy, but says so only where there is an accelerator."""
    pinned, tensor = [], torch.tensor

    def like_on_a_gpu(
        numbers: Any, *, dtype: torch.dtype, device: torch.device, pin_memory: bool = False
    ) -> Tensor:
        assert not (pin_memory and isinstance(numbers, np.ndarray)), "can't pin an array"
        assert device == CPU or not pin_memory, "only what is on the host can be pinned"
        made = tensor(numbers, dtype=dtype)
        return made.pin_memory() if pin_memory else made

    def pin_memory(made: Tensor) -> Tensor:
        pinned.append(made)
        return made

    monkeypatch.setattr(torch, "tensor", like_on_a_gpu)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    made = host_tensor(values, dtype, torch.device("cuda"))
    assert made is pinned.pop() and made.dtype == dtype
    there = to_device(values, dtype, CPU)
    assert made.tolist() == there.tolist() == np.array(values).tolist() and not pinned
