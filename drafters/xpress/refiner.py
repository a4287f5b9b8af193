"""XPress's head (arXiv 2608.02438): the slots of a block are corrected all at once, by everything
that comes before each, and again behind the tokens that this drafts.

With h the final hidden states of a block's rows, from the anchor's, g their mean, E a table of the
tokens before, and a lower triangular matrix L of each channel over the rows:

    x_k = W [A h_k; B g; E(token before row k)]
    c_k = x_k + sum over j <= k of L_kj x_j
    logits_k + R (c_k + D (silu(G c_k) * U c_k))

All up to c is linear, so what the block says of it is computed once (`start`), and the tokens' part
is added. The anchor's row has no draft, but L mixes it into all others. The token before it is the
one before the anchor, here as in training; vLLM takes the anchor itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.head import Head, HeadConfig, HeadSizes, Refiner
from drafters.keys import Keys, require

MAX_RANK = 2**16
"""More than any head has: a rank beyond comes from a damaged file."""
MAX_PASSES = 1024
"""More than any block has slots."""

KEYS = {
    "anchor_cap_to_max_valid", "eval_jacobi_passes", "num_jacobi_passes", "prefix_valid_mask",
    "xpress_block_size", "xpress_candidate_topc", "xpress_compile_head", "xpress_fused_kernel",
    "xpress_mlp_hidden", "xpress_mlp_ratio", "xpress_num_passes", "xpress_rank", "xpress_topc",
}  # fmt: skip
"""What `config.json` may say about this head. Some keys are of training, or of how vLLM computes:
its `xpress_topc` tokens of a slot that are corrected stand for all of them, which we correct.
"""

RELEASED = {
    "xpress_head.w1.": "refiner_head.token_embed.",
    "xpress_head.w2.": "refiner_head.readout.",
    "xpress_head.mix.L": "refiner_head.mix_l",
    "xpress_head.mlp.gate_proj.": "refiner_head.mlp_gate.",
    "xpress_head.mlp.up_proj.": "refiner_head.mlp_up.",
    "xpress_head.mlp.down_proj.": "refiner_head.mlp_down.",
    "xpress_head.": "refiner_head.",
}
"""How names of tensors begin in the authors' checkpoints, and in the layout of speculators."""


@dataclass(frozen=True, slots=True)
class XPressConfig(HeadConfig):
    """XPress's head.

    Attributes:
        rank: r, channels.
        mlp_ratio: width of its MLP in multiples of r.
        num_passes: of a chain, see `drafters.head.Refiner`.

    Raises:
        CheckpointError: a size that cannot be.
    """

    algorithm: ClassVar[str] = "xpress"

    rank: int
    mlp_ratio: int = 2
    num_passes: int = 6

    def __post_init__(self) -> None:
        for name, size, most in (
            ("xpress_rank", self.rank, MAX_RANK),
            ("xpress_mlp_ratio", self.mlp_ratio, MAX_RANK // max(self.rank, 1)),
            ("xpress_num_passes", self.num_passes, MAX_PASSES),
        ):
            require(1 <= size <= most, f"{name} is {size}; it must lie in [1, {most:,}]")

    def check(self, sizes: HeadSizes, *, sample_from_anchor: bool) -> None:
        require(
            not sample_from_anchor,
            "xpress with sample_from_anchor is not supported: drafts begin in the row behind the"
            " anchor's; if it was trained so, say false",
        )

    def modules(self, sizes: HeadSizes) -> Mapping[str, nn.Module]:
        return {"refiner_head": RefinerModule(self, sizes)}

    def head(self, model: nn.Module, embed: Callable[[Tensor], Tensor]) -> Head:
        return XPress(self, model)

    def json(self) -> dict[str, Any]:
        """As `config.json` holds it, in the words of both layouts."""
        return {
            "xpress_rank": self.rank,
            "xpress_mlp_ratio": self.mlp_ratio,
            "xpress_mlp_hidden": self.mlp_ratio * self.rank,
            "num_jacobi_passes": self.num_passes,
            "xpress_num_passes": self.num_passes,
        }


def parse_xpress(keys: Keys) -> XPressConfig:
    """What `config.json` says; 6 passes where it does not, as speculators and vLLM have it.

    Raises:
        CheckpointError: a missing or malformed value, or two that disagree.
    """
    rank, block = keys.required("xpress_rank"), keys.required("block_size")
    ratio, width = keys.integer("xpress_mlp_ratio"), keys.integer("xpress_mlp_hidden")
    passes, others = keys.integer("num_jacobi_passes"), keys.integer("xpress_num_passes")
    require(ratio is not None or width is not None, "config.json lacks xpress_mlp_ratio")
    ratio = (width or 0) // max(rank, 1) if ratio is None else ratio
    for name, said, of, wanted in (
        ("xpress_mlp_hidden", width, "xpress_rank times the ratio", ratio * rank),
        ("xpress_num_passes", others, "num_jacobi_passes", passes),
        ("xpress_block_size", keys.integer("xpress_block_size"), "block_size", block),
    ):
        what = f"{name} is {said}, but {of} is {wanted}; correct the wrong one in config.json"
        require(said is None or wanted in (said, None), what)
    passes = others if passes is None else passes
    return XPressConfig(rank, ratio, 6 if passes is None else passes)


class RefinerModule(nn.Module):
    """The weights under their names in the layout of speculators."""

    def __init__(self, config: XPressConfig, sizes: HeadSizes) -> None:
        super().__init__()
        rank, width = config.rank, config.mlp_ratio * config.rank
        self.token_embed = nn.Embedding(sizes.vocab_size, rank)
        self.down_h, self.down_g = (nn.Linear(sizes.hidden_size, rank, bias=False) for _ in "hg")
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, sizes.block_size, sizes.block_size))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, width, bias=False) for _ in "gu")
        self.mlp_down = nn.Linear(width, rank, bias=False)
        self.readout = nn.Linear(rank, sizes.draft_vocab_size, bias=False)


class XPress(Refiner):
    """The head. A state is what c is without the tokens to come, [..., slots to come * r]."""

    def __init__(self, config: XPressConfig, model: nn.Module) -> None:
        self.num_passes, self._rank = config.num_passes, config.rank
        self._module = cast(RefinerModule, model.get_submodule("refiner_head"))

    @property
    def gathered_bytes(self) -> int:
        """Bytes of E."""
        return self._module.token_embed.weight.nbytes

    @property
    def right(self) -> Tensor:
        """R."""
        return self._module.readout.weight

    def start(self, rows: Tensor, before: Tensor) -> Tensor:
        module = self._module
        mean = module.down_g(rows.mean(dim=-2, keepdim=True))
        known = module.down_h(rows)
        inputs = torch.cat([known, mean.expand_as(known)], dim=-1)
        x = F.linear(inputs, module.in_proj.weight[:, : 2 * self._rank])
        anchor = x[..., :1, :] + self._of_tokens(before)[..., None, :]
        return self._mixed(torch.cat([anchor, x[..., 1:, :]], dim=-2))[..., 1:, :].flatten(-2)

    def left(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "a refiner starts with the whole block"
        rows, x = state.unflatten(-1, (-1, self._rank)), self._of_tokens(previous)
        slot = self._module.mix_l.shape[-1] - rows.shape[-2]
        mixed = rows + x[..., None, :] * self._module.mix_l[:, slot:, slot].T
        return self._refined(mixed[..., 0, :] + x), mixed[..., 1:, :].flatten(-2)

    def sides(self, start: Tensor, previous: Tensor) -> Tensor:
        rows = start.unflatten(-1, (-1, self._rank))[..., : previous.shape[-1], :]
        return self._refined(rows + self._mixed(self._of_tokens(previous), first=1))

    def _of_tokens(self, token_ids: Tensor) -> Tensor:
        """What tokens before rows add to x, [..., r]."""
        weight = self._module.in_proj.weight[:, 2 * self._rank :]
        return F.linear(self._module.token_embed(token_ids), weight)

    def _mixed(self, x: Tensor, first: int = 0) -> Tensor:
        """c of x [..., rows, r], of the rows from `first` on."""
        some = slice(first, first + x.shape[-2])
        return x + torch.einsum("rkj,...jr->...kr", self._module.mix_l[:, some, some].tril(), x)

    def _refined(self, mixed: Tensor) -> Tensor:
        """What R is given, of c [..., r]."""
        module = self._module
        gated = F.silu(module.mlp_gate(mixed)) * module.mlp_up(mixed)
        return cast(Tensor, mixed + module.mlp_down(gated))
