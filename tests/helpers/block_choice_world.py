"""Decoding without a model or a clock: made-up times and acceptance, on which choices of shapes are
compared.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from specdec.base.blocks import MAX_NODES, BlockShape
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.draft_acceptance import Path
from specdec.engine.policy.shapes import shapes
from tests.helpers.tree_oracle import Node, heap_tree

MOST = 15
"""Positions that are drafted."""

Time = Callable[[int, int], float]
"""Of a step, by requests and drafts of a chain."""


def chains() -> BlockChoice:
    """A choice among chains."""
    return BlockChoice(shapes(MOST, trees=0))


def trees(
    *, likeliest_first: bool = False, most: int = MOST, forward_for_each: bool = False
) -> BlockChoice:
    """A choice among chains and trees."""
    return BlockChoice(
        shapes(most, trees=MAX_NODES, forward_for_each=forward_for_each),
        likeliest_first=likeliest_first,
        forward_for_each=forward_for_each,
    )


@dataclass(frozen=True)
class World:
    """What decoding of chains would be like.

    Attributes:
        time: undisturbed milliseconds of a step, by requests and drafts.
        rate: P(a draft is accepted | those before it are), by its position from 0 and the step.
        num_reqs: of a step.
        spread: relative standard deviation of a step's time; one in 30 is disturbed and takes up to
            five times as long.
        moods: by how much the acceptance of each request is off at most, for a hundred steps at a
            time.
    """

    time: Time
    rate: Callable[[int, int], float]
    num_reqs: Callable[[int], int] = lambda step: 1
    spread: float = 0.05
    moods: float = 0.1

    def took(self, num_reqs: int, shape: BlockShape) -> float:
        """Undisturbed time of a step."""
        return self.time(num_reqs, shape.drafts)

    def texts(self, step: int) -> tuple[float, ...]:
        """What expected tokens depend on beside the shape."""
        return tuple(self.rate(position, step) for position in range(MOST))

    def tokens(self, shape: BlockShape, step: int) -> float:
        """Expected tokens of each request."""
        alive, tokens = 1.0, 1.0
        for position in range(shape.drafts):
            alive *= self.rate(position, step)
            tokens += alive
        return tokens

    def path(self, shape: BlockShape, step: int, mood: float, rng: random.Random) -> Path:
        """What a request accepts."""
        kept = 0
        while kept < shape.drafts:
            rate = self.rate(kept, step)
            if rng.random() >= rate + mood * min(rate, 1 - rate):
                break
            kept += 1
        return Path(range(1, kept + 1), [0] * kept)


@dataclass(frozen=True)
class TreeWorld:
    """What decoding of chains and trees would be like.

    Attributes:
        time: undisturbed milliseconds of a step, by requests and the shape of their blocks.
        ranks: P(a candidate is right | those before it on the path are), of every position the
            likeliest first.
        num_reqs, spread, moods: see `World`.
    """

    time: Callable[[int, BlockShape], float]
    ranks: tuple[float, ...]
    num_reqs: Callable[[int], int] = lambda step: 1
    spread: float = 0.05
    moods: float = 0.1

    def took(self, num_reqs: int, shape: BlockShape) -> float:
        """Undisturbed time of a step."""
        return self.time(num_reqs, shape)

    def texts(self, step: int) -> tuple[float, ...]:
        """See `World.texts`."""
        return self.ranks

    def tokens(self, shape: BlockShape, step: int) -> float:
        """Expected tokens of each request."""
        if shape.is_tree:
            return 1 + sum(math.exp(node.score) for node in _best_tree(self.ranks, shape))
        return sum(self.ranks[0] ** depth for depth in range(shape.drafts + 1))

    def path(self, shape: BlockShape, step: int, mood: float, rng: random.Random) -> Path:
        """What a request accepts."""
        first, *others = self.ranks
        rates = (first + mood * min(first, 1 - first), *others)
        children = _children(self.ranks, shape) if shape.is_tree else _chain(shape.drafts)
        rows: list[int] = []
        ranks: list[int] = []
        row = 0
        while (rank := _right(rates, rng)) is not None and (row, rank) in children:
            row = children[row, rank]
            rows.append(row)
            ranks.append(rank)
        return Path(rows, ranks)


def _right(rates: tuple[float, ...], rng: random.Random) -> int | None:
    """The candidate that is right, if any is."""
    left = rng.random()
    for rank, rate in enumerate(rates):
        left -= rate
        if left < 0:
            return rank
    return None


@cache
def _chain(drafts: int) -> dict[tuple[int, int], int]:
    """As `_children`: the likeliest alone, one behind the other."""
    return {(row, 0): row + 1 for row in range(drafts)}


@cache
def _best_tree(ranks: tuple[float, ...], shape: BlockShape) -> list[Node]:
    return heap_tree([[math.log(rate) for rate in ranks]] * shape.depth, shape.drafts)


@cache
def _children(ranks: tuple[float, ...], shape: BlockShape) -> dict[tuple[int, int], int]:
    """Rows by that of their parent and their rank."""
    return {(node.parent, node.path[-1]): node.row for node in _best_tree(ranks, shape)}


def pace(world: World | TreeWorld, shape: BlockShape, step: int = 0) -> float:
    """Time per token of each request with blocks of that shape, undisturbed."""
    return world.took(world.num_reqs(step), shape) / world.tokens(shape, step)


@dataclass
class Outcome:
    """What choosing shapes came to.

    Attributes:
        chosen: of every step.
        loss: share of the time that the best fixed shape of every step's texts and batch size would
            have saved.
        behind: of every step, when it began and by how much it was slower than plain decoding of as
            many tokens.
    """

    chosen: list[BlockShape]
    loss: float
    behind: list[tuple[float, float]]

    def worst(self, window: float) -> float:
        """Largest share of a stretch of so much time that plain decoding would have saved."""
        most = late = 0.0
        first = 0
        for start, behind in self.behind:
            late += behind
            while self.behind[first][0] <= start - window:
                late -= self.behind[first][1]
                first += 1
            most = max(most, late)
        return most / window


def decode(
    world: World | TreeWorld, choice: BlockChoice, *, steps: int, seed: int, length: int = 0
) -> Outcome:
    """Steps in a world. Results are read while the next step runs, as on an accelerator.

    Args:
        world: where.
        choice: chooses, and is taught.
        steps: how many.
        seed: of the disturbances and the acceptance.
        length: steps behind which a whole batch of requests takes the place of the one before; 0
            for texts without an end.
    """
    rng = random.Random(seed)
    chosen: list[BlockShape] = []
    told: list[tuple[float, float]] = []
    unread: tuple[int, BlockShape, list[Path], float] | None = None
    took = least = 0.0
    moods: list[float] = []
    known: dict[tuple[int, tuple[float, ...]], tuple[dict[BlockShape, float], float, float]] = {}
    for step in range(steps):
        num_reqs = world.num_reqs(step)
        if step % 100 == 0 or len(moods) < num_reqs:
            moods = [world.moods * (2 * rng.random() - 1) for _ in range(num_reqs)]
        shape = choice.choose(num_reqs, fresh=num_reqs if length and step % length == 0 else 0)
        if unread:
            last, before, paths, seconds = unread
            counts = [len(path.rows) for path in paths]
            own = [path for path in paths if path.rows] if before.is_tree else []
            choice.observe(last, before, counts, seconds, paths=own)
        paths = [world.path(shape, step, moods[i], rng) for i in range(num_reqs)]
        undisturbed = world.took(num_reqs, shape)
        seconds = undisturbed * max(0.5, rng.gauss(1, world.spread))
        if rng.random() < 1 / 30:
            seconds *= 1 + 4 * rng.random()
        unread = num_reqs, shape, paths, seconds / 1000
        if (texts := (num_reqs, world.texts(step))) not in known:
            paces = [pace(world, other, step) for other in choice.arms]
            tokens = {other: world.tokens(other, step) for other in choice.arms}
            known[texts] = tokens, paces[0], min(paces)
        tokens, plain, best = known[texts]
        told.append((took, undisturbed - plain * tokens[shape]))
        took += undisturbed  # neither a disturbance nor luck with the drafts is the choice's doing
        least += best * tokens[shape]
        chosen.append(shape)
    return Outcome(chosen, 1 - least / took, told)
