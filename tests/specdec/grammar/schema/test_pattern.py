"""Regular expressions: what is let through is what Python matches, also within JSON; the rest is
refused by name.
"""

import json
import random
import re
import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("xgrammar")

from specdec.base.errors import InvalidInputError
from specdec.grammar.grammar import Grammar
from tests.helpers.grammar_texts import writes, writes_json

CHARACTERS = [
    "a", "b", "A", "Z", "1", "_", "-", " ", '"', "\\", "/", "\n", "\t", "\x01", "\x7f", "é",
    "\u0663", "\u2028", "日", "😀", ".",
]  # fmt: skip

_ATOMS = (
    r"a b 1 - A / é 日 😀 \/ \\ \n \t \. \$ \^ \{ } _ \u0061 \x41 \u00e9 \- \d \w \s \D \W \S ."
)
_CLASSES = (
    r"[ab-] [^a] [^\d] [\w-] [\s\S] [^\W_] [é-ü] [\n\"] [^\\] [.$/] [a\-z] [-a] [\]x] [^\s\"]"
)
ATOMS = f"{_ATOMS} {_CLASSES}".split(" ")

HELD = [
    ("^$", [""], ["a"]),
    ("a|^b$", ["a", "b"], ["ab"]),
    ("^(a|)$", ["", "a"], ["aa"]),
    ("(^a|b$)", ["a", "b"], ["ab"]),
    ('^"$', ['"'], ["a"]),
    (r"^\\$", ["\\"], ["/"]),
    (r"^\n\t\x01$", ["\n\t\x01"], ["nt1"]),
    ("^.$", ["é", "😀", '"'], ["\n", "\r", "\u2028"]),
    (r"^[\s\S]$", ["\n", "a", "\u2028"], ["ab"]),
    (r"^\d$", ["7"], ["\u0663", "a"]),
    (r"^\D$", ["a"], ["7", "\u0663"]),
    (r"^\W$", ["-", "\u2028"], ["a", "_", "é"]),
    (r"^\s$", [" ", "\t", "\u2028"], ["a", "\x1c"]),
    (r"^(?<year>\d{4})-(?P<month>\d\d)$", ["2024-05"], ["24-05"]),
    ("^a{2}b{1,}c{0,2}$", ["aab", "aabbcc"], ["ab", "aabccc"]),
    ("^(a*)*b??$", ["", "aab"], ["ba"]),
    ("^{x}]$", ["{x}]"], ["x"]),
    (r"^[\]x]$", ["]", "x"], ["\\"]),
    (r"x|(y|)", ["x", "y", ""], ["/", "xy"]),
    (r"^(?=.*[0-9])(?=.*[A-Z])[^ ]{4,}$", ["abC1", '"C1\\'], ["abc1", "aC1", "aC 1"]),
    (r"^(?!admin$)[a-z]+$", ["adm", "admins"], ["admin"]),
    (r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$", ["-1.5", "0"], ["", "+.", "-"]),
    (r"^x(?=.*1)", ["xa1", "x1\n"], ["x", "ax1"]),
    (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+D)?(T(?=\d)(\d+H)?(\d+M)?)?)$",
        ["P2W", "P1D", "PT5M"],
        ["P", "PT", "P1D2W"],
    ),
    (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
        r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ["a@b.co", "a.b'c@d-.ee"],
        [".a@b.co", "a..b@c.de", "a'@b.co"],
    ),
]
"""Patterns, texts that they match as a whole (or anywhere, where nothing else would), and others.
"""

REFUSED = [
    ("(?<=a)b", "a lookbehind at character 0"),
    ("a(?<!a)b", "a lookbehind"),
    (r"a\b", r"a word boundary \\b"),
    (r"(a)\1", r"a back-reference \\1"),
    (r"(?P<n>a)(?P=n)", "a back-reference"),
    (r"\Aa\Z", r"the escape \\A at character 0"),
    (r"a\z", r"the escape \\z"),
    (r"\p{L}", r"the escape \\p"),
    (r"\cA", r"the escape \\c"),
    (r"\01", r"a back-reference \\0"),
    ("(?i)a", "a flag or an unknown group"),
    ("(?i:a)", "a flag or an unknown group"),
    ("(?>a)", "an atomic group"),
    ("(?#a)", "a comment"),
    ("(?(1)a|b)", "a condition"),
    ("a++", "a quantifier of a quantifier"),
    ("a*+", "a quantifier of a quantifier"),
    ("a**", "a quantifier of a quantifier"),
    ("a{,2}", "a count without its least number"),
    ("a{3,2}", r"the count \{3,2\}"),
    ("a{70000}", "reach 65536 at most"),
    ("*a", "a quantifier of nothing"),
    ("^*a", "a repeated anchor"),
    ("(?=a)*b", "a repeated anchor or lookahead"),
    ("a^b", r"a \^ in its midst"),
    ("a$b", r"a \$ in its midst"),
    ("(a$)+", r"a \$ in its midst"),
    ("^((?=a)b)c$", "a lookahead within a group that text can follow"),
    ("(?:(?!ab).)*", "a lookahead within a group"),
    ("[", r"a \[ without its \]"),
    ("[]a]", r"a class that begins with \]"),
    ("[[:alpha:]]", "a named class"),
    (r"[a-\d]", "a range"),
    (r"[\w-.]", "a range"),
    ("[z-a]", "a range"),
    (r"[^\s\S]", "a class of no characters"),
    ("(a", r"a \( without its \)"),
    ("a)", r"a \) without its \("),
    ("\\", "the escape"),
    ("(" * 200 + ")" * 200, "more than 100 groups in each other"),
    (r"\ud83d", "NUL or half a character"),
]


def schema_of(pattern: str) -> Grammar:
    return Grammar.json_schema({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(("pattern", "right", "wrong"), HELD)
def test_held_to(pattern: str, right: list[str], wrong: list[str]) -> None:
    for grammar, write in ((Grammar.regex(pattern), writes), (schema_of(pattern), writes_json)):
        assert [text for text in [*right, *wrong] if write(grammar, text)] == right
    assert not writes(schema_of(pattern), '"\n"'), "JSON has no raw line break in a string"


@pytest.mark.parametrize(("pattern", "reason"), REFUSED)
def test_refused_by_name(pattern: str, reason: str) -> None:
    """In one line, alone and in each place of a schema."""
    within = [
        {"pattern": pattern},
        {"propertyNames": {"pattern": pattern}},
        {"patternProperties": {pattern: {}}},
    ]
    types = ("string", "object", "object")
    for make in [
        lambda: Grammar.regex(pattern),
        *(
            lambda one=one, kind=kind: Grammar.json_schema({"type": kind, **one})
            for one, kind in zip(within, types, strict=True)
        ),
    ]:
        with pytest.raises(InvalidInputError, match=reason) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern", [r"^(?=.*[0-9])(yes|no)$", r"^(?!a)a$", r"^(?=b)(?=a)", r"(?=.{5})[ab]{2}$"]
)
def test_what_nothing_matches_is_refused_when_it_is_compiled(pattern: str) -> None:
    with pytest.raises(InvalidInputError, match="no text meets"):
        writes(schema_of(pattern), "a")


@pytest.mark.parametrize(
    "lengths", [{"maxLength": 0}, {"minLength": 7}, {"minLength": 70_000}], ids=str
)
def test_a_length_that_a_count_cannot_reach_is_refused(lengths: dict[str, int]) -> None:
    grammar = Grammar.json_schema({"type": "string", "pattern": "^x[a-z]{2,5}$", **lengths})
    with pytest.raises(InvalidInputError, match=r"no text meets|more than 1,000 states"):
        writes(grammar, "a")


def patterns(draw: random.Random, depth: int = 0) -> str:
    """A random pattern of what is understood."""

    def one() -> str:
        if depth < 3 and draw.random() < 0.25:
            begin = draw.choice(["(", "(?:"])
            options = (patterns(draw, depth + 1) for _ in range(draw.randint(1, 3)))
            return f"{begin}{'|'.join(options)})"
        return draw.choice(ATOMS)

    many = ["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,2}", "{2,}", "{0}"]
    return "".join(one() + draw.choice(many) for _ in range(draw.randint(0 if depth else 1, 3)))


def texts(draw: random.Random) -> Iterator[str]:
    yield from ["", *CHARACTERS]
    for _ in range(20):
        yield "".join(draw.choice(CHARACTERS) for _ in range(draw.randint(2, 4)))


@pytest.mark.parametrize("seed", range(2))
def test_random_patterns_let_through_what_python_matches(seed: int) -> None:
    """All that it matches by its rules for ASCII, but for a few characters that ECMA-262 reads
    otherwise.
    """
    draw = random.Random(seed)
    for _ in range(15):
        pattern = patterns(draw)
        regex, schema = Grammar.regex(pattern), schema_of(f"^(?:{pattern})$")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loose, strict = re.compile(pattern), re.compile(pattern, re.ASCII)
        for text in texts(draw):
            fits = bool(loose.fullmatch(text))
            rare = set(text) & set("\u2028\x01\u0663é日")
            certain = fits and bool(strict.fullmatch(text)) and not rare
            for found in (
                writes(regex, text),
                writes(schema, json.dumps(text, ensure_ascii=False)),
            ):
                assert found <= fits and found >= certain, (pattern, text)
