"""tau without the engine: the drafts of every anchor at once, then the walk that a live greedy run would take over them.

Live anchors are not spread evenly over an answer: each follows a rejection or a fully accepted block. So the answer is walked
from its first token, each step jumping by the drafts it accepted and one more, as the engine does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.dflash.model import DFlashModel
from drafters.training.blocks import block_hidden, make_blocks
from drafters.training.config import TrainConfig
from drafters.training.dataset import AnswerSet, in_batches
from drafters.training.mask import use_flex
from drafters.training.target import Target


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a greedy run would do on the held-out answers.

    Attributes:
        num_emitted, num_steps: per answer, tokens output after the first one and the verify steps that took.
        row_rates: share of all anchors whose drafts match up to row 1, 2, ...; an anchor near the end of the answer counts
            for the rows it has.
    """

    num_emitted: list[int]
    num_steps: list[int]
    row_rates: list[float]

    @property
    def tau(self) -> float:
        """Tokens per verify step, pooled over the answers."""
        return sum(self.num_emitted) / sum(self.num_steps)


def walk(matches: Sequence[int]) -> int:
    """Verify steps that a greedy run takes.

    Args:
        matches: for every token of the answer but the last, the number of drafts accepted when it is the anchor.

    >>> walk([2, 0, 0, 1, 0])  # 0 -> 3 -> 5
    2
    >>> walk([0, 0, 0])
    3
    """
    anchor, steps = 0, 0
    while anchor < len(matches):
        anchor += matches[anchor] + 1
        steps += 1
    return steps


@torch.no_grad()
def replay(model: DFlashModel, target: Target, answers: AnswerSet, config: TrainConfig) -> ReplayResult:
    """Replays a greedy run over `answers`, which must be the target's own greedy ones.

    One difference to a live run remains: that one drafts fewer tokens in the last step of an answer that the token limit cuts,
    and a block with fewer rows may draft otherwise.

    Args:
        model: the drafter, on the target's device and in its type.
        target: the target.
        answers: held-out answers.
        config: how much runs at once.
    """
    flex = use_flex(config.mask_path, target.device)
    anchors, rows = config.anchors, config.loss_rows
    num_rows = model.config.max_draft_tokens
    emitted, steps = [], []
    reached, offered = torch.zeros(num_rows), torch.zeros(num_rows)
    order = sorted(range(len(answers)), key=lambda index: answers.lengths[index])
    for piece in in_batches(len(order), max(config.batch_size // config.accumulation, 1)):
        chosen = [order[i] for i in piece]
        batch = answers.take(chosen, torch.tensor(chosen, device=target.device), answers.longest(chosen))
        features, _ = target.features(batch)
        context = model.context_kv(features, torch.arange(batch.token_ids.shape[1], device=target.device))
        counts = (batch.lengths - batch.prompt_lens - 1).tolist()
        found = []
        for chunk in in_batches(-(-max(counts) // anchors) * anchors, anchors):
            offsets = torch.arange(chunk.start, chunk.stop, device=target.device)
            positions = batch.prompt_lens[:, None] + offsets
            valid = positions < batch.lengths[:, None] - 1
            blocks = make_blocks(batch, positions.masked_fill(~valid, 0), valid, num_rows=num_rows)
            hidden = block_hidden(model, target.embed, batch, blocks.anchors, context, flex=flex)
            found.append(_correct(hidden.flatten(0, 1), blocks.labels.flatten(0, 1), target, rows).view_as(blocks.valid))
            found[-1] &= blocks.valid
            reached += found[-1].cumprod(dim=-1).sum(dim=(0, 1)).cpu()
            offered += blocks.valid.sum(dim=(0, 1)).cpu()
        matches = torch.cat(found, dim=1).cumprod(dim=-1).sum(dim=-1).tolist()
        emitted += counts
        steps += [walk(row[:count]) for row, count in zip(matches, counts, strict=True)]
    return ReplayResult(emitted, steps, (reached / offered.clamp(min=1)).tolist())


def _correct(hidden: Tensor, labels: Tensor, target: Target, rows: int) -> Tensor:
    """Whether the most likely token is the label, bool [n, K]."""
    chunks = min(-(-labels.numel() // rows), len(labels))
    parts = zip(hidden.tensor_split(chunks), labels.tensor_split(chunks), strict=True)
    return torch.cat([target.head(part).argmax(dim=-1) == wanted for part, wanted in parts])
