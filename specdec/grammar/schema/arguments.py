"""Arguments of a function that are written one by one: texts as they are, others as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specdec.grammar.schema.form import LENGTHS
from specdec.grammar.schema.formats import FORMATS
from specdec.grammar.schema.refs import Root, is_of
from specdec.grammar.schema.text_rules import Text

LONGEST_TEXT = 48
"""Characters of a text whose length is held to, since every one of them is a state."""


@dataclass(frozen=True)
class Argument:
    """One argument.

    Attributes:
        name: of the argument.
        schema: of its value.
        required: a call has it.
        root: the schema of all arguments.
    """

    name: str
    schema: Any
    required: bool
    root: Mapping[str, Any]

    @cached_property
    def _leaves(self) -> list[Any]:
        return list(Root(self.root).leaves(self.schema))

    @cached_property
    def kinds(self) -> set[str]:
        """Types of its values, in the words of schemas; empty where it is not said."""
        return Root(self.root).kinds(self.schema)

    @property
    def is_text(self) -> bool:
        """Whether it can be nothing but a text."""
        return self.kinds == {"string"}

    @property
    def may_be_text(self) -> bool:
        """Whether it can be a text, which is written as it is."""
        return not self.kinds or "string" in self.kinds

    @property
    def listed(self) -> list[Any] | None:
        """All values; None where the schema does not list them."""
        known = self._leaves[0] if len(self._leaves) == 1 else None
        listed = known.get("enum") if isinstance(known, Mapping) else None
        if isinstance(known, Mapping) and "const" in known:
            listed = [known["const"]]
        return listed if isinstance(listed, list) else None

    @property
    def values(self) -> list[str] | None:
        """All that may be written; None where the schema does not list it."""
        if self.listed is None:
            return None
        return [one if isinstance(one, str) else json.dumps(one) for one in self.listed]

    @property
    def whole(self) -> dict[str, Any]:
        """The schema of its value, by itself."""
        shared = ("$defs", "definitions")
        return {**{word: self.root[word] for word in shared if word in self.root}, **self.schema}

    @property
    def text(self) -> Text | None:
        """What it may be beside any text; None where it may be any, or is not held to."""
        leaf = self._leaves[0] if len(self._leaves) == 1 else None
        if not self.is_text or not isinstance(leaf, Mapping):
            return None
        least, most = leaf.get("minLength", 0), leaf.get("maxLength")
        if max(least, most or 0) > LONGEST_TEXT:
            least, most = 0, None
        patterns = (leaf["pattern"],) if "pattern" in leaf else ()
        formats = (FORMATS[leaf["format"]],) if leaf.get("format") in FORMATS else ()
        asked = patterns or formats or least or most is not None
        return Text(patterns, int(least), most and int(most), formats=formats) if asked else None

    @property
    def unheld(self) -> list[str]:
        """What its schema asks of a text and the output is not held to."""
        if not self.may_be_text or self.values is not None:
            return []
        some = [leaf for leaf in self._leaves if isinstance(leaf, Mapping)]
        long = any(leaf.get(word, 0) > LONGEST_TEXT for leaf in some for word in LENGTHS)
        words = LENGTHS if self.text else (*LENGTHS, "pattern", "format")
        found = [word for word in words for leaf in some if word in leaf]
        if self.text and not long:
            return []
        return [f"{word} of the text {self.name}" for word in dict.fromkeys(found)]

    def as_json(self, text: str) -> str:
        """The value of a text as JSON, in which numbers stay as they were written.

        >>> argument = Argument("a", {"type": ["integer", "string"]}, True, {})
        >>> argument.as_json("5"), argument.as_json("[5]")
        ('5', '"[5]"')
        """
        if not self.may_be_text:
            return text
        try:
            value = None if self.is_text else json.loads(text, parse_constant=_no_json)
            fits = not self.kinds or any(is_of(value, one) for one in self.kinds)
        except (ValueError, RecursionError):
            fits = False
        return text if fits else json.dumps(text, ensure_ascii=False)


def _no_json(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def arguments_of(schema: Any) -> Iterator[Argument] | None:
    """The arguments that a schema names; None where they may have any names."""
    if not isinstance(schema, Mapping):
        return None
    leaves = list(Root(schema).leaves(schema))
    known = leaves[0] if len(leaves) == 1 else None
    named = known.get("properties") if isinstance(known, Mapping) else None
    if not isinstance(known, Mapping) or not isinstance(named, Mapping):
        return None
    required = known.get("required", ())
    return (Argument(name, one, name in required, schema) for name, one in named.items())
