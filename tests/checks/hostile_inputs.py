"""What hostile clients send: every kind that has broken a server,
and generated ones beside them.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

from tests.fuzz import requests
from tests.fuzz.notation import written

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
Address = tuple[str, int]


class Asked(NamedTuple):
    """One request; `refused` where nothing but 400 is right."""

    name: str
    path: str
    body: Any
    refused: bool = False


def _many(item: Any, count: int) -> dict[str, Any]:
    return {"$times": [item if isinstance(item, str) else [item], count]}


_CONSTANTS = {"$raw": "[" + ",".join(f'{{"const": {number}}}' for number in range(6_000)) + "]"}
_STRINGS = {"$raw": written({"$each": ["zz%d", 10**5]})[:-1] + f', "{"q" * 500}"]'}
_MESSAGE = {"role": "user", "content": "hi"}
FIELDS: dict[str, dict[str, Any]] = {
    "n = 10**6": {"n": 10**6},
    "n = 10**9": {"n": 10**9},
    "n = 0": {"n": 0},
    "10**6 prompts": {"prompt": _many("a", 10**6)},
    "10**6 lists of tokens": {"prompt": _many([5], 10**6)},
    "a prompt of 2 MB": {"prompt": _many("a b ", 500_000)},
    "a prompt of 4 MB": {"prompt": _many("a b ", 10**6)},
    "a prompt of 15.6 MB": {"prompt": _many("a b ", 3_900_000)},
    "oneOf of 6,000 constants": {"guided_json": {"oneOf": _CONSTANTS}},
    "enum of 10**5": {"guided_json": {"enum": {"$each": ["v%d", 10**5]}}},
    "10**4 properties": {
        "guided_json": {"properties": {f"p{number}": {} for number in range(10**4)}}
    },
    "minimum of 10**400": {"guided_json": {"type": "integer", "minimum": 10**400}},
    "maxLength of 10**6": {"guided_json": {"type": "string", "maxLength": 10**6}},
    "a schema 5,000 deep": {"guided_json": {"$deep": ['{"items": ', True, "}", 5_000]}},
    "items 2,000 deep as text": {"guided_json": '{"items": ' * 2_000 + "true" + "}" * 2_000},
    "a* x 10**5": {"guided_regex": _many("a*", 10**5)},
    "nested counts": {"guided_regex": "((a{1,300}){1,300}){1,300}"},
    "1 MB of a|a": {"guided_regex": _many("a|", 500_000)},
    "10**5 (": {"guided_regex": _many("(", 10**5)},
    "a choice of 6 MB": {"guided_choice": [_many("a", 6_000_000)]},
    "10**5 choices": {"guided_choice": {"$each": ["a%d", 10**5]}},
    "left recursion": {"guided_grammar": "root ::= root"},
    "10**5 ( of rules": {"guided_grammar": _many("(", 10**5)},
    "10**5 stop strings": {"stop": _STRINGS, "stream": True, "max_tokens": 60},
    "a stop string of 8 MB": {"stop": _many("q", 8_000_000)},
    "a bias of 5,000 digits": {"logit_bias": {"1" * 5_000: 1}},
    "a bias of 10**400": {"logit_bias": {"5": 10**400}},
    "10**5 biases": {"logit_bias": {str(number): 1 for number in range(10**5)}},
    "10**5 stop tokens": {"stop_token_ids": _many(5, 10**5), "min_tokens": 1},
    "an enum of 5": {"guided_json": {"enum": 5}},
    "half a character": {"guided_regex": "\ud800"},
    "deep JSON in a field": {"user": {"$deep": ["[", 1, "]", 10**5]}},
    "a seed of 5,000 digits": {"seed": {"$raw": "1" * 5_000}},
    "a salt of 1 MB": {"cache_salt": _many("x", 10**6)},
    "2,000 unknown fields": {f"field{number}": 1 for number in range(2_000)},
    "a prompt of NUL": {"prompt": "\0"},
    "a prompt of half a character": {"prompt": "\ud800"},
}
CHAT: dict[str, dict[str, Any]] = {
    "10**5 messages": {"messages": _many(_MESSAGE, 10**5)},
    "a message of 4 MB": {"messages": [{"role": "user", "content": _many("a b ", 10**6)}]},
    "10**5 parts": {
        "messages": [{"role": "user", "content": _many({"type": "text", "text": "a"}, 10**5)}]
    },
    "10**4 tools": {"tools": _many({"type": "function", "function": {"name": "f"}}, 10**4)},
    "deep arguments": {"chat_template_kwargs": {"x": {"$deep": ["[", 1, "]", 900]}}},
    "a role of half a character": {"messages": [{"role": "\ud800", "content": "x"}]},
    "no max_tokens": {"messages": [_MESSAGE]},
}
TOKENS: list[Asked] = [
    Asked(
        "tokenize 6 MB", "/tokenize", {"prompt": _many("ab ", 2_000_000), "return_token_strs": True}
    ),
    Asked("detokenize 5 M", "/detokenize", {"tokens": _many(5, 5_000_000)}),
    Asked("detokenize 2**70", "/detokenize", {"tokens": [2**70]}),
    Asked("no JSON", COMPLETIONS, {"$raw": "{"}),
    Asked("10**5 brackets", COMPLETIONS, {"$deep": ["[", 1, "]", 10**5]}),
]
_WRONG: dict[str, list[Any]] = {
    "type": [5, "evil", [[]], {}],
    "enum": [5, "x", {}],
    "properties": [[], 5, "x"],
    "required": [5, "x", [5]],
    "anyOf": [5, {}, "x"],
    "oneOf": [5, {}, [5]],
    "allOf": [5, "x"],
    "items": [5, "x"],
    "prefixItems": [5, {}],
    "minProperties": ["x", -1],
    "maxLength": ["x", -5],
    "minItems": ["x", 1.5],
    "pattern": [5, "(", "[", "a{5,2}"],
    "$ref": [5, "#/none", "x"],
    "minimum": ["x", []],
    "multipleOf": ["x", 0],
}
_AROUND: list[Callable[[Any], Any]] = [
    lambda one: one,
    lambda one: {"type": "object", "properties": {"a": one}, "required": ["a"]},
    lambda one: {"type": "array", "items": one, "minItems": 1},
    lambda one: {"anyOf": [one, one]},
]
_PATTERNS = ["(", ")", "[", "a{5,2}", "(?=a)b", r"\1", "*", "a**", "[z-a]", "\\"]
_RULES = [
    "root ::=", "root ::= a", "a ::= root", 'root ::= "', "root ::= [", "root ::= (", "root = x",
    "::=", "root ::= |",
]  # fmt: skip
_RULES += ["root ::= {2}", 'root ::= "a" ::= "b"']


def malformed() -> list[Asked]:
    """Schemas and grammars that are none, at any depth: over 200."""
    schemas = [{name: value} for name, values in _WRONG.items() for value in values]
    made = [("guided_json", around(one)) for around in _AROUND for one in schemas]
    made += [
        ("guided_json", {"type": "integer", "minimum": 5, "maximum": 2}),
        ("guided_json", {"$ref": "#"}),
    ]
    made += [("guided_regex", one) for one in _PATTERNS] + [
        ("guided_grammar", one) for one in _RULES
    ]
    return [Asked(f"{name} {one}", COMPLETIONS, _short({name: one}), True) for name, one in made]


def known() -> list[Asked]:
    """The inputs that have broken a server before."""
    made = [Asked(name, COMPLETIONS, _short(fields)) for name, fields in FIELDS.items()]
    made += [Asked(name, CHATS, {"messages": [_MESSAGE]} | fields) for name, fields in CHAT.items()]
    return [*made, *TOKENS]


def generated(count: int, seed: int) -> Iterator[Asked]:
    """New ones of the same kinds."""
    draw = Random(seed)
    for number in range(count):
        one = requests.body(draw)
        yield Asked(f"seed {seed}, number {number}", one["path"], one["body"])


def _short(fields: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 8} | fields


RAW: dict[str, bytes] = {
    "a header of 1 MB": b"GET /health HTTP/1.1\r\nx: " + b"a" * 10**6 + b"\r\n\r\n",
    "10**5 headers": b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * 10**5 + b"\r\n",
    "a request line of 1 MB": b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n",
    "a length of 5,000 digits": b"POST /tokenize HTTP/1.1\r\ncontent-length: "
    + b"9" * 5_000
    + b"\r\n\r\n",
    "a negative length": b"POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "a wrong chunk": b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding:"
    b" chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
    "10**5 chunks": b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"1\r\na\r\n" * 10**5,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": bytes(10**5),
}
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type:"
    b" application/json\r\ncontent-length: %d\r\n\r\n"
)


def connect(address: Address, data: bytes) -> socket.socket:
    """An open connection on which so much has been sent, as far as the server took it."""
    made = socket.create_connection(address, timeout=10)
    with suppress(OSError):
        made.sendall(data)
    return made


def half_open(address: Address) -> list[socket.socket]:
    """Connections that go no further: silent, within a line, within a body."""
    starts = [b"", b"POST /v1/comp", _HEAD % 100 + b"{", _HEAD % 16_700_000 + b" " * 10**6]
    counts = [100, 100, 100, 40]
    return [
        connect(address, data)
        for data, count in zip(starts, counts, strict=True)
        for _ in range(count)
    ]


def unread(address: Address, count: int = 10) -> list[socket.socket]:
    """Streams that nobody reads."""
    text = written(
        {"prompt": "abc", "stream": True, "max_tokens": 60, "ignore_eos": True, "n": 4}
    ).encode()
    return [connect(address, _HEAD % len(text) + text) for _ in range(count)]


def leave(opened: list[socket.socket]) -> None:
    """Ends them without a word, as a machine that is switched off."""
    for one in opened:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()


def drip(opened: list[socket.socket], seconds: int) -> None:
    """A byte a second on each."""
    for _ in range(seconds):
        for one in opened:
            with suppress(OSError):
                one.send(b"a")
        time.sleep(1)
