"""A target's layers for multi-token prediction as tensors that are trained, and written again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.layers.prediction import PredictionLayers
from specdec.model.core import Verifier
from verifiers.building.builder import LayerBuilder
from verifiers.decoder import DecoderVerifier
from verifiers.prediction import (
    SPECULATORS,
    Source,
    builder_of,
    layers_config,
    layers_of,
    read_layers,
    source_of,
    spec_of,
)
from verifiers.weights.weights import Weights

_NAMES = {
    "projection.": "mtp_layers.0.input_proj.",
    "embedding_norm.": "mtp_layers.0.token_layernorm.",
    "hidden_norm.": "mtp_layers.0.hidden_layernorm.",
    "norm.": "mtp_layers.0.final_layernorm.",
    "model.layers.0.": "mtp_layers.0.",
}
"""What the layout of speculators calls tensors."""


class PredictionWeights:
    """The layers of the checkpoint of a target, or of a folder in the layout of speculators.

    Raises:
        InvalidInputError: layers that are not trained.
        CheckpointError: see `verifiers.prediction.read_prediction`.

    Attributes:
        tensors: in the target's type, whatever the checkpoint stores.
    """

    def __init__(self, verifier: Verifier, folder: Path | None = None) -> None:
        found = source_of(verifier, folder)
        assert isinstance(verifier, DecoderVerifier)
        if not isinstance(found, Source):
            what = f"drafter {str(folder)!r} reads its target's keys, which training does not know"
            raise InvalidInputError(f"{what}; leave --init out")
        self._source, self._own = found, layers_config(found.config, found.layers)
        self.tensors: dict[str, Tensor] = read_layers(verifier, found, self._own, as_stored=False)
        written = layers_config(found.config, SPECULATORS).to_dict()
        if written != self._own.to_dict() or "norm.weight" not in self.tensors:
            raise InvalidInputError(
                f"layers of {verifier.name!r} for multi-token prediction have no words in the"
                f" layout of speculators, so what they learn could not be kept; leave --init out"
            )
        self._builder: LayerBuilder | None = None

    def layers(
        self,
        verifier: Any,
        tensors: Mapping[str, Tensor],
        attention: Callable[[AttentionSpec | MlaSpec], AttentionBackend | MlaBackend],
    ) -> PredictionLayers:
        """The layers that `tensors` make, through which gradients reach them, on `attention`."""
        backend = attention(self.spec(verifier))
        weights = Weights(dict(tensors), trained=True)
        builder = builder_of(self._own, backend, weights, self._builder)
        self._builder = builder  # whose rotations wait for numbers
        return layers_of(verifier, self._own, backend, builder, weights)

    def spec(self, verifier: Any) -> AttentionSpec | MlaSpec:
        """What the layers ask of their attention."""
        return spec_of(verifier, self._own)

    def stated(self) -> dict[str, Any]:
        """What `config.json` says in the layout of speculators, beside who drafts."""
        layer: dict[str, Any] = self._source.config.to_dict()
        return {"transformer_layer_config": layer, "num_nextn_predict_layers": 1}

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of that layout.

        Raises:
            CheckpointError: one has none.
        """
        found = {}
        for name, tensor in tensors.items():
            own = next((one for one in _NAMES if name.startswith(one)), None)
            if own is None:
                raise CheckpointError(f"tensor {name} has no name in the layout of speculators")
            found[_NAMES[own] + name.removeprefix(own)] = tensor
        return found
