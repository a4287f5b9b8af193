"""What is refused of JSON schemas: all that xgrammar lets pass though it is not valid, and nothing that it holds to."""

import json
from typing import Any

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

import jsonschema
import xgrammar
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec.errors import InvalidInputError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.schema import unsupported

INTEGERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}

REFUSED: list[tuple[Any, Any, str]] = [
    ({"type": "number", "multipleOf": 0.5}, 0.3, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, 7, "multipleOf"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa", "pattern with a length"),
    ({"type": "string", "format": "date", "maxLength": 3}, "2020-01-02", "format with a length"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], "uniqueItems"),
    ({"type": "object", "properties": INTEGERS, "dependentRequired": {"a": ["b"]}}, {"a": 1}, "dependentRequired"),
    ({"type": "object", "properties": INTEGERS, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}, "dependentSchemas"),
    ({"type": "object", "properties": INTEGERS, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, "if"),
    ({"type": "integer", "not": {"const": 3}}, 3, "not"),
    ({"type": "object", "properties": INTEGERS, "anyOf": [{"required": ["a"]}]}, {}, "beside anyOf"),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, 4, "oneOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 2, "oneOf"),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 6, "allOf"),
    ({"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p", "minimum": 3}, 2, r"minimum beside \$ref"),
    ({"type": "string", "enum": [1, "a"]}, 1, "1 in enum"),
    ({"type": "string", "const": 1}, 1, "1 in const"),
    ({"minimum": 3}, 1, "minimum without a type"),
    ({"minLength": 3}, "a", "minLength without a type"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}, {"a": 1}, "required property 'b'"),
]
"""Schemas, documents that they exclude and xgrammar would write, and what is said."""

HELD: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "multipleOf": 3}, [9, 0, -6], [4]),
    ({"type": "integer", "minimum": 5, "maximum": 17}, [5, 17], [4, 18]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1, -0.1]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd"], ["a", "abcde"]),
    ({"type": "string", "pattern": "^a+b$"}, ["aab"], ["b", "xab"]),
    ({"type": "string", "format": "date"}, ["2020-01-02"], ["x"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[1, "a"]], [["a"], [1, "a", 2]]),
    ({"type": "object", "properties": INTEGERS, "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "object", "properties": INTEGERS, "required": ["b"], "maxProperties": 1}, [{"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"yyy": 1}]),
    ({"type": "object", "patternProperties": {"^x$": {"type": "integer"}}, "additionalProperties": False}, [{"x": 1}], [{"y": 1}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [3, "a"], [None]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [3, "a"], [None]),
    ({"allOf": [{"type": "integer"}]}, [3], ["a"]),
    ({"$defs": {"p": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/p"}}, [[1]], [["a"]]),
    ({"type": "object", "properties": {"c": {"$ref": "#"}}}, [{"c": {}}], [{"c": 1}]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2]),
    ({"type": ["integer", "null"], "minimum": 3}, [None, 4], [1, "a"]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "x"}, "a": {"type": "integer"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "y"}}, "required": ["k"]},
            ]
        },
        [{"k": "x", "a": 1}, {"k": "y"}],
        [{}, {"k": "z"}],
    ),
]
"""Schemas, documents that xgrammar writes, and documents that they exclude."""


@pytest.fixture(scope="module")
def compiler() -> Any:
    characters = [*map(chr, range(32, 127)), "</s>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(characters, stop_token_ids=[len(characters) - 1]))


def writes(compiler: Any, schema: Any, document: Any) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return bool(matcher.accept_string(json.dumps(document)) and matcher.is_completed())


@pytest.mark.parametrize(("schema", "document", "reason"), REFUSED)
def test_refused(compiler: Any, schema: Any, document: Any, reason: str) -> None:
    """For a reason: a document that is not valid would pass. Nested ones are found as well."""
    assert writes(compiler, schema, document) and not jsonschema.Draft202012Validator(schema).is_valid(document)
    for nested in (schema, {"type": "array", "items": schema} if "$defs" not in schema else schema):
        with pytest.raises(InvalidInputError, match=reason):
            Grammar.json_schema(nested)


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD)
def test_held_to(compiler: Any, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert unsupported(schema) == []
    assert all(writes(compiler, schema, document) for document in right)
    assert not any(writes(compiler, schema, document) for document in wrong)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert all(validator.is_valid(document) for document in right)
    assert not any(validator.is_valid(document) for document in wrong)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "contains": {"type": "integer"}}, "contains at #"),
        ({"type": "array", "items": [{"type": "integer"}]}, "prefixItems"),
        ({"type": "string", "format": "zip"}, "format zip"),
        ({"type": "object", "minProperties": 2, "additionalProperties": True}, "twice"),
        ({"type": "object", "properties": {"p": {"items": {"uniqueItems": True}}}}, "uniqueItems at #/properties/p/items"),
        ({"$ref": "https://example.com/schema"}, "another document"),
        ({"not": {}, "if": True}, "not at #; if at #"),
        (False, "allows nothing"),
        ("[1]", "no schema"),
        ("{", "is no JSON"),
        ({"const": object()}, "cannot be written"),
    ],
)
def test_refused_by_name(schema: Any, reason: str) -> None:
    """All reasons in one line, with their places."""
    with pytest.raises(InvalidInputError, match=reason) as caught:
        Grammar.json_schema(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strings", "right", "wrong"),
    [
        ({}, "\u00e9\x7f b", "\t\n\r\x01"),
        ({"minLength": 1, "maxLength": 2}, "\u00e9\x7f b", "\t\n\r\x01"),
        ({"minLength": 1}, "\u00e9\x7f b", "\t\n\r\x01"),
        ({"pattern": "^[^a]{1,2}$"}, "\u00e9\x7f b", "a\t\n\r\x01"),
    ],
    ids=str,
)
def test_characters_that_json_does_not_have_in_a_string(strings: Any, right: str, wrong: str) -> None:
    """As they are, in names of properties too. With a length xgrammar itself would let a tab pass."""
    pieces = ["</s>", *map(chr, [*range(1, 128), 0xE9])]
    model = models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[], unk_token="</s>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")
    compiler = GrammarCompiler(tokenizer, len(pieces), [0])
    named = {"type": "object", "propertyNames": strings, "additionalProperties": {"type": "integer"}}
    for schema, before in (({"type": "string", **strings}, '"'), (named, '{"')):
        for character in right + wrong:
            progress = compiler.start(Grammar.json_schema(schema))
            fits = progress.advance([pieces.index(one) for one in before + character])
            assert fits == (character in right), (schema, character)
