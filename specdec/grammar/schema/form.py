"""The form of a JSON schema's keywords: what the metaschema of draft 2020-12 asks of them, and what
fits a machine's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import ceil, floor, isfinite
from typing import Any

from specdec.base.errors import shown

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


LENGTHS = ("minLength", "maxLength")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

NOT_KNOWN = (
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that are never held to."""

OF_TYPE = {
    "string": (*LENGTHS, "pattern", "format"),
    "number": (*BOUNDS, "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
}
"""Keywords by the type of what they speak of; an integer is a number."""

CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these that a schema has is held to alone."""

WORDS = {"type", *CHOICES, *(keyword for words in OF_TYPE.values() for keyword in words)}


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 2**63
        and isfinite(value)
    )


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 2**31 and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_types(value: Any) -> bool:
    some = [value] if isinstance(value, str) else value
    return (
        isinstance(some, list)
        and bool(some)
        and all(isinstance(one, str) and one in TYPES for one in some)
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


MANY = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
)
"""Keywords of objects of schemas, of lists of them, and of one."""

_FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("type", _are_types, f"one of {', '.join(TYPES)}, or a list of some"),
    ("enum", lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    ("required", _are_names, "a list of names"),
    (" ".join(MANY[:-1]), _are_named, "an object of schemas"),
    (" ".join(SEVERAL), _are_schemas, "a list of at least one schema"),
    ("items", lambda value: _is_schema(value) or isinstance(value, list), "a schema"),
    (" ".join(SINGLE[1:]), _is_schema, "a schema"),
    (
        "minLength maxLength minItems maxItems minProperties maxProperties",
        _is_count,
        "a whole number from 0 to 2**31 - 1",
    ),
    ("minimum maximum exclusiveMinimum exclusiveMaximum", _is_number, "a number within 2**63"),
    (
        "multipleOf",
        lambda value: _is_number(value) and value > 0,
        "a number above 0 and within 2**63",
    ),
    ("pattern format $ref", lambda value: isinstance(value, str), "a string"),
    ("uniqueItems", lambda value: isinstance(value, bool), "true or false"),
)
FORMS = {keyword: (check, form) for keywords, check, form in _FORMS for keyword in keywords.split()}

PAIRS = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)


def malformed(schema: Mapping[str, Any]) -> list[str]:
    """Keywords of a schema itself, not of its parts, that are not of their form."""
    found = [
        f"{keyword} is {shown(value)}, which must be {FORMS[keyword][1]},"
        for keyword, value in schema.items()
        if keyword in FORMS and not FORMS[keyword][0](value)
    ]
    crossed = (
        (least, most) for least, most in PAIRS if not found and least in schema and most in schema
    )
    return found + [
        f"{least} above {most}" for least, most in crossed if schema[least] > schema[most]
    ]


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within one that is of its form, by where they stand in it."""
    for keyword in MANY:
        some = schema.get(keyword)
        yield from (
            ((f"{keyword}/{name}", part) for name, part in some.items())
            if isinstance(some, Mapping)
            else ()
        )
    for keyword in SEVERAL:
        yield from (
            (f"{keyword}/{number}", part) for number, part in enumerate(schema.get(keyword, ()))
        )
    yield from ((keyword, schema[keyword]) for keyword in SINGLE if keyword in schema)


def narrowed(bounds: Mapping[str, float], decimals: int) -> tuple[float | None, float | None]:
    """The least and the largest number of so many decimals within some bounds.

    >>> narrowed({"exclusiveMinimum": 0, "maximum": 2.55}, 1)
    (0.1, 2.5)
    """
    scale = 10**decimals
    lows = [ceil(Fraction(str(bounds[name])) * scale) for name in ("minimum",) if name in bounds]
    lows += [
        floor(Fraction(str(bounds[name])) * scale) + 1
        for name in ("exclusiveMinimum",)
        if name in bounds
    ]
    highs = [floor(Fraction(str(bounds[name])) * scale) for name in ("maximum",) if name in bounds]
    highs += [
        ceil(Fraction(str(bounds[name])) * scale) - 1
        for name in ("exclusiveMaximum",)
        if name in bounds
    ]
    return tuple(  # type: ignore[return-value]
        None
        if not some
        else choose(some) // scale
        if choose(some) % scale == 0
        else choose(some) / scale
        for some, choose in ((lows, max), (highs, min))
    )


def meets(value: Any, keyword: str, asked: Any) -> bool:
    """Whether a constant plainly meets what a keyword asks."""
    if keyword in LENGTHS and not isinstance(value, str):
        return True
    if keyword in BOUNDS and (isinstance(value, bool) or not isinstance(value, int | float)):
        return True
    match keyword:
        case "minLength":
            return len(value) >= asked
        case "maxLength":
            return len(value) <= asked
        case "minimum":
            return value >= asked
        case "maximum":
            return value <= asked
        case "exclusiveMinimum":
            return value > asked
        case "exclusiveMaximum":
            return value < asked
    return False
