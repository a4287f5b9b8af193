"""Calls of random functions, with drafts and without, by a tiny model whose weights are random:
`python -m tests.checks.calls --shapes 500`.

The functions have the shapes of public suites for function calling: nested objects, arrays, enums,
options, arguments that may be left out, names of other scripts and names with dots; several of them
at once, of which one is called, or several, or one that is named. What comes with drafts has to be
what comes without, and the arguments what their schemas describe.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema

from specdec.base.chat.tools import FORMATS
from specdec.sampling.params import SamplingParams
from specdec.serve.answers.reader import CallReader
from specdec.serve.protocol import ChatRequest
from specdec.serve.tools import Tools, tools_of
from specdec.session.decoder import SpecDecoder
from tests.checks.grammar import random_schema
from tests.helpers.tools import HARMONY, HERMES, function, tool_decoder

NAMES = ["get_weather", "math.factorial", "get", "sendMail", "höhe", "市", "set-light", "a1"]
MAX_TOKENS = 300


def random_tools(draw: random.Random) -> list[dict[str, Any]]:
    """Of one request."""
    names = draw.sample(NAMES, draw.randint(1, 3))
    return [function(name, None if draw.random() < 0.1 else _schema(draw)) for name in names]


def _schema(draw: random.Random) -> dict[str, Any]:
    schema = random_schema(draw)
    if draw.random() < 0.3:
        old, new = draw.choice(list(schema["properties"])), draw.choice(["höhe", "市", "a b"])
        schema["properties"] = {
            new if name == old else name: one for name, one in schema["properties"].items()
        }
        schema["required"] = [new if name == old else name for name in schema["required"]]
    return schema


def asked(draw: random.Random, decoder: SpecDecoder, form: str) -> tuple[Tools, SamplingParams]:
    """The tools of a random request, and how it is sampled."""
    tools = random_tools(draw)
    name = draw.choice(tools)["function"]["name"]
    choice = draw.choice(["required", "auto", {"type": "function", "function": {"name": name}}])
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": draw.random() < 0.5,
    }
    made = tools_of(ChatRequest(**fields), decoder.tokenizer, FORMATS[form])
    assert made is not None
    vocabulary = decoder.tokenizer.get_vocab()
    seldom = ["\n", " "]
    if made.form.channels:  # the letters of other channels, and what begins other messages
        seldom = draw.choice([["\n"], ["\n", "a", "f", "<|message|>"]])
    bias = {vocabulary[name]: -8.0 for name in seldom}
    bias |= {vocabulary[name]: 8.0 for name in ("[TOOL_CALLS]",) if name in vocabulary}
    return made, SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=draw.choice([0.0, 1.0]),
        seed=draw.randrange(2**32),
        logit_bias=tuple(bias.items()),
        grammar=made.grammar(decoder.tokenizer, None),
    )


def outcome(tools: Tools, text: str, reason: str) -> str:
    """What became of a request: calls that are valid, a text, or an output that was cut.

    Raises:
        AssertionError: a call is not what was asked for.
    """
    calls = list[list[str]]()
    for piece in CallReader(tools.form, tools.functions).push(text, end=True):
        if piece.kind == "name":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
        elif not tools.form.channels:  # where talk may come before a call
            assert not tools.required and not calls, f"{piece.text!r} beside calls: {text!r}"
    if reason != "stop":
        return "cut"
    for name, arguments in calls:
        schema = tools.functions[name] or {"type": "object"}
        jsonschema.validate(json.loads(arguments), schema)
    assert tools.parallel or len(calls) < 2
    return "called" if calls else "text"


def compare(decoder: SpecDecoder, requests: Sequence[tuple[Tools, SamplingParams]]) -> Counter[str]:
    """How many of some requests ended in which way.

    Raises:
        AssertionError: an output with drafts is another than without.
    """
    prompt, texts = [[7, 8, 9]] * len(requests), list[list[Any]]()
    for one in (decoder, decoder.plain()):
        texts.append(one.generate(prompt, [sampling for _, sampling in requests]))
    found: Counter[str] = Counter()
    for (tools, sampling), drafted, plain in zip(requests, *texts, strict=True):
        assert drafted.token_ids == plain.token_ids, (sampling, drafted.text, plain.text)
        assert drafted.finish_reason != "error", drafted.error
        found[outcome(tools, drafted.text, drafted.finish_reason)] += 1
        found["accepted drafts"] += sum(drafted.stats.num_accepted)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=500, help="of each format")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for form in args.formats:
        decoder = tool_decoder(HARMONY if FORMATS[form].channels else HERMES)
        draw = random.Random(args.seed)
        found = compare(decoder, [asked(draw, decoder, form) for _ in range(args.shapes)])
        print(form, dict(found), flush=True)


if __name__ == "__main__":
    main()
