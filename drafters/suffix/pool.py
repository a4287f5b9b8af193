"""Past outputs, the latest so many tokens of them, on the device."""

import torch
from torch import Tensor

from drafters.suffix.matches import NOTHING


class TextPool:
    """A ring of texts with `NOTHING` between them. The oldest tokens make room for new ones.

    Attributes:
        tokens: int32 [size + 1], the last of them always `NOTHING`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        # The last cell takes what is not to be kept.
        self.tokens = torch.full((size + 1,), NOTHING, dtype=torch.int32, device=device)
        self._next = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, text: Tensor, start: Tensor, end: Tensor) -> None:
        """Adds tokens `start` to `end` - 1, int64 [], of a text int32 [width]; or its end."""
        start = torch.maximum(start, end - (self._size - 1))
        places = torch.arange(len(text) + 1, device=text.device)
        tokens = torch.cat([text, text.new_full((1,), NOTHING)])
        tokens = torch.where(places < end, tokens, NOTHING)
        kept = (places >= start) & (places <= end) & (start < end)
        cells = torch.where(kept, (self._next + places - start) % self._size, self._size)
        self.tokens.index_copy_(0, cells, torch.where(kept, tokens, NOTHING))
        self._next.copy_((self._next + kept.sum()) % self._size)

    def clear(self) -> None:
        """Forgets all of them."""
        self.tokens.fill_(NOTHING)
        self._next.zero_()
