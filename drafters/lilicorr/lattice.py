"""LiLiCorr's head (arXiv 2608.20530): the likeliest tokens of all slots look at each other before a
path is taken through them.

A candidate is a vector: its embedding, its slot's hidden state, five numbers of its probability,
and a learned vector for its slot and its rank. All candidates of a block attend to each other, with
a bias by the distance of their slots. Two unit vectors come out of a candidate's state x and that
of the anchor's context, a. By the one it follows, by the other it is followed:

    f = silu(W [x; a; x * a]),  out = unit(A f),  in = unit(B f)

and token b behind token a of the slot before scores `logit_scale * <out_a, in_b>`. In the first
slot `out` is a projection of the anchor's context. Log-probabilities enter as features alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.head import HeadConfig, HeadSizes, Lattice
from drafters.keys import Keys, require

MAX_WIDTH = 2**16
"""More than any head has: a width beyond comes from a damaged file."""

_FIELDS = {
    "hidden_size": "hidden_size", "candidate_topk": "top_k", "num_heads": "num_heads",
    "num_layers": "num_layers", "mlp_ratio": "mlp_ratio", "factor_dim": "factor_dim",
    "vector_eps": "vector_eps", "logit_scale": "logit_scale",
}  # fmt: skip
KEYS = {f"lilicorr_{name}" for name in _FIELDS} | {"lilicorr_enabled"}
"""What `config.json` says about this head."""
FEATURES = 5
"""Log-probability, probability, distance to the best, rank from 0 to 1, and whether it is best."""


@dataclass(frozen=True, slots=True)
class LatticeConfig(HeadConfig):
    """LiLiCorr's head.

    Attributes:
        hidden_size: of a candidate's state; 0 is that of the backbone.
        top_k: candidates of a slot, those of the highest logits.
        num_layers, num_heads, mlp_ratio: of the layers in which candidates attend to each other.
        factor_dim: of the vectors that are multiplied.
        vector_eps: least norm that these are divided by.
        logit_scale: factor of their products.

    Raises:
        CheckpointError: a size that cannot be.
    """

    algorithm: ClassVar[str] = "lilicorr"

    hidden_size: int = 0
    top_k: int = 16
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    factor_dim: int = 128
    vector_eps: float = 1e-6
    logit_scale: float = 16.0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "factor_dim"):
            size = getattr(self, name)
            rule = f"lilicorr_{name} is {size}; it must lie in [1, {MAX_WIDTH:,}]"
            require(1 <= size <= MAX_WIDTH, rule)
        rule = f"lilicorr_hidden_size is {self.hidden_size}; it must lie in [0, {MAX_WIDTH:,}]"
        require(0 <= self.hidden_size <= MAX_WIDTH, rule)
        rule = f"lilicorr_candidate_topk is {self.top_k}; it must lie in [1, 64]"
        require(1 <= self.top_k <= 64, rule)
        for name in ("mlp_ratio", "vector_eps", "logit_scale"):
            value = getattr(self, name)
            require(0 < value < MAX_WIDTH, f"lilicorr_{name} is {value}; it must be positive")

    def check(self, sizes: HeadSizes, *, sample_from_anchor: bool) -> None:
        require(
            not sample_from_anchor and sizes.draft_vocab_size == sizes.vocab_size,
            "lilicorr with sample_from_anchor or a vocabulary of its own is not supported: it is"
            " trained on the rows behind the anchor and on all tokens",
        )
        most, width = sizes.vocab_size, self.hidden_size or sizes.hidden_size
        rule = f"lilicorr_candidate_topk is {self.top_k}; the vocabulary has {most} tokens"
        require(self.top_k <= most, rule)
        rule = f"lilicorr_num_heads is {self.num_heads}; it must divide the width {width}"
        require(width % self.num_heads == 0, rule)

    def modules(self, sizes: HeadSizes) -> Mapping[str, nn.Module]:
        return {"lilicorr": LatticeModule(self, sizes)}

    def head(self, model: nn.Module, embed: Callable[[Tensor], Tensor]) -> Lattice:
        return LiLiCorr(self, model, embed)

    def json(self) -> dict[str, Any]:
        said = {f"lilicorr_{name}": getattr(self, field) for name, field in _FIELDS.items()}
        return {"lilicorr_enabled": True, **said}


def parse_lattice(keys: Keys) -> LatticeConfig:
    """What `config.json` says; CheckpointError: a missing or malformed value."""
    require(keys.flag("lilicorr_enabled") is not False, "lilicorr_enabled is false; it has a head")
    whole = ("hidden_size", "candidate_topk", "num_heads", "num_layers", "factor_dim")
    said: dict[str, Any] = {_FIELDS[name]: keys.required(f"lilicorr_{name}") for name in whole}
    for name in ("mlp_ratio", "vector_eps", "logit_scale"):
        said[name] = keys.number(f"lilicorr_{name}")
        require(said[name] is not None, f"config.json lacks lilicorr_{name}")
    return LatticeConfig(**said)


class _MLP(nn.Module):
    def __init__(self, given: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(given, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.up_proj(x))))


class _Attention(nn.Module):
    """Under the names of `torch.nn.MultiheadAttention`."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj, self._heads = nn.Linear(hidden, hidden), num_heads

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        sides = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = sides.unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return cast(Tensor, self.out_proj(out.transpose(1, 2).flatten(2)))


class _Layer(nn.Module):
    def __init__(self, config: LatticeConfig, hidden: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(hidden, eps=eps) for _ in "am")
        self.attn = _Attention(hidden, config.num_heads)
        self.mlp = _MLP(hidden, int(hidden * config.mlp_ratio), hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class LatticeModule(nn.Module):
    """The weights under their names in a checkpoint."""

    def __init__(self, config: LatticeConfig, sizes: HeadSizes) -> None:
        super().__init__()
        own, eps, block = sizes.hidden_size, sizes.rms_norm_eps, sizes.block_size
        hidden = config.hidden_size or own
        self.token_proj = None if hidden == own else nn.Linear(own, hidden)
        self.pass_hidden_proj, self.context_proj = nn.Linear(own, hidden), nn.Linear(own, hidden)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = _MLP(FEATURES, hidden, hidden)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, block - 1, 1, hidden))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.top_k, hidden))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.num_heads, 2 * block - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.num_heads))
        self.layers = nn.ModuleList(_Layer(config, hidden, eps) for _ in range(config.num_layers))
        self.output_norm, self.anchor_norm = (nn.RMSNorm(hidden, eps=eps) for _ in "oa")
        self.factor_input_proj = nn.Linear(3 * hidden, hidden)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(hidden, config.factor_dim) for _ in "oia"
        )


class LiLiCorr(Lattice):
    """The head of a model."""

    def __init__(
        self, config: LatticeConfig, model: nn.Module, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.num_candidates, self._config, self._embed = config.top_k, config, embed
        self._module = cast(LatticeModule, model.get_submodule("lilicorr"))

    def table(self, hidden: Tensor, token_ids: Tensor, scores: Tensor, context: Tensor) -> Tensor:
        module, (count, slots, width) = self._module, token_ids.shape
        tokens = self._embed(token_ids)
        states = tokens if module.token_proj is None else module.token_proj(tokens)
        ranks = torch.arange(width, device=scores.device)
        parts = scores, scores.exp(), scores - scores.amax(dim=-1, keepdim=True)
        by_rank = (ranks / max(width - 1, 1)).expand_as(scores), (ranks == 0).expand_as(scores)
        features = torch.stack([*parts, *(one.to(scores.dtype) for one in by_rank)], dim=-1)
        states = states + module.pass_hidden_proj(hidden)[:, :, None]
        states = states + module.feature_mlp(module.feature_norm(features.to(states.dtype)))
        states = (
            states + module.slot_embedding[0, :, :slots] + module.rank_embedding[0, :, :, :width]
        )
        rows, bias = states.flatten(1, 2), self._bias(slots, width).to(states.dtype)
        for layer in module.layers:
            rows = layer(rows, bias)
        anchor = module.anchor_norm(module.context_proj(context))
        # A request without a context yet has a state of zeros.
        anchor = torch.where(context.any(dim=-1, keepdim=True), anchor, 0.0)
        states = module.output_norm(rows).view(count, slots, width, -1)
        beside = anchor[:, None, None].expand_as(states)
        joined = torch.cat([states, beside, states * beside], dim=-1)
        factors = F.silu(module.factor_input_proj(joined))
        incoming, outgoing = self._unit(module.in_head(factors)), module.out_head(factors)
        first = module.anchor_out_head(anchor)[:, None, None].expand(-1, 1, width, -1)
        outgoing = self._unit(torch.cat([first, outgoing[:, :-1]], dim=1))
        return self._config.logit_scale * torch.matmul(outgoing, incoming.mT).float()

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1, eps=self._config.vector_eps)

    def _bias(self, slots: int, width: int) -> Tensor:
        """Bias of attention, [heads, slots * width, slots * width]."""
        module = self._module
        owners = torch.arange(slots, device=module.same_slot_bias.device).repeat_interleave(width)
        apart = owners[:, None] - owners
        middle = module.relative_slot_bias.shape[1] // 2
        same = (apart == 0) * module.same_slot_bias[:, None, None]
        return module.relative_slot_bias[:, apart + middle] + same
