"""Linear attention of one decoder layer: a recurrence in the place of keys and values."""

from dataclasses import dataclass

from torch import Tensor

from specdec.kv_cache import StateCache
from specdec.layers.attention import Rows
from specdec.layers.linear import Linear
from specdec.layers.norm import Norm
from specdec.layers.ops import Ops
from specdec.layers.recurrence import Recurrence, RecurrentRows
from specdec.layers.rotary import Rope


@dataclass(frozen=True, slots=True, eq=False)
class LinearAttention:
    """Linear attention whose output is normed by head and gated, as in Qwen3-Next.

    Attributes:
        inputs: to what the recurrence takes of a row, then the gates of the outputs [value heads * V].
        recurrence: of the layer.
        norm: of each value head.
    """

    inputs: Linear
    recurrence: Recurrence
    norm: Norm

    @property
    def rope(self) -> Rope | None:
        """See `Attention.rope`."""
        return None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `Attention.linears`."""
        return (self.inputs,)

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, ahead: Linear) -> Tensor:
        """See `Attention.__call__`."""
        assert isinstance(rows.cache, StateCache) and isinstance(rows.plan, RecurrentRows)
        joined = ops.project(self.inputs, hidden)
        out = ops.recur(joined, self.recurrence, rows.cache, rows.plan)
        return ops.gated_norm(out, joined[:, self.recurrence.width :], self.norm)
