"""Numbers of the host on their way to a device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")


def host_tensor(
    values: Sequence[Any] | NDArray[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor on the host that is to go to `device`: in pinned memory for an accelerator, as the
    host would wait for any other copy.
    """
    pinned = device.type == "cuda"
    if isinstance(values, np.ndarray):  # which torch.tensor would not pin
        made = torch.from_numpy(values).to(dtype)
        return made.pin_memory() if pinned else made
    return torch.tensor(values, dtype=dtype, device=CPU, pin_memory=pinned)


def to_device(
    values: Sequence[Any] | NDArray[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers on a device; the host does not wait for it."""
    return host_tensor(values, dtype, device).to(device, non_blocking=True)
