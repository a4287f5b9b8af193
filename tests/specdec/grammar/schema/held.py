"""JSON schemas that outputs are held to."""

from typing import Any

INTEGERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}

HELD: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "multipleOf": 3}, [9, 0, -6], [4]),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}, [0, 95], [3, 105]),
    ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 5}, [0, 0.5], [5.5, 0.3]),
    ({"type": ["integer", "null"], "multipleOf": 1, "minimum": 0}, [3, None], [-1]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, [0, 2**63 - 1], ["a"]),
    ({"type": "number", "minimum": -3.4e38, "maximum": 1.7e308}, [-1.5, 10**18], ["a"]),
    ({"type": "number", "maximum": 2**63 - 1}, [1.5], [2**63, 10**20]),
    ({"type": "string", "maxLength": 2**32}, ["a"], [1]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2**53 - 1}, [[1]], [["a"]]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3000}, ["a" * 3000], ["a" * 3001]),
    (
        {"type": "string", "pattern": "^x[a-z]*yy$", "minLength": 4, "maxLength": 5},
        ["xayy", "xabyy"],
        ["xyy", "xabcyy"],
    ),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 2**31}, ["abc"], ["A"]),
    (
        {"type": "string", "minLength": 3, "allOf": [{"pattern": "[a-z]"}, {"pattern": "[0-9]"}]},
        ["ab1"],
        ["abc", "a1", "123"],
    ),
    ({"allOf": [{"type": "string", "format": "date"}, {}]}, ["2020-02-29"], ["x", 1]),
    ({"allOf": [{"$ref": "#/$defs/p"}, {"title": "P"}], "$defs": {"p": {"const": 1}}}, [1], [2]),
    ({"enum": ["x", None, 3], "format": "int32", "minLength": 1, "minimum": 3}, ["x", None, 3], []),
    ({"enum": [1, 2], "format": "date-time", "pattern": "^x$"}, [1, 2], [3]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
        [{"b": "x"}, {"a": 1, "b": 2}],
        [{"a": 1}, {}],
    ),
    (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/c"},
            "additionalProperties": {"type": "integer"},
            "required": ["x"],
            "minProperties": 2,
            "$defs": {"c": {"type": "string", "enum": ["x", "y"]}},
        },
        [{"x": 1, "y": 2}],
        [{"x": 1}, {"y": 1}, {"x": 1, "z": 1}, {"x": 1, "y": ""}],
    ),
    (
        {
            "oneOf": [
                {"enum": ["none"]},
                {
                    "type": "object",
                    "properties": {"circle": {"type": "integer"}},
                    "required": ["circle"],
                    "additionalProperties": False,
                },
                {"type": "object", "properties": {"b": {}}, "required": ["b"], "maxProperties": 1},
            ]
        },
        ["none", {"circle": 1}, {"b": 1}],
        ["x", {}, {"circle": 1, "b": 1}],
    ),
    ({"type": "integer", "minimum": 5, "maximum": 17}, [5, 17], [4, 18]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1, -0.1]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd"], ["a", "abcde"]),
    ({"type": "string", "pattern": "^a+b$"}, ["aab"], ["b", "xab"]),
    ({"type": "string", "format": "date"}, ["2020-02-29"], ["x", "2021-02-29", "2020-04-31"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a..b@c.de", "@b.c", '"a"@b.cd']),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["256.1.1.1", "1.2.3"]),
    ({"type": "string", "format": "json-pointer"}, ["", '/a"b'], ["a", "/~2"]),
    (
        {"type": "string", "format": "email", "minLength": 1, "maxLength": 7},
        ["a@bc.de"],
        ["ab@cd.ef"],
    ),
    (
        {"type": "string", "format": "date-time", "pattern": "^2.*Z$"},
        ["2024-02-29T01:02:03.5Z"],
        ["1999-01-01T00:00:00Z"],
    ),
    (
        {"type": "string", "format": "uuid", "pattern": "^.{14}4"},
        [f"{0:08}-0000-4000-8000-{0:012}"],
        [f"{0:08}-0000-1000-8000-{0:012}"],
    ),
    (
        {"type": "string", "format": "ipv6", "pattern": "5$", "maxLength": 5},
        ["::5", "1::25"],
        ["|::5", "::51", "1::255"],
    ),
    (
        {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3},
        ["aa", "aaa"],
        ["a", "aaaa"],
    ),
    ({"type": "integer", "format": "int64", "pattern": "^x$", "minLength": 9}, [3], ["x"]),
    ({"type": ["string", "null"], "maxLength": 1}, [None, "a"], ["ab"]),
    ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 2.5}, [1, 2], [0, 3]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.000001}, [], [0, 0.5]),
    ({"enum": ["ab", "c"], "type": "string", "maxLength": 2}, ["ab", "c"], ["abc"]),
    ({"const": 4, "type": "integer", "minimum": 3}, [4], [3]),
    ({"$ref": "#/$defs/p", "type": "number", "$defs": {"p": {"type": "integer"}}}, [1], ["a"]),
    ({"anyOf": [{"type": "integer"}, {"const": 0.5}], "type": "number"}, [1, 0.5], ["a"]),
    ({"$ref": "#/components/a~1b", "components": {"a/b": {"type": "null"}}}, [None], [1]),
    (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/c"},
            "$defs": {"c": {"enum": ["x", "y"]}},
        },
        [{"x": 1}],
        [{"z": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": False},
        [{}],
        [{"a": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 2}, "unevaluatedProperties": False},
        [{}],
        [{"a": 1}],
    ),
    ({"minItems": 1}, [[1]], [[]]),
    ({"anyOf": [{"const": None}, {"enum": [1, "a"]}]}, [None, 1, "a"], [2, "null"]),
    ({"allOf": [{"const": 3}]}, [3], [None]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "array", "items": {"maxItems": 1}}, [[[]], [[1]]], [[[1, 2]]]),
    ({"maxProperties": 1, "maxItems": 1}, [{}, {"a": 1}, [1]], [[1, 2], {"a": 1, "b": 2}]),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "object"}}},
        [None, {}],
        [1],
    ),
    ({"oneOf": [{"const": number} for number in range(3000)]}, [0, 2999], [3000]),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{"a": 1, "b": ""}],
        [{"a": ""}],
    ),
    (
        {
            "$defs": {
                "A": {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "x": {"type": "integer"}},
                    "required": ["k", "x"],
                },
                "B": {
                    "type": "object",
                    "properties": {"k": {"enum": ["b", "c"]}, "y": {"type": "string"}},
                    "required": ["k"],
                },
                "C": {
                    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
                    "discriminator": {"propertyName": "k"},
                },
            },
            "oneOf": [{"$ref": "#/$defs/C"}, {"type": "null"}],
        },
        [{"k": "a", "x": 1}, {"k": "b", "y": "s"}, {"k": "c"}, None],
        [{"k": "a", "y": "s"}, {"k": "d"}, {"x": 1}],
    ),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3], ["a"]],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[1, "a"]],
        [["a"], [1, "a", 2]],
    ),
    ({"type": "object", "properties": INTEGERS, "minProperties": 1}, [{"a": 1}], [{}]),
    (
        {"type": "object", "properties": INTEGERS, "required": ["b"], "maxProperties": 1},
        [{"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    (
        {
            "type": "object",
            "propertyNames": {"maxLength": 2},
            "additionalProperties": {"type": "integer"},
        },
        [{"x": 1}],
        [{"yyy": 1}],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^x$": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{"x": 1}],
        [{"y": 1}],
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [3, "a"], [None]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [3, "a"], [None]),
    ({"allOf": [{"type": "integer"}]}, [3], ["a"]),
    (
        {"$defs": {"p": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/p"}},
        [[1]],
        [["a"]],
    ),
    ({"type": "object", "properties": {"c": {"$ref": "#"}}}, [{"c": {}}], [{"c": 1}]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2]),
    ({"type": ["integer", "null"], "minimum": 3}, [None, 4], [1, "a"]),
    (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "x"}, "a": {"type": "integer"}},
                    "required": ["k"],
                },
                {"type": "object", "properties": {"k": {"const": "y"}}, "required": ["k"]},
            ]
        },
        [{"k": "x", "a": 1}, {"k": "y"}],
        [{}, {"k": "z"}],
    ),
]
"""Schemas, documents that xgrammar writes, and documents that they exclude."""
