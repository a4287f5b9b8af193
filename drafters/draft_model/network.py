"""A language model as a network that drafts token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.sequential.network import Rows, SequentialNetwork
from specdec.attention.selector import tree_reasons
from specdec.base.errors import CheckpointError
from specdec.kv_cache import LayerSpec, SharedLayerSpec, bytes_per_slot
from specdec.model.batch import ForwardInput
from specdec.model.core import Verifier


class DraftModelNetwork(SequentialNetwork):
    """Another model that runs as a target does, with its cache in the target's blocks.

    Args:
        model: the draft model, on the target's device, with its type, block size and type of cache.
        target: drafts are for it.
        num_tokens: ids that both have in common, from 0 on.

    Raises:
        CheckpointError: a model that cannot take tokens back, or goes by a request's length.
    """

    def __init__(self, model: Verifier, target: Verifier, num_tokens: int) -> None:
        if bytes_per_slot(model.kv_specs, 1):
            raise CheckpointError(
                f"draft model {model.name!r} has recurrent layers, whose states cannot take"
                " rejected drafts back; choose one with attention alone"
            )
        if model.length_rule is not None and not model.length_rule.grows:
            raise CheckpointError(
                f"draft model {model.name!r} rotates requests longer than"
                f" {model.length_rule.start:,} tokens in another way,"
                " which a draft model cannot yet; choose another"
            )
        self.model, self.takes_trees = model, not tree_reasons(model.attention)
        self.num_tokens = min(num_tokens, model.vocab_size, target.vocab_size)
        # A target may have tokens that the model lacks; it drafts a few of its own ids alone then.
        partial = self.num_tokens < target.vocab_size
        self.target_ids = torch.arange(self.num_tokens, device=target.device) if partial else None

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        """See `SequentialNetwork.kv_specs`; of layers that store something."""
        return [spec for spec in self.model.kv_specs if not isinstance(spec, SharedLayerSpec)]

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def forward(self, rows: Rows, caches: Sequence[Any], wanted: Tensor | None) -> Tensor:
        """Logits [n, V] of the model, which stand for its hidden states."""
        token_ids = rows.token_ids
        if self.target_ids is not None:
            # of a token that it lacks it learns the place alone
            token_ids = token_ids.where(token_ids < self.num_tokens, 0)
        position_ids, stored, held = rows.position_ids, iter(caches), list[Any]()
        if rows.metadata.max_seq_len > self.model.context.extended:
            position_ids = position_ids.clamp(max=self.model.context.extended - 1)
        for spec in self.model.kv_specs:
            held.append(held[spec.layer] if isinstance(spec, SharedLayerSpec) else next(stored))
        return self.model.forward(
            ForwardInput(token_ids, position_ids, rows.metadata, logit_rows=wanted), held
        ).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """See `SequentialNetwork.logits`: those of common tokens."""
        return hidden[:, : self.num_tokens]
