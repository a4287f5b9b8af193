"""References within a JSON schema: where they lead, whether they ever end, and what can be told of a schema through them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from specdec.grammar.schema_form import TYPES, malformed

MOST_OPTIONS = 100
"""Of a `oneOf`, beside constants: each is compared with each."""


class Root:
    """A whole schema, in which references are looked up."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def target(self, reference: str) -> Any:
        """What a reference names; None where there is no schema.

        >>> Root({"$defs": {"a/b": {"type": "null"}}}).target("#/$defs/a~1b")
        {'type': 'null'}
        """
        found = self._schema
        if reference != "#" and not reference.startswith("#/"):
            return None
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found if isinstance(found, bool | Mapping) else None

    def leaves(self, schema: Any, seen: set[str] | None = None) -> Iterator[Any]:
        """The schemas that a schema chooses from, through references, each followed once; itself where it does not."""
        seen = set() if seen is None else seen
        if isinstance(schema, Mapping) and not malformed(schema):
            if "$ref" in schema:
                reference = schema["$ref"]
                if reference not in seen:
                    seen.add(reference)
                    yield from self.leaves(self.target(reference), seen)
                return
            parts = schema.get("anyOf") or schema.get("oneOf")
            if len(schema.get("allOf", ())) == 1:
                parts = schema["allOf"]
            if parts and not {"const", "enum"} & schema.keys():
                for part in parts:
                    yield from self.leaves(part, seen)
                return
        yield schema

    def kinds(self, schema: Any) -> set[str]:
        """Types of the values that may fit; empty where it is not said."""
        each = [_kinds(leaf) for leaf in self.leaves(schema)]
        return set().union(*each) if all(each) else set()

    def within(self, schema: Any, types: list[str]) -> bool:
        """Whether whatever fits is plainly of one of some types."""
        for leaf in self.leaves(schema):
            constants = _constants(leaf)
            if constants is not None:
                fits = all(any(is_of(value, name) for name in types) for value in constants)
            else:
                own = types_of(leaf) if isinstance(leaf, Mapping) else []
                fits = bool(own) and all(one in types or (one == "integer" and "number" in types) for one in own)
            if not fits:
                return False
        return True

    def loops(self, references: Iterable[str]) -> bool:
        """Whether one of some references comes back to itself before anything is said of a value."""
        left = {one: set(_direct(self.target(one))) for one in references}
        while ends := {one for one, others in left.items() if not others & left.keys()}:
            left = {one: others for one, others in left.items() if one not in ends}
        return bool(left)

    def finite(self, references: Iterable[str]) -> bool:
        """Whether a value of finite size can fit the whole: a least fixed point over all its references."""
        some = list(references)
        known: set[str] = set()
        while more := {one for one in some if one not in known and _finite(self.target(one), known)}:
            known |= more
        return _finite(self._schema, known)

    def disjoint(self, options: list[Any]) -> bool:
        """Whether it is plain that no value fits two options."""
        leaves = [(number, leaf) for number, option in enumerate(options) for leaf in self.leaves(option)]
        owners: dict[str, int] = {}
        kinds: set[str] = set()  # of constants
        rest: list[tuple[int, Any]] = []
        for number, leaf in leaves:
            values = _values(leaf)
            if values is None:
                rest.append((number, leaf))
            elif any(owners.setdefault(value, number) != number for value in values):
                return False
            else:
                kinds |= _kinds(leaf)
        if len(rest) > MOST_OPTIONS or (kinds and any(not _kinds(leaf) or _kinds(leaf) & kinds for _, leaf in rest)):
            return False
        return all(
            number == other or self._apart(one, two) for place, (number, one) in enumerate(rest) for other, two in rest[:place]
        )

    def _apart(self, one: Any, other: Any) -> bool:
        types, others = _kinds(one), _kinds(other)
        if types and others and not types & others:
            return True
        if not types == others == {"object"}:
            return False
        tags = (
            (one.get("properties", {}).get(name), other.get("properties", {}).get(name))
            for name in one.get("required", ())
            if name in other.get("required", ())
        )
        return any(self._tell_apart(tag, rest) for tag, rest in tags)

    def _tell_apart(self, tag: Any, other: Any) -> bool:
        values, others = (
            [_values(leaf) for leaf in self.leaves(one)] if isinstance(one, Mapping) else [None] for one in (tag, other)
        )
        if None in values or None in others:
            return False
        flat = {value for some in values for value in some or ()}
        return flat.isdisjoint(value for some in others for value in some or ())


def _direct(schema: Any) -> Iterator[str]:
    """References that a schema is, or chooses from."""
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        yield schema["$ref"]
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(keyword, ()):
            yield from _direct(part)


def _finite(schema: Any, known: set[str]) -> bool:
    """Whether a value of finite size fits a schema, given the references of which that is known."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema:
        return schema["$ref"] in known
    for keyword, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if keyword in schema:
            return enough(_finite(part, known) for part in schema[keyword])
    if set(types_of(schema)) - {"array", "object"}:
        return True
    named = schema.get("properties", {})
    rows = schema.get("prefixItems", [])[: int(schema.get("minItems", 0))]
    more = [schema["items"]] if schema.get("minItems", 0) > len(rows) and "items" in schema else []
    return all(_finite(part, known) for part in [*(named[one] for one in schema.get("required", ())), *rows, *more])


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names."""
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def is_of(value: Any, name: str) -> bool:
    """Whether a value is of a JSON type."""
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _constants(schema: Any) -> list[Any] | None:
    """The values that a schema names; None where it names none."""
    if not isinstance(schema, Mapping) or malformed(schema):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _values(schema: Any) -> list[str] | None:
    """The same as JSON, where 1.0 is 1."""
    constants = _constants(schema)
    plain = constants and [int(one) if isinstance(one, float) and one.is_integer() else one for one in constants]
    return None if plain is None else [json.dumps(value, sort_keys=True) for value in plain]


def _kinds(schema: Any) -> set[str]:
    """Types of the values that fit a leaf; empty where it is not said."""
    if not isinstance(schema, Mapping) or malformed(schema):
        return set()
    constants = _constants(schema)
    if constants is not None:
        return {name for name in TYPES for value in constants if name != "integer" and is_of(value, name)}
    return {"number" if name == "integer" else name for name in types_of(schema)}
