"""What a step verifies."""

from typing import NamedTuple

from torch import Tensor

from specdec.model.core import DraftOutput
from specdec.model.packing import Packing


class Block(NamedTuple):
    """The anchors of a batch, and the drafts behind them; see `specdec.base.blocks`.

    Attributes:
        token_ids: int64 [num_reqs, N + 1].
        positions: int64 [num_reqs, N + 1], not clamped.
        draft: where the drafts come from; None without any.
        packing: which rows are verified; None for all.
    """

    token_ids: Tensor
    positions: Tensor
    draft: DraftOutput | None
    packing: Packing | None = None
