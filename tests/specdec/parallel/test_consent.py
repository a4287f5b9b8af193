"""What ranks use together: one's failure is everyone's, and they ask each other equally often."""

import pytest

from specdec.parallel.consent import made_by_all


def refuse() -> str:
    raise RuntimeError("no shared\nmemory")


@pytest.mark.parametrize(
    ("fails", "right", "others", "asked", "said"),
    [
        (False, True, (1, 1), [1, 1], None),
        (True, True, (1, 1), [0], "no shared memory"),
        (False, True, (0, 1), [1], "another rank could not"),
        (False, False, (1, 1), [1, 0], "its sums are not those in the order of ranks"),
        (False, True, (1, 0), [1, 1], "its sums are not those in the order of ranks"),
    ],
)
def test_all_or_none(
    fails: bool,
    right: bool,
    others: tuple[int, int],
    asked: list[int],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a rank that goes on with what another one lacks, and one that asks once more than the
    others.
    """
    own: list[int] = []

    def least(number: int) -> int:
        own.append(int(number))
        return min(number, others[len(own) - 1])

    made = made_by_all(refuse if fails else lambda: "made", lambda one: right, least, "another way")
    assert made == (None if said else "made")
    assert own == asked
    assert caplog.messages == ([f"another way: {said}"] if said else [])
