"""DSpark's heads (arXiv 2607.05147, deepseek-ai/DeepSpec): a Markov head, and confidences.

W1 embeds the token before a slot, W2 turns a vector of the same rank into corrections of all
logits. What W2 is given is, for token x before a slot with hidden state h:

    vanilla: W1[x]
    gated:   sigmoid(gate([h; W1[x]])) * W1[x]
    rnn:     tanh(o), with (g, c, o) = joint([s; W1[x]; h]); the next state is
             sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)

Its authors correct the whole vocabulary, slot by slot, and so do we unless `dspark_draft_topk` (a
key of vLLM's) says how many of the likeliest tokens to correct.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from drafters.head import Head, HeadConfig, HeadSizes
from drafters.keys import Keys, require

KINDS = ("vanilla", "gated", "rnn")
MAX_RANK = 2**16
"""More than any head has: a rank beyond comes from a damaged file."""

KEYS = {
    "confidence_head_alpha", "confidence_head_with_markov", "dspark_draft_topk",
    "dspark_fixup_head_type", "dspark_markov_rank",
    "enable_confidence_head", "markov_head_type", "markov_rank", "use_confidence_head",
}  # fmt: skip
"""What `config.json` may say about these heads; alpha is a weight in training."""


@dataclass(frozen=True, slots=True)
class MarkovConfig(HeadConfig):
    """DSpark's heads.

    Attributes:
        rank: r, width of W1 and W2.
        kind: "vanilla", "gated" or "rnn".
        has_confidence: whether there is a confidence head.
        confidence_sees_token: whether that one is given W1 of the token before, too.
        draft_top_k: tokens of a slot that are corrected for a chain, those of the highest logits;
            None for the whole vocabulary, as the authors do.

    Raises:
        CheckpointError: another kind, or a size that cannot be.
    """

    algorithm: ClassVar[str] = "dspark"

    rank: int
    kind: str = "vanilla"
    has_confidence: bool = False
    confidence_sees_token: bool = True
    draft_top_k: int | None = None

    def __post_init__(self) -> None:
        valid = 1 <= self.rank <= MAX_RANK
        require(valid, f"markov_rank is {self.rank}; it must lie in [1, {MAX_RANK:,}]")
        known = self.kind in KINDS
        require(known, f"markov_head_type is {self.kind!r}; supported: {', '.join(KINDS)}")
        top_k = self.draft_top_k
        valid = top_k is None or 1 <= top_k <= 64
        require(valid, f"dspark_draft_topk is {top_k}; it must lie in [1, 64], or be left out")

    def check(self, sizes: HeadSizes, *, sample_from_anchor: bool) -> None:
        require(
            self.kind != "rnn" or sample_from_anchor,
            "markov_head_type 'rnn' without sample_from_anchor is not supported: its state begins"
            " in the anchor's row, whose output is not kept",
        )

    def modules(self, sizes: HeadSizes) -> Mapping[str, nn.Module]:
        modules: dict[str, nn.Module] = {"markov_head": MarkovHead(self, sizes)}
        if self.has_confidence:
            input_size = sizes.hidden_size + self.confidence_sees_token * self.rank
            modules["confidence_head"] = ConfidenceHead(input_size)
        return modules

    def head(self, model: nn.Module, embed: Callable[[Tensor], Tensor]) -> Head:
        return DSparkHead(self, model)

    def json(self) -> dict[str, Any]:
        said = {
            "markov_rank": self.rank,
            "markov_head_type": self.kind,
            "enable_confidence_head": self.has_confidence,
            "confidence_head_with_markov": self.confidence_sees_token,
        }
        return said | ({} if self.draft_top_k is None else {"dspark_draft_topk": self.draft_top_k})


def parse_markov(keys: Keys) -> MarkovConfig:
    """What `config.json` says; CheckpointError: a missing or malformed value."""
    enabled, used = keys.flag("enable_confidence_head"), keys.flag("use_confidence_head")
    sees_token, rank = keys.flag("confidence_head_with_markov"), keys.integer("dspark_markov_rank")
    return MarkovConfig(
        rank=rank
        if keys.integer("markov_rank") is None and rank is not None
        else keys.required("markov_rank"),
        kind=str(keys.find("markov_head_type") or "vanilla"),
        has_confidence=bool(used if enabled is None else enabled),
        confidence_sees_token=True if sees_token is None else sees_token,
        draft_top_k=keys.integer("dspark_draft_topk"),
    )


class MarkovHead(nn.Module):
    """W1 and W2, and what makes the one's rows the other's inputs."""

    def __init__(self, config: MarkovConfig, sizes: HeadSizes) -> None:
        super().__init__()
        rank, self.kind = config.rank, config.kind
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, sizes.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(sizes.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + sizes.hidden_size, 3 * rank)

    def left(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `drafters.head.Head.left`; a state has the width r."""
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(
                self.gate_proj(_beside(embedded, hidden, embedded))
            ) * embedded, None
        state = embedded.new_zeros(embedded.shape[-1]) if state is None else state
        gate, candidate, output = self.joint_proj(_beside(embedded, state, embedded, hidden)).chunk(
            3, dim=-1
        )
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot's draft is accepted, if those before it are."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., input_size] to [...]."""
        return self.proj(features).squeeze(-1)


class DSparkHead(Head):
    """Both heads of a model."""

    def __init__(self, config: MarkovConfig, model: nn.Module) -> None:
        self._config, self._markov = config, cast(MarkovHead, model.get_submodule("markov_head"))
        self._confidence: ConfidenceHead | None = None
        if config.has_confidence:
            self._confidence = cast(ConfidenceHead, model.get_submodule("confidence_head"))
        self.has_state, self.num_candidates = config.kind == "rnn", config.draft_top_k

    @property
    def gathered_bytes(self) -> int:
        own = self._markov.markov_w1.weight.nbytes
        return own if self.num_candidates is None else own + self.right.nbytes

    @property
    def right(self) -> Tensor:
        """W2."""
        return self._markov.markov_w2.weight

    def left(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What W2 is given."""
        return self._markov.left(hidden, previous, state)

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        if self._confidence is None:
            return None
        features = hidden
        if self._config.confidence_sees_token:
            embedded = self._markov.markov_w1(previous)
            features = _beside(embedded, hidden, embedded)
        return torch.sigmoid(self._confidence(features).float())


def _beside(like: Tensor, *parts: Tensor) -> Tensor:
    """Vectors [..., n] side by side, their other axes broadcast with those of `like`."""
    axes = torch.broadcast_shapes(*(part.shape[:-1] for part in (like, *parts)))
    return torch.cat([part.expand(*axes, part.shape[-1]) for part in parts], dim=-1)
