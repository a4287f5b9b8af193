"""From a block's hidden states and base logits to its drafts: a chain or a tree."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.choice import (
    MAX_CANDIDATES,
    Choice,
    Guesses,
    chain_of,
    choose,
    forecast_chain,
    guess,
    tree_of,
)
from drafters.dflash.coupling import CouplingTable
from drafters.dflash.edges import edges_of, logprobs_of
from drafters.head import Head, Lattice, Refiner
from specdec.base.blocks import MAX_NODES
from specdec.base.config import DraftSampling
from specdec.layers.linear_choice import linear
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling.filters import COLDEST
from specdec.sampling.noise import Purpose, gumbel, of_step, stream
from specdec.sampling.trees.trees import best_chain, best_first

ALTERNATIVES = 16
"""Tokens per slot that may replace a draft that a grammar refuses; more gain little."""


class Slots(NamedTuple):
    """What the backbone says about the slots of a block.

    Attributes:
        hidden: [num_reqs, depth, H], final hidden states.
        logits: [num_reqs, depth, draft_vocab_size], without the head's correction.
        context: what the head knows beside them: [num_reqs, H], see `drafters.head.Lattice.table`;
            [num_reqs, S], see `drafters.head.Refiner.start`; None for another head.
    """

    hidden: Tensor
    logits: Tensor
    context: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Tensor,
        to_logits: Callable[[Tensor], Tensor],
        head: Head | Lattice | None,
        before: Tensor | None,
        depth: int | None = None,
    ) -> "Slots":
        """What the rows of blocks say.

        Args:
            rows: [num_reqs, K, H], final hidden states of the predicting rows; of a refiner's
                blocks [num_reqs, B, H], of all rows.
            to_logits: makes logits of hidden states.
            head: of the drafter.
            before: of the token before each anchor what a lattice's `table` or a refiner's
                `start` asks for; None for another head.
            depth: slots that are drafted, the first ones; None for all.
        """
        if not isinstance(head, Refiner):
            return cls(rows, to_logits(rows), before)
        assert before is not None, "a refiner is told the tokens before anchors"
        hidden = rows[:, 1:] if depth is None else rows[:, 1 : 1 + depth]
        return cls(hidden, to_logits(hidden), head.start(rows, before))


class _Block(NamedTuple):
    """A block to be drafted, with weights of coupled drafts; None for ones."""

    batch: DecodeBatch
    slots: Slots
    weights: Tensor | None  # float32 [2, num_reqs, depth], of `drafters.dflash.coupling`
    sees_noise: bool


class Drafts:
    """How the drafts of one run are drawn.

    Args:
        draft_sampling: of the run.
        coupling: weights for coupled drafts; None are ones.
        target_ids: int64 [draft_vocab_size], the target's token of each column, or None.
        head: what corrects the logits behind each token; None for plain DFlash.

    Attributes:
        forecasts: whether drafts come with `DraftOutput.forecast`.
    """

    forecasts = False

    def __init__(
        self,
        draft_sampling: DraftSampling,
        coupling: CouplingTable | None = None,
        target_ids: Tensor | None = None,
        head: Head | Lattice | None = None,
    ) -> None:
        self.draft_sampling, self._coupling = draft_sampling, coupling
        self._target_ids, self._head = target_ids, head
        corrector = None if isinstance(head, Lattice) else head
        self._correction = None if corrector is None else linear(corrector.right.detach())
        self._columns = None
        if corrector is not None and target_ids is not None:
            self._columns = _inverse(target_ids)

    def of(self, batch: DecodeBatch, slots: Slots) -> DraftOutput:
        """The block of each request."""
        sees_noise = self.draft_sampling != "greedy" and not batch.sampling.plan.all_greedy
        weights = None
        if sees_noise and self._coupling is not None:
            weights = self._coupling.at(batch.sampling.temperature, batch.shape.depth)
        block = _Block(batch, slots, weights, sees_noise)
        if batch.shape.is_tree:
            return self._tree(block)
        if self._head is None:
            chain = self._chain(block, [self._choose(block, slots.logits, 0)])
            if batch.sampling.plan.guided and chain.probs is None and ALTERNATIVES:
                chain.alternatives = self._candidates(block, ALTERNATIVES).token_ids
            return chain
        if isinstance(self._head, Lattice):
            return self._path(block, self._head, self._head.num_candidates)
        if isinstance(self._head, Refiner):
            return self._chain(block, [self._refined(block, self._head)])
        if self._head.num_candidates is None:
            return self._chain(block, self._one_by_one(block, self._head))
        return self._path(block, self._head, self._head.num_candidates)

    def _choose(self, block: _Block, logits: Tensor, first: int, *, last: bool = True) -> Choice:
        """Chooses drafts of the slots from `first` on, as many as `logits` [num_reqs, n,
        draft_vocab_size] has, each for itself; what is told of them is told of the `last`.
        """
        given = block.batch, logits, first, self.draft_sampling, self._target_ids
        return choose(*given, weights=block.weights, wants_own=self.forecasts and last)

    def _refined(self, block: _Block, head: Refiner) -> Choice:
        """All slots corrected at once, over and over, each behind what the pass before drafted.

        Where drafts are drawn, the numbers of a slot are the same in every pass. What it is drawn
        from depends on those of earlier slots alone, so it is a distribution as any other.
        """
        batch, slots = block.batch, block.slots
        assert self._correction is not None and slots.context is not None
        base = slots.logits.flatten(0, 1)
        passes = min(head.num_passes, batch.shape.depth)
        chosen = self._choose(block, slots.logits, 0, last=False)
        for turn in range(1, passes + 1):
            previous = torch.cat([batch.anchors[:, None], chosen.token_ids[:, :-1]], dim=1)
            sides = head.sides(slots.context, previous).flatten(0, 1)
            logits = self._correction(sides, base).view_as(slots.logits)
            chosen = self._choose(block, logits, 0, last=turn == passes)
        return chosen

    def _one_by_one(self, block: _Block, head: Head) -> list[Choice]:
        """Each slot corrected behind the token of the one before, over the whole vocabulary."""
        assert self._correction is not None
        batch, slots = block.batch, block.slots
        previous, state, chosen = batch.anchors, None, []
        for slot in range(batch.shape.depth):
            left, state = head.left(slots.hidden[:, slot], previous, state)
            logits = slots.logits[:, slot]
            if slot >= head.first_slot:
                logits = self._correction(left, logits)
            chosen.append(self._choose(block, logits[:, None], slot))
            previous = chosen[-1].token_ids[:, 0]
        return chosen

    def _chain(self, block: _Block, parts: Sequence[Choice]) -> DraftOutput:
        """The choices for all slots, in order."""
        return self._with_scores(block, *chain_of(parts, self._target_ids))

    def _path(self, block: _Block, head: Head | Lattice, count: int) -> DraftOutput:
        """The chain of the best candidates, each behind the last; only these are drawn."""
        batch, draws = block.batch, self.draft_sampling == "probabilistic" and block.sees_noise
        # it takes no part in which candidates may be drawn
        block = block._replace(sees_noise=block.sees_noise and not draws)
        candidate_ids, scores, edges = self._edges(block, head, count)
        if draws:
            edges = edges / batch.sampling.temperature[:, None, None, None].clamp(min=COLDEST)
            bits = stream(batch.sampling.seeds, of_step(batch.seq_lens, batch.k), Purpose.DRAFT)
            ranks = best_chain(edges + gumbel(bits, candidate_ids)[:, :, None])
        else:
            ranks = best_chain(edges)
        token_ids = candidate_ids.gather(-1, ranks[..., None]).squeeze(-1)
        if not draws and not self.forecasts:
            return DraftOutput(token_ids)
        table = edges if draws else logprobs_of(edges, scores)
        before = F.pad(ranks[:, :-1], (1, 0))[..., None, None].expand_as(table[:, :, :1])
        rows = table.gather(2, before).squeeze(2)
        probs = rows.softmax(dim=-1) if draws else rows.exp()
        chain = DraftOutput(token_ids)
        if draws:
            chain = DraftOutput(token_ids, probs=probs, candidate_ids=candidate_ids)
        return self._with_scores(block, chain, probs.gather(-1, ranks[..., None]).squeeze(-1))

    def _tree(self, block: _Block) -> DraftOutput:
        """The tree of the likeliest paths; without a head positions are independent."""
        batch = block.batch
        # one position has no more paths than tokens
        count = min(MAX_CANDIDATES if batch.shape.depth > 1 else MAX_NODES, batch.k)
        if self._head is None:
            token_ids, scores = self._candidates(block, count)
        else:
            token_ids, _, scores = self._edges(block, self._head, count, as_logprobs=True)
        return tree_of(token_ids, best_first(scores, batch.k), forecasts=self.forecasts)

    def _pairs(
        self, block: _Block, head: Lattice, *, as_logprobs: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`_edges` of a lattice, whose candidates are always those it was trained on."""
        batch, slots = block.batch, block.slots
        assert slots.context is not None, "a lattice is given the anchor's context"
        likeliest = block._replace(sees_noise=False)
        token_ids, scores = self._candidates(likeliest, head.num_candidates)
        table = head.table(slots.hidden, token_ids, scores, slots.context)
        if block.sees_noise:
            positions = batch.positions(batch.shape.depth + 1)[:, 1:]
            noise = gumbel(stream(batch.sampling.seeds, positions, Purpose.SAMPLE), token_ids)
            temperature = batch.sampling.temperature[:, None]
            ones = torch.ones_like(noise[..., 0])
            a, b = (ones, ones) if block.weights is None else block.weights
            a = torch.where(temperature > 0, a / temperature.clamp(min=COLDEST), 1.0)
            b = torch.where(temperature > 0, b, 0.0)
            table = a[..., None, None] * table + (b[..., None] * noise)[:, :, None]
        return token_ids, scores, logprobs_of(table, scores) if as_logprobs else table

    def _edges(
        self, block: _Block, head: Head | Lattice, count: int, *, as_logprobs: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates int64 [num_reqs, depth, count], their own scores, and `edges_of` them."""
        if isinstance(head, Lattice):
            return self._pairs(block, head, as_logprobs=as_logprobs)
        batch, slots, scale = block.batch, block.slots, None
        token_ids, scores = self._candidates(block, count)
        columns, compared = self._columns_of(token_ids), None
        if block.sees_noise:
            temperature = batch.sampling.temperature[:, None]
            trust = torch.ones_like(scores[..., 0]) if block.weights is None else block.weights[0]
            scale = torch.where(temperature > 0, trust / temperature.clamp(min=COLDEST), 1.0)
            # those it was trained on; the noise makes candidates of others
            if head.compares_candidates:
                assert head.num_candidates is not None
                likeliest = self._candidates(block._replace(sees_noise=False), head.num_candidates)
                compared = Guesses(self._columns_of(likeliest.token_ids), likeliest.scores)
        arguments = head, slots.hidden, batch.anchors, token_ids, columns, scores, scale, compared
        table = edges_of(*arguments, start=slots.context, as_logprobs=as_logprobs)
        return token_ids, scores, table

    def _columns_of(self, token_ids: Tensor) -> Tensor:
        """Where in the drafter's vocabulary tokens of the target stand."""
        return token_ids if self._columns is None else self._columns[token_ids]

    def _candidates(self, block: _Block, count: int) -> Guesses:
        """The `count` likeliest tokens of every slot, given the target's noise if it is seen."""
        sampling: DraftSampling = self.draft_sampling if block.sees_noise else "greedy"
        given = block.batch, block.slots.logits, 0, count, sampling, self._target_ids
        return guess(*given, weights=block.weights)

    def _with_scores(self, block: _Block, chain: DraftOutput, probs: Tensor | None) -> DraftOutput:
        """A chain, and how likely its drafts are: as far as the head trusts in them, or else by
        their own probabilities float32 [num_reqs, depth].
        """
        if not self.forecasts:
            return chain
        previous = torch.cat([block.batch.anchors[:, None], chain.token_ids[:, :-1]], dim=1)
        head, hidden = self._head, block.slots.hidden
        trusted = None if head is None else head.confidences(hidden, previous)
        kept = probs if trusted is None else trusted
        assert kept is not None
        return forecast_chain(chain, kept)


def _inverse(target_ids: Tensor) -> Tensor:
    """The column of every token of the target, up to the last that has one."""
    columns = torch.zeros(int(target_ids.max()) + 1, dtype=torch.int64, device=target_ids.device)
    return columns.scatter_(0, target_ids, torch.arange(len(target_ids), device=target_ids.device))
