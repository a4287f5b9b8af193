"""The head of a new drafter, and its first weights: those that correct nothing yet."""

import torch
from torch import nn

from drafters.dflash2.selector import SelectorConfig
from drafters.domino.gru import DominoConfig
from drafters.dspark.markov import MarkovConfig
from drafters.head import HeadConfig
from drafters.lilicorr.lattice import LatticeConfig
from drafters.training.config import TrainConfig
from drafters.xpress.refiner import XPressConfig

HEAD_MODULES = (
    "markov_head", "candidate_selector", "confidence_head", "prefix_gru", "embed_proj", "lilicorr",
    "refiner_head",
)  # fmt: skip
"""What a model calls the parts of its head."""
ZERO = "markov_w2", "successor_codebook", "embed_proj.2", "readout", "mix_l"
"""Parts of the names of weights that begin as zeros."""
KINDS = {"markov": "vanilla", "gated": "gated"}
"""DSpark's heads by the names of options."""


def new_head(config: TrainConfig) -> HeadConfig | None:
    """The head that the options ask for."""
    if config.head == "selector":
        return SelectorConfig(config.head_rank, config.head_candidates or 16)
    if config.head in KINDS:
        return MarkovConfig(
            config.head_rank,
            KINDS[config.head],
            has_confidence=config.confidence > 0,
            draft_top_k=config.head_candidates or None,
        )
    if config.head == "domino":
        return DominoConfig(config.head_rank, config.head_state)
    if config.head == "lilicorr":
        width = config.head_state
        num_heads = max(width // 64, 1)
        return LatticeConfig(
            width, config.head_candidates, num_heads=num_heads, factor_dim=config.head_rank
        )
    if config.head == "xpress":
        return XPressConfig(config.head_rank)
    return None


@torch.no_grad()
def init_head(model: nn.Module, names: set[str], generator: torch.Generator, scale: float) -> None:
    """First weights of a head: the right side is zero, so that drafts begin as those of the
    backbone; but a lattice's, which has no such side, and begins at random.

    Args:
        model: has the head.
        names: of its parameters that are new.
        generator: draws them.
        scale: of an embedding's numbers, for projections of embeddings.
    """
    for name, parameter in model.named_parameters():
        if name not in names or name.partition(".")[0] not in HEAD_MODULES:
            continue
        if name.endswith("bias") or any(part in name for part in ZERO):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        elif "parametrizations" in name:  # so that a row of the table has numbers around 1
            spread = 1 / (scale * parameter.shape[1] ** 0.5)
            nn.init.normal_(parameter, std=spread, generator=generator)
        elif any(part in name for part in ("markov_w1", "predecessor_codebook", "token_embed")):
            nn.init.normal_(parameter, generator=generator)
        elif name.startswith(("lilicorr", "refiner_head", "prefix_gru")) and parameter.ndim == 2:
            of_embeddings = scale if "token_proj" in name else 1.0
            std = parameter.shape[1] ** -0.5 / of_embeddings
            nn.init.normal_(parameter, std=std, generator=generator)
        else:
            nn.init.normal_(parameter, std=0.02, generator=generator)
