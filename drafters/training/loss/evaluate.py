"""tau without the engine: drafts of every anchor, then the walk of a live run over them.

Live anchors are not spread evenly over an answer: each follows a rejection or a fully accepted
block. So the answer is walked from its first token, each step jumping by the drafts it accepted and
one more, as the engine does. Drafts come from the run's own functions; where the target sampled,
its seed gives the noise back that they are chosen with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.choice import MAX_CANDIDATES
from drafters.dflash.drafts import Drafts, Slots
from drafters.head import Lattice, Refiner
from drafters.training.config import TrainConfig
from drafters.training.data.dataset import AnswerSet, in_batches
from drafters.training.families.choice import TrainedModel, trained
from drafters.training.families.trained import Trained
from drafters.training.loss.blocks import Blocks, make_blocks
from drafters.training.target import Target
from drafters.vocabulary import target_ids
from specdec.base.blocks import BlockShape
from specdec.model.batch import DecodeBatch
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.candidates import candidates
from specdec.sampling.trees.trees import walk as walk_tree

TREES = (16, 64)
"""Drafts of the trees that are told of."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a live run would do on the held-out answers.

    Attributes:
        shapes: of the steps' blocks: the chain of all drafts, then trees.
        temperatures: of each answer; 0 is greedy.
        num_emitted: per answer, tokens output after the first one.
        num_steps: per answer, the verify steps that takes with blocks of each shape, and lastly if
            every path through the candidates were tried: no head among them does better.
        row_rates: share of all anchors of greedy answers whose drafts match up to row 1, 2, ...; an
            anchor near the end of the answer counts for the rows it has.
        recall: share of the rows of greedy answers whose earlier rows hold the answer's tokens
            among their candidates, and which then do so themselves.
    """

    shapes: tuple[BlockShape, ...]
    temperatures: list[float]
    num_emitted: list[int]
    num_steps: list[list[int]]
    row_rates: list[float]
    recall: list[float]

    def figures(self) -> dict[str, float]:
        """tau by drafts: "15", "tree 16", "candidates"; "sampled 15", ... of drawn answers."""
        names = [*map(str, self.shapes), "candidates"]
        return {
            f"{'sampled ' * sampled}{name}": self._tau(i, sampled)
            for sampled in sorted({t > 0 for t in self.temperatures})
            for i, name in enumerate(names)
        }

    def tau(self, shape: BlockShape | None = None, *, sampled: bool = False) -> float:
        """Tokens per verify step, pooled over the greedy answers or over the sampled ones.

        Args:
            shape: of the blocks; None is the chain.
            sampled: over answers that were drawn, by drafts chosen with the target's noise.
        """
        return self._tau(0 if shape is None else self.shapes.index(shape), sampled)

    def _tau(self, place: int, sampled: bool) -> float:
        answers = zip(self.temperatures, self.num_emitted, self.num_steps, strict=True)
        some = [(count, steps[place]) for t, count, steps in answers if (t > 0) == sampled]
        return sum(count for count, _ in some) / sum(steps for _, steps in some)


def walk(matches: Sequence[int]) -> int:
    """Verify steps that a run takes.

    Args:
        matches: of every token of the answer but the last, drafts accepted behind it.

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


def shapes_of(depth: int, vocab_size: int, *, trees: bool = True) -> tuple[BlockShape, ...]:
    """The chain of `depth` drafts, and the trees of `TREES` that so many rows can make, if the
    target is served with trees.

    >>> [str(shape) for shape in shapes_of(15, 49152)]
    ['15', 'tree 16', 'tree 64']
    """
    paths = sum(min(MAX_CANDIDATES, vocab_size) ** min(d, 6) for d in range(1, depth + 1))
    return (BlockShape(depth), *(BlockShape(n, depth) for n in TREES if trees and n <= paths))


@torch.no_grad()
def replay(
    model: TrainedModel, target: Target, answers: AnswerSet, config: TrainConfig
) -> ReplayResult:
    """Replays runs over `answers`, which must be the target's own.

    One difference to a live run remains: that one drafts fewer tokens in the last step of an answer
    that the token limit cuts, and a block with fewer rows may draft otherwise.
    """
    anchors, num_rows = config.anchors, model.config.max_draft_tokens
    drafter = trained(model, target, config)
    drafts = _Drafts(drafter, model, target, config)
    temperatures, emitted, steps = [], [], []
    reached, offered, held, asked = torch.zeros(4, num_rows).unbind()
    stated = zip(answers.draws, answers.lengths, strict=True)
    keys = [(temperature, n) for (temperature, _), n in stated]
    order = sorted(range(len(answers)), key=keys.__getitem__)
    for piece in in_batches(len(order), max(config.batch_size // config.accumulation, 1)):
        chosen = [order[i] for i in piece]
        indices = torch.tensor(chosen, device=target.device)
        batch = answers.take(chosen, indices, answers.longest(chosen))
        draws = [answers.draws[index] for index in chosen]
        sampling = _sampling(draws, config.top_p, target.device)
        greedy = torch.tensor([[[temperature == 0]] for temperature, _ in draws]).to(target.device)
        features, _ = target.features(batch)
        context = drafter.context(batch, features)
        counts = (batch.lengths - batch.prompt_lens - 1).tolist()
        found = []
        for chunk in in_batches(-(-max(counts) // anchors) * anchors, anchors):
            offsets = torch.arange(chunk.start, chunk.stop, device=target.device)
            positions = batch.prompt_lens[:, None] + offsets
            valid = positions < batch.lengths[:, None] - 1
            blocks = make_blocks(batch, positions.masked_fill(~valid, 0), valid, num_rows=num_rows)
            hidden = drafter.hidden(batch, blocks.anchors, context)
            before = drafter.before(batch, features, blocks.anchors)
            accepted, inside = drafts.accepted(hidden, blocks, sampling, before)
            found.append(accepted)
            rows = torch.arange(num_rows, device=target.device)
            reached += ((rows < accepted[..., :1]) & greedy).sum(dim=(0, 1)).cpu()
            offered += (blocks.valid & greedy).sum(dim=(0, 1)).cpu()
            reaches = F.pad(inside[..., :-1], (1, 0), value=True).cumprod(dim=-1).bool()
            asking = blocks.valid & greedy & reaches
            asked += asking.sum(dim=(0, 1)).cpu()
            held += (asking & inside).sum(dim=(0, 1)).cpu()
        matches = torch.cat(found, dim=1).transpose(1, 2).tolist()  # by answer, shape and anchor
        emitted += counts
        temperatures += [temperature for temperature, _ in draws]
        pairs = zip(matches, counts, strict=True)
        steps += [[walk(row[:count]) for row in rows] for rows, count in pairs]
    rates = [
        (part / whole.clamp(min=1)).tolist() for part, whole in ((reached, offered), (held, asked))
    ]
    return ReplayResult(drafts.shapes, temperatures, emitted, steps, *rates)


class _Drafts:
    """Drafts of every shape, and how many of them hold the answer's tokens."""

    def __init__(
        self, drafter: Trained, model: TrainedModel, target: Target, config: TrainConfig
    ) -> None:
        shape = model.config
        vocab_size = shape.draft_vocab_size or target.verifier.vocab_size
        trees = drafter.draws_trees and not target.tree_reasons
        self.shapes = shapes_of(shape.max_draft_tokens, vocab_size, trees=trees)
        self._drafter, self._rows = drafter, config.loss_rows
        self._width = min(MAX_CANDIDATES, vocab_size)
        self._target_ids = None if model.d2t is None else target_ids(model.d2t)
        coupling, head = drafter.coupling, drafter.head
        self._drafts = Drafts("coupled", coupling, self._target_ids, head=head)

    def accepted(
        self,
        hidden: Tensor,
        blocks: Blocks,
        sampling: SamplingTensors,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Counts accepted drafts of blocks of sequences drawn as `sampling` says.

        Args:
            hidden: [S, N, K, ...], see `Trained.hidden`.
            blocks: [S, N] of them.
            sampling: of the S sequences.
            before: of them, see `Trained.before`.

        Returns:
            int64 [S, N, shapes + 1], accepted drafts, and bool [S, N, K], labels held.
        """
        anchors = blocks.anchors
        owners = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(anchors)
        labels = blocks.labels.masked_fill(~blocks.valid, -1)
        size = max(self._rows // labels.shape[2], 1)
        before = anchors if before is None else before
        tables = (hidden, before, anchors, blocks.previous[:, :, 0], labels, owners)
        pieces = zip(*(x.flatten(0, 1).split(size) for x in tables), strict=True)
        found = [self._of_blocks(sampling, *part) for part in pieces]
        accepted, inside = (
            torch.cat(parts).unflatten(0, anchors.shape) for parts in zip(*found, strict=True)
        )
        return accepted, inside

    def _of_blocks(
        self,
        sampling: SamplingTensors,
        hidden: Tensor,
        before: Tensor,
        anchors: Tensor,
        anchor_ids: Tensor,
        labels: Tensor,
        owners: Tensor,
    ) -> tuple[Tensor, Tensor]:
        depth, device = labels.shape[1], labels.device
        chain, *trees = self.shapes
        batch = DecodeBatch(
            slots=torch.arange(len(anchors), device=device),
            anchors=anchor_ids,
            seq_lens=anchors,
            block_table=torch.empty(len(anchors), 0, dtype=torch.int32, device=device),
            shape=chain,
            max_seq_len=0,
            block_size=1,
            max_model_len=1,
            sampling=sampling.select(owners, sampling.plan),
        )
        head = self._drafter.head
        told = before if isinstance(head, Lattice | Refiner) else None
        slots = Slots.of(hidden, self._drafter.logits, head, told)
        counts = [(self._drafts.of(batch, slots).token_ids == labels).cumprod(dim=1).sum(dim=1)]
        if trees:  # the first drafts of the largest tree are the smaller ones
            output = self._drafts.of(replace(batch, shape=trees[-1]), slots)
            assert output.tree is not None
            behind = F.pad(labels, (0, 1), value=-1).gather(1, F.pad(output.tree.depths, (1, 0)))
            sizes = (torch.full_like(anchors, shape.drafts) for shape in trees)
            counts += [
                walk_tree(output.token_ids, output.tree, behind, depth, size)[1] for size in sizes
            ]
        positions = batch.positions(depth + 1)[:, 1:]
        token_ids, _ = candidates(
            slots.logits, batch.sampling, positions, self._width, target_ids=self._target_ids
        )
        inside = (token_ids == labels[..., None]).any(dim=-1)
        return torch.stack([*counts, inside.cumprod(dim=1).sum(dim=1)], dim=1), inside


def _sampling(
    draws: Sequence[tuple[float, int]], top_p: float, device: torch.device
) -> SamplingTensors:
    """How answers of these temperatures and seeds were drawn."""
    params = [
        SamplingParams(temperature=temperature, top_p=top_p if temperature > 0 else 1.0)
        for temperature, _ in draws
    ]
    numbers = SamplingTensors.of(params, [seed for _, seed in draws])
    return replace(numbers, floats=numbers.floats.to(device), ints=numbers.ints.to(device))
