"""Values that nobody expects, and samples with changes that nobody would make."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz.notation import written

_NUMBERS = [0, -1, 1, 2, 3, 97, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e-320]
_NUMBERS += [1e30, 1e308, float("nan"), float("inf"), -float("inf")]
_TEXTS: list[Any] = [
    "", "x", "1", "2048", "true", "\ud800", "\0", "é\u202e", "a\nb", "../../x", "{{",
]  # fmt: skip
_LONG: list[Any] = [{"$times": ["x", 10_000]}, {"$times": [[0], 3_000]}, {"$each": ["%d", 3_000]}]
_DEEP = [
    ["[", 1, "]", 200],
    ["[", 1, "]", 20_000],
    ['{"a": ', 1, "}", 200],
    ['{"a": ', 1, "}", 5_000],
]
_PLAIN: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    [None],
    ["a"],
    [1],
    [-1.5],
    {"a": 1},
    {"": None},
]


def any_value(draw: Random) -> Any:
    """One of any type."""
    pools: list[list[Any]] = [
        _NUMBERS,
        _TEXTS,
        _PLAIN,
        _PLAIN,
        _LONG,
        [{"$deep": deep} for deep in _DEEP],
    ]
    return deepcopy(draw.choice(draw.choices(pools, [4, 3, 3, 3, 1, 1])[0]))


def changed(draw: Random, sample: Any, names: list[str]) -> Any:
    """A JSON value with one to three changes; `names` are keys that may be added."""
    made = [deepcopy(sample)]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _change(draw, made, names)
    return made[0]


def damaged(draw: Random, data: bytes) -> bytes:
    """Bytes that are cut, overwritten, doubled or moved."""
    made = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        start = draw.randrange(len(made) + 1)
        end = min(len(made), start + draw.choice([1, 1, 2, 4, 8, 64]))
        other = draw.randrange(len(made) + 1)
        news = [
            b"",
            draw.randbytes(end - start),
            b"\xff" * 8,
            b"\0" * (end - start),
            bytes(made[other:]),
        ]
        made[start:end] = draw.choice(news)
        if draw.random() < 0.1:
            del made[draw.randrange(len(made) + 1) :]
    return bytes(made)


def damaged_json(draw: Random, value: Any) -> Any:
    """Text that was JSON."""
    text = written(value)
    broken = damaged(draw, text[:20_000].encode()).decode(errors="replace")
    return {"$raw": draw.choice([broken, "\ufeff" + text, text * 2, text + "\0", f"[{text}]", ""])}


def _change(draw: Random, root: list[Any], names: list[str]) -> None:
    """One change somewhere below `root[0]`."""
    holder: Any = root
    key: Any = 0
    while (
        isinstance(holder[key], dict | list)
        and holder[key]
        and draw.random() < (0.98 if holder is root else 0.7)
    ):
        holder = holder[key]
        if next(iter(holder), "") in ("$times", "$each", "$deep", "$raw"):
            return
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    old = holder[key]
    way = draw.randrange(8)
    if way == 0:
        del holder[key]
        root.extend([None] * (not root))
    elif way == 1 and isinstance(holder, dict):
        holder[draw.choice(names)] = any_value(draw)
    elif way == 2 and isinstance(old, int | float):
        holder[key] = draw.choice([-old, old + 1, old - 1, str(old), [old], old * 2**20])
    elif way == 3:
        holder[key] = draw.choice([[old], {"a": old}, [old, old], json.dumps(str(old)), {"": old}])
    elif way == 4 and isinstance(holder, dict):
        holder[key], holder[draw.choice(names)] = deepcopy(holder[draw.choice(list(holder))]), old
    else:
        holder[key] = any_value(draw)
