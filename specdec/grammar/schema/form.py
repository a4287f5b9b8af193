"""The form of a JSON schema's keywords: the metaschema of draft 2020-12, and machine numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import ceil, floor, isfinite
from operator import ge, gt, le, lt
from typing import Any

from specdec.base.errors import shown
from specdec.base.validation import as_float
from specdec.grammar.schema.formats import FORMATS

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "array": list, "object": dict,
}  # fmt: skip


LENGTHS = ("minLength", "maxLength")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COMPARED = {
    **{"minLength": ge, "maxLength": le, "minimum": ge, "maximum": le},
    **{"exclusiveMinimum": gt, "exclusiveMaximum": lt},
}
"""How a length, or a number, has to compare with what these keywords ask."""

NOT_KNOWN = (
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
"""Keywords that are never held to."""

OF_TYPE = {
    "string": (*LENGTHS, "pattern", "format"),
    "number": (*BOUNDS, "multipleOf"),
    "array": (
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems",
        "uniqueItems",
    ),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    ),
}  # fmt: skip
"""Keywords by the type of what they speak of; an integer is a number."""

CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these that a schema has is held to alone."""

WORDS = {"type", *CHOICES, *(keyword for words in OF_TYPE.values() for keyword in words)}


MAX_COUNT = 2**31 - 1
"""A larger count bounds nothing that could be written."""


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and isfinite(value)
    )


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_reachable(value: Any) -> bool:
    return _is_count(value) and value <= MAX_COUNT


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_types(value: Any) -> bool:
    some = [value] if isinstance(value, str) else value
    if not isinstance(some, list) or not some:
        return False
    return all(isinstance(one, str) and one in TYPES for one in some)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


MANY = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    "items", "additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems",
    "propertyNames",
)  # fmt: skip
"""Keywords of objects of schemas, of lists of them, and of one."""

_FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("type", _are_types, f"one of {', '.join(TYPES)}, or a list of some"),
    ("enum", lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    ("required", _are_names, "a list of names"),
    (" ".join(MANY[:-1]), _are_named, "an object of schemas"),
    (" ".join(SEVERAL), _are_schemas, "a list of at least one schema"),
    ("items", lambda one: _is_schema(one) or _are_schemas(one), "a schema, or a list of some"),
    (" ".join(SINGLE[1:]), _is_schema, "a schema"),
    ("minLength minItems minProperties", _is_reachable, "a whole number from 0 to 2**31 - 1"),
    ("maxLength maxItems maxProperties", _is_count, "a whole number of at least 0"),
    (" ".join(BOUNDS), _is_number, "a number"),
    (
        "multipleOf",
        lambda value: _is_number(value) and 0 < value < 2**63,
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
    pairs = () if found else PAIRS
    crossed = ((least, most) for least, most in pairs if {least, most} <= schema.keys())
    wrong = (f"{least} above {most}" for least, most in crossed if schema[least] > schema[most])
    return [*found, *wrong]


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within one that is of its form, by where they stand in it."""
    for keyword in MANY:
        some = schema.get(keyword)
        named = some.items() if isinstance(some, Mapping) else ()
        yield from ((f"{keyword}/{name}", part) for name, part in named)
    for keyword in (*SEVERAL, "items"):
        rows = schema.get(keyword)
        if isinstance(rows, list):
            yield from ((f"{keyword}/{number}", part) for number, part in enumerate(rows))
    yield from (
        (keyword, schema[keyword])
        for keyword in SINGLE
        if isinstance(schema.get(keyword), bool | Mapping)
    )


def rows_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of an array whose `items` is a list (until draft 2019-09), by today's names.

    >>> rows_of({"items": [{}], "additionalItems": False, "maxItems": 1})
    {'maxItems': 1, 'prefixItems': [{}], 'items': False}
    """
    own = {name: part for name, part in schema.items() if name not in ("items", "additionalItems")}
    if not isinstance(schema.get("items"), list):  # beside which additionalItems says nothing
        return own | ({"items": schema["items"]} if "items" in schema else {})
    own["prefixItems"] = schema["items"]
    more = schema.get("additionalItems")
    return own if more is None else own | {"items": more}


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of an object by name; required ones that are not listed are further ones."""
    named: dict[str, Any] = dict(schema.get("properties", {}))
    further = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    return named | {name: further for name in schema.get("required", ()) if name not in named}


def says(schema: Any) -> bool:
    """Whether a schema asks for anything."""
    return schema is not True and not (
        isinstance(schema, Mapping) and schema.keys().isdisjoint({*WORDS, *NOT_KNOWN, "$id"})
    )


def joined_strings(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a schema and its `allOf` ask of a string, with all patterns; None if one asks more.

    >>> joined_strings({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]})
    {'pattern': ('a', 'b')}
    """
    parts = [{name: own for name, own in schema.items() if name != "allOf"}, *schema["allOf"]]
    words = {"type", *OF_TYPE["string"]}
    if any(
        not isinstance(part, Mapping)
        or part.keys() & {*WORDS, *NOT_KNOWN, "$id"} - words
        or part.get("type", "string") not in ("string", ["string"])
        or malformed(part)
        for part in parts
    ) or not any("type" in part for part in parts):
        return None
    some = {word: [part[word] for part in parts if word in part] for word in OF_TYPE["string"]}
    formats = dict.fromkeys(one for one in some["format"] if one in FORMATS)
    if len(formats) > 1:
        return None
    made: dict[str, list[Any]] = {
        "minLength": [int(max(some["minLength"]))] if some["minLength"] else [],
        "maxLength": [int(min(*some["maxLength"], MAX_COUNT))] if some["maxLength"] else [],
        "pattern": [tuple(some["pattern"])] if some["pattern"] else [],
        "format": list(formats or some["format"])[:1],
    }
    return {word: value for word, values in made.items() for value in values}


def narrowed(bounds: Mapping[str, float], decimals: int) -> tuple[float | None, float | None]:
    """The least and largest number of so many decimals within bounds, up to 2**64.

    >>> narrowed({"exclusiveMinimum": 0, "maximum": 2.55}, 1)
    (0.1, 2.5)
    """
    scale = 10**decimals
    bounds = {name: min(max(bound, -(2**64)), 2**64) for name, bound in bounds.items()}
    lows = [ceil(Fraction(str(bounds[name])) * scale) for name in ("minimum",) if name in bounds]
    if (above := bounds.get("exclusiveMinimum")) is not None:
        lows.append(floor(Fraction(str(above)) * scale) + 1)
    highs = [floor(Fraction(str(bounds[name])) * scale) for name in ("maximum",) if name in bounds]
    if (below := bounds.get("exclusiveMaximum")) is not None:
        highs.append(ceil(Fraction(str(below)) * scale) - 1)
    return tuple(  # type: ignore[return-value]
        None
        if not some
        else choose(some) // scale
        if choose(some) % scale == 0
        else choose(some) / scale
        for some, choose in ((lows, max), (highs, min))
    )


def multiples(
    step: float, least: float | None, most: float | None, count: int
) -> list[float] | None:
    """The multiples of a number within some bounds, or None where they are more than so many. Only
    of a number that floats have exactly, as 0.5: others leave it open what is a multiple.

    >>> multiples(0.5, 0, 1.2, 9), multiples(0.1, 0, 1, 99)
    ([0, 0.5, 1], None)
    """
    exact = Fraction(step)
    if least is None or most is None or exact != Fraction(str(step)):
        return None
    first, last = ceil(Fraction(str(least)) / exact), floor(Fraction(str(most)) / exact)
    if last - first >= count:
        return None
    some = [number * exact for number in range(first, last + 1)]
    return [int(one) if one.denominator == 1 else float(one) for one in some]


def rounded(value: Any) -> Iterator[int]:
    """Whole numbers within a value that xgrammar writes as others: those beyond 64 bits are floats.

    >>> list(rounded({"a": [2**63 - 1, 2**64, 10**30, -(10**400)]})) == [-(10**400), 10**30]
    True
    """
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping | list):
            left += one.values() if isinstance(one, Mapping) else one
        elif isinstance(one, int) and not -(2**63) <= one < 2**63 and as_float(one) != one:
            yield one


def meets(value: Any, keyword: str, asked: Any) -> bool:
    """Whether a constant plainly meets what a keyword asks."""
    own = next((family for family, words in OF_TYPE.items() if keyword in words), None)
    if own and (isinstance(value, bool) or not isinstance(value, TYPES[own])):
        return True
    if keyword == "format":
        return asked not in FORMATS
    size = len(value) if keyword in LENGTHS else value
    return keyword in COMPARED and bool(COMPARED[keyword](size, asked))
