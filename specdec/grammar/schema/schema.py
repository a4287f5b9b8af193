"""JSON schemas, read before xgrammar is given them: it leaves out what it does not know, with a
warning at most.

Refused is what would let an invalid document pass. What makes it stricter than the schema is let
be: it writes no properties that the schema does not name, and takes a pattern for the whole of a
string. Found with xgrammar 0.2.8, by documents that are valid and others that are not. What goes to
it is written anew: references lead to definitions of its own, strings with a pattern or a format
are marks in the place of which rules of ours are put, and what the standard calls an annotation is
gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from specdec.base.errors import InvalidInputError
from specdec.grammar.limits import DEEPEST, MAX_PATTERN_CHARACTERS, MAX_REASONS, shown
from specdec.grammar.schema import form
from specdec.grammar.schema.formats import FORMATS, LONGEST
from specdec.grammar.schema.pattern import NOT_HELD
from specdec.grammar.schema.refs import Root, is_of, types_of
from specdec.grammar.schema.text_rules import Text

SHORT = 64
"""A longest length up to which an endless format is held to it as well."""

DECIMALS = 6
"""Decimals that xgrammar 0.2.8 writes of a number with a bound."""

Own = dict[str, Any]
"""Keywords of a schema that speak of one type."""

FURTHER = ("additionalProperties", "unevaluatedProperties")

COUNTS = {"minLength", "maxLength", "minProperties", "maxProperties"}

LARGEST, LARGEST_WHOLE = 2**63 - 1024, 2**63 - 1
"""The largest bounds that xgrammar reads exactly, of floats and of whole numbers."""

MOST_MULTIPLES = 1000
"""Values of a `multipleOf` within bounds that are written one by one."""

MARK, FIRST_MARK, LAST_MARK = "\ue000", 0xE100, 0xEFFF
"""What stands for a string of our own: the mark, and a character of private use for its number."""


NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")
"""Characters that have no UTF-8, and the one that ends the library's texts."""


@dataclass(slots=True)
class Reading:
    """What was found in a schema.

    Attributes:
        schema: for the library.
        reasons: what it asks for and would not get, each with its place.
        notes: what it asks for and the standard lets be, and so do we.
        texts: strings of our own, by number.
        counts: strings have lengths, or objects a number of properties.
    """

    schema: Any = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a schema something stands; written only where there is something to say of it."""

    step: str
    within: Place | None = None

    def __truediv__(self, step: object) -> Place:
        """What is in it."""
        return Place(str(step), self)

    def __str__(self) -> str:
        """The whole way, or its beginning."""
        steps: list[str] = []
        place: Place | None = self
        while place is not None:
            steps.append(shown(place.step, 40))
            place = place.within
        return shown("/".join(reversed(steps)))


def reading(text: str) -> Reading:
    """What a schema asks for.

    Raises:
        InvalidInputError: it is no JSON.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        return _Reader(schema).read()
    except InvalidInputError:
        raise
    except ValueError as error:
        raise InvalidInputError(f"the JSON schema is no JSON: {shown(error)}") from error
    except RecursionError as error:
        raise InvalidInputError("the JSON schema is nested too deeply; make it flatter") from error


def misformed(schema: Any) -> list[str]:
    """What in a schema is not of the metaschema's form, each with its place."""
    reader = _Reader(schema)
    reader._look_at_forms()
    return reader._found.reasons


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    if not isfinite(value := float(digits)):
        raise ValueError(f"{shown(digits, 40)} is too large")
    return value


class _Reader:
    """Reads one schema, and those that its references name, each once."""

    def __init__(self, schema: Any) -> None:
        self._schema, self._root, self._found = schema, Root(schema), Reading()
        self._names: dict[str, str] = {}  # of definitions, by reference
        self._left: list[str] = []  # references of those that are yet to be read
        self._numbers: dict[Text, int] = {}  # of strings of our own
        self._num_characters = 0  # of their patterns

    def read(self) -> Reading:
        found = self._found
        self._look_at_forms()
        if found.reasons:
            return found
        whole = self._part(self._schema, Place("#"), 0)
        made: dict[str, Any] = {}
        while self._left:  # definitions may name others
            reference = self._left.pop()
            made[self._names[reference]] = self._part(
                self._root.target(reference), Place(shown(reference)), 0
            )
        found.schema = whole | {"$defs": made} if made else whole
        found.texts = list(self._numbers)
        if NO_TEXT.search(json.dumps(found.schema, ensure_ascii=False).replace("\\u0000", "\0")):
            found.reasons.append("NUL or half a character")
        found.reasons[:] = dict.fromkeys(found.reasons)
        found.notes[:] = dict.fromkeys(found.notes)
        if not found.reasons and self._root.loops(self._names):
            found.reasons.append("a $ref that comes back to itself")
        if not found.reasons and not self._root.finite(self._names):
            found.reasons.append("values without an end: a required part that holds itself")
        return found

    def _look_at_forms(self) -> None:
        """Refuses what is not of its form, wherever it stands."""
        left = [(Place("#"), self._schema)]
        while left:
            place, schema = left.pop()
            if isinstance(schema, Mapping):
                wrong = self._root.malformed(schema)
                self._refuse_all(f"{one} at {place}" for one in wrong)
                parts = () if wrong else form.parts_of(schema)
                left += ((place / step, part) for step, part in parts)

    def _refuse(self, *reasons: str) -> dict[str, Any]:
        return self._refuse_all(reasons)

    def _refuse_all(self, reasons: Iterable[str]) -> dict[str, Any]:
        room = MAX_REASONS - len(self._found.reasons)
        self._found.reasons += (
            shown(reason, 300) for reason, _ in zip(reasons, range(room), strict=False)
        )
        return {}

    def _note(self, note: str) -> None:
        if len(self._found.notes) < MAX_REASONS:
            self._found.notes.append(note)

    def _part(self, schema: Any, path: Place, depth: int) -> Any:
        if isinstance(schema, bool):
            return {} if schema else self._refuse(f"{path} allows nothing")
        if not isinstance(schema, Mapping):
            return self._refuse(f"{path} is no schema")
        if depth > DEEPEST:
            return self._refuse(f"more than {DEEPEST} schemas within each other")
        wrong = self._root.malformed(schema)
        if wrong:  # where only a reference leads
            return self._refuse_all(f"{one} at {path}" for one in wrong)
        self._refuse_all(f"{keyword} at {path}" for keyword in form.NOT_KNOWN if keyword in schema)
        if isinstance(schema.get("$id"), str) and path != Place("#"):
            return self._refuse(f"$id below the top at {path}")
        choice = next((keyword for keyword in form.CHOICES if keyword in schema), None)
        if choice is None:
            return self._plain(schema, path, depth)
        if choice == "allOf":
            schema = {**schema, "allOf": [part for part in schema["allOf"] if form.says(part)]}
            if joined := form.joined_strings(schema):
                return {"type": "string"} | self._string(joined, ["string"], path, depth)
        self._refuse_all(self._beside(schema, choice, path))
        match choice:
            case "const" | "enum":
                what = f"in {choice}, a whole number beyond 64 bits, at {path}"
                self._refuse_all(f"{shown(one)} {what}" for one in form.rounded(schema[choice]))
                return {choice: schema[choice]}
            case "$ref":
                return self._reference(schema["$ref"], path)
        numbered = enumerate(schema[choice])
        parts = [self._part(part, path / choice / place, depth + 1) for place, part in numbered]
        if choice == "oneOf" and not self._root.disjoint(schema["oneOf"]):
            self._refuse(f"oneOf whose options no type or constant property tells apart at {path}")
        if choice == "allOf" and len(parts) > 1:
            self._refuse(f"allOf with several options at {path}")
        # as one list they compile much sooner
        if parts and all(part.keys() <= {"const", "enum"} and part for part in parts):
            values = (part.get("enum", [part.get("const")]) for part in parts)
            return {"enum": [value for some in values for value in some]}
        return {"anyOf": parts} if choice != "allOf" else parts[0] if parts else {}

    def _reference(self, reference: str, path: Place) -> dict[str, Any]:
        if not reference.startswith("#"):
            return self._refuse(f"$ref to another document at {path}")
        if self._root.target(reference) is None:
            return self._refuse(f"$ref {shown(reference)!r} at {path}, where there is nothing")
        if reference not in self._names:
            self._names[reference] = f"d{len(self._names)}"
            self._left.append(reference)
        return {"$ref": f"#/$defs/{self._names[reference]}"}

    def _beside(self, schema: Mapping[str, Any], choice: str, path: Place) -> Iterator[str]:
        """What stands beside a keyword that is held to alone, and excludes something."""
        values = {"const": [schema.get("const")], "enum": schema.get("enum")}.get(choice)
        types = types_of(schema)
        for keyword in form.WORDS & schema.keys() - {choice}:
            if keyword == "type" and values is not None:
                wrong = (value for value in values if not any(is_of(value, name) for name in types))
                what = f"in {choice}, which the type at {path} excludes"
                yield from (f"{json.dumps(value)} {what}" for value in wrong)
                continue
            if keyword == "type":
                vacuous = self._root.within({choice: schema[choice]}, types)
            elif values is not None:
                vacuous = all(form.meets(value, keyword, schema[keyword]) for value in values)
            else:
                vacuous = keyword == "format" and schema["format"] not in FORMATS
            if not vacuous:
                yield f"{keyword} beside {choice} at {path}"

    def _plain(self, schema: Mapping[str, Any], path: Place, depth: int) -> dict[str, Any]:
        """A schema that chooses nothing; what speaks of other types than its own has no effect."""
        types = types_of(schema)
        if not types:
            for name in ("string", "number"):
                words = [one for one in form.OF_TYPE[name] if one in schema]
                words = [one for one in words if one != "format" or schema[one] in FORMATS]
                self._refuse_all(f"{keyword} without a type at {path}" for keyword in words)
            kinds = ("array", "object")
            types = [name for name in kinds if not schema.keys().isdisjoint(form.OF_TYPE[name])]
        self._found.counts |= not COUNTS.isdisjoint(schema)
        families = {"number" if name == "integer" else name for name in types}
        made: dict[str, Any] = {"type": types if len(types) > 1 else types[0]} if types else {}
        for family in form.OF_TYPE:
            own = {word: schema[word] for word in form.OF_TYPE[family] if word in schema}
            for keyword in own.keys() & {*COUNTS, "minItems", "maxItems"}:
                own[keyword] = int(min(own[keyword], form.MAX_COUNT))
            if family in families and own:
                read = {"string": self._string, "number": self._number}
                read |= {"array": self._array, "object": self._object}
                made |= read[family](own, types, path, depth)
        return {"enum": made["enum"]} if "enum" in made else made

    def _string(self, own: Own, types: list[str], path: Place, depth: int) -> Own:
        least, most = own.get("minLength", 0), own.get("maxLength")
        asked = own.get("format")
        if asked is not None and asked not in FORMATS:
            self._note(f"format {shown(asked)} at {path} is taken for an annotation")
        patterns = own.get("pattern", ())
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        formats = (FORMATS[asked],) if asked in FORMATS else ()
        if not patterns + formats:
            return {keyword: own[keyword] for keyword in form.LENGTHS if keyword in own}
        if most is not None and asked in FORMATS and most > SHORT and "pattern" not in own:
            if asked not in LONGEST:
                self._note(f"maxLength {most} beside format {asked} at {path} is not held to")
            most = None
        text = Text(patterns, least, most, in_json=True, formats=formats)
        return {"pattern": self._mark(text, path)}

    def _mark(self, text: Text, path: Place) -> str:
        """A pattern that stands for a string of our own."""
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self._num_characters += sum(map(len, text.patterns))
            if self._num_characters > MAX_PATTERN_CHARACTERS:
                what = f"patterns of more than {MAX_PATTERN_CHARACTERS:,} characters together"
                self._refuse(what)
                return ""
            try:
                text.check()
            except InvalidInputError as error:
                self._refuse(f"{str(error).partition(NOT_HELD)[0]} at {path}")
        number = FIRST_MARK + self._numbers[text]
        if number > LAST_MARK:
            most = LAST_MARK - FIRST_MARK + 1
            self._refuse(f"more than {most:,} patterns, formats and lengths that differ")
        return MARK + chr(min(number, LAST_MARK))

    def _number(self, own: Own, types: list[str], path: Place, depth: int) -> Own:
        step, whole = own.pop("multipleOf", None), "number" not in types
        if step is not None and whole and step.as_integer_ratio()[0] == 1:
            step = None  # of which every whole number is a multiple
        if step is not None and not own and types == ["integer"] and step == int(step):
            return {"multipleOf": int(step)}
        least, most = form.narrowed(own, 0 if whole else DECIMALS)
        largest = LARGEST_WHOLE if whole else LARGEST
        least = None if least is None else max(least, -largest)
        most = None if most is None else min(most, largest)
        if (largest if most is None else most) < (-largest if least is None else least):
            what = f"no number of at most {DECIMALS} decimals within the bounds"
            return self._refuse(f"{what} at {path}")
        if step is not None:
            some = form.multiples(step, least, most, MOST_MULTIPLES)
            if not some or len(types) > 1:
                return self._refuse(
                    f"multipleOf of other than unbounded integers or {MOST_MULTIPLES} values at"
                    f" {path}"
                )
            return {"enum": some}
        bounds = {"minimum": least, "maximum": most}
        return {keyword: bound for keyword, bound in bounds.items() if bound is not None}

    def _array(self, own: Own, types: list[str], path: Place, depth: int) -> Own:
        own = form.rows_of(own)
        if own.pop("uniqueItems", False):
            self._refuse(f"uniqueItems at {path}")
        if not {"items", "prefixItems", "unevaluatedItems"} & own.keys():
            own["items"] = {}  # else none could come
        if "prefixItems" in own:
            rows = enumerate(own["prefixItems"])
            own["prefixItems"] = [
                self._part(part, path / "prefixItems" / number, depth + 1) for number, part in rows
            ]
        return self._with_parts(own, ("items", "unevaluatedItems"), path, depth)

    def _object(self, own: Own, types: list[str], path: Place, depth: int) -> Own:
        own = self._with_required(own, path, depth)
        named, patterns = own.get("properties", {}), own.get("patternProperties", {})
        further = own.get(
            "additionalProperties",
            own.get("unevaluatedProperties", False if named or patterns else None),
        )
        if own.get("minProperties", 0) > 1 and (further is not False or patterns):
            text = f"minProperties above 1 where names are free, and so may come twice, at {path}"
            self._refuse(text)
        speaking = {"properties", "patternProperties", "propertyNames"}
        if further is None and own.keys().isdisjoint(speaking):
            own["additionalProperties"] = {}
        escaped = [
            name
            for name in named
            if further is not False and json.dumps(name, ensure_ascii=False) != f'"{name}"'
        ]
        if escaped:
            text = f"property {shown(escaped[0])!r}, which JSON escapes"
            self._refuse(f"{text}, beside names that are free at {path}")
        if patterns and (named or len(patterns) > 1 or further is not False):
            self._refuse(f"patternProperties beside other properties at {path}")
        if "propertyNames" in own:
            own["propertyNames"] = self._names_of(
                own["propertyNames"], bool(named or patterns), path, depth
            )
            if further is False:  # no names at all, which xgrammar 0.2.8 takes for any
                del own["propertyNames"]
        for keyword in ("properties", "patternProperties"):
            if keyword in own:
                parts = own[keyword].items()
                own[keyword] = {
                    name: self._part(part, path / keyword / name, depth + 1) for name, part in parts
                }
        if patterns:
            named = own["patternProperties"].items()
            marked = {self._mark(Text((name,), in_json=True), path): part for name, part in named}
            own["patternProperties"] = marked
        return self._with_parts(own, FURTHER, path, depth)

    def _with_required(self, own: Own, path: Place, depth: int) -> Own:
        """An object that lists what it requires; where `propertyNames` lists names, all of them."""
        listed = own.get("properties", {})
        missing = [name for name in own.get("required", ()) if name not in listed]
        if not missing:
            return own
        named, names = form.properties_of(own), list(missing)
        further = named[missing[0]]
        if "propertyNames" in own:
            self._names_of(own["propertyNames"], bool(listed), path, depth)
            names = self._root.texts(own["propertyNames"])
            named = dict.fromkeys(names, further)
        if further is False or "patternProperties" in own or not set(missing) <= set(names):
            what = f"required property {shown(missing[0])!r} that is not among the properties"
            self._refuse(f"{what} at {path}")
            return own
        if "propertyNames" in own:
            own = {name: own[name] for name in own.keys() - {"propertyNames", *FURTHER}}
            own["additionalProperties"] = False
        return own | {"properties": named}

    def _names_of(self, names: Any, beside: bool, path: Place, depth: int) -> Any:
        if beside:
            self._refuse(f"propertyNames beside properties at {path}")
        if isinstance(names, Mapping) and not {"type", *form.CHOICES} & names.keys():
            names = {"type": "string", **names}
        if self._root.kinds(names) != {"string"}:
            self._refuse(f"propertyNames of other than strings at {path}")
        return self._part(names, path / "propertyNames", depth + 1)

    def _with_parts(self, own: Own, keywords: tuple[str, ...], path: Place, depth: int) -> Own:
        for keyword in keywords:  # a bool says whether something is allowed at all
            if isinstance(own.get(keyword), Mapping):
                own[keyword] = self._part(own[keyword], path / keyword, depth + 1)
        return own
