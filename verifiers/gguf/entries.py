"""Entries of configs from what a GGUF file says, as far as several families share them."""

from collections.abc import Callable, Mapping
from typing import Any

from specdec.base.errors import CheckpointError
from verifiers.gguf.file import Entries, Facts

EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
"""Keys by entries of mixtures; a file may lack any."""

NO_WINDOW = {"sliding_window": None}

FULL = "full_attention"

SIGMOID = 2
"""How llama.cpp writes that experts are scored by a sigmoid."""

COUNTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
LOCAL_COUNTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
BIAS = {"attention_bias": "attn_q.bias"}
BIASES = {**BIAS, "mlp_bias": "ffn_up.bias"}


class Gguf:
    """An architecture of llama.cpp: what its configs say beyond what all say, and what its
    converter does to tensors. What a file does not say, llama.cpp takes for granted, and so do we.

    Args:
        more: give entries, from a file and the entries that all families have.
        needs: keys by entry, which a file has to have.
        has: tensors by entry, which is whether a file has them.
        fixed: entries that llama.cpp takes for granted.
        neighbors: rows of a head that RoPE rotates against each other lie side by side.
        adds_one: norms hold what they multiply by, and not what it differs from 1 by.
        groups_values: value heads are sorted by their place in a group first.
        transposed: Transformers has projections as [in, out].
    """

    def __init__(
        self,
        *more: Callable[[Facts, Entries], Entries],
        needs: Mapping[str, str] = {},
        has: Mapping[str, str] = {},
        fixed: Mapping[str, Any] = {},
        neighbors: bool = False,
        adds_one: bool = False,
        groups_values: bool = False,
        transposed: bool = False,
    ) -> None:
        self._more, self._needs, self._has, self._fixed = more, needs, has, fixed
        self.neighbors, self.adds_one, self.groups_values = neighbors, adds_one, groups_values
        self.transposed = transposed

    def entries(self, facts: Facts, entries: Entries) -> Entries:
        """Further entries of a file; a "model_type" is there if it is not the usual one."""
        found: Entries = {}
        for one in self._more:
            found |= one(facts, entries)
        return found | needed(facts, self._needs) | present(facts, self._has) | dict(self._fixed)


def needed(facts: Facts, keys: Mapping[str, str]) -> Entries:
    """Values that the file has to have, by entry."""
    return {entry: facts.need(key) for entry, key in keys.items()}


def present(facts: Facts, tensors: Mapping[str, str]) -> Entries:
    """Whether the file has tensors, by entry."""
    return {entry: facts.has(name) for entry, name in tensors.items()}


def partial_rotation(facts: Facts, entries: Entries) -> Entries:
    """RoPE of a part of each head."""
    share = facts("rope.dimension_count", entries["head_dim"]) / entries["head_dim"]
    return {"rope_parameters": {**entries["rope_parameters"], "partial_rotary_factor": share}}


def windows(facts: Facts, period: int) -> list[str]:
    """Kinds of layers: those in the list, or all but every last one of `period` slide."""
    layers = range(facts.layers)
    pattern = facts.each("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        slides = [bool(one) for one in pattern]
    else:
        period = pattern if isinstance(pattern, int) and pattern else period
        slides = [(layer + 1) % period != 0 for layer in layers]
    return ["sliding_attention" if slides[layer] else FULL for layer in layers]


def experts_of(facts: Facts, entries: Entries) -> Entries:
    """Entries of a mixture, which has to say how many experts a row is sent to."""
    facts.need("expert_used_count")
    return {entry: value for entry, key in EXPERTS.items() if (value := facts(key)) is not None}


def expert_width(facts: Facts, entries: Entries) -> Entries:
    """The width of experts in families whose configs say it as others say that of a dense MLP."""
    width = facts("expert_feed_forward_length", entries.get("intermediate_size"))
    return {"intermediate_size": width}


def first_sparse(facts: Facts) -> int:
    """The first layer with experts."""
    layers = facts.layers_with("ffn_gate_exps.weight")
    if not layers:
        raise CheckpointError(f"{facts.name!r} has no layer with experts; fetch it again")
    return layers[0]
