"""DFlash 2's candidate selector (inco.ai, z-lab/dflash 0.1.0): which path to take through the
likeliest tokens of all slots.

Token b after token a in a slot with hidden state h scores `logit(b) + < A[a] * (P h), B[b] >`, with
two codebooks A and B of rank r and a projection P.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from drafters.head import Head, HeadConfig, HeadSizes
from drafters.keys import Keys, require

MAX_RANK = 2**16
"""More than any selector has: a rank beyond comes from a damaged file."""

KEYS = {"selector_rank", "selector_top_k"}
"""What `config.json` says about a selector."""


@dataclass(frozen=True, slots=True)
class SelectorConfig(HeadConfig):
    """A candidate selector.

    Attributes:
        rank: r.
        top_k: tokens of a slot among which a chain chooses, those of the highest logits.

    Raises:
        CheckpointError: a size that cannot be.
    """

    algorithm: ClassVar[str] = "dflash2"

    rank: int
    top_k: int = 16

    def __post_init__(self) -> None:
        valid = 1 <= self.rank <= MAX_RANK
        require(valid, f"selector_rank is {self.rank}; it must lie in [1, {MAX_RANK:,}]")
        require(1 <= self.top_k <= 64, f"selector_top_k is {self.top_k}; it must lie in [1, 64]")

    def check(self, sizes: HeadSizes, *, sample_from_anchor: bool) -> None:
        most = sizes.draft_vocab_size
        what = f"selector_top_k is {self.top_k}; the drafter's vocabulary has {most} tokens"
        require(self.top_k <= most, what)

    def modules(self, sizes: HeadSizes) -> Mapping[str, nn.Module]:
        return {"candidate_selector": CandidateSelector(self, sizes)}

    def head(self, model: nn.Module, embed: Callable[[Tensor], Tensor]) -> Head:
        return cast(CandidateSelector, model.get_submodule("candidate_selector"))

    def json(self) -> dict[str, Any]:
        return {"selector_rank": self.rank, "selector_top_k": self.top_k}


def parse_selector(keys: Keys) -> SelectorConfig:
    """What `config.json` says; CheckpointError: a missing or malformed value."""
    return SelectorConfig(keys.required("selector_rank"), keys.required("selector_top_k"))


class CandidateSelector(nn.Module, Head):
    """Both codebooks and the projection."""

    compares_candidates = True

    def __init__(self, config: SelectorConfig, sizes: HeadSizes) -> None:
        super().__init__()
        self.num_candidates = config.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(sizes.vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(sizes.draft_vocab_size, config.rank))
        self.hidden_projection = nn.Linear(sizes.hidden_size, config.rank, bias=False)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that are read of both codebooks."""
        return self.predecessor_codebook.nbytes + self.successor_codebook.nbytes

    @property
    def right(self) -> Tensor:
        return self.successor_codebook

    def left(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A[previous] * (P hidden)."""
        return nn.functional.embedding(
            previous, self.predecessor_codebook
        ) * self.hidden_projection(hidden), None
