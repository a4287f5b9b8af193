"""What a grammar lets through, by xgrammar's own matcher over a vocabulary of single characters."""

from __future__ import annotations

import json
import random
from functools import cache, lru_cache
from typing import Any

import numpy as np
import xgrammar

from specdec.grammar.grammar import Grammar
from specdec.grammar.rules import rules_of

CHARACTERS = [*map(chr, [*range(1, 128), 0xE9, 0x663, 0x2028, 0x65E5, 0x1F600])]
END = len(CHARACTERS)


@cache
def _compiler() -> Any:
    info = xgrammar.TokenizerInfo([*CHARACTERS, "</s>"], stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@lru_cache(32)
def _compiled(grammar: Grammar) -> Any:
    return _compiler().compile_grammar(rules_of(grammar))


def writes(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar's."""
    matcher = xgrammar.GrammarMatcher(_compiled(grammar))
    return bool(matcher.accept_string(text) and matcher.is_completed())


def writes_json(grammar: Grammar, document: Any) -> bool:
    """Whether a document is, with characters escaped or as they are."""
    return any(
        writes(grammar, json.dumps(document, ensure_ascii=escaped)) for escaped in (False, True)
    )


def sample(grammar: Grammar, draw: random.Random, most: int = 400) -> str | None:
    """A text drawn character by character, with a leaning to its end;
    None where it grew too long.
    """
    matcher, mask = (
        xgrammar.GrammarMatcher(_compiled(grammar)),
        xgrammar.allocate_token_bitmask(1, END + 1),
    )
    text = ""
    while len(text) < most:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: END + 1]).tolist()
        closing = [token for token in allowed if token == END or CHARACTERS[token] in '"]},']
        token = draw.choice(closing if closing and draw.random() < 0.3 else allowed)
        if token == END:
            return text
        assert matcher.accept_token(token)
        text += CHARACTERS[token]
    return None
