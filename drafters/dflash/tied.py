"""Tables of a head made of the target's own, where a vocabulary would outweigh the drafter.

A head of rank r has a table [V, r] of the tokens before, and one of the tokens that it corrects:
beside a small target most of the drafter. With `tied_tables` it has projections [r, H] in their
place. The first table is P emb(x) of the target's input embeddings, the second Q head(y) of the
rows of its output head. The method is ours; what runs is the same head.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specdec.model.core import Verifier

OF_EMBEDDINGS = (
    "markov_head.markov_w1.weight",
    "candidate_selector.predecessor_codebook",
    "refiner_head.token_embed.weight",
)
OF_HEAD = (
    "markov_head.markov_w2.weight",
    "candidate_selector.successor_codebook",
    "embed_proj.2.weight",
    "refiner_head.readout.weight",
)
TIED = (*OF_EMBEDDINGS, *OF_HEAD)
"""Names of the tables."""


class FromEmbeddings(nn.Module):
    """Makes a table [V, r] of a projection [r, H], from the embeddings of `target`."""

    def __init__(self, target: Verifier) -> None:
        super().__init__()
        self._target = target

    def forward(self, projection: Tensor) -> Tensor:
        """The table."""
        tokens = torch.arange(self._target.vocab_size, device=projection.device)
        return self._target.embed(tokens) @ projection.T


class FromHead(nn.Module):
    """Makes a table [V, r] of a projection [r, H], from the output head of `target`."""

    def __init__(self, target: Verifier) -> None:
        super().__init__()
        self._target = target

    def forward(self, projection: Tensor) -> Tensor:
        """The table."""
        return self._target.head(projection).T


def tie(model: nn.Module, target: Verifier) -> None:
    """Gives a drafter projections in place of the tables that its head has; they are zero. A table
    is made whenever it is read.

    Args:
        model: the drafter; a table can be read once it is on the target's device and in its type.
        target: the target.
    """
    for name in TIED:
        owner, _, table = name.rpartition(".")
        if owner.partition(".")[0] in dict(model.named_children()):
            module = model.get_submodule(owner)
            rank = getattr(module, table).shape[1]
            setattr(module, table, nn.Parameter(torch.zeros(rank, target.hidden_size)))
            parametrize.register_parametrization(module, table, _maker(name, target), unsafe=True)


def checkpoint_names(model: nn.Module) -> dict[str, str]:
    """Names of a model's tensors in its state, by what a checkpoint calls them, tied or not."""
    return {
        name.replace("parametrizations.", "").removesuffix(".original"): name
        for name in model.state_dict()
    }


@torch.no_grad()
def expanded(tensors: Mapping[str, Tensor], target: Verifier) -> dict[str, Tensor]:
    """Tensors of a checkpoint with tables for projections, in the target's type."""
    made = dict(tensors)
    for name in TIED:
        if name in made:
            made[name] = _maker(name, target)(
                made[name].to(target.device, target.dtype)
            ).contiguous()
    return made


def _maker(name: str, target: Verifier) -> nn.Module:
    return FromEmbeddings(target) if name in OF_EMBEDDINGS else FromHead(target)
