"""Configs with one value changed, which every reader of drafters takes or refuses in a line."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from drafters.fit import fit_of

Place = tuple[str | int, ...]
"""Keys that lead to an object inside a config."""

VALUES: list[Any] = [
    None,
    0,
    -1,
    1,
    2**40,
    10**30,
    0.5,
    1e300,
    float("nan"),
    "10000",
    [],
    [1],
    [{}],
    {},
    {"a": 1},
    True,
    False,
]


def changed(raw: Mapping[str, Any], place: Place, key: str, value: object) -> dict[str, Any]:
    """The config with one value changed."""
    found = inner = deepcopy(dict(raw))
    for part in place:
        inner = inner[part]  # type: ignore[index]
    inner[key] = value
    return found


def check_any_value(raw: Mapping[str, Any], place: Place, target: Any) -> None:
    """Every key with every kind of value: nothing raises, and nothing takes two lines."""
    inner: Any = raw
    for part in place:
        inner = inner[part]
    assert fit_of(raw, target).problems == ()
    for key in (*inner, "rope_theta", "partial_rotary_factor"):
        for value in VALUES:
            problems = fit_of(changed(raw, place, key, value), target).problems
            assert all(
                problem and "\n" not in problem and len(problem) < 700 for problem in problems
            ), (key, value)
