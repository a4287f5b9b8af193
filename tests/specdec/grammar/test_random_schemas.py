"""Random schemas: documents of a tiny target, whose tokens are characters, and texts drawn from
grammars alone.
"""

import json
import random

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

import jsonschema

from specdec.base.errors import InvalidInputError
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.checks.grammar import outcome, random_schema
from tests.helpers.grammar_texts import sample
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.wild_schemas import wild_schema


def test_documents_are_valid_and_the_same_with_drafts() -> None:
    """Sampled by random weights, so anything that a schema allows is written sooner or later."""
    draw = random.Random(3)
    schemas = [random_schema(draw) for _ in range(12)]
    verifier = paged_verifier(plain_model("llama"))
    decoder = SpecDecoder(verifier, tiny_tokenizer(), random_dflash(verifier))
    asked = [
        (
            [5, 6, 7],
            SamplingParams(
                max_tokens=200, temperature=1.0, seed=seed, grammar=Grammar.json_schema(schema)
            ),
        )
        for seed, schema in enumerate(schemas)
    ]
    found = []
    for one in (decoder, decoder.plain()):
        results = {chunk.index: chunk.result for chunk in one.session.map(asked) if chunk.result}
        found.append([results[index] for index in range(len(schemas))])
    drafted, plain = found
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    outcomes = [outcome(schema, result) for schema, result in zip(schemas, drafted, strict=True)]
    assert "invalid" not in outcomes and sum(one.startswith("valid") for one in outcomes) >= 6, (
        outcomes
    )


@pytest.mark.parametrize("seed", range(2))
def test_what_is_not_refused_is_held_to(seed: int) -> None:
    """However wild the schema is; a dead end would be an error of the draw."""
    draw, formats = random.Random(seed), jsonschema.FormatChecker(["date", "ipv4", "ipv6", "email"])
    num_drawn = 0
    for _ in range(60):
        schema = wild_schema(draw)
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        try:
            grammar = Grammar.json_schema(schema)
            texts = [text for _ in range(4) if (text := sample(grammar, draw, 300)) is not None]
        except (InvalidInputError, RuntimeError):  # refused here, or by the library
            continue
        num_drawn += len(texts)
        assert all(validator.is_valid(json.loads(text)) for text in texts), (schema, texts)
    assert num_drawn > 60
