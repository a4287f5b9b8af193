"""What one file of `verifiers/families` says of a model type."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from verifiers.description import Description, ExpertLayout
from verifiers.gguf.entries import Gguf

Describe = Callable[[Any, Mapping[str, Any]], Description | None]
"""Describes a model from its config and from what is read off all of them; None where our layers
lack a part of it.
"""


class Sizes(NamedTuple):
    """See `specdec.layers.recurrence.recurrence.Recurrence`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gates: int  # of a value head

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * (self.value_dim + self.gates)

    def of_rank(self, config: Any) -> "Sizes":
        """Sizes of a rank's part of the layers; see `verifiers.weights.shards.sharded`."""
        ranks = getattr(config, "ranks", 1)
        key_heads = self.key_heads // ranks
        return self._replace(key_heads=key_heads, value_heads=self.value_heads // ranks)


class Recurrent(NamedTuple):
    """Layers that keep a state per request.

    Attributes:
        rule: the gated delta rule, the same with a decay of every key number, Mamba-2, or a gated
            convolution alone.
        sizes: of the whole model's, from its config; a convolution has none.
        epsilon: of their norms where no config states it; None for that of the config.
        same_activation: convolutions have the activation of feed-forward sublayers, and SiLU is
            the one that ours have.
        steps: least and largest step of Mamba-2, from the config.
    """

    rule: Literal["delta", "key decay", "mamba", "convolution"]
    sizes: Callable[[Any], Sizes]
    epsilon: float | None = None
    same_activation: bool = False
    steps: Callable[[Any], tuple[float, float]] = lambda config: (
        config.time_step_limit or (0.0, float("inf"))
    )


class Prediction(NamedTuple):
    """Layers for multi-token prediction of one depth.

    Attributes:
        names: expressions for names in files, once these are like those of a text model, and what
            they become: `embedding_norm`, `hidden_norm`, `projection`, `norm`, and `model.layers.0`
            and so on. `{layers}` stands for the number of the target's layers. The first that
            matches counts. Without a `norm` it is the target's.
        kinds: of the layers, as `layer_types` of a config, from the target's.
        feed_forward: of each layer, as `mlp_layer_types`, where the config has such.
    """

    names: Sequence[tuple[str, str]]
    kinds: Callable[[Any], Sequence[str]] = lambda config: ("full_attention",)
    feed_forward: str = "sparse"

    @property
    def has_norm(self) -> bool:
        """Whether a norm of its own follows the layers."""
        return any(replacement == "norm." for _, replacement in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type, as far as its layers are not those of Llama.

    Attributes:
        describe: its layers, from its config; None where transformers' modules run them.
        partial_rope: a part of each head is rotated where the config says so; other types rotate
            all, whatever it says.
        latent: attention is latent, as `verifiers.building.latent` builds it.
        indexer: latent attention is to the positions that an indexer selects, whose RoPE turns
            halves or neighbors against each other, whatever that of attention does.
        sinks: some layers, or all, have sinks.
        chunked: some layers attend within chunks.
        sliding_kv_heads: sliding layers have so many times the config's key and value heads.
        recurrent: its layers that keep a state, which `layer_types` of the config tells.
        experts: how transformers keeps the weights of joined experts.
        renamed: pairs of an expression and its replacement, which turn names of tensors in
            published files into those of transformers.
        wide: tensors, by a part of their names, that stay in float32 beyond those that
            transformers' class lists.
        against: reasons against a model of this type, from its config.
        prediction: its layers for multi-token prediction.
        wrappers: model types of composites with such a text part, which is a decoder by itself:
            rows of text alone meet nothing of the tower.
        aliases: model types that transformers does not know, with the same layers; their configs
            are read as this type's.
        gguf: by llama.cpp's name, architectures of GGUF files that hold such a model.
    """

    describe: Describe | None = None
    partial_rope: bool = False
    latent: bool = False
    indexer: Literal["halves", "neighbors"] | None = None
    sinks: bool = False
    chunked: bool = False
    sliding_kv_heads: int = 1
    recurrent: Recurrent | None = None
    experts: ExpertLayout = "gated"
    renamed: Sequence[tuple[str, str]] = ()
    wide: Sequence[str] = ()
    against: Callable[[Any], Iterable[str]] = lambda config: ()
    prediction: Prediction | None = None
    wrappers: Sequence[str] = ()
    aliases: Sequence[str] = ()
    gguf: Mapping[str, Gguf] = field(default_factory=dict)


def plain(**options: Any) -> Describe:
    """Layers that differ from those of Llama only in these fields of `Description`; a value that
    follows from the config is a function of it.
    """

    def describe(config: Any, common: Mapping[str, Any]) -> Description:
        own = {name: one(config) if callable(one) else one for name, one in options.items()}
        return Description(**common, **own)

    return describe
