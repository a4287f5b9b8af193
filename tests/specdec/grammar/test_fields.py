"""The fields of requests over HTTP that ask for a grammar."""

from typing import Any

import pytest

from specdec.errors import InvalidInputError
from specdec.grammar.fields import grammar_of
from specdec.grammar.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
        ({"guided_json_object": True}, Grammar.json_object()),
        ({"guided_regex": "a+", "guided_json_object": False}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ],
)
def test_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert grammar_of(fields) == grammar


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "several grammars"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "several grammars"),
        ({"response_format": {"type": "xml"}}, "'xml'"),
        ({"response_format": "json"}, "None; choose text"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": "json"}, "must be an object"),
        ({"guided_regex": 3}, "'regex' is 3"),
        ({"guided_choice": "ab"}, "'choice' is 'ab'"),
        ({"guided_choice": []}, "at least one"),
        ({"guided_choice": ["a", 3]}, "list of at least one string"),
        ({"guided_regex": ""}, "must be a string"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        grammar_of(fields)
