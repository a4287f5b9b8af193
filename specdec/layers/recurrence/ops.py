"""`specdec.layers.ops.ops.Ops` where our kernels compute recurrent layers and nothing else, as
around latent attention.
"""

from torch import Tensor

from specdec.kv_cache import StateCache
from specdec.layers.ops.norm import GroupNorm
from specdec.layers.ops.ops import Ops
from specdec.layers.ops.triton_gated_norm import gated_norm
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows
from specdec.layers.recurrence.triton_recurrence import recur


class RecurrentOps(Ops):
    """Plain torch but for states and the norms behind them."""

    def recur(
        self, x: Tensor, recurrence: Recurrence, cache: StateCache, rows: RecurrentRows
    ) -> Tensor:
        return recur(x, recurrence, cache, rows)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: GroupNorm) -> Tensor:
        return gated_norm(x, gate, **norm._asdict())
