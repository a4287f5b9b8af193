"""Memory that kernels work in, at addresses that never change."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.base.sizes import power_of_two


@dataclass(slots=True)
class Scratch:
    """One buffer per name, type and power of two of elements, never given up, so that captured
    graphs may use its address.
    """

    device: torch.device
    _buffers: dict[tuple[str, int, torch.dtype], Tensor] = field(default_factory=dict)

    def take(
        self, name: str, count: int, dtype: torch.dtype, make: Callable[..., Tensor] = torch.empty
    ) -> Tensor:
        """The first `count` elements of a buffer; a new one is what `make` yields for its size."""
        key = (name, power_of_two(count), dtype)
        if key not in self._buffers:
            self._buffers[key] = make(key[1], dtype=dtype, device=self.device)
        return self._buffers[key][:count]
