"""Makes documents for random JSON schemas, with drafts and without, and validates them:
`python -m tests.checks.grammar`.

The schemas have the shapes of those that people publish for function calls, settings and records
(as in JSONSchemaBench): objects of a few properties, mostly required, of nested objects, arrays,
enums, numbers with bounds, strings with lengths, formats or patterns, options and references. They
are kept small, so that their documents are. `jsonschema` validates what comes out. It also looks
closer at formats, which the standard calls annotations: days that their month does not have are
told apart.

Outputs that the token limit cuts are counted apart: they are the beginning of a valid document, and
no document.
"""

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from drafters.dflash import drafts
from specdec.base.config import EngineConfig
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder

WORDS = [
    "id", "name", "status", "count", "price", "tags", "owner", "city", "kind", "active", "email",
    "code", "level", "notes", "size", "color", "unit", "rate", "parent", "items",
]  # fmt: skip
VALUES = [
    "low", "medium", "high", "red", "green", "blue", "on", "off", "draft", "done", "USD", "EUR",
    "cat", "dog",
]  # fmt: skip
PATTERNS = ["^[A-Z]{2}[0-9]{3}$", "^[a-z]{1,6}$", "^#[0-9a-f]{6}$", "^(yes|no)$", r"^\d{4}-\d{2}$"]
CHECKED = ["date", "email", "ipv4", "uuid"]
"""Formats that `jsonschema` knows by itself."""
FORMATS = [*CHECKED, "time", "date-time", "hostname"]


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema; at depth 0 that of an object, deeper any."""
    if depth == 0:
        schema = _object(draw, depth)
        if draw.random() < 0.2:
            name = draw.choice(list(schema["properties"]))
            schema["$defs"] = {"shared": schema["properties"][name]}
            schema["properties"][name] = {"$ref": "#/$defs/shared"}
        return schema
    simple = [_string, _string, _integer, _number, _enum, _boolean, _constant, _nullable]
    return draw.choice(simple if depth > 2 else [*simple, _object, _array, _array, _options])(
        draw, depth
    )


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(1, 4 if depth == 0 else 2))
    properties = {name: random_schema(draw, depth + 1) for name in names}
    required = [name for name in names if draw.random() < 0.8]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.15:
        return {
            "type": "array",
            "prefixItems": [random_schema(draw, 3) for _ in range(2)],
            "items": False,
            "minItems": 2,
        }
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 1),
    }


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    kind = draw.random()
    if kind < 0.2:
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind < 0.45:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    return {
        "type": "string",
        "minLength": draw.choice([0, 1, 3]),
        "maxLength": draw.choice([8, 16]),
    }


def _integer(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.1:
        return {"type": "integer", "multipleOf": draw.choice([2, 5, 10])}
    least = draw.choice([-20, 0, 1, 100])
    return {"type": "integer", "minimum": least, "maximum": least + draw.choice([5, 99, 1234])}


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "number",
        "minimum": 0,
        draw.choice(["maximum", "exclusiveMaximum"]): draw.choice([1, 2.5, 100]),
    }


def _enum(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": draw.sample(VALUES, draw.randint(2, 5))}


def _boolean(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _constant(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"const": draw.choice([*VALUES, 1, True, None])}


def _nullable(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": 50}


def _options(draw: random.Random, depth: int) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"anyOf": [random_schema(draw, 3), {"type": "null"}]}
    tags = draw.sample(VALUES, 2)
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": tag}, "value": random_schema(draw, 3)},
                "required": ["kind"],
            }
            for tag in tags
        ]
    }


@dataclass
class Tally:
    """What became of the documents of one way to decode.

    Attributes:
        outcomes: "valid", "valid but for a format", "cut" by the token limit, or "invalid".
        texts: by schema.
        tokens, steps, drafted, accepted: of all outputs.
        seconds: of the processor, from the first prompt to the last token: what other programs take
            does not count.
        phases: seconds of each part of the steps by the clock, where it was taken.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    texts: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def line(self, name: str) -> str:
        """All of it but the texts."""
        outcomes = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        speed = (
            f"{self.tokens / self.seconds:.1f} tokens/s, {self.tokens / max(1, self.steps):.2f}"
            f" tokens per step"
        )
        phases = "".join(f", {phase} {seconds:.2f}" for phase, seconds in self.phases.items())
        return (
            f"{name}: {outcomes}; {self.tokens} tokens in {self.seconds:.1f} s of the processor,"
            f" {speed}{phases}"
        )


def tally(
    found: Tally,
    decoder: SpecDecoder,
    schemas: list[dict[str, Any]],
    first: int,
    *,
    max_tokens: int,
    temperature: float,
    guided: bool = True,
    show: bool = False,
) -> None:
    """Documents for schemas, each with a seed of its own.

    Args:
        found: they are added to it.
        decoder: writes them.
        schemas: one a document.
        first: number of the first.
        max_tokens, temperature: of each.
        guided: hold outputs to their schemas; otherwise the model is left to itself.
        show: put schemas into prompts; otherwise the names of their properties alone, which are
            read sooner.
    """
    asked = []
    for seed, schema in enumerate(schemas, start=first):
        told = (
            f" for this schema: {json.dumps(schema)}"
            if show
            else f", with {', '.join(schema['properties'])}"
        )
        prompt = decoder.tokenize(
            [{"role": "user", "content": f"Write one short example as JSON{told}"}]
        )
        grammar = Grammar.json_schema(schema) if guided else None
        asked.append(
            (
                prompt,
                SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, seed=seed, grammar=grammar
                ),
            )
        )
    results: dict[int, Any] = {}
    started = time.process_time()
    for chunk in decoder.session.map(asked):
        if chunk.result is not None:
            results[chunk.index] = chunk.result
    found.seconds += time.process_time() - started
    found.phases = dict(decoder.engine.timer.totals)
    for index, schema in enumerate(schemas):
        result = results[index]
        found.texts.append(result.token_ids)
        found.tokens += len(result.token_ids)
        found.steps += result.stats.num_steps
        what = outcome(schema, result)
        found.outcomes[what] += 1
        if what == "invalid":
            print(f"invalid: {json.dumps(schema)}: {result.text!r}", flush=True)


def outcome(schema: dict[str, Any], result: Any) -> str:
    """What became of one document."""
    if result.finish_reason == "length":
        return "cut"
    try:
        document = json.loads(result.text)
    except ValueError:
        return "invalid"
    validator = jsonschema.Draft202012Validator(schema)
    if result.finish_reason != "stop" or not validator.is_valid(document):
        return "invalid"
    strict = validator.evolve(format_checker=jsonschema.FormatChecker(formats=CHECKED))
    return "valid" if strict.is_valid(document) else "valid but for a format"


def main() -> int:
    """Prints lines for each way to decode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schemas", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument(
        "--chunk", type=int, default=50, help="schemas between two lines (default %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="(default %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default %(default)s)")
    parser.add_argument(
        "-k",
        "--num-draft-tokens",
        default="auto",
        help="of the runs with drafts (default %(default)s)",
    )
    parser.add_argument(
        "--alternatives",
        type=int,
        default=drafts.ALTERNATIVES,
        help="of refused drafts (default %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="(default %(default)s)")
    parser.add_argument("--timing", action="store_true", help="say where the time of steps goes")
    parser.add_argument("--free", action="store_true", help="also without a grammar")
    parser.add_argument(
        "--show",
        action="store_true",
        help="put schemas into prompts, not the names of their properties alone",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the schemas (default %(default)s)")
    args = parser.parse_args()
    drafts.ALTERNATIVES = args.alternatives
    draw = random.Random(args.seed)
    schemas = [random_schema(draw) for _ in range(args.schemas)]
    k = args.num_draft_tokens if args.num_draft_tokens == "auto" else int(args.num_draft_tokens)
    config = EngineConfig(max_num_seqs=args.max_num_seqs, num_draft_tokens=k, timing=args.timing)
    drafting = SpecDecoder.from_pretrained("embedded", dtype=args.dtype, engine=config)
    ways = {"without drafts": (drafting.plain(), True), "with drafts": (drafting, True)}
    if args.free:
        ways |= {
            "no grammar, without drafts": (drafting.plain(), False),
            "no grammar, with drafts": (drafting, False),
        }
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "show": args.show}
    tallies = {name: Tally() for name in ways}
    for start in range(0, len(schemas), args.chunk):
        for name, (decoder, guided) in ways.items():
            tally(
                tallies[name],
                decoder,
                schemas[start : start + args.chunk],
                start,
                guided=guided,
                **options,
            )
        print(f"{min(start + args.chunk, len(schemas))} schemas", flush=True)
        for name, found in tallies.items():
            print("  " + found.line(name), flush=True)
    plain, drafted = tallies["without drafts"], tallies["with drafts"]
    same = sum(one == other for one, other in zip(plain.texts, drafted.texts, strict=True))
    print(f"{same} of {len(schemas)} outputs are the same with drafts, token for token")
    return int(plain.outcomes["invalid"] + drafted.outcomes["invalid"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
