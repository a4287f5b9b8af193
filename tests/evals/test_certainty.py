"""Intervals and tests of differences, against known values and a public implementation."""

import numpy as np
import pytest
from scipy import stats

from evals.certainty import (
    MEAN_TAU,
    TAU,
    conversations,
    drawn_sums,
    interval,
    intervals,
    mean_of_tasks,
    no_difference,
    quotient,
)


def sample(seed: int, num_rows: int) -> np.ndarray:
    """Tokens and steps of conversations whose tau differs."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(20, 200, num_rows)
    return np.stack([steps * rng.normal(3.0, 0.5, num_rows), steps], axis=1)


def test_an_interval_is_that_of_a_public_bootstrap() -> None:
    """Catches a share of the draws at one end, and rows drawn apart for tokens and steps."""
    rows = sample(1, 60)
    ours = interval(quotient(drawn_sums(rows), slice(0, 2)))
    theirs = stats.bootstrap(
        (rows[:, 0], rows[:, 1]),
        lambda tokens, steps, axis: tokens.sum(axis) / steps.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(7),
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Catches intervals of another level: 95 % of 200 are 190, and a standard deviation is 3."""
    covered = 0
    for seed in range(200):
        low, high = interval(quotient(drawn_sums(sample(seed, 80), draws=500), slice(0, 2))) or (
            0,
            0,
        )
        covered += low <= 3.0 <= high
    assert 180 <= covered <= 197


def test_a_p_is_uniform_without_a_difference_and_small_with_one() -> None:
    """Catches a one-sided p, and one that calls noise a difference."""
    p = []
    for seed in range(200):
        differences = np.random.default_rng(seed).normal(0.0, 1.0, (60, 1))
        p.append(no_difference(drawn_sums(differences, draws=500)[:, 0], 60))
    assert 3 <= sum(one < 0.05 for one in p) <= 19  # 10 are expected, give or take 3
    shifted = np.random.default_rng(0).normal(1.0, 1.0, (60, 1))
    for sign in (1, -1):
        assert no_difference(drawn_sums(sign * shifted, draws=500)[:, 0], 60) == 2 / 501


def test_both_kinds_of_tau_are_those_of_the_conversations() -> None:
    """Catches answers of one conversation that are drawn apart, and answers without steps."""
    columns = {"item": [0, 1, 2, 0], "num_emitted": [8, 6, 0, 2], "num_steps": [2, 3, 0, 2]}
    rows = conversations(columns)
    assert sorted(rows) == [0, 1]
    sums = np.array([*rows.values()]).sum(axis=0)
    assert quotient(sums, TAU) == 16 / 7
    assert quotient(sums, MEAN_TAU) == pytest.approx((4 + 2 + 1) / 3)
    # Of five draws the first conversation has three or more in 5.8 %, four or more in 0.7 %.
    wide = {"item": [*range(5)], "num_emitted": [4, 8, 8, 8, 8], "num_steps": [4, 4, 4, 4, 4]}
    found = intervals(wide, range(5))
    assert found["tau_interval"] == pytest.approx((1.4, 2.0))
    assert found["mean_tau_interval"] == pytest.approx((1.4, 2.0))
    assert intervals(wide, range(4)) == {"tau_interval": None, "mean_tau_interval": None}


def test_the_mean_of_tasks_weighs_tasks_alike() -> None:
    """Catches one that is pooled, where the longer task decides."""
    columns = {
        "item": [*range(10)],
        "num_emitted": [40] * 5 + [2000] * 5,
        "num_steps": [10] * 5 + [1000] * 5,
    }
    assert mean_of_tasks(columns, ["a"] * 5 + ["b"] * 5).tolist() == [3.0] * 10_000
    assert not len(mean_of_tasks(columns, ["a"] * 5 + ["b"] * 4 + ["c"]))
