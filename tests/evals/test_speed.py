"""Speeds, from hand-counted runs; the docstrings of the module hold the smallest examples."""

from evals.speed import Speed


def test_speed_is_the_median_run_and_the_ratio_compares_medians() -> None:
    """Catches a mean, which one slow run spoils, and a ratio of times in place of speeds."""
    fast = Speed(num_tokens=[120, 120, 120], seconds=[1.0, 2.0, 100.0])
    slow = Speed(num_tokens=[60, 60], seconds=[2.0, 3.0])
    assert (fast.median, fast.spread) == (60.0, (1.2, 120.0))
    assert slow.median == 25.0
    assert fast.ratio(slow) == 2.4


def test_no_runs_have_no_speed() -> None:
    nothing = Speed([], [])
    assert (nothing.median, nothing.spread, nothing.ratio(nothing)) == (0.0, (0.0, 0.0), None)
