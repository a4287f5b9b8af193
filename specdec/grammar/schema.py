"""JSON schemas of which xgrammar would not hold to every word: it leaves out what it does not know, with a warning at most.

Refused is what would let an invalid document pass. What makes it stricter than the schema is let be: it writes no properties that
the schema does not name, and takes a pattern for the whole of a string. Found with xgrammar 0.2.8, by documents that are valid and
others that are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

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

FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "json-pointer",
    "relative-json-pointer",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
)

OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
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

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def unsupported(schema: Any, path: str = "#") -> list[str]:
    """What a schema asks for and would not get, one line each with its place; empty where every output will be valid."""
    if isinstance(schema, bool):
        return [] if schema else [f"{path} allows nothing"]
    if not isinstance(schema, Mapping):
        return [f"{path} is no schema"]
    found = [f"{keyword} at {path}" for keyword in NOT_KNOWN if keyword in schema]
    choice = next((keyword for keyword in CHOICES if keyword in schema), None)
    if choice:
        found += _beside(schema, choice, path)
        if choice in ("const", "enum"):
            return found + _excluded_values(schema, choice, path)
        if choice == "$ref" and not str(schema["$ref"]).startswith("#"):
            found.append(f"$ref to another document at {path}")
        if choice == "oneOf" and not _disjoint(schema["oneOf"]):
            found.append(f"oneOf whose options no type or constant property tells apart at {path}")
        if choice == "allOf" and len(schema["allOf"]) > 1:
            found.append(f"allOf with several options at {path}")
    else:
        found += _without_type(schema, path) + _numbers(schema, path) + _strings(schema, path)
        found += _arrays(schema, path) + _objects(schema, path)
    for place, part in _parts(schema):
        found += unsupported(part, f"{path}/{place}")
    return found


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas within a schema, those that are left out aside; a bool says whether something is allowed at all."""
    for keyword in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
        if isinstance(schema.get(keyword), Mapping):
            yield keyword, schema[keyword]
    if isinstance(schema.get("propertyNames"), Mapping):
        yield "propertyNames", {"type": "string"} | schema["propertyNames"]
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, part in enumerate(schema.get(keyword, ())):
            yield f"{keyword}/{index}", part
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        for name, part in schema.get(keyword, {}).items():
            yield f"{keyword}/{name}", part


def _types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def _beside(schema: Mapping[str, Any], choice: str, path: str) -> list[str]:
    """What stands beside a keyword that is held to alone."""
    keywords = {keyword for words in OF_TYPE.values() for keyword in words} | set(CHOICES) - {choice}
    if choice not in ("const", "enum"):
        keywords.add("type")
    return [f"{keyword} beside {choice} at {path}" for keyword in schema if keyword in keywords]


def _excluded_values(schema: Mapping[str, Any], choice: str, path: str) -> list[str]:
    values = [schema["const"]] if choice == "const" else schema["enum"]
    types = _types(schema)
    wrong = [value for value in values if types and not any(_is(value, name) for name in types)]
    return [f"{json.dumps(value)} in {choice}, which the type at {path} excludes" for value in wrong]


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _without_type(schema: Mapping[str, Any], path: str) -> list[str]:
    """Keywords of strings and numbers need the type beside them; those of arrays and objects bring it along."""
    if "type" in schema:
        return []
    return [
        f"{keyword} without a type at {path}" for name in ("string", "number") for keyword in OF_TYPE[name] if keyword in schema
    ]


def _numbers(schema: Mapping[str, Any], path: str) -> list[str]:
    if "multipleOf" not in schema:
        return []
    alone = not any(keyword in schema for keyword in OF_TYPE["number"] if keyword != "multipleOf")
    whole = _types(schema) == ["integer"] and isinstance(schema["multipleOf"], int)
    return [] if alone and whole else [f"multipleOf of other than unbounded integers at {path}"]


def _strings(schema: Mapping[str, Any], path: str) -> list[str]:
    found = []
    if "format" in schema and schema["format"] not in FORMATS:
        found.append(f"format {schema['format']} at {path}")
    for keyword in ("pattern", "format"):
        if keyword in schema and ("minLength" in schema or "maxLength" in schema):
            found.append(f"{keyword} with a length at {path}")
    if "pattern" in schema and "format" in schema:
        found.append(f"pattern with a format at {path}")
    return found


def _arrays(schema: Mapping[str, Any], path: str) -> list[str]:
    found = [f"uniqueItems at {path}"] if schema.get("uniqueItems") else []
    if isinstance(schema.get("items"), list):
        found.append(f"items as a list, today's prefixItems, at {path}")
    return found


def _objects(schema: Mapping[str, Any], path: str) -> list[str]:
    found = []
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        found.append(f"required property {missing[0]!r} that is not among the properties at {path}")
    patterns = schema.get("patternProperties", {})
    further = schema.get("additionalProperties", schema.get("unevaluatedProperties", False if properties or patterns else None))
    open_ended = further is not False or patterns
    if schema.get("minProperties", 0) > 1 and open_ended:
        found.append(f"minProperties above 1 where names are free, and so may come twice, at {path}")
    if patterns and (properties or len(patterns) > 1 or further is not False):
        found.append(f"patternProperties beside other properties at {path}")
    if "propertyNames" in schema and (properties or patterns):
        found.append(f"propertyNames beside properties at {path}")
    return found


def _disjoint(options: Any) -> bool:
    """Whether it is plain that no value fits two options."""
    return all(_apart(one, other) for index, one in enumerate(options) for other in options[:index])


def _apart(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(value in others for value in values)
    types, other_types = _kinds(one), _kinds(other)
    if types and other_types and not types & other_types:
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    tags = ((one.get("properties", {}).get(name), other.get("properties", {}).get(name)) for name in shared)
    return types == other_types == {"object"} and any(
        isinstance(tag, Mapping) and isinstance(rest, Mapping) and None not in (_values(tag), _values(rest)) and _apart(tag, rest)
        for tag, rest in tags
    )


def _values(schema: Mapping[str, Any]) -> list[str] | None:
    """The constants that a schema names, as JSON; None where it names none."""
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if constants is None else [json.dumps(value, sort_keys=True) for value in constants]


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Types of the values that fit; empty where it is not said."""
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    if constants is not None:
        return {name for name in TYPES for value in constants if name != "integer" and _is(value, name)}
    return {"number" if name == "integer" else name for name in _types(schema)}
