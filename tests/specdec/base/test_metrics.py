"""The figures, from hand-counted steps; the docstrings of the module hold the smallest examples."""

import pytest

from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats, mean_tau, pooled

# Four steps of up to three drafts: all accepted; one accepted; none offered; two accepted, but a
# stop kept only one of them.
STATS = AcceptanceStats(
    num_drafted=[3, 3, 0, 3], num_accepted=[3, 1, 0, 1], num_emitted=[4, 2, 1, 1]
)


def test_tau_counts_output_tokens_per_verify_step() -> None:
    """Catches tau = accepted + 1, which would count tokens that a stop cut away, and counting the
    prefill as a step.
    """
    assert STATS.num_steps == 4
    assert STATS.tau == 8 / 4
    assert STATS.mean_accepted == 5 / 4


def test_acceptance_rate_counts_only_steps_that_offered_the_position() -> None:
    """Catches dividing by all steps, which blames the drafter for drafts it never made."""
    assert STATS.acceptance_rate == [3 / 3, 1 / 3, 1 / 3]


def test_histogram_is_indexed_by_tokens_and_adds_up() -> None:
    """Catches a histogram of accepted drafts in place of output tokens, off by one."""
    assert STATS.histogram == [0, 2, 1, 0, 1]
    assert sum(STATS.histogram) == STATS.num_steps
    assert sum(tokens * count for tokens, count in enumerate(STATS.histogram)) == sum(
        STATS.num_emitted
    )


def test_pooled_tau_weighs_steps_and_mean_tau_weighs_requests() -> None:
    """Catches one being used for the other."""
    short = AcceptanceStats([1], [1], [2])
    assert pooled([STATS, short]).tau == 10 / 5
    assert mean_tau([STATS, short]) == (2 + 2) / 2
    quick = AcceptanceStats([3], [3], [4])
    assert pooled([STATS, quick]).tau == 12 / 5
    assert mean_tau([STATS, quick]) == (2 + 4) / 2


def test_empty_statistics_are_zero() -> None:
    """Catches division by zero for a request that ended with its first token."""
    empty = AcceptanceStats()
    assert (empty.num_steps, empty.tau, empty.mean_accepted) == (0, 0.0, 0.0)
    assert (empty.acceptance_rate, empty.histogram) == ([], [])
    assert (pooled([]).tau, mean_tau([]), mean_tau([empty])) == (0.0, 0.0, 0.0)
    assert mean_tau([empty, STATS]) == STATS.tau
    assert empty.to_dict()["tau"] == 0.0


def test_plain_decoding_has_tau_one() -> None:
    plain = AcceptanceStats([0] * 5, [0] * 5, [1] * 5)
    assert (plain.tau, plain.acceptance_rate, plain.histogram) == (1.0, [], [0, 5])


def test_to_dict_holds_the_totals_it_is_made_of() -> None:
    record = STATS.to_dict()
    assert (
        record["num_steps"],
        record["num_drafted"],
        record["num_accepted"],
        record["num_emitted"],
    ) == (4, 9, 5, 8)
    assert (record["tau"], record["histogram"]) == (STATS.tau, STATS.histogram)


def test_statistics_of_different_length_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="statistics are of 1 and 2 steps"):
        AcceptanceStats([1], [1, 1], [2])
