"""Schemas, regular expressions and rules: compiled, or refused in a line."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from tests.fuzz.draw import any_value, changed, damaged_json
from tests.fuzz.kind import Check, Kind, attempt
from tests.fuzz.notation import meant, written
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.waiting import HANG
from tests.helpers.wild_schemas import wild_schema

WORDS = [
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "anyOf", "oneOf",
    "allOf",
]  # fmt: skip
WORDS += [
    "$ref", "$defs", "minimum", "maximum", "minLength", "maxLength", "pattern", "format",
    "multipleOf",
]  # fmt: skip
WORDS += [
    "minItems", "maxItems", "minProperties", "patternProperties", "additionalProperties", "not",
    "if",
]  # fmt: skip
LARGE: list[Any] = [
    {"oneOf": {"$times": [[{"const": "a"}], 2_000]}},
    {"enum": {"$each": ["v%d", 20_000]}},
    {"type": "string", "maxLength": 10**6},
    {"type": "array", "minItems": 10**9},
    {"type": "integer", "minimum": 10**400},
    {"$deep": ['{"items": ', True, "}", 2_000]},
    {"$deep": ['{"anyOf": [', True, "]}", 500]},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
]
ATOMS = [
    "a", "b", "é", ".", r"\d", "[a-z]", "[^a]", "[]", "x y", r"\n", r"\u0041", "(?:a)",
    "[a-z0-9_.-]",
]  # fmt: skip
ODD = [
    "(", ")", "]", "}", "\\", "\0", "\ud800", "(?=a)", r"\1", r"\p{L}", "[^\\s\\S]", "^", "$",
    "a{5,2}",
]  # fmt: skip
COUNTS = [
    "*", "+", "?", "{3}", "{2,}", "{0,40}", "{1,5000}", "{65536}", "{1000000}",
    "{99999999999999999999}", "*?",
]  # fmt: skip
TERMS = ["root", "a", "b", '"x"', '"\\n"', "[a-z]", "[^a]", '""', "."]
ODD_TERMS = ["(", ")", "::=", "|", "#", "[", '"', "\\U00110000", "missing", "{", "\0", '"\ud800"']


def schema(draw: Random) -> Any:
    """One that is wild, malformed, or large."""
    way = draw.random()
    if way < 0.1:
        return draw.choice(LARGE)
    if way < 0.15:
        return any_value(draw)
    made = changed(draw, wild_schema(draw), WORDS)
    return damaged_json(draw, made) if way > 0.95 else made


def pattern(draw: Random) -> Any:
    """A regular expression, or nearly one."""
    made = _pattern(draw, 0)
    return {"$times": [made, draw.choice([100, 3_000])]} if draw.random() < 0.1 else made


def _pattern(draw: Random, depth: int) -> str:
    parts = []
    for _ in range(draw.randint(1, 4)):
        part = draw.choice(ODD if draw.random() < 0.04 else ATOMS)
        if depth < 3 and draw.random() < 0.3:
            part = f"({_pattern(draw, depth + 1)})"
        parts.append(part + (draw.choice(COUNTS) if draw.random() < 0.4 else ""))
    return draw.choice(["", "", "|"]).join(parts)


def rules(draw: Random) -> Any:
    """GBNF, or nearly that."""
    made = "\n".join(f"{name} ::= {_rule(draw, 0)}" for name in ("root", "a", "b"))
    return {"$times": [made + "\n", draw.choice([100, 3_000])]} if draw.random() < 0.1 else made


def _rule(draw: Random, depth: int) -> str:
    parts = []
    for _ in range(draw.randint(1, 4)):
        part = draw.choice(ODD_TERMS if draw.random() < 0.04 else TERMS)
        if depth < 3 and draw.random() < 0.3:
            part = f"({_rule(draw, depth + 1)})"
        parts.append(part + (draw.choice(COUNTS) if draw.random() < 0.3 else ""))
    return draw.choice([" ", " | "]).join(parts)


def _start(made: Any) -> Any:
    def start(folder: Path) -> Check:
        compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, [2])

        def check(one: Any) -> None:
            grammar = attempt(lambda: made(one))
            if grammar is not None:
                attempt(lambda: compiler.compiled(grammar).result(HANG))

        return check

    return start


def _of_schema(one: Any) -> Grammar:
    """Of the value where there is one, as Python gives it; of text otherwise."""
    value = meant(one)
    return Grammar.json_schema(value if isinstance(value, dict | bool) else written(one))


KINDS = {
    "schemas": Kind(schema, _start(_of_schema), 30),
    "regexes": Kind(pattern, _start(lambda one: Grammar.regex(meant(one))), 30),
    "rules": Kind(rules, _start(lambda one: Grammar.ebnf(meant(one))), 30),
}
