"""Tables of a head that are made of the target's own, for targets whose vocabulary would outweigh the drafter.

A head of rank r has a table [V, r] of the tokens before, and one of the tokens that it corrects: beside a small target most of the
drafter. With `tied_tables` it has projections [r, H] in their place. The first table is P emb(x) of the target's input embeddings, the
second Q head(y) of the rows of its output head. The method is ours; what runs is the same head.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

OF_EMBEDDINGS = ("markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook")
OF_HEAD = ("markov_head.markov_w2.weight", "candidate_selector.successor_codebook")
TIED = (*OF_EMBEDDINGS, *OF_HEAD)
"""Names of the tables."""

Rows = Callable[[Tensor], Tensor]


class FromEmbeddings(nn.Module):
    """A table [V, r] from a projection [r, H].

    Args:
        embed: int64 [...] to embeddings [..., H], as the target scales them.
        vocab_size: V.
    """

    def __init__(self, embed: Rows, vocab_size: int) -> None:
        super().__init__()
        self._embed, self._vocab_size = embed, vocab_size

    def forward(self, projection: Tensor) -> Tensor:
        """The table, in the type of the projection."""
        rows = self._embed(torch.arange(self._vocab_size, device=projection.device))
        return rows.to(projection.dtype) @ projection.T


class FromHead(nn.Module):
    """A table [V, r] from a projection [r, H].

    Args:
        head: hidden states [..., H] to logits [..., V] of the target, without its softcap.
    """

    def __init__(self, head: Rows) -> None:
        super().__init__()
        self._head = head

    def forward(self, projection: Tensor) -> Tensor:
        """The table."""
        return self._head(projection).T


def maker(name: str, embed: Rows, head: Rows, vocab_size: int) -> nn.Module:
    """What makes the table of this name."""
    return FromEmbeddings(embed, vocab_size) if name in OF_EMBEDDINGS else FromHead(head)


def tie(model: nn.Module, embed: Rows, head: Rows, vocab_size: int, hidden_size: int) -> None:
    """Gives a model projections in place of the tables that it has; they are zero.

    Args:
        model: a drafter whose head has tables.
        embed, head, vocab_size: of the target; they are called whenever a table is read.
        hidden_size: H.
    """
    for name in TIED:
        owner, _, table = name.rpartition(".")
        if owner.split(".")[0] not in dict(model.named_children()):
            continue
        module = model.get_submodule(owner)
        old = getattr(module, table)
        setattr(module, table, nn.Parameter(old.new_zeros(old.shape[1], hidden_size)))
        parametrize.register_parametrization(module, table, maker(name, embed, head, vocab_size), unsafe=True)


def checkpoint_names(model: nn.Module) -> dict[str, str]:
    """What a checkpoint calls each tensor of a model's state, tied or not, and what the model does."""
    return {name.replace("parametrizations.", "").removesuffix(".original"): name for name in model.state_dict()}


@torch.no_grad()
def expanded(tensors: Mapping[str, Tensor], embed: Rows, head: Rows, vocab_size: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors of a checkpoint with tables in place of projections.

    Args:
        tensors: of the checkpoint.
        embed, head, vocab_size: of the target.
        device, and the type of its embeddings: where the tables are made.
    """
    dtype = embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
    made = dict(tensors)
    for name in TIED:
        if name in made:
            made[name] = maker(name, embed, head, vocab_size)(made[name].to(device, dtype)).contiguous()
    return made
