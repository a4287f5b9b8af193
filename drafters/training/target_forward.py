"""The target's forward over whole sequences: as a plain module, or over a scratch cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from drafters.training.loss.blocks import SequenceBatch
from drafters.training.loss.packing import into_rows, out_of_rows
from specdec.attention.backend import AttentionMetadata
from specdec.kv_cache import PagedKVCache, blocks_for
from specdec.model.batch import ForwardInput

ATTENTION_NAME = "specdec_causal"
"""Value of `attn_implementation`, under which Transformers finds no mask function."""


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
    """Causal attention of one layer over whole sequences: [S, T, heads, D], and no weights.

    Where sequences share rows, `attention_mask` is `Packing.index`, [1, 1, S, T]: each is attended
    to in a row of its own, which costs no more than rows of like length do and needs no mask.
    """
    if attention_mask is not None:
        index, count, width = attention_mask[0, 0], query.shape[0], query.shape[2]
        query, key, value = (
            out_of_rows(x.transpose(1, 2).flatten(0, 1), index).transpose(1, 2)
            for x in (query, key, value)
        )
        options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window}
        own = causal_attention(module, query, key, value, None, **options)[0]
        rows = into_rows(own, index.flatten(), count * width)
        return rows.unflatten(0, (count, width)), None
    length, mask, groups = query.shape[2], None, query.shape[1] // key.shape[1]
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance
        mask = (distance >= 0) & (distance < sliding_window)
        # With a mask, the memory-efficient CUDA kernel takes only as many key heads as query heads.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    is_causal = mask is None
    enable_gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, causal_attention)


class PlainForward:
    """Runs the model without a cache; padding is computed like any token.

    Packed rows are run as they are where attention is ours; elsewhere every sequence runs in a row
    of its own, and what it gives is packed.

    Args:
        model: the causal language model, whose attention is switched to one without a cache.
        layers: its decoder layers, as far as they are run.
        layer_ids: layers to tap.
        compile: compile the layers.
    """

    def __init__(
        self, model: Any, layers: Sequence[Any], layer_ids: Sequence[int], *, compile: bool
    ) -> None:
        # Sinks and softcaps are Transformers' business; its masks cost a wait for the device in
        # every forward.
        sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
        self._plain = not sinks and getattr(model.config, "attn_logit_softcapping", None) is None
        model.set_attn_implementation(ATTENTION_NAME if self._plain else "eager")
        self._base: nn.Module = model.base_model
        self._layer_ids = tuple(layer_ids)
        self._tapped: dict[int, Tensor] = {}
        for layer_id in self._layer_ids:
            layers[layer_id].register_forward_hook(partial(self._keep, layer_id))
        for layer in layers if compile else ():
            # outside the hooks, and one layer's code serves all
            layer.forward = torch.compile(layer.forward, dynamic=True)

    def __call__(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """See `Target.features`."""
        # Causal attention never looks to the right, so padding needs no mask, and without a mask
        # the fast kernels apply.
        packing, inputs = batch.packing, {"input_ids": batch.token_ids}
        if packing is not None and self._plain:
            inputs = {
                "input_ids": packing.pack(batch.token_ids, batch.lengths),
                "position_ids": batch.positions,
                # a mask of four axes reaches every layer as it is
                "attention_mask": packing.index(batch.lengths, batch.token_ids.shape[1])[
                    None, None
                ],
            }
        output = self._base(**inputs, use_cache=False)
        features = torch.cat([self._tapped[layer_id] for layer_id in self._layer_ids], dim=-1)
        self._tapped.clear()
        if packing is not None and not self._plain:
            packed = packing.pack(features, batch.lengths)
            return packed, packing.pack(output.last_hidden_state, batch.lengths)
        return features, output.last_hidden_state

    def _keep(self, layer_id: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output


class PackedForward:
    """Runs the verifier's own forward, for models on the decoder stack, which needs the paged
    cache; padding is left out.
    """

    def __init__(self, verifier: Any, layer_ids: Sequence[int]) -> None:
        self._verifier = verifier
        self._specs = verifier.kv_specs
        self._layer_ids = tuple(layer_ids)

    def __call__(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """See `Target.features`; zeros stand at padding."""
        num_seqs, width = batch.token_ids.shape
        spec = self._verifier.attention.spec
        blocks = blocks_for(width, spec.block_size)  # per sequence
        cache = PagedKVCache(
            self._specs,
            num_blocks=num_seqs * blocks,
            block_size=spec.block_size,
            dtype=spec.kv_dtype,
            device=batch.token_ids.device,
            num_slots=num_seqs,
        )
        # of every row
        sequences = torch.repeat_interleave(batch.lengths, output_size=sum(batch.lengths_host))
        ends = batch.lengths.cumsum(0)
        numbers = torch.arange(len(sequences), device=ends.device)
        positions = numbers - (ends - batch.lengths)[sequences]
        every = torch.arange(num_seqs * blocks, dtype=torch.int32, device=ends.device)
        table = every.view(num_seqs, blocks)
        slots = sequences * (blocks * spec.block_size) + positions
        metadata = AttentionMetadata.packed(batch.lengths_host, batch.lengths_host, table, slots)
        places = sequences * width + positions
        owners = torch.arange(num_seqs, device=ends.device)
        rule = self._verifier.length_rule
        rope_lens = (
            None if rule is None else (batch.lengths * (batch.lengths > rule.start))[sequences]
        )
        token_ids = batch.token_ids.flatten()[places]
        rows = ForwardInput(token_ids, positions, metadata, rope_lens=rope_lens, slots=owners)
        final, tapped = self._verifier.hidden(rows, cache.layers, self._layer_ids)
        if (packing := batch.packing) is not None:
            places, num_seqs = packing.places[sequences] + positions, len(packing.slots)
            width = packing.length
        taps = _unpack(torch.cat(tapped, dim=-1), places, num_seqs, width)
        return taps, _unpack(final, places, num_seqs, width)


def _unpack(packed: Tensor, places: Tensor, num_rows: int, width: int) -> Tensor:
    """Rows [n, C] at `places` int64 [n], as a new tensor [R, T, C], which autograd takes."""
    rows = packed.new_zeros(num_rows * width, packed.shape[1]).index_copy_(0, places, packed)
    return rows.view(num_rows, width, -1)
