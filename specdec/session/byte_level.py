"""Tokens that stand for bytes, as in byte-level vocabularies: first GPT-2's, and most since."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PLAIN)]
BYTE_OF = {chr(byte): byte for byte in _PLAIN}
BYTE_OF |= {chr(0x100 + number): byte for number, byte in enumerate(_OTHERS)}
"""By the character that such vocabularies write a byte with."""


def steps_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Types of the steps that make text of tokens; empty for tokenizers that do not tell."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    decoder = json.loads(decoder.__getstate__()) if decoder is not None else None
    steps = (decoder.get("decoders") or [decoder]) if decoder else []
    return [step["type"] for step in steps]


class Pieces(dict[int, bytes]):
    """What tokens add to a text whose tokenizer only joins their bytes, each looked up once.

    Args:
        tokenizer: of a byte-level vocabulary.
        skip_special_tokens: these add nothing.
        shown: but these do.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool, shown: frozenset[int]
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self._hidden = {token for token, one in added if one.special} - shown

    def __missing__(self, token: int) -> bytes:
        name = None
        if token not in self._hidden:
            name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # of a row of logits that has no token
            made = b""
        elif all(sign in BYTE_OF for sign in name):
            made = bytes(BYTE_OF[sign] for sign in name)
        else:
            made = name.encode()
        self[token] = made
        return made


@lru_cache(maxsize=8)
def pieces_of(
    tokenizer: PreTrainedTokenizerBase,
    skip_special_tokens: bool,
    shown: frozenset[int] = frozenset(),
) -> Pieces | None:
    """Bytes of its tokens; None where a text is more than these in a row."""
    byte_level = steps_of(tokenizer) == ["ByteLevel"]
    return Pieces(tokenizer, skip_special_tokens, shown) if byte_level else None
