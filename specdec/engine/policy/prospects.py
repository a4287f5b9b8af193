"""What steps are expected to take and to give, by the shape of their blocks: what
`specdec.engine.policy.block_choice` compares.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdec.base.blocks import BlockShape

_NEW = 15  # steps that a kind of step costs once, until a capture has shown what it takes


@dataclass(frozen=True, slots=True)
class Prospects:
    """What steps are expected to take and to give, by the shape of their blocks.

    Attributes:
        seconds: of a step.
        tokens: of each request.
        is_new: whether a step of a shape would have to be captured first.
        new_seconds: what that takes, if it is known.
    """

    seconds: Mapping[BlockShape, float]
    tokens: dict[BlockShape, float]
    is_new: Callable[[BlockShape], bool]
    new_seconds: float | None

    def capture(self, shape: BlockShape) -> float:
        """Seconds that a step takes longer now."""
        if not self.is_new(shape):
            return 0.0
        return _NEW * min(self.seconds.values()) if self.new_seconds is None else self.new_seconds

    def pace(self, shape: BlockShape, *, among: float = float("inf")) -> float:
        """Seconds per token; a capture is divided among so many tokens, of which no shape needs more than another."""
        return self.seconds[shape] / self.tokens[shape] + self.capture(shape) / among

    def lost(self, shape: BlockShape, other: BlockShape) -> float:
        """Seconds that a step takes longer than its tokens would take in the shape `other`."""
        return self.seconds[shape] - self.tokens[shape] * self.pace(other)
