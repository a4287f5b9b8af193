"""What every layer is given of the tokens themselves beside the residual stream: per-layer
embeddings, as Gemma 4 has them.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from specdec.layers.linear import Linear
from specdec.layers.ops.activation import gated
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Join, Ops


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Makes the inputs of all layers at once: a row of a table for the token, and a projection of
    its embedding.

    Attributes:
        table: [V, layers * P].
        scale: factor of its rows.
        projection: to [layers * P].
        projection_scale: factor of its product.
        norm: of each layer's part of that.
    """

    table: Tensor
    scale: float
    projection: Linear
    projection_scale: float
    norm: Norm

    def __call__(self, ops: Ops, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """[T, layers, P] from ids int64 [T] and their embeddings [T, H] as the first layer is given
        them.
        """
        width = len(self.norm.weight)
        projected = ops.project(self.projection, embeddings) * self.projection_scale
        projected = projected.view(-1, width)
        normed = ops.norm(projected, self.norm).view(len(token_ids), -1, width)
        return (normed + F.embedding(token_ids, self.table).view_as(normed) * self.scale) * 0.5**0.5


@dataclass(frozen=True, slots=True, eq=False)
class InputGate:
    """The sublayer that adds a layer's own input to the stream, as far as the stream asks for it.

    Attributes:
        gate: to [P], whose activation is the factor of the input.
        projection: back to [H].
        norm: of what it puts out.
        activation: see `specdec.layers.ops.activation`.
    """

    gate: Linear
    projection: Linear
    norm: Norm
    activation: str

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's weights."""
        return self.gate, self.projection

    def __call__(
        self, ops: Ops, residual: Tensor, layer_input: Tensor, join: Join, prefetch: Linear | None
    ) -> tuple[Tensor, Tensor]:
        """The output for `layer_input` [T, P] joins the stream `residual` [T, H]; see `Ops.add`."""
        opened = gated(ops.project(self.gate, residual), layer_input, self.activation)
        return ops.project_add(self.projection, opened, residual, join, prefetch)
