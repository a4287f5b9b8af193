"""What a network needs to draft token by token."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.kv_cache import LayerSpec


class Rows(NamedTuple):
    """Packed rows of a forward.

    A network without features has one row for the token of a position. One with features has a row
    for a *pair*: the features of a position and the token after it. Either is stored, and rotated,
    at that position.
    """

    token_ids: Tensor  # int64 [T]
    features: Tensor | None  # [T, F]; None without features
    position_ids: Tensor  # int64 [T]
    metadata: AttentionMetadata


class Mask(NamedTuple):
    """What stands for a token not drafted yet, where one forward drafts all of them."""

    token_id: int
    features: Tensor  # [F]


class SequentialNetwork(Protocol):
    """A network whose every row predicts the token after the one that it is given; see `Rows`.

    A subclass without features gives `kv_specs`, `weight_bytes`, `forward` and `logits`.
    """

    aux_layer_ids: tuple[int, ...] = ()
    """Decoder layers (0-based) of the target whose raw outputs `condense` is given."""
    feature_size: int = 0
    """F, numbers of the features of a position; 0 without features."""
    target_ids: Tensor | None = None
    """int64 [V'], the target's token of each column of the logits; None where they are the same."""
    takes_trees: bool = True
    """Whether its attention serves rows that see what is above them in a tree alone."""
    mask: Mask | None = None
    """The mask of a network that drafts all tokens in one forward; None for others."""

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        """Cache layers needed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a forward reads, with what it borrows of the target."""

    def condense(self, aux_hidden: Tensor) -> Tensor:
        """Features [T, F] from tapped layers side by side [T, taps * H]; by default the same."""
        return aux_hidden

    def forward(self, rows: Rows, caches: Sequence[Any], wanted: Tensor | None) -> Tensor:
        """Writes the keys and values of rows to `caches`, one per entry of `kv_specs`.

        Returns:
            Hidden states [n, ...], for `logits` and `next_features`, of the rows `wanted` int64
            [n], or of all where it is None.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V'] of hidden states that `forward` gave."""

    def next_features(self, hidden: Tensor) -> Tensor | None:
        """Features [n, F] of the rows after those of hidden states; None without features."""
        return None
