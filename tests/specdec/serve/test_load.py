"""The check program for a few requests of each client: see `tests.checks.serve`."""

from tests.checks.serve import check


def test_many_clients_that_come_and_leave() -> None:
    report, wrong, line = check(clients=24, requests=2, max_queue=8)
    assert wrong == [], line
    assert report.outcomes["answered"] and report.outcomes["left"] and report.outcomes["busy"], line
