"""One rank's shard of layers that are no target's, such as a drafter's."""

from transformers import Qwen3Config

from specdec.parallel.group import Group
from verifiers.config.families import describe
from verifiers.weights.shards import Shard


def plain_shard(group: Group, *, name: str, heads: int, kv_heads: int) -> Shard:
    """The shard of layers with attention by heads and gated feed-forward sublayers, whose tensors
    are called as a target's.

    Args:
        group: the ranks.
        name: how to call the layers in messages.
        heads, kv_heads: of a layer, for queries and for keys.

    Raises:
        UnsupportedModelError: the ranks do not divide them.
    """
    config = Qwen3Config(
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=2
    )
    description = describe(config)
    assert description is not None, "our own layers run this family"
    return Shard(config, description, group, name=name)
