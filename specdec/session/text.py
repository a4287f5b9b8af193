"""Token ids, and their text as they arrive: unfinished characters wait, stop strings are cut."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specdec.base.errors import InvalidInputError, shown
from specdec.base.validation import as_integer, entries
from specdec.engine.stops import stop_strings
from specdec.session.byte_level import pieces_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def token_ids(prompt: Any) -> list[int]:
    """Token ids of a list or the like as Python's own integers.

    Raises:
        InvalidInputError: there is none, or one is no integer.
    """
    given = entries(prompt)
    if given is None:
        raise InvalidInputError(f"the prompt is {shown(prompt)}; it must be a list of token ids")
    ids = [token if type(token) is int else as_integer("a token id", token) for token in given]
    if not ids:
        raise InvalidInputError("the prompt is empty; give at least one token")
    return ids


def text_of(
    tokenizer: PreTrainedTokenizerBase | None,
    token_ids: list[int],
    *,
    skip_special_tokens: bool = True,
    shown: frozenset[int] = frozenset(),
) -> str:
    """Text of tokens that nothing follows; none without a tokenizer. Those `shown` always show."""
    if tokenizer is None:
        return ""
    if skip_special_tokens and shown:
        hidden = frozenset(_special_tokens(tokenizer).values()) - shown
        token_ids = [token for token in token_ids if token not in hidden]
        skip_special_tokens = False
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


_REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are not UTF-8, as of an unfinished character."""

_LONG_WINDOW = 8
"""Tokens decoded again with every new one at most, but for those of an unfinished character."""


@lru_cache(maxsize=4)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens of single bytes, as tokenizers with byte fallback spell them; else none."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    found = zip(names, tokenizer.convert_tokens_to_ids(names), strict=True)
    known = [(name, token) for name, token in found if token is not None]
    return frozenset(one for name, one in known if tokenizer.convert_ids_to_tokens(one) == name)


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, int]:
    """Ids of the tokens that texts leave out, by what they read."""
    tokens = tokenizer.added_tokens_decoder.items()
    return {added.content: token for token, added in tokens if added.special}


_never_found: set[str] = set()
"""Stop strings that were said never to match; bounded, so that requests fill no memory or log."""


def _stop_ids(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> frozenset[int]:
    """Special tokens that are stop strings; warns of those beside more text, which never match."""
    special = _special_tokens(tokenizer) if stop else {}
    for entry in stop:
        parts = (name for name in special if name and name in entry)
        held = None if entry in special else next(parts, None)
        if held is not None and entry not in _never_found and len(_never_found) < 1000:
            _never_found.add(entry)
            logger.warning(
                "stop string %.80r holds the special token %r, which texts leave out, so it never"
                " matches; set skip_special_tokens to false, or stop at the token alone",
                entry,
                held,
            )
    return frozenset(special[entry] for entry in stop if entry in special)


class IncrementalDecoder:
    """The text of one output, token by token.

    Tokens that only stand for bytes are joined. Elsewhere new text is the difference between two
    decodings of a short window: the tokens last turned to text, then the new ones. The former make
    the window decode as it would in the middle of the whole output, above all with its leading
    space.

    Text is *settled* once no later token can change it. Only settled text is handed out. It leaves
    out

    * a trailing replacement character, which may be the first bytes of a longer one;
    * a trailing run of byte-fallback tokens, because one invalid byte turns all of the run to
      replacement characters.

    The outcome depends on the tokens alone, not on how `push` receives them. Pieces add up to
    `tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)`, up to the stop string. One
    exception: a special token inside a run of byte-fallback tokens settles what comes before it.

    Args:
        stop: strings that end the output. The one completed first wins, whichever way it is cut
            into tokens; of two completed by the same character, the longer one.
        min_tokens: tokens in whose text no stop string is looked for.
        skip_special_tokens: leave special tokens out of the text; stop strings of them go by ids.
        shown: those that are not.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer, self._byte_tokens = tokenizer, _byte_tokens(tokenizer)
        self._stop = tuple(stop)
        self._stop_ids = (
            _stop_ids(tokenizer, self._stop) if skip_special_tokens else frozenset[int]()
        )
        self._stops = stop_strings(self._stop)
        self._num_exempt = min_tokens  # tokens before the search begins
        self._node = self._searched = 0  # where the search is, and how much of `_text` it has seen
        self._skip_special_tokens, self._shown = skip_special_tokens, shown
        self._window: list[int] = []  # the context, then the pending tokens
        # tokens whose text is settled, kept for what they do to the next ones
        self._num_context = 0
        self._context_length = 0  # characters of the context alone
        # characters of the window that are settled, some of a pending token's perhaps among them
        self._num_settled = 0
        self._taken: list[str] = []  # what `take` has handed out
        self._text = ""  # the rest of the settled text
        self._pending_text = ""  # the rest, as it would read if nothing followed
        self._pieces = pieces_of(tokenizer, skip_special_tokens, shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stopped = False

    @property
    def text(self) -> str:
        """Settled text so far, without a completed stop string; everything after `finish`."""
        return "".join(self._taken) + self._text

    @property
    def stopped(self) -> bool:
        """A stop string was completed."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Adds tokens.

        Returns:
            How many of `token_ids` to keep when a stop string was completed among them, the
            completing token included; None when the output goes on. After a stop nothing more is
            kept, so the answer is 0.
        """
        if self._stopped:
            return 0
        if not self._stop:
            self._append(token_ids)
            return None
        for num_kept, token_id in enumerate(token_ids, start=1):
            self._append([token_id])
            if self._num_exempt:
                self._num_exempt, self._searched = self._num_exempt - 1, len(self._text)
            elif self._cut_at_stop():
                return num_kept
            elif token_id in self._stop_ids:  # which has no text that would have to be cut
                self._stopped = True
                return num_kept
        return None

    def take(self) -> str:
        """New settled text, except for an ending that could grow into a stop string."""
        held = 0 if self._stopped else self._stops.depth[self._node]
        return self._take_until(len(self._text) - held)

    def finish(self) -> str:
        """Ends the output: settles what is pending and returns all text not yet taken."""
        if self._pieces is not None:
            self._pending_text = self._utf8.decode(b"", final=True)
        self._text += self._pending_text
        self._pending_text = ""
        return self._take_until(len(self._text))

    def _append(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        if self._pieces is not None:
            self._text += self._utf8.decode(b"".join([self._pieces[token] for token in token_ids]))
            return
        self._window.extend(token_ids)
        new_text = self._decode(self._window)[self._num_settled :]
        settled = self._settled_part(new_text)
        self._text += settled
        self._pending_text = new_text[len(settled) :]
        self._num_settled += len(settled)
        if not self._pending_text:
            self._shorten_window()

    def _decode(self, token_ids: list[int]) -> str:
        skip = self._skip_special_tokens
        return text_of(self._tokenizer, token_ids, skip_special_tokens=skip, shown=self._shown)

    def _settled_part(self, new_text: str) -> str:
        if new_text.endswith(_REPLACEMENT):
            return new_text.rstrip(_REPLACEMENT)
        return "" if self._window[-1] in self._byte_tokens else new_text

    def _shorten_window(self) -> None:
        """Keeps the newest tokens that show text as the context; a dropped space is used up.

        Not after every token, since the text of what is kept has to be decoded for that.
        """
        if self._num_settled == self._context_length:
            if self._context_length > 0:
                del self._window[self._num_context :]
        elif len(self._window) > _LONG_WINDOW:
            del self._window[: self._num_context]
            self._num_settled = len(self._decode(self._window))
        self._num_context, self._context_length = len(self._window), self._num_settled

    def _cut_at_stop(self) -> bool:
        """Looks through what is new, and through what is pending as if nothing followed."""
        begin = self._searched
        self._node, end, length = self._stops.search(self._node, self._text[begin:])
        self._searched = len(self._text)
        if not length:
            begin = self._searched
            _, end, length = self._stops.search(self._node, self._pending_text.rstrip(_REPLACEMENT))
            if not length:
                return False
        assert begin + end >= length, "text was handed out that a stop string has cut"
        self._text = (self._text + self._pending_text)[: begin + end - length]
        self._pending_text = ""
        self._utf8.reset()
        self._stopped = True
        return True

    def _take_until(self, end: int) -> str:
        piece, self._text = self._text[:end], self._text[end:]
        self._searched -= end
        self._taken.append(piece)
        return piece


def overlap(text: str, mark: str) -> int:
    """How many of the last characters of a text may begin a mark.

    >>> overlap("a <tool", "<tool_call>"), overlap("a", "<tool_call>")
    (5, 0)
    """
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
