"""Domino's head (arXiv 2605.29707, sgl-project/SpecForge): a recurrent state over the tokens before
a slot corrects its logits.

With e the input embedding of the token before a slot and h the slot's hidden state:

    s <- GRU(e, s), from zeros before the anchor
    logits + W2 silu(W1 [h; s])

The first `pure_draft_prefix_len` slots keep their logits; their tokens enter the state, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.head import Head, HeadConfig, HeadSizes
from drafters.keys import Keys, require

MAX_WIDTH = 2**16
"""More than any head has: a width beyond comes from a damaged file."""

KEYS = {"emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "use_embed_proj", "use_hidden_proj"}
"""What `config.json` may say about this head; `shift_label` is the backbone's."""


@dataclass(frozen=True, slots=True)
class DominoConfig(HeadConfig):
    """Domino's head.

    Attributes:
        rank: of the correction, between W1 and W2.
        state_size: of the GRU.
        pure_prefix: slots whose logits stay as they are.

    Raises:
        CheckpointError: a size that cannot be.
    """

    algorithm: ClassVar[str] = "domino"

    rank: int
    state_size: int
    pure_prefix: int = 0

    def __post_init__(self) -> None:
        for name, size in (("emb_dim", self.rank), ("gru_hidden_dim", self.state_size)):
            require(1 <= size <= MAX_WIDTH, f"{name} is {size}; it must lie in [1, {MAX_WIDTH:,}]")
        valid = self.pure_prefix >= 0
        require(valid, f"pure_draft_prefix_len is {self.pure_prefix}; it must be at least 0")

    def modules(self, sizes: HeadSizes) -> Mapping[str, nn.Module]:
        projection = nn.Sequential(
            nn.Linear(sizes.hidden_size + self.state_size, self.rank, bias=False),
            nn.SiLU(),
            nn.Linear(self.rank, sizes.draft_vocab_size, bias=False),
        )
        gru = nn.GRU(sizes.hidden_size, self.state_size, bias=False)
        return {"prefix_gru": gru, "embed_proj": projection}

    def head(self, model: nn.Module, embed: Callable[[Tensor], Tensor]) -> Head:
        return DominoHead(self, model, embed)

    def json(self) -> dict[str, Any]:
        sizes = {
            "emb_dim": self.rank,
            "gru_hidden_dim": self.state_size,
            "pure_draft_prefix_len": self.pure_prefix,
        }
        return {"projector_type": "domino", **sizes}


def parse_domino(keys: Keys) -> DominoConfig:
    """What `config.json` says.

    Raises:
        CheckpointError: a missing or malformed value, or a correction of another form.
    """
    for name, plain in (("use_embed_proj", True), ("use_hidden_proj", False)):
        stated = keys.flag(name)
        what = f"Domino with {name} {stated!r} is not supported yet; supported: {plain!r}"
        require(stated in (None, plain), what)
    return DominoConfig(
        keys.required("emb_dim"),
        keys.required("gru_hidden_dim"),
        keys.integer("pure_draft_prefix_len") or 0,
    )


class DominoHead(Head):
    """The weights of a model."""

    has_state = True

    def __init__(
        self, config: DominoConfig, model: nn.Module, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.first_slot, self._embed = config.pure_prefix, embed
        self._gru = cast(nn.GRU, model.get_submodule("prefix_gru"))
        projection = cast(nn.Sequential, model.get_submodule("embed_proj"))
        self._first, self._second = cast(nn.Linear, projection[0]), cast(nn.Linear, projection[2])

    @property
    def right(self) -> Tensor:
        """W2."""
        return self._second.weight

    def left(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What W2 is given, and the state with the token before in it."""
        embedded = self._embed(previous)
        before = embedded.new_zeros(self._gru.hidden_size) if state is None else state
        state = self._step(embedded, before)
        axes = torch.broadcast_shapes(hidden.shape[:-1], state.shape[:-1])
        both = [part.expand(*axes, part.shape[-1]) for part in (hidden, state)]
        return F.silu(self._first(torch.cat(both, dim=-1))), state

    def _step(self, x: Tensor, state: Tensor) -> Tensor:
        """A step of `torch.nn.GRU` for [..., H] and [..., S]; one kernel and two products."""
        axes = torch.broadcast_shapes(x.shape[:-1], state.shape[:-1])
        x, state = (
            part.expand(*axes, part.shape[-1]).reshape(-1, part.shape[-1]) for part in (x, state)
        )
        given, kept = cast(Tensor, self._gru.weight_ih_l0), cast(Tensor, self._gru.weight_hh_l0)
        return torch.gru_cell(x, state, given, kept).view(*axes, -1)
