"""A model on our own decoder stack as the target: the same weights and maths as transformers'
modules, in fewer operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from specdec.attention.chunks import in_chunks
from specdec.attention.mla import MlaBackend
from specdec.kv_cache import LatentLayerSpec, LayerSpec, StateCache, StateLayerSpec
from specdec.layers.decoder import Decoder
from specdec.layers.linear_choice import linear
from specdec.layers.ops.choice import ops_for
from specdec.layers.packed.gguf import Quantized
from specdec.layers.packed.table import PackedTable
from specdec.layers.sharded import Embedding, GatheredLinear
from specdec.model.batch import ForwardInput
from specdec.model.core import RoutedExperts, VerifyOutput
from specdec.sampling.params import SamplingDefaults
from verifiers.building.builder import LayerBuilder
from verifiers.building.recurrent import recurrent_rows
from verifiers.config.shape import (
    context_limits,
    layer_caches,
    layer_kinds,
    layer_specs,
    length_rule,
)
from verifiers.description import Description
from verifiers.entries import layer_windows
from verifiers.weights.shards import sharded
from verifiers.weights.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Checkpoint(NamedTuple):
    """Where a target's tensors come from, and whether quantized ones stay packed."""

    folder: Path
    as_stored: bool


class DecoderVerifier:
    """A decoder seen through the `Verifier` protocol.

    Args:
        config: the whole model's.
        description: of its family, from the config as `verifiers.weights.shards.sharded` gives it.
        weights: its tensors, or a rank's part of them, which are taken over.
        checkpoint: what `weights` were read from, which may hold more than the target needs; None
            where it does not matter.

    Raises:
        CheckpointError: a tensor is missing, or one is left that our layers know nothing of.
    """

    def __init__(
        self,
        config: "PreTrainedConfig",
        description: Description,
        weights: Weights,
        *,
        name: str,
        backend: AttentionBackend | MlaBackend,
        eos: tuple[int, ...] = (),
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.name, self.attention, self.eos_token_ids = name, backend, eos
        self.media_token_ids: Mapping[int, str] = {}
        self.defaults, self.random_weights = SamplingDefaults(), False
        self.config, self.group, self._description = config, weights.group, description
        own = sharded(config, self.group)
        weights.rename(description.names)
        blocks = weights.blocks("model.embed_tokens.weight")
        table: Tensor | PackedTable
        table = PackedTable(blocks) if blocks else weights.tensor("model.embed_tokens.weight")
        self._embedding = Embedding(table, self.group)
        self.device, self.dtype = table.device, table.dtype
        stored = [weight for weight in weights.tensors.values() if isinstance(weight, Quantized)]
        packed = sorted({code for weight in stored for code in weight.kinds})
        self.weight_codes = () if self.device.type == "cpu" else tuple(packed)
        head: Tensor | Quantized | None = weights.blocks("lm_head.weight")
        head = weights.optional("lm_head.weight") if head is None else head
        tied = table.weight if isinstance(table, PackedTable) else table
        self._head = linear(tied if head is None else head, weights.optional("lm_head.bias"))
        if self.group is not None:
            self._head = GatheredLinear(self._head, self.group, config.vocab_size)
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.context, self.length_rule = context_limits(config, own=True), length_rule(config)
        self.max_model_len = self.context.usual
        self.vocab_size = self._head.out_features
        self.kv_specs = layer_specs(own, backend)
        self._places = layer_caches(config)
        of_layers = zip(layer_windows(config), self._places, strict=True)
        self.windows = [window for window, places in of_layers for _ in places]
        self.embedding_scale = description.embedding_scale_in(self.dtype)
        self.final_softcap = description.final_softcap
        states = (i for i, spec in enumerate(self.kv_specs) if isinstance(spec, StateLayerSpec))
        self._states = next(states, None)
        kinds = {"mixes": description.routing is not None, "recurs": self._states is not None}
        self._ops = ops_for(backend, **kinds, group=self.group, width=self.hidden_size)
        builder = LayerBuilder(own, description, backend)
        self._kinds = layer_kinds(own, backend)
        self._plain: tuple[MlaBackend, ...] = ()
        self._inputs = builder.inputs(weights.under("model.")) if description.layer_inputs else None
        scopes = (weights.under(f"model.layers.{index}.") for index in range(self.num_layers))
        layers = [builder.layer(index, scope) for index, scope in enumerate(scopes)]
        self.final_norm = builder.norm(weights, "model.norm")
        weights.check_all_taken()
        scale = description.residual_scale
        self._decoder = Decoder(layers, self.final_norm, ops=self._ops, residual_scale=scale)

    @property
    def weight_bytes(self) -> int:
        """See `Verifier.weight_bytes`."""
        inputs = 0 if self._inputs is None else self._inputs.projection.nbytes
        return self._decoder.nbytes + self._head.nbytes + inputs

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """See `Verifier.routed_experts`."""
        mixtures = self._decoder.mixtures
        if not mixtures:
            return None
        routing, nbytes = mixtures[0].router.routing, sum(one.experts.nbytes for one in mixtures)
        return RoutedExperts(routing.num_experts, routing.top_k, nbytes)

    @torch.inference_mode()
    def forward(
        self, rows: ForwardInput, caches: Sequence[Any], aux_layer_ids: Sequence[int] = ()
    ) -> VerifyOutput:
        """Scores packed rows; see `Verifier.forward`."""
        normed, tapped = self.hidden(rows, caches, aux_layer_ids)
        if rows.logit_rows is not None:
            normed = normed.index_select(0, rows.logit_rows)
        logits = self.head(normed)
        if self._description.logits_scale != 1:
            logits = logits * self._description.logits_scale
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return VerifyOutput(logits=logits, aux_hidden=torch.cat(tapped, dim=-1) if tapped else None)

    def hidden(
        self, rows: ForwardInput, caches: Sequence[Any], taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [T, H] after the final norm, and the raw outputs [T, H] of `taps`."""
        embeddings = self._embedding(self._ops, rows.token_ids, self.embedding_scale)
        angles = self._decoder.angles(rows.position_ids, self.dtype, rows.rope_lens)
        inputs = None
        if self._inputs is not None:
            inputs = self._inputs(self._ops, rows.token_ids, embeddings)
        each = (*self.attention.each, *self._plain)
        of_each = [_plan(backend, rows.metadata) for backend in each]
        recurrent = None if self._states is None else recurrent_rows(rows)
        backends, held, plans = [each[kind] for kind in self._kinds], [], []
        # of the first layers, where some were dropped
        for kind, places in zip(self._kinds, self._places, strict=False):
            own = [caches[place] for place in places]
            used = [recurrent if isinstance(cache, StateCache) else of_each[kind] for cache in own]
            held.append(own[0] if len(own) == 1 else own)
            plans.append(used[0] if len(own) == 1 else used)
        result = self._decoder(embeddings, angles, backends, held, plans, taps, inputs=inputs)
        if recurrent is not None and self._states is not None:
            recurrent.finish(caches[self._states].lengths)
        return result

    def store(self, specs: Sequence[LayerSpec]) -> None:
        """Takes other specs of the cache; latents in the model's type have a backend of their
        own.
        """
        self.kv_specs = list(specs)
        latents = [isinstance(spec, LatentLayerSpec) and bool(spec.dtype) for spec in specs]
        if isinstance(self.attention, MlaBackend) and any(latents):
            self._kinds = [int(any(latents[n] for n in places)) for places in self._places]
            plain = replace(self.attention.spec, cache_dtype=None)
            self._plain = (type(self.attention)(plain),)

    def keep_layers(self, count: int) -> None:
        """Drops the layers from `count` on, for who wants the outputs of those before alone."""
        self._decoder.keep_layers(count)
        del self._places[count:]
        self.kv_specs = self.kv_specs[: sum(map(len, self._places))]

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `Verifier.embed`."""
        return self._embedding(self._ops, token_ids)

    def head(self, hidden: Tensor) -> Tensor:
        """See `Verifier.head`."""
        return self._head(hidden)


def _plan(backend: AttentionBackend | MlaBackend, metadata: AttentionMetadata) -> Any:
    """A backend's plan for the layers that it serves."""
    spec = backend.spec
    if isinstance(spec, AttentionSpec) and spec.chunk is not None:
        metadata = in_chunks(metadata, spec.chunk, spec.block_size)
    return backend.plan(metadata)
