"""Whatever stands in a schema, a pattern, rules, choices or a field is taken, or refused by one
line; nothing else is raised.
"""

import json
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

import jsonschema

from specdec.base.errors import InvalidInputError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.fields import grammar_of
from specdec.grammar.grammar import Grammar
from specdec.grammar.limits import MAX_CHARACTERS, MAX_COMPARISONS, MAX_PATTERN_CHARACTERS
from specdec.grammar.schema.form import CHOICES, NOT_KNOWN, OF_TYPE
from tests.helpers.live_server import live_server
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.waiting import HANG

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 5, 10**400, "", "x", "str", "[", "\ud800", "#/x", "#/$defs"),
    *([], [5], [None], [[]], ["x"], ["x", "x"], [{}], [[[[]]]], ["\udfff"], [True], [{"type": 5}]),
    *({}, {"a": 5}, {"a": None}, {"a": []}, {"type": 5}, {"$ref": 5}, {"\ud800": {}}, {"type": []}),
]
"""Of every JSON type, right and wrong."""

KEYWORDS = [
    "type", *CHOICES, *(keyword for some in OF_TYPE.values() for keyword in some), "$defs",
    "definitions", *NOT_KNOWN,
]  # fmt: skip

TYPE_OF = {keyword: name for name, some in OF_TYPE.items() for keyword in some}
"""Of the values that a keyword speaks of."""

VALID = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)

RULES = [
    *(
        "", "root", "root ::=", 'root ::= "a', "root ::= [", "root ::= [b-a]", "root ::= missing",
        'other ::= "a"', "::= x",
    ),
    *(
        "root ::= (", "root ::= a{", 'root ::= "a"{3,1}', 'root ::= "\\x"', "root = x",
        "root ::= |)",
    ),
    *(
        'root ::= "a" "', 'root ::= "a" root ::= ', "\0", "\ud800", "root ::= *",
        'root ::= "a"{999999999999999999999}', "{}", "[]",
    ),
    *(
        "root ::= " + "(" * 50_000, "root ::= " + '"a" |' * 3 + " =", 'root ::= "a"{-1}',
        "root ::= [\\", "root ::= ((a)", "%",
    ),
]  # fmt: skip
PATTERNS = [
    *(
        "[", "(", ")", "*", "a**", "a{2,1}", "a{99999}", "(?<=a)b", "(?P<n>a)(?P=n)", "\\1", "\\",
        "\\b", "(?i)a", "[b-a]", "[]", "{,3}",
    ),
    *(
        "a++", "(?>a)", "\\p{L}", "\\A", "[[:alpha:]]", "\0", "\ud800", "^*", "(?=a)*", "a$b",
        "(" * 50_000, "(?", "(?(1)a)", "[^\\S\\s]",
    ),
    *(
        "a{1,2}{3}", "(?#x)", "a{" + "9" * 5000 + "}", "\\x", "\\u12", "[\\",
        "x" * (MAX_PATTERN_CHARACTERS + 1),
    ),
]  # fmt: skip
DOCUMENTS: list[Any] = [5, [], None, "x", False, {"type": 5}]
TYPES: list[Any] = [5, [], {}, None, "x"]

MALFORMED: dict[str, list[Any]] = {
    "guided_json": [
        *(
            5,
            [],
            [5],
            "",
            "{",
            "[" * 100_000,
            "nan",
            '{"a":' * 5000,
            '{"const": 1e999}',
            True,
            "null",
            {"anyOf": []},
            {"$ref": "#"},
        ),
        *({"type": "integer", "minimum": 5, "maximum": 2}, {"type": "integer", "minimum": 10**400}),
    ],
    "guided_choice": [
        5,
        "a",
        [],
        [5],
        [None],
        [""],
        ["a", []],
        {"a": 1},
        ["\ud800"],
        ["\0"],
        True,
        [["a"]],
    ],
    "guided_regex": [5, [], {}, True, "", ["a"]],
    "guided_grammar": [5, [], {}, True, ""],
    "structured_outputs": [
        5,
        [],
        "json",
        True,
        {"json": 5},
        {"regex": []},
        {"x": 1},
        {"choice": "a"},
        {"\ud800": 1},
    ],
    "response_format": [
        *(5, [], "json", True, *({"type": kind} for kind in [*TYPES, "json_schema", "regex"])),
        *({"type": "json_schema", "json_schema": {"schema": one}} for one in DOCUMENTS),
        *({"type": "json_schema", "json_schema": one} for one in DOCUMENTS),
        *({"type": "json_object", "schema": one} for one in DOCUMENTS[:2]),
    ],
    "format": [5, ["a"], "xml", {"type": 5}, True],
    "grammar": [
        5,
        [5],
        {"type": "json", "value": 5},
        *({"type": kind} for kind in [*TYPES, "regex"]),
    ],
}
FIELDS: list[dict[str, Any]] = [{name: one} for name, some in MALFORMED.items() for one in some]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = tiny_tokenizer()
    return GrammarCompiler(tokenizer, VOCAB, [tokenizer.eos_token_id])


def refusal(fields: dict[str, Any], compiler: GrammarCompiler | None = None) -> str | None:
    """What is said of a grammar; None where it is taken."""
    try:
        grammar = grammar_of(fields)
        if grammar is not None and compiler is not None:
            compiler.compiled(grammar).result(HANG)
    except InvalidInputError as error:
        line = str(error)
        assert line and "\n" not in line and len(line) < 4000, line[:5000]
        return line
    return None


@pytest.mark.parametrize("keyword", dict.fromkeys(KEYWORDS))
def test_a_keyword_with_any_value(keyword: str) -> None:
    """What the metaschema forbids is refused, at the top and within; beside the type that the
    keyword speaks of, beside another one or none.
    """
    for number, value in enumerate(VALUES):
        allowed = keyword == "items" and isinstance(value, list)  # right in older drafts
        errors = VALID.iter_errors({keyword: value})
        forbidden = not allowed and any(error.validator != "uniqueItems" for error in errors)
        named = [TYPE_OF.get(keyword, "object"), "string" if number % 2 else "array"]
        for schema in ({keyword: value}, *({"type": one, keyword: value} for one in named)):
            schema = {keyword: value} if keyword == "type" else schema
            within = (
                {"type": "array", "items": schema},
                {"$ref": "#/$defs/a", "$defs": {"a": schema}},
            )
            for each in (schema, within[number % 2]):
                said = refusal({"guided_json": each})
                assert said or not forbidden, f"{each} is taken"


@pytest.mark.parametrize("kind", ["guided_regex", "guided_grammar"])
def test_texts(kind: str, compiler: GrammarCompiler) -> None:
    for text in PATTERNS if kind == "guided_regex" else RULES:
        assert refusal({kind: text}, compiler), f"{text[:100]!r} is taken"


def test_fields() -> None:
    for fields in FIELDS:
        assert refusal(fields), f"{fields} is taken"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Grammar.choice(5), "choices are 5"),  # type: ignore[arg-type]
        (lambda: Grammar.choice("ab"), "choices are 'ab'"),
        (lambda: Grammar.choice(torch.tensor(5)), r"choices are tensor\(5\)"),
        (lambda: Grammar.choice([{1}]), "cannot be written as JSON"),  # type: ignore[list-item]
        (
            lambda: Grammar.json_schema({(1, 2): 3}),  # type: ignore[dict-item]
            "cannot be written as JSON",
        ),
        (
            lambda: Grammar.json_schema(object()),  # type: ignore[arg-type]
            "cannot be written as JSON",
        ),
        (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be written as JSON"),
        (lambda: Grammar("regex", None), "must be a string"),  # type: ignore[arg-type]
        (lambda: Grammar([], "a"), r"kind is \[\]"),  # type: ignore[arg-type]
        (lambda: Grammar(10**5000, "a"), "kind is <an integer of"),  # type: ignore[arg-type]
        (
            lambda: Grammar.ebnf("a" * (MAX_CHARACTERS + 1)),
            rf"{MAX_CHARACTERS + 1:,} characters and the limit is {MAX_CHARACTERS:,}",
        ),
        (lambda: Grammar.choice(["a" * 6_000_000]), "6,000,004 characters"),
        (
            lambda: Grammar.regex("a*" * 100_000),
            f"200,000 characters and the limit is {MAX_PATTERN_CHARACTERS:,}",
        ),
        (
            lambda: Grammar.json_schema(
                {
                    "prefixItems": [
                        {"type": "string", "pattern": f"^a{number}{'b' * 99}$"}
                        for number in range(200)
                    ]
                }
            ),
            f"patterns of more than {MAX_PATTERN_CHARACTERS:,} characters",
        ),
        (
            lambda: Grammar.json_schema(
                {
                    "$defs": {"a": {"anyOf": [{"type": "null"}] * 900}},
                    "prefixItems": [{"type": "null", "$ref": "#/$defs/a"}] * 900,
                }
            ),
            f"more than {MAX_COMPARISONS:,} comparisons",
        ),
    ],
)
def test_from_python(made: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        made()


def test_messages_are_short() -> None:
    """However many things are wrong, and however long they are."""
    wrong = {
        "type": "object",
        "properties": {
            f"{'n' * 999}{number}": {"type": "string", "minLength": "x" * 999}
            for number in range(500)
        },
    }
    assert len(refusal({"guided_json": wrong}) or "") < 3000
    notes = {
        "type": "object",
        "properties": {
            str(number): {"type": "string", "format": "x" * 999} for number in range(500)
        },
    }
    assert sum(map(len, Grammar.json_schema(notes).notes)) < 3000


def test_many_tagged_options() -> None:
    """Whose tags are looked at once, not in pairs."""
    options = [
        {
            "type": "object",
            "properties": {"k": {"enum": [f"{one}.{other}" for other in range(9)]}},
            "required": ["k"],
        }
        for one in range(900)
    ]
    assert Grammar.json_schema({"oneOf": options})
    options[-1]["properties"] = {"k": {"const": "0.0"}}
    assert "oneOf" in (refusal({"guided_json": {"oneOf": options}}) or "")


def test_by_http() -> None:
    """400 with one line each, on a connection that serves the next request."""
    texts = [{"guided_regex": text} for text in PATTERNS[::3]] + [
        {"guided_grammar": text} for text in RULES[::3]
    ]
    schemas = [
        {"guided_json": {"type": "string", keyword: one}}
        for keyword in ("enum", "minLength")
        for one in VALUES[:1]
    ]
    with live_server() as live, httpx.Client(base_url=live.url, timeout=HANG) as client:
        for fields in [*FIELDS[::2], *texts, *schemas]:
            body = json.dumps({"prompt": "abc", "max_tokens": 1, **fields})
            answer = client.post(
                "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
            said = answer.json()["error"]["message"]
            assert answer.status_code == 400 and said and "\n" not in said, fields
        assert (
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}).status_code
            == 200
        )
