"""The bytes that tokens stand for, which text does not tell of parts of a character."""

from __future__ import annotations

import codecs
import re
from functools import cached_property
from typing import TYPE_CHECKING

from specdec.session.byte_level import BYTE_OF, steps_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTINUATIONS = bytes(range(0x80, 0xC0))
"""Bytes within a character of UTF-8."""

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

    def of(self, token: int, *, first: bool = False) -> bytes:
        """What a token adds to a text; the `first` may lose a space."""
        text = self.text(token)
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if "\ufffd" not in text:
            # lost by a token that is decoded alone
            spaced = not first and piece.startswith("\u2581") and not text.startswith(" ")
            return f"{' ' * spaced}{text}".encode(errors="replace")
        if "ByteFallback" in self._decoders and (match := _FALLBACK.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if "ByteLevel" in self._decoders and all(sign in BYTE_OF for sign in piece):
            return bytes(BYTE_OF[sign] for sign in piece)
        return text.encode()

    def is_special(self, token: int) -> bool:
        """Whether texts leave it out, unless they are to have special tokens."""
        return token in self._special

    def name(self, token: int) -> str:
        """A token in print: as OpenAI's completions have it, bytes where these are no text."""
        made = self.of(token)
        try:
            return made.decode() if "\ufffd" in self.text(token) else self.text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in made)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(token for token, one in added if one.special)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the steps that make text of tokens."""
        return frozenset(steps_of(self._tokenizer))


class TextLength:
    """How long a text is that is put together from tokens.

    >>> length = TextLength()
    >>> [length.add(piece) for piece in (b"a", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b"b")]
    [0, 1, 1, 2]
    >>> [length.add(piece) for piece in ("\U0001f600".encode()[:2], b"c", b"d")]
    [3, 4, 5]
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0

    def add(self, piece: bytes) -> int:
        """Adds a token's bytes; gives where in the text it begins, in whole characters."""
        unfinished = self._decoder.getstate()[0] if piece else b""
        goes_on = piece[:1] in _CONTINUATIONS
        begin = self._length + bool(unfinished and not goes_on)  # behind a U+FFFD for those bytes
        self._length += len(self._decoder.decode(piece))
        return begin

    def end(self) -> None:
        """Ends a text, behind which another one comes."""
        self._length += len(self._decoder.decode(b"", final=True))
