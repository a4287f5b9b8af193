"""A clock for steps that moves when a test moves it."""


class FakeClock:
    """In the place of `specdec.engine.policy.timing.StepClock`.

    Attributes:
        now: seconds; whoever computes adds to it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        return self.now

    def wait(self, stamp: float) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start
