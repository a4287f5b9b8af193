"""The frozen target as training sees it: features of whole sequences, embeddings and the output head."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from specdec.attention.mla import MlaBackend
from specdec.errors import InvalidInputError, UnsupportedModelError

ATTENTION_NAME = "specdec_causal"
"""Value of `attn_implementation`. No mask function is registered under it, so Transformers builds no masks."""


def causal_attention(
    module: nn.Module,
    query: Tensor,  # [S, heads, T, D]
    key: Tensor,  # [S, kv_heads, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one layer over whole sequences: [S, T, heads, D], and no weights."""
    length, mask, groups = query.shape[2], None, query.shape[1] // key.shape[1]
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance
        mask = (distance >= 0) & (distance < sliding_window)
        # With a mask, the memory-efficient CUDA kernel takes only as many key heads as query heads.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, causal_attention)


def check_trainable(verifier: Any) -> None:
    """Refuses a loaded target whose modules run on the paged cache only.

    Raises:
        UnsupportedModelError: it has latent attention.
    """
    if isinstance(verifier.attention, MlaBackend):
        raise UnsupportedModelError(
            f"drafters cannot be trained yet for targets with latent attention, such as {verifier.name};"
            " train for another target, or load a drafter that was trained elsewhere"
        )


class Target:
    """A loaded target in training.

    It takes the model over: attention is no longer paged, and layers above the deepest tap are dropped unless the target's
    distribution is needed.

    Args:
        verifier: as `specdec.registry.VERIFIERS` loads it.
        layer_ids: tapped decoder layers, 0-based.
        distribution: also give the final hidden states, for distillation.
        compile: compile the decoder layers.

    Raises:
        InvalidInputError: a layer does not exist.
        UnsupportedModelError: the decoder layers cannot be found, or have latent attention.
    """

    def __init__(self, verifier: Any, layer_ids: Sequence[int], *, distribution: bool = False, compile: bool = False) -> None:
        if min(layer_ids) < 0 or max(layer_ids) >= verifier.num_layers:
            raise InvalidInputError(
                f"taps {list(layer_ids)} are not all layers of {verifier.name}, which has {verifier.num_layers};"
                f" choose from 0 to {verifier.num_layers - 1}"
            )
        check_trainable(verifier)
        self.verifier = verifier
        self.device, self.dtype = verifier.device, verifier.dtype
        self.layer_ids = tuple(layer_ids)
        model = verifier.model.requires_grad_(False)
        # Sinks and softcaps are Transformers' business; its masks cost a wait for the device in every forward.
        plain = model.config.model_type != "gpt_oss" and getattr(model.config, "attn_logit_softcapping", None) is None
        model.set_attn_implementation(ATTENTION_NAME if plain else "eager")
        self._base: nn.Module = model.base_model
        lists = [(n, m) for n, m in self._base.named_children() if isinstance(m, nn.ModuleList) and len(m) == verifier.num_layers]
        if len(lists) != 1:
            raise UnsupportedModelError(
                f"cannot find the decoder layers of {type(model).__name__}, so it cannot be trained for yet"
            )
        name, layers = lists[0]
        if not distribution:
            setattr(self._base, name, layers[: max(layer_ids) + 1])
        self._tapped: dict[int, Tensor] = {}
        for layer_id in self.layer_ids:
            layers[layer_id].register_forward_hook(partial(self._keep, layer_id))
        if compile:
            for layer in getattr(self._base, name):
                layer.forward = torch.compile(layer.forward, dynamic=True)  # outside the hooks, and one layer's code serves all

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the target over sequences padded on the right; what it says about padding means nothing.

        Args:
            token_ids: int64 [S, T].

        Returns:
            Features [S, T, num_taps * H], and final hidden states [S, T, H], which are the target's own only with `distribution`.
        """
        # Causal attention never looks to the right, so padding needs no mask, and without a mask the fast kernels apply.
        output = self._base(input_ids=token_ids, use_cache=False)
        features = torch.cat([self._tapped[layer_id] for layer_id in self.layer_ids], dim=-1)
        self._tapped.clear()
        return features, output.last_hidden_state

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., H] as the target scales them."""
        embeddings: Tensor = self.verifier.embed(token_ids)
        scale = self.verifier.embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., H], with the target's final softcap."""
        logits: Tensor = self.verifier.head(hidden)
        softcap = self.verifier.final_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _keep(self, layer_id: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output
