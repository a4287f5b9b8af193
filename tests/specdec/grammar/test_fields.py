"""The fields of requests over HTTP that ask for a grammar."""

from typing import Any

import pytest

from specdec.base.errors import InvalidInputError
from specdec.grammar.fields import grammar_of, unknown_keys
from specdec.grammar.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        (
            {"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": None},
            None,
        ),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            Grammar.json_schema(SCHEMA),
        ),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
        ({"guided_json_object": True}, Grammar.json_object()),
        ({"guided_regex": "a+", "guided_json_object": False}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"guided_json": {"name": "x", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"json_schema": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"grammar": 'root ::= "a"', "regex": None}, Grammar.ebnf('root ::= "a"')),
        ({"grammar": {"type": "regex", "value": "a+"}}, Grammar.regex("a+")),
        ({"grammar": {"type": "json", "value": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"format": "json"}, Grammar.json_object()),
        ({"format": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"format": ""}, None),
        *(
            ({"response_format": response_format}, grammar)
            for response_format, grammar in (
                ({"type": "json_object", "schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
                ({"type": "json_object", "schema": None}, Grammar.json_object()),
                ({"type": "json", "value": SCHEMA}, Grammar.json_schema(SCHEMA)),
                ({"type": "json_schema", "schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
                ({"type": "json_schema", "json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
                (
                    {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
                    Grammar.json_schema(SCHEMA),
                ),
                ({"type": "regex", "value": "a+"}, Grammar.regex("a+")),
                ({"type": "regex", "pattern": "a+"}, Grammar.regex("a+")),
                ({"type": "grammar", "grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
                ({"type": "choice", "choice": ["a"]}, Grammar.choice(["a"])),
            )
        ),
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
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            "'structural_tag'; choose text",
        ),
        ({"response_format": {"type": "json_object", "schema": "a"}}, "no JSON"),
        (
            {"response_format": {"type": "json_object", "schema": [1]}},
            r"response_format.schema is \[1\]",
        ),
        ({"response_format": {"type": "json_schema"}}, "of type json_schema has no json_schema"),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": SCHEMA}},
            "give one of them",
        ),
        ({"response_format": {"type": "regex"}}, "of type regex has no regex"),
        ({"json_schema": SCHEMA, "regex": "a"}, "several grammars"),
        ({"grammar": 3}, "grammar is 3"),
        ({"format": "xml"}, "format is 'xml'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "json_schema.schema",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": "json"}, "must be an object"),
        ({"guided_regex": 3}, "guided_regex is 3"),
        ({"guided_choice": "ab"}, "guided_choice is 'ab'"),
        ({"guided_choice": []}, "at least one"),
        ({"guided_choice": ["a", 3]}, "list of at least one string"),
        ({"guided_regex": ""}, "must be a string, empty for json_object alone"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        grammar_of(fields)


def test_keys_within_that_nothing_is_made_of() -> None:
    for given, names in (
        ({"type": "text", "schema": {}}, ["response_format.schema"]),
        ({"type": "json_object", "schema": {}, "colour": 1}, ["response_format.colour"]),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {}, "scheme": 1},
            },
            ["response_format.json_schema.scheme"],
        ),
        (None, []),
    ):
        assert list(unknown_keys({"response_format": given})) == names
