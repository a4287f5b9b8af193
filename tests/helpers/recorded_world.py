"""Decoding again what a model once decoded: what every shape would have accepted at each place of
its answers, at made-up times.
"""

import json
import pathlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from specdec.base.blocks import BlockShape
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.draft_acceptance import Path

MOST = 15
"""Positions that were drafted."""


class Place(NamedTuple):
    """A place in an answer.

    Attributes:
        chain: drafts of a chain of 15 that are right there.
        rows: of a tree of 63 drafts, those on the right path.
        ranks: of each of these among the candidates of its position.
    """

    chain: int
    rows: list[int]
    ranks: list[int]

    def accepted(self, shape: BlockShape) -> int:
        """Drafts that a step accepts. The first rows of a tree are a smaller tree."""
        return (
            sum(row <= shape.drafts for row in self.rows)
            if shape.is_tree
            else min(self.chain, shape.drafts)
        )


@cache
def recorded(name: str) -> list[list[Place]]:
    """The embedded model's answers to ten questions of GSM8K's test split, with the shipped
    drafter.

    Args:
        name: "greedy", or "sampled" at temperature 1.
    """
    answers = json.loads(pathlib.Path(__file__).with_name("recorded_acceptance.json").read_text())[
        name
    ]
    return [[Place(*place) for place in answer] for answer in answers]


class Ended(NamedTuple):
    """What decoding came to.

    Attributes:
        pace: seconds per token, without the disturbances.
        shapes: of every step.
    """

    pace: float
    shapes: list[BlockShape]


@dataclass
class Replay:
    """Answers that are decoded again, one at a time and all over again.

    Args:
        answers: of `recorded`.
        time: undisturbed seconds of a step by shape.
        seed: of where to begin, and of the disturbances.
        disturbed: share of steps that take up to five times as long.
    """

    answers: Sequence[Sequence[Place]]
    time: Callable[[BlockShape], float]
    seed: int
    disturbed: float = 1 / 30

    def run(
        self,
        choose: Callable[[], BlockShape],
        steps: int,
        choice: BlockChoice | None = None,
        *,
        sampled: bool = False,
    ) -> Ended:
        """So many steps; the choice, if there is one,
        learns of each while the next is under way.
        """
        rng = random.Random(self.seed)
        taken, took, tokens = [], 0.0, 0
        unread: tuple[BlockShape, list[int], float, list[Path]] | None = None
        answer, at = rng.randrange(len(self.answers)), 0
        for _ in range(steps):
            shape = choose()
            taken.append(shape)
            if unread and choice:
                last, num_accepted, lasted, paths = unread
                choice.observe(1, last, num_accepted, lasted, sampled=sampled, paths=paths)
            place = self.answers[answer][at]
            accepted = place.accepted(shape)
            undisturbed = self.time(shape)
            seconds = (
                undisturbed
                * max(0.5, rng.gauss(1, 0.05))
                * (1 + 4 * rng.random() if rng.random() < self.disturbed else 1)
            )
            took += undisturbed
            tokens += accepted + 1
            path = Path(place.rows[:accepted], place.ranks[:accepted])
            unread = shape, [accepted], seconds, [path] if shape.is_tree and accepted else []
            at += accepted + 1
            if at >= len(self.answers[answer]):
                answer, at = (answer + 1) % len(self.answers), 0
        return Ended(took / tokens, taken)
