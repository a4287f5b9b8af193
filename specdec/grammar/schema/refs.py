"""References within a JSON schema: where they lead, and what can be told through them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from specdec.base.errors import InvalidInputError
from specdec.grammar.limits import MAX_COMPARISONS
from specdec.grammar.schema.form import OF_TYPE, TYPES, malformed, properties_of, rows_of

MAX_OPTIONS = 100
"""Most options of a `oneOf`, beside constants: each is compared with each."""


class Root:
    """A whole schema, in which references are looked up.

    Looks at parts are counted, so that no small schema takes long: `InvalidInputError` then.
    """

    def __init__(self, schema: Any) -> None:
        self._schema, self._num_compared = schema, 0
        self._malformed: dict[int, list[str]] = {}  # of schemas, by identity

    def _compares(self, count: int = 1) -> None:
        self._num_compared += count
        if self._num_compared > MAX_COMPARISONS:
            raise InvalidInputError(
                f"the JSON schema takes more than {MAX_COMPARISONS:,} comparisons to tell its"
                " options, types and references apart; make it simpler"
            )

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
            elif (
                isinstance(found, list)
                and name.isdecimal()
                and len(name) < 9
                and int(name) < len(found)
            ):
                found = found[int(name)]
            else:
                return None
        return found if isinstance(found, bool | Mapping) else None

    def malformed(self, schema: Mapping[str, Any]) -> list[str]:
        """See `specdec.grammar.schema.form.malformed`; looked at once."""
        if id(schema) not in self._malformed:
            self._malformed[id(schema)] = malformed(schema)
        return self._malformed[id(schema)]

    def leaves(self, schema: Any, seen: set[str] | None = None) -> Iterator[Any]:
        """The schemas that a schema chooses from, through references, or the schema itself."""
        self._compares()
        seen = set() if seen is None else seen
        if isinstance(schema, Mapping) and not self.malformed(schema):
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

    def texts(self, schema: Any) -> list[str]:
        """The strings that a schema names, where it names nothing else."""
        each = [_constants(leaf) or [None] for leaf in self.leaves(schema)]
        some = [value for values in each for value in values]
        self._compares(len(some))
        return some if all(isinstance(value, str) for value in some) else []

    def within(self, schema: Any, types: list[str]) -> bool:
        """Whether whatever fits is plainly of one of some types."""
        for leaf in self.leaves(schema):
            constants = _constants(leaf)
            self._compares(len(constants or ()))
            if constants is not None:
                fits = all(any(is_of(value, name) for name in types) for value in constants)
            else:
                own = types_of(leaf) if isinstance(leaf, Mapping) else []
                fits = bool(own) and all(
                    one in types or (one == "integer" and "number" in types) for one in own
                )
            if not fits:
                return False
        return True

    def loops(self, references: Iterable[str]) -> bool:
        """Whether a reference comes back to itself before anything is said of a value."""
        some = set(references)
        left = {one: some.intersection(_direct(self.target(one))) for one in references}
        return bool(self._left(left, lambda one, known: left[one] <= known))

    def finite(self, references: Iterable[str]) -> bool:
        """Whether a value of finite size can fit the whole: a least fixed point over references."""
        left = {one: self.target(one) for one in references}
        known = left.keys() - self._left(left, lambda one, known: self._finite(left[one], known))
        return self._finite(self._schema, known)

    def _left(self, some: Iterable[str], is_known: Callable[[str, set[str]], bool]) -> set[str]:
        """References that are never known, where one is by those that are. Those that were found
        last, which lead to few others, are looked at first.
        """
        left, known = list(some)[::-1], set[str]()
        while True:
            self._compares(len(left))
            rest = []
            for one in left:
                if is_known(one, known):
                    known.add(one)
                else:
                    rest.append(one)
            if len(rest) == len(left):
                return set(rest)
            left = rest[::-1]  # in turns, whichever way they lead

    def disjoint(self, options: list[Any]) -> bool:
        """Whether it is plain that no value fits two options."""
        leaves = [(n, leaf) for n, option in enumerate(options) for leaf in self.leaves(option)]
        owners: dict[str, int] = {}
        kinds: set[str] = set()  # of constants
        rest: list[tuple[int, Any]] = []
        for number, leaf in leaves:
            values = self._values(leaf)
            if values is None:
                rest.append((number, leaf))
            elif any(owners.setdefault(value, number) != number for value in values):
                return False
            else:
                kinds |= _kinds(leaf)
        if rest and not kinds and self._one_tag(rest):
            return True
        if len(rest) > MAX_OPTIONS or (
            kinds and any(not _kinds(leaf) or _kinds(leaf) & kinds for _, leaf in rest)
        ):
            return False
        return all(
            number == other or self._apart(one, two)
            for place, (number, one) in enumerate(rest)
            for other, two in rest[:place]
        )

    def _one_tag(self, leaves: list[tuple[int, Any]]) -> bool:
        """Whether objects of numbered options are told apart by the constants of one property."""
        if any(_kinds(leaf) != {"object"} for _, leaf in leaves):
            return False
        names = set.intersection(*(set(leaf.get("required", ())) for _, leaf in leaves))
        return any(self._is_told_by(name, leaves) for name in sorted(names))

    def _is_told_by(self, name: str, leaves: list[tuple[int, Any]]) -> bool:
        owners: dict[str, int] = {}
        for number, leaf in leaves:
            tag = leaf.get("properties", {}).get(name)
            for values in (
                [self._values(one) for one in self.leaves(tag)]
                if isinstance(tag, Mapping)
                else [None]
            ):
                if values is None or any(
                    owners.setdefault(value, number) != number for value in values
                ):
                    return False
        return True

    def _apart(self, one: Any, other: Any) -> bool:
        types, others = _kinds(one), _kinds(other)
        if types and others and not types & others:
            return True
        if not types == others == {"object"}:
            return False
        self._compares(len(one.get("required", ())) + len(other.get("required", ())))
        if _lacks(one, other) or _lacks(other, one):
            return True
        names = set(one.get("required", ())) & set(other.get("required", ()))
        sides = one.get("properties", {}), other.get("properties", {})
        tags = ((sides[0].get(name), sides[1].get(name)) for name in sorted(names))
        return any(self._tell_apart(tag, rest) for tag, rest in tags)

    def _tell_apart(self, tag: Any, other: Any) -> bool:
        values, others = (
            [self._values(leaf) for leaf in self.leaves(one)]
            if isinstance(one, Mapping)
            else [None]
            for one in (tag, other)
        )
        if None in values or None in others:
            return False
        flat = {value for some in values for value in some or ()}
        return flat.isdisjoint(value for some in others for value in some or ())

    def _values(self, schema: Any) -> list[str] | None:
        """The values that a schema names as JSON, where 1.0 is 1; None where it names none."""
        constants = _constants(schema)
        self._compares(len(constants or ()))
        plain = constants and [
            int(one) if isinstance(one, float) and one.is_integer() else one for one in constants
        ]
        return None if plain is None else [json.dumps(value, sort_keys=True) for value in plain]

    def _finite(self, schema: Any, known: set[str]) -> bool:
        """Whether a value of finite size fits a schema, given references of which that is known."""
        self._compares()
        if not isinstance(schema, Mapping):
            return schema is not False
        if "const" in schema or "enum" in schema:
            return True
        if "$ref" in schema:
            return schema["$ref"] in known
        for keyword, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            if keyword in schema:
                return enough(self._finite(part, known) for part in schema[keyword])
        types = types_of(schema) or [
            name for name in ("array", "object") if not schema.keys().isdisjoint(OF_TYPE[name])
        ]
        if not types or set(types) - {"array", "object"}:
            return True
        named, array = properties_of(schema), rows_of(schema)
        rows = array.get("prefixItems", [])[: int(schema.get("minItems", 0))]
        many = schema.get("minItems", 0) > len(rows) and "items" in array
        more = [array["items"]] if many else []
        needed = [named[one] for one in schema.get("required", ())]
        parts = {"object": needed, "array": [*rows, *more]}
        return any(all(self._finite(part, known) for part in parts[name]) for name in types)


def _direct(schema: Any) -> Iterator[str]:
    """References that a schema is, or chooses from."""
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        yield schema["$ref"]
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(keyword, ()):
            yield from _direct(part)


def _lacks(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one object may not have what the other has to have."""
    further = one.get("additionalProperties", one.get("unevaluatedProperties"))
    named = one.get("properties", {})
    return (
        further is False
        and "patternProperties" not in one
        and any(name not in named for name in other.get("required", ()))
    )


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names."""
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(dict.fromkeys(named))


def is_of(value: Any, name: str) -> bool:
    """Whether a value is of a JSON type."""
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (
        name == "integer" and isinstance(value, float) and value.is_integer()
    )


def _constants(schema: Any) -> list[Any] | None:
    """The values that a schema names; None where it names none."""
    if not isinstance(schema, Mapping) or malformed(schema):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Any) -> set[str]:
    """Types of the values that fit a leaf; empty where it is not said."""
    if not isinstance(schema, Mapping) or malformed(schema):
        return set()
    constants = _constants(schema)
    if constants is not None:
        names = TYPES.keys() - {"integer"}
        return {name for name in names for value in constants if is_of(value, name)}
    return {"number" if name == "integer" else name for name in types_of(schema)}
