"""A sample of `tests.checks.grammar`: documents of a tiny target, whose tokens are characters, for random schemas."""

import random

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

from specdec.decoder import SpecDecoder
from specdec.grammar.grammar import Grammar
from specdec.sampling_params import SamplingParams
from tests.checks.grammar import outcome, random_schema
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer


def test_documents_are_valid_and_the_same_with_drafts() -> None:
    """Sampled by random weights, so anything that a schema allows is written sooner or later."""
    draw = random.Random(3)
    schemas = [random_schema(draw) for _ in range(12)]
    verifier = paged_verifier(plain_model("llama"))
    decoder = SpecDecoder(verifier, tiny_tokenizer(), random_dflash(verifier))
    asked = [
        ([5, 6, 7], SamplingParams(max_tokens=200, temperature=1.0, seed=seed, grammar=Grammar.json_schema(schema)))
        for seed, schema in enumerate(schemas)
    ]
    found = []
    for one in (decoder, decoder.plain()):
        results = {chunk.index: chunk.result for chunk in one.session.map(asked) if chunk.result}
        found.append([results[index] for index in range(len(schemas))])
    drafted, plain = found
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    outcomes = [outcome(schema, result) for schema, result in zip(schemas, drafted, strict=True)]
    assert "invalid" not in outcomes and sum(one.startswith("valid") for one in outcomes) >= 6, outcomes
