"""The bytes that tokens stand for, which text does not tell of parts of a character."""

from __future__ import annotations

import codecs
import re
from functools import cached_property
from typing import TYPE_CHECKING

from specdec.session.byte_level import BYTE_OF, steps_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """A token by itself; a character that is not whole shows as U+FFFD."""
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]

    def of(self, token: int) -> bytes:
        """What a token adds to a text."""
        text = self.text(token)
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if "\ufffd" not in text:
            # lost by a token that is decoded alone
            spaced = piece.startswith("\u2581") and not text.startswith(" ")
            return f"{' ' * spaced}{text}".encode(errors="replace")
        if "ByteFallback" in self._decoders and (match := _FALLBACK.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if "ByteLevel" in self._decoders and all(sign in BYTE_OF for sign in piece):
            return bytes(BYTE_OF[sign] for sign in piece)
        return text.encode()

    def is_special(self, token: int) -> bool:
        """Whether texts leave it out, unless they are to have special tokens."""
        return not self._tokenizer.decode([token], skip_special_tokens=True)

    def name(self, token: int) -> str:
        """A token in print: as OpenAI's completions have it, bytes where these are no text."""
        made = self.of(token)
        try:
            return made.decode() if "\ufffd" in self.text(token) else self.text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in made)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the steps that make text of tokens."""
        return frozenset(steps_of(self._tokenizer))


class TextLength:
    """How long a text is that is put together from tokens.

    >>> length = TextLength()
    >>> [length.add(piece) for piece in (b"a", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b"b")]
    [0, 1, 1, 2]
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0

    def add(self, piece: bytes) -> int:
        """Adds a token's bytes; gives where in the text it begins, in whole characters."""
        begin = self._length
        self._length += len(self._decoder.decode(piece))
        return begin
