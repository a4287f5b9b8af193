"""What is refused of JSON schemas: all that xgrammar lets pass though it is not valid, and nothing
that it holds to.
"""

import json
import random
from typing import Any

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

import jsonschema
import xgrammar
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec.base.errors import InvalidInputError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.schema.formats import FORMATS
from tests.helpers.grammar_texts import CHARACTERS, sample, writes, writes_json
from tests.specdec.grammar.schema.held import HELD, INTEGERS

REFUSED: list[tuple[Any, Any, str]] = [
    ({"type": "number", "multipleOf": 0.5}, 0.3, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, 7, "multipleOf"),
    ({"$ref": "#/x", "x": {"type": "integer", "not": {"const": 3}}}, 3, "not at #/x"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], "uniqueItems"),
    (
        {"type": "object", "properties": INTEGERS, "dependentRequired": {"a": ["b"]}},
        {"a": 1},
        "dependentRequired",
    ),
    (
        {"type": "object", "properties": INTEGERS, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"a": 1},
        "dependentSchemas",
    ),
    (
        {
            "type": "object",
            "properties": INTEGERS,
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
        },
        {"a": 1},
        "if",
    ),
    ({"type": "integer", "not": {"const": 3}}, 3, "not"),
    (
        {"type": "object", "properties": INTEGERS, "anyOf": [{"required": ["a"]}]},
        {},
        "beside anyOf",
    ),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, 4, "oneOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 2, "oneOf"),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 6, "allOf"),
    (
        {"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p", "minimum": 3},
        2,
        r"minimum beside \$ref",
    ),
    ({"type": "string", "enum": [1, "a"]}, 1, "1 in enum"),
    ({"type": "string", "const": 1}, 1, "1 in const"),
    ({"const": [10**30]}, [1e30], "in const, a whole number beyond 64 bits"),
    ({"type": "integer", "enum": [3, -(10**30)]}, -1e30, "in enum, a whole number beyond"),
    ({"minimum": 3}, 1, "minimum without a type"),
    ({"minLength": 3}, "a", "minLength without a type"),
]
"""Schemas, documents that they exclude and xgrammar would write, and what is said."""

LOOSE_FORMATS = ("email", "json-pointer", "date-time", "uuid")
"""Which `jsonschema` checks with packages that are not installed, or not to the last character."""

SAMPLED: list[Any] = [
    *({"type": "string", "format": name} for name in FORMATS),
    {"enum": ['é"\t\n\\', {"a": [1, "x"]}, 1.5, True]},
    {"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.3},
    {"type": "number", "maximum": -1e-9},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "qu": {}},
        "additionalProperties": {"type": "string", "maxLength": 2},
    },
    {
        "type": "object",
        "propertyNames": {"pattern": '^[a"\\\\]+$'},
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
    },
    {
        "type": "object",
        "patternProperties": {'^[a"]{1,2}$': {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    {"type": "string", "pattern": '^(?=.*[0-9])(?=.*").{3,5}$'},
    {"type": "string", "minLength": 1, "maxLength": 2, "pattern": '^["\\\\n]*$'},
    {"type": ["string", "null", "integer"], "pattern": "^a?$", "minimum": 3},
    {
        "anyOf": [
            {"type": "string", "maxLength": 1},
            {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        ]
    },
]

_WRONG_TYPES: list[Any] = ["str", {}, [], None, ["string", "any"]]
_WRONG_PARTS: list[Any] = [["a"], None, {"a": 3}]
_WRONG_ITEMS: list[Any] = [[{}, 5], [], 3]
MALFORMED: list[Any] = [
    *({"type": wrong} for wrong in _WRONG_TYPES),
    *({"type": "object", "properties": wrong} for wrong in _WRONG_PARTS),
    *(
        {keyword: wrong}
        for keyword in ("anyOf", "oneOf", "allOf", "enum", "prefixItems", "required")
        for wrong in (None, 5, "a")
    ),
    *({"type": "string", "minLength": wrong} for wrong in ("1", -1, 1.5, True)),
    *({"type": "integer", "minimum": wrong} for wrong in ("1", True, 2**70, 10**400)),
    *({"type": "array", "items": wrong} for wrong in _WRONG_ITEMS),
    {"type": "array", "items": [{"type": "str"}]},
    {"type": "array", "items": [{"$ref": "#"}], "minItems": 1},
    {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
    {"type": "number", "maximum": -1e19},
    {"$ref": "#/x", "x": {"allOf": [{"type": "string"}, {"minLength": "1"}]}},
    {"$ref": "#/x", "x": {"allOf": [{"type": "string"}, {"pattern": 5}]}},
    {"type": "string", "pattern": "^x[a-z]*$", "minLength": 70_000, "maxLength": -1},
    {"enum": []},
    {"$defs": []},
    {"enum": [1], "type": "foo"},
    {"$ref": "#/nope"},
    {"$ref": "#name"},
    {"$ref": 5},
    {"type": "integer", "multipleOf": 0},
    {"type": "string", "minLength": 3, "maxLength": 1},
    {"type": "number", "minimum": 3, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7},
    {"const": "\ud800"},
    {"properties": {"\ud800": {}}},
    {"const": "\0"},
    {"$ref": "#"},
    {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}]}, "B": {"$ref": "#/$defs/A"}},
    },
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "object", "properties": {"a": {"type": "object", "$id": "x"}}},
    {"type": "object", "propertyNames": {"type": "integer"}},
    "[" * 100_000,
    '{"items":' * 300 + "{}" + "}" * 300,
    '{"const": NaN}',
    '{"type": "number", "minimum": 1e999}',
]


@pytest.fixture(scope="module")
def compiler() -> Any:
    characters = [*map(chr, range(32, 127)), "</s>"]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(characters, stop_token_ids=[len(characters) - 1])
    )


@pytest.mark.parametrize(("schema", "document", "reason"), REFUSED)
def test_refused(compiler: Any, schema: Any, document: Any, reason: str) -> None:
    """For a reason: a document that is not valid would pass. Nested ones are found as well."""
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    assert matcher.accept_string(json.dumps(document)) and matcher.is_completed()
    assert not jsonschema.Draft202012Validator(schema).is_valid(document)
    for nested in (schema, {"type": "array", "items": schema} if "$ref" not in schema else schema):
        with pytest.raises(InvalidInputError, match=reason):
            Grammar.json_schema(nested)


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD)
def test_held_to(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    grammar = Grammar.json_schema(schema)
    assert [document for document in [*right, *wrong] if writes_json(grammar, document)] == right
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert all(validator.is_valid(document) for document in right)
    assert not any(
        validator.is_valid(document)
        for document in wrong
        if schema.get("format") not in LOOSE_FORMATS
    )


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"type": "string", "format": "byte"}, "format byte at # is taken for an annotation"),
        (
            {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
            "maxLength 2083 beside format uri at #",
        ),
        ({"type": "string", "format": "uuid", "maxLength": 100}, ""),
        ({"type": "integer", "format": "uint32"}, ""),
    ],
)
def test_what_is_let_be_is_said(schema: Any, note: str, caplog: pytest.LogCaptureFixture) -> None:
    grammar = Grammar.json_schema(schema)
    assert len(grammar.notes) == bool(note) and note in "".join(grammar.notes)
    pieces = [*CHARACTERS, "</s>"]
    model = models.BPE(
        vocab={piece: token for token, piece in enumerate(pieces)}, merges=[], unk_token="</s>"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")
    GrammarCompiler(tokenizer, len(pieces), [len(pieces) - 1]).compiled(grammar).result()
    assert [
        record.getMessage().rpartition("held to: ")[2] for record in caplog.records
    ] == grammar.notes


def test_a_format_gives_way_to_a_pattern_with_which_it_takes_too_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specdec.grammar.language.MAX_STATES", 20)
    grammar = Grammar.json_schema({"type": "string", "format": "ipv6", "pattern": "^[0-9:]*$"})
    assert writes_json(grammar, "1:2") and not writes_json(grammar, "a::b")
    assert "a format beside the pattern ^[0-9:]*$" in caplog.messages[0]
    with pytest.raises(InvalidInputError, match="more than 20 states"):
        writes_json(
            Grammar.json_schema({"type": "string", "format": "ipv6", "maxLength": 30}), "::1"
        )


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"items": [{"type": "string"}, {"type": "null"}], "additionalItems": False},
            [["a", None]],
            [["a"], [None, "a"], ["a", None, 1]],
        ),
        (
            {"items": [{"type": "string"}, {"minimum": 1, "type": "number"}]}
            | {"additionalItems": {"type": "null"}},
            [["a", 1], ["a", 1, None, None]],
            [["a", 0], ["a", 1, 2], []],
        ),
        ({"items": {"type": "null"}, "additionalItems": False}, [[None, None]], [[1, 1]]),
    ],
)
def test_lists_of_items_as_of_draft_7(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    """Which other generators still write."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", **schema}
    grammar = Grammar.json_schema(schema | {"minItems": 2})
    assert [document for document in [*right, *wrong] if writes_json(grammar, document)] == right
    validator = jsonschema.Draft7Validator(schema | {"minItems": 2})
    assert [document for document in [*right, *wrong] if validator.is_valid(document)] == right


def test_a_name_is_not_written_twice_in_another_spelling() -> None:
    grammar = Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": {"type": "string"},
        }
    )
    assert writes(grammar, '{"a": 1, "b": "x"}')
    assert not any(writes(grammar, f'{{"a": 1, "{name}": "x"}}') for name in ("a", "\\u0061"))


@pytest.mark.parametrize("schema", SAMPLED, ids=lambda schema: json.dumps(schema)[:60])
def test_whatever_comes_out_is_valid(schema: Any) -> None:
    draw, grammar = random.Random(5), Grammar.json_schema(schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker(["date", "ipv4", "ipv6", "email"])
    )
    found = [text for _ in range(15) if (text := sample(grammar, draw)) is not None]
    assert len(found) > 3 and all(validator.is_valid(json.loads(text)) for text in found), found


@pytest.mark.parametrize("schema", MALFORMED, ids=lambda schema: repr(schema)[:60])
def test_malformed_schemas_are_refused_in_one_line(schema: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Grammar.json_schema(schema)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "contains": {"type": "integer"}}, "contains at #"),
        ({"type": "array", "items": [{"contains": True}]}, "contains at #/prefixItems/0"),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1}, "multipleOf"),
        ({"type": "integer", "multipleOf": 50, "minimum": 1, "maximum": 20}, "multipleOf"),
        ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 5000}, "or 1000 values"),
        ({"type": ["integer", "null"], "multipleOf": 5, "minimum": 0, "maximum": 5}, "multipleOf"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allOf with several"),
        ({"allOf": [{"minLength": 3}, {"maxLength": 5}]}, "allOf with several"),
        (
            {"allOf": [{"type": "string", "format": "date"}, {"format": "email"}]},
            "allOf with several",
        ),
        ({"enum": ["x"], "format": "date"}, "format beside enum"),
        (
            {"type": "object", "required": ["a"], "additionalProperties": False},
            "required property 'a'",
        ),
        (
            {"type": "object", "required": ["a"], "patternProperties": {"^a$": {}}},
            "required property 'a'",
        ),
        (
            {"type": "object", "required": ["a"], "propertyNames": {"enum": ["b"]}},
            "required property 'a'",
        ),
        (
            {"type": "object", "required": ["a"], "propertyNames": {"maxLength": 3}},
            "required property 'a'",
        ),
        ({"format": "date"}, "format without a type"),
        (
            {"type": "object", "properties": {'a"': {}}, "additionalProperties": True},
            "which JSON escapes, beside names that are free",
        ),
        ({"type": "object", "minProperties": 2, "additionalProperties": True}, "twice"),
        (
            {"type": "object", "properties": {"p": {"items": {"uniqueItems": True}}}},
            "uniqueItems at #/properties/p/items",
        ),
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
def test_characters_that_json_does_not_have_in_a_string(
    strings: Any, right: str, wrong: str
) -> None:
    """As they are, in names of properties too.
    With a length xgrammar itself would let a tab pass.
    """
    pieces = ["</s>", *map(chr, [*range(1, 128), 0xE9])]
    model = models.BPE(
        vocab={piece: token for token, piece in enumerate(pieces)}, merges=[], unk_token="</s>"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")
    compiler = GrammarCompiler(tokenizer, len(pieces), [0])
    named = {
        "type": "object",
        "propertyNames": strings,
        "additionalProperties": {"type": "integer"},
    }
    for schema, before in (({"type": "string", **strings}, '"'), (named, '{"')):
        for character in right + wrong:
            progress = compiler.start(Grammar.json_schema(schema))
            fits = progress.advance([pieces.index(one) for one in before + character])
            assert fits == (character in right), (schema, character)
