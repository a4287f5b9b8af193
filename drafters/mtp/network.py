"""A target's layers for multi-token prediction as a network that drafts token by token."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drafters.sequential.network import Rows, SequentialNetwork
from specdec.kv_cache import LayerSpec
from specdec.layers.prediction import PredictionLayers
from specdec.model.core import Verifier


class PredictionNetwork(SequentialNetwork):
    """The layers of the first depth, which every draft goes through; a draft after the first is
    given their own hidden state.
    """

    def __init__(self, layers: PredictionLayers, verifier: Verifier) -> None:
        self.layers, self.verifier = layers, verifier
        self.aux_layer_ids = (verifier.num_layers - 1,)
        self.feature_size = verifier.hidden_size

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        return self.layers.kv_specs

    @property
    def weight_bytes(self) -> int:
        """See `SequentialNetwork.weight_bytes`; of experts all of them."""
        target = self.verifier
        borrowed = target.vocab_size * target.hidden_size * target.dtype.itemsize
        return self.layers.nbytes + (borrowed if self.layers.head is None else 0)

    def condense(self, aux_hidden: Tensor) -> Tensor:
        return self.layers.features(aux_hidden)

    def forward(self, rows: Rows, caches: Sequence[Any], wanted: Tensor | None) -> Tensor:
        assert rows.features is not None
        embeddings = self.verifier.embed(rows.token_ids)
        if self.verifier.embedding_scale != 1:
            embeddings = embeddings * self.verifier.embedding_scale
        return self.layers(
            embeddings, rows.features, rows.position_ids, rows.metadata, caches, wanted
        )

    def logits(self, hidden: Tensor) -> Tensor:
        own = self.layers.head is not None
        return self.layers.logits(hidden) if own else self.verifier.head(hidden)

    def next_features(self, hidden: Tensor) -> Tensor:
        return self.layers.following(hidden)
