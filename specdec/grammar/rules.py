"""Grammars as rules in GBNF, which is all that xgrammar is asked to read beside schemas."""

from __future__ import annotations

import json
import re

from specdec.grammar.calls import Calls
from specdec.grammar.grammar import Grammar
from specdec.grammar.schema.schema import FIRST_MARK, reading
from specdec.grammar.schema.text_rules import Text

LOOSE, STRICT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""Characters of strings with a length: as xgrammar 0.2.8 writes them, and as JSON has them."""

MARKED = re.compile(r'\(\("\\ue000" "\\u(e[0-9a-f]{3}|E[0-9A-F]{3})"\)\)')
"""A mark of `specdec.grammar.schema.schema`, as xgrammar 0.2.8 writes it."""

OTHER_NAMES = re.compile(r"^\w*addl_key\w* ::= .*$", re.MULTILINE)
ESCAPED = r' | ("\\" basic_escape basic_string_sub)'
"""Rules of names that are none of the schema's, and what would write one with an escape."""

WHITESPACE = 16
"""Characters of white space between two parts of JSON: a line's end and its indentation."""


def rules_of(grammar: Grammar) -> str:
    """Rules in GBNF, the first of them called root.

    Raises:
        InvalidInputError: nothing can ever match.
        RuntimeError: xgrammar refuses a schema.

    >>> rules_of(Grammar.choice(["yes", "no"]))
    'root ::= "yes" | "no"'
    """
    match grammar.kind:
        case "json_schema":
            return _schema_rules(grammar.text)
        case "json_object":
            return _json_rules({"type": "object"}, strict=False)
        case "regex":
            whole, more = Text((grammar.text,)).rules("t")
            return "\n".join([f"root ::= {whole}", *more])
        case "choice":
            return f"root ::= {' | '.join(map(_literal, json.loads(grammar.text)))}"
        case "ebnf":
            return grammar.text
        case "calls":
            asked = Calls.of(grammar.text)
            return asked.rules(lambda kind, text: rules_of(Grammar.known(kind, text)))


def _schema_rules(text: str) -> str:
    found = reading(text)
    named: dict[int, str] = {}
    appended: list[str] = []

    def put(match: re.Match[str]) -> str:
        number = int(match[1], 16) - FIRST_MARK
        if number not in named:
            named[number], more = found.texts[number].rules(f"t{number}")
            appended.extend(more)
        return f"({named[number]})"

    rules = _json_rules(found.schema, strict=True).replace(LOOSE, STRICT)
    rules = OTHER_NAMES.sub(lambda match: match[0].replace(ESCAPED, ""), rules)
    rules = MARKED.sub(put, rules)
    return "\n".join([rules.rstrip("\n"), *appended])


def _json_rules(schema: object, *, strict: bool) -> str:
    import xgrammar

    made = xgrammar.Grammar.from_json_schema(
        json.dumps(schema, ensure_ascii=False), max_whitespace_cnt=WHITESPACE, strict_mode=strict
    )
    return str(made)


def _literal(text: str) -> str:
    """A string in GBNF, whose escapes are those of JSON.

    >>> _literal('say "a"')
    '"say \\\\"a\\\\""'
    """
    return json.dumps(text, ensure_ascii=False)
