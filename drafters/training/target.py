"""The frozen target as training sees it: features of sequences, embeddings and output head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.training.loss.blocks import SequenceBatch
from drafters.training.target_forward import PackedForward, PlainForward
from specdec.base.errors import InvalidInputError
from specdec.engine.build import target_tree_reasons


class Target:
    """A loaded target in training.

    It takes the model over: layers above the deepest tap are dropped unless the target's
    distribution is needed; attention is no longer paged, except on the decoder stack.

    Args:
        verifier: as `specdec.base.registry.VERIFIERS` loads it.
        layer_ids: tapped decoder layers, 0-based.
        distribution: also give the final hidden states, for distillation.
        compile: compile the decoder layers; without effect on the decoder stack.

    Raises:
        InvalidInputError: a layer does not exist.

    Attributes:
        tree_reasons: why it is not served with trees of drafts; empty where it is.
    """

    def __init__(
        self,
        verifier: Any,
        layer_ids: Sequence[int],
        *,
        distribution: bool = False,
        compile: bool = False,
    ) -> None:
        if min(layer_ids) < 0 or max(layer_ids) >= verifier.num_layers:
            raise InvalidInputError(
                f"taps {list(layer_ids)} are not all layers of {verifier.name}, which has"
                f" {verifier.num_layers}; choose from 0 to {verifier.num_layers - 1}"
            )
        self.verifier = verifier
        self.device, self.dtype = verifier.device, verifier.dtype
        self.tree_reasons = target_tree_reasons(verifier)  # before layers are dropped
        count = verifier.num_layers if distribution else max(layer_ids) + 1
        verifier.keep_layers(count)
        self._forward = (
            PlainForward(
                verifier.model.requires_grad_(False),
                list(verifier.layers),
                layer_ids,
                compile=compile,
            )
            if hasattr(verifier, "model")
            else PackedForward(verifier, layer_ids)
        )

    @torch.no_grad()
    def features(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Runs the target over sequences; what it says about padding means nothing.

        Returns:
            Features [S, T, num_taps * H], and final hidden states [S, T, H], which are the target's
            own only with `distribution`; of packed rows [R, L, ...].
        """
        return self._forward(batch)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., H] as the target scales them."""
        return self.scaled(self.verifier.embed(token_ids))

    def scaled(self, embeddings: Tensor) -> Tensor:
        """Embeddings [..., H] times what the target's are multiplied by."""
        scale = self.verifier.embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., H], with the target's final softcap."""
        return self.capped(self.verifier.head(hidden))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits with the target's final softcap, if it has one."""
        softcap = self.verifier.final_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)
