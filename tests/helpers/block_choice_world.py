"""Decoding without a model or a clock: made-up times and acceptance, on which ways of choosing k
are compared.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.base.blocks import BlockShape
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.shapes import shapes

Time = Callable[[int, int], float]
"""Of a step, by requests and k."""
Block = Any
"""What is chosen: k of a chain, or a `BlockShape`."""


class Chooser(Protocol):
    """What chooses k; see `specdec.engine.policy.block_choice.BlockChoice`."""

    arms: tuple[Block, ...]

    def choose(self, num_reqs: int) -> Block: ...

    def observe(self, num_reqs: int, k: Block, accepted: Any, seconds: float | None) -> None: ...


class Place(Protocol):
    """Where to decode; see `World`."""

    @property
    def spread(self) -> float: ...

    @property
    def moods(self) -> float: ...

    @property
    def num_reqs(self) -> Callable[[int], int]: ...

    @property
    def time(self) -> Callable[[int, Block], float]: ...

    def tokens(self, k: Block, step: int) -> float: ...

    def pace(self, k: Block, step: int) -> float: ...

    def accepted(self, k: Block, step: int, mood: float, rng: random.Random) -> Any: ...


class ChainLength:
    """A `BlockChoice` that chooses among chains, each named by its number of drafts.

    Args:
        most: drafts.
        steps: behind which a whole batch of requests takes the place of the one before; 0 for
            texts without an end.
    """

    def __init__(self, most: int, steps: int = 0) -> None:
        self.choice = BlockChoice(shapes(most, trees=0))
        self._steps, self._number = steps, 0
        self.arms = tuple(shape.drafts for shape in self.choice.arms)

    def choose(self, num_reqs: int) -> int:
        anew = self._steps > 0 and self._number % self._steps == 0
        self._number += 1
        return self.choice.choose(num_reqs, fresh=num_reqs * anew).drafts

    def observe(
        self, num_reqs: int, k: int, accepted: Sequence[int], seconds: float | None
    ) -> None:
        self.choice.observe(num_reqs, BlockShape(k), accepted, seconds)


@dataclass(frozen=True)
class World:
    """What decoding would be like.

    Attributes:
        time: undisturbed milliseconds of a step, by requests and k.
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

    def tokens(self, k: int, step: int) -> float:
        """Expected tokens of each request."""
        alive, tokens = 1.0, 1.0
        for position in range(k):
            alive *= self.rate(position, step)
            tokens += alive
        return tokens

    def pace(self, k: int, step: int) -> float:
        """Time per token of each request with fixed `k`, undisturbed."""
        return self.time(self.num_reqs(step), k) / self.tokens(k, step)

    def accepted(self, k: int, step: int, mood: float, rng: random.Random) -> int:
        """Drafts that a request accepts."""
        for position in range(k):
            if rng.random() >= in_mood(self.rate(position, step), mood):
                return position
        return k


@dataclass
class Outcome:
    """What choosing k came to.

    Attributes:
        chosen: k of every step.
        loss: share of the time that the best fixed k of every step's texts and batch size would
            have saved.
        behind: of every step, when it began and by how much it was slower than plain decoding of as
            many tokens.
    """

    chosen: list[Block]
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


def decode(world: Place, choice: Chooser, *, steps: int, seed: int) -> Outcome:
    """Steps in a world. Results are read while the next step runs, as on an accelerator.

    Args:
        world: where.
        choice: chooses k, and is taught.
        steps: how many.
        seed: of the disturbances and the acceptance.
    """
    rng = random.Random(seed)
    chosen: list[Block] = []
    told: list[tuple[float, float]] = []
    unread: tuple[int, Block, list[Any], float] | None = None
    took = least = 0.0
    moods: list[float] = []
    for step in range(steps):
        num_reqs = world.num_reqs(step)
        if step % 100 == 0 or len(moods) < num_reqs:
            moods = [world.moods * (2 * rng.random() - 1) for _ in range(num_reqs)]
        k = choice.choose(num_reqs)
        if unread:
            choice.observe(*unread)
        accepted = [world.accepted(k, step, moods[i], rng) for i in range(num_reqs)]
        undisturbed = world.time(num_reqs, k)
        seconds = undisturbed * max(0.5, rng.gauss(1, world.spread))
        if rng.random() < 1 / 30:
            seconds *= 1 + 4 * rng.random()
        unread = num_reqs, k, accepted, seconds / 1000
        best = min(world.pace(other, step) for other in choice.arms)
        plain = choice.arms[0]
        told.append((took, undisturbed - world.pace(plain, step) * world.tokens(k, step)))
        took += undisturbed  # neither a disturbance nor luck with the drafts is the choice's doing
        least += best * world.tokens(k, step)
        chosen.append(k)
    return Outcome(chosen, 1 - least / took, told)


def in_mood(rate: float, mood: float) -> float:
    """A rate of acceptance that is off by that much."""
    return min(1.0, max(0.0, rate + mood * min(rate, 1 - rate)))
