"""What a step verifies."""

from typing import NamedTuple

from torch import Tensor

from specdec.model.core import DraftOutput


class Block(NamedTuple):
    """The anchors of a batch, and the drafts behind them; see `specdec.base.blocks`.

    Attributes:
        token_ids: int64 [num_reqs, N + 1].
        positions: int64 [num_reqs, N + 1], not clamped.
        draft: where the drafts come from; None without any.
    """

    token_ids: Tensor
    positions: Tensor
    draft: DraftOutput | None
