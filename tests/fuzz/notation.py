"""JSON values, with a short way to write what is long, deep or no JSON at all.

`{"$times": ["ab", 3]}` is "ababab", `{"$times": [[0], 3]}` is [0, 0, 0], `{"$each": ["a%d", 3]}` is
["a0", "a1", "a2"], `{"$deep": ["[", 1, "]", 3]}` is [[[1]]] and `{"$raw": "1,,2"}` is that text.
"""

from __future__ import annotations

import json
from typing import Any


def written(value: Any) -> str:
    """The text that a value stands for.

    >>> written({"a": {"$times": [[0], 3]}, "b": {"$deep": ["[", 1, "]", 2]}})
    '{"a": [0, 0, 0], "b": [[1]]}'
    >>> written([{"$times": ["ab", 2]}, {"$each": ["a%d", 2]}, {"$raw": "NaN,"}])
    '["abab", ["a0", "a1"], NaN,]'
    """
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    sign: str
    said: Any
    sign, said = next(iter(value.items()), ("", None))
    if sign == "$raw":
        return str(said)
    if sign == "$deep":
        before, inner, behind, depth = said
        return before * depth + written(inner) + behind * depth
    if sign == "$each":
        return json.dumps([said[0] % number for number in range(said[1])])
    if sign == "$times" and isinstance(said[0], str):
        return json.dumps(said[0] * said[1])
    if sign == "$times":
        return f"[{', '.join([written(one) for one in said[0]] * said[1])}]"
    return f"{{{', '.join(f'{json.dumps(name)}: {written(one)}' for name, one in value.items())}}}"


def meant(value: Any) -> Any:
    """The value itself; its text where that is no JSON, or too deep."""
    text = written(value)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
