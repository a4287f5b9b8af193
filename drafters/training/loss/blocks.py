"""Training blocks: where they start, what they are given, what they must say, their forward."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.model import DFlashModel
from drafters.head import Head, Lattice, Refiner
from drafters.training.loss.mask import BlockAttention
from drafters.training.loss.packing import Packing

FLEX_CONTEXT = 512
"""FlexAttention is compiled for each length: the context is padded to a multiple of this."""


@dataclass(slots=True)
class SequenceBatch:
    """Sequences of prompt and answer, padded on the right.

    Attributes:
        token_ids: int64 [S, T].
        prompt_lens: int64 [S], where the last answer begins.
        lengths: int64 [S], where it ends.
        lengths_host: the same, known to the host.
        ends: int64 [S, T], of each token of an answer where that answer ends, and 0 of all others.
        packing: how they lie in the rows that the networks are given; None is a row for each.
    """

    token_ids: Tensor
    prompt_lens: Tensor
    lengths: Tensor
    lengths_host: list[int]
    ends: Tensor
    packing: Packing | None = None

    @property
    def positions(self) -> Tensor:
        """int64 [T], or [R, L] of packed rows: of every token in its own sequence."""
        positions = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        if self.packing is None:
            return positions
        return self.packing.pack(positions.expand_as(self.token_ids), self.lengths)

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """What rows [S, T, C], or packed [R, L, C], have at positions int64 [S, n]."""
        count, width = self.token_ids.shape
        first = torch.arange(0, count * width, width, device=positions.device)
        first = first if self.packing is None else self.packing.places
        index = (first[:, None] + positions).flatten()
        return x.flatten(0, 1).index_select(0, index).view(*positions.shape, -1)


@dataclass(slots=True)
class Blocks:
    """N blocks of each of S sequences; K rows of a block predict.

    Attributes:
        anchors: int64 [S, N], position of the anchor; 0 in a block that is not valid.
        labels: int64 [S, N, K], the answer's token for predicting rows, anything if not `valid`.
        previous: int64 [S, N, K], the token before that: the anchor's for the first row.
        valid: bool [S, N, K].
    """

    anchors: Tensor
    labels: Tensor
    previous: Tensor
    valid: Tensor


def sample_anchors(batch: SequenceBatch, count: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Answer positions before other answer tokens, those with the highest scores, in order.

    Args:
        batch: the sequences.
        count: N.
        scores: float32 [S, T] in [0, 1), random.

    Returns:
        Positions int64 [S, N], 0 where a short answer has fewer, and whether each is one.
    """
    length = batch.token_ids.shape[1]
    positions = torch.arange(length, device=batch.token_ids.device)
    eligible = positions < batch.ends - 1
    top, anchors = scores.masked_fill(~eligible, -1.0).topk(min(count, length), dim=1)
    return _in_order(anchors, top >= 0, length)


def next_anchors(blocks: Blocks, accepted: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Where a run would draft next behind these blocks, as `sample_anchors` gives positions.

    Args:
        blocks: [S, N] of them.
        accepted: int64 [S, N], how many drafts of each are right.
        batch: the sequences.
    """
    behind = blocks.anchors + accepted + 1
    ends = batch.ends.gather(1, blocks.anchors)
    return _in_order(behind, blocks.valid[..., 0] & (behind < ends - 1), batch.token_ids.shape[1])


def _in_order(anchors: Tensor, valid: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Both [S, N], sorted, those that are not valid last and 0; `length` is behind all anchors."""
    anchors = anchors.masked_fill(~valid, length).sort(dim=1).values
    valid = anchors < length
    return anchors.masked_fill(~valid, 0), valid


def make_blocks(batch: SequenceBatch, anchors: Tensor, valid: Tensor, *, num_rows: int) -> Blocks:
    """Labels of blocks at `anchors` int64 [S, N]: row k predicts the anchor's position + k."""
    length = batch.token_ids.shape[1]
    positions = anchors[:, :, None] + torch.arange(1, num_rows + 1, device=anchors.device)
    following = batch.token_ids.gather(1, positions.clamp(max=length - 1).flatten(1))
    labels = following.view_as(positions)
    previous = torch.cat([batch.token_ids.gather(1, anchors)[:, :, None], labels[:, :, :-1]], dim=2)
    ends = batch.ends.gather(1, anchors)[:, :, None]
    return Blocks(anchors, labels, previous, valid[:, :, None] & (positions < ends))


@torch.no_grad()
def anchor_states(
    model: DFlashModel, batch: SequenceBatch, features: Tensor, anchors: Tensor
) -> Tensor:
    """`DFlashModel.context_state` [S, N, H] of features [S, T, num_taps * H_target], or packed,
    of the tokens before anchors int64 [S, N], zeros before the first one; without gradient.
    """
    states = model.context_state(batch.at(features, (anchors - 1).clamp(min=0)))
    return states.masked_fill(anchors[..., None] == 0, 0)


def before_anchors(
    head: Head | Lattice | None,
    model: DFlashModel,
    batch: SequenceBatch,
    features: Tensor,
    anchors: Tensor,
) -> Tensor | None:
    """What a head asks for of the tokens before anchors int64 [S, N]: the `anchor_states` of which
    its lattice is given, or which they are, int64 [S, N]; None for another head. The token before
    the first one is taken to be that one.
    """
    if isinstance(head, Lattice):
        return anchor_states(model, batch, features, anchors)
    if isinstance(head, Refiner):
        return batch.token_ids.gather(1, (anchors - 1).clamp(min=0))
    return None


def block_hidden(
    model: DFlashModel,
    embed: Callable[[Tensor], Tensor],
    batch: SequenceBatch,
    anchors: Tensor,
    context: tuple[Tensor, Tensor],
    *,
    flex: bool,
    head: Head | Lattice | None = None,
) -> Tensor:
    """Final hidden states of the predicting rows of all blocks.

    Args:
        model: the drafter.
        embed: token ids [...] to scaled embeddings [..., H].
        batch: the sequences.
        anchors: int64 [S, N].
        context: keys and values [S, T, layers, kv_heads, head_dim] of every position, or of packed
            rows, from `DFlashModel.context_kv`.
        flex: see `BlockAttention`.
        head: of the drafter; a refiner is given all rows.

    Returns:
        [S, N, K, H], or [S, N, B, H] of all rows.
    """
    config, packing = model.config, batch.packing
    width = config.max_draft_tokens + (not config.sample_from_anchor)
    room = -context[0].shape[1] % FLEX_CONTEXT if flex else 0
    keys, values = (F.pad(part, (0, 0, 0, 0, 0, 0, 0, room)).unbind(2) for part in context)
    anchor_tokens = batch.token_ids.gather(1, anchors)[:, :, None]
    token_ids = F.pad(anchor_tokens, (0, width - 1), value=config.mask_token_id)
    positions = anchors[:, :, None] + torch.arange(width, device=anchors.device)
    places, starts = anchors, None
    if packing is not None:  # the blocks of a row's sequences, one after the other
        starts = packing.starts[:, :, None].expand(-1, -1, anchors.shape[1])
        places = (packing.by_slot(anchors) + starts).flatten(1)
        starts = starts.flatten(1)
        token_ids, positions = (packing.by_slot(x).flatten(1) for x in (token_ids, positions))
    attention = BlockAttention(places, keys[0].shape[1], width, flex, starts)
    kinds = list(zip(config.causal, config.windows, strict=True))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        joined = torch.cat([keys[layer], key], dim=1)
        return attention(kinds[layer], query, joined, torch.cat([values[layer], value], dim=1))

    hidden = model.block_forward(embed(token_ids.flatten(1)), positions.flatten(1), attend)
    if packing is not None:
        hidden = packing.by_sequence(hidden.unflatten(1, (packing.slots.shape[1], -1)))
    first = 0 if isinstance(head, Refiner) else width - config.max_draft_tokens
    # Contiguous, or the frozen head would be multiplied block by block, and read as often.
    return hidden.view(*anchors.shape, width, -1)[:, :, first:].contiguous()
