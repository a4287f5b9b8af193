"""The text of an output in two parts, its thinking and its answer, parted by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec.base.chat.thinking import Phase, Place, Thinking, thinking_of
from specdec.session.text import IncrementalDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.sampling.params import SamplingParams
    from specdec.session.outputs import GenerationResult


class PartedDecoder(IncrementalDecoder):
    """An `IncrementalDecoder` that knows which text is thinking and which answer; tags are neither.

    Args:
        tokenizer, stop, options: see `IncrementalDecoder`.

    Attributes:
        parts: thinking and answer of all text that was handed out, as far as it is known which.
        new_parts: of these what the last piece brought.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        thinking: Thinking,
        place: Place,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, stop, **options)
        self.parts = self.new_parts = ("", "")
        self._thinking, self._place = thinking, place
        self._num_told = self._num_parted = 0  # characters that were handed out, and parted
        self._unparted = ""  # those between
        # What the text is from a character on; tags are no phase's, and marked as BEFORE.
        self._bounds = [(0, place.phase)]
        self._closing: list[int] = []  # where the last tokens begin that may close the thinking

    def push(self, token_ids: Sequence[int]) -> int | None:
        for at, token in enumerate(token_ids):
            if self._place.phase is Phase.BEHIND:
                kept = super().push(token_ids[at:])
                return None if kept is None else at + kept
            begin = self._length
            kept = super().push([token])
            self._step(token, begin)
            if kept is not None:
                return at + kept
        return None

    def take(self) -> str:
        return self._part(super().take())

    def finish(self) -> str:
        """See `IncrementalDecoder.finish`. A beginning that was none after all is an answer."""
        if self._place.phase is Phase.BEFORE:
            self._bounds = [(0, Phase.BEHIND)]
        self._closing = []
        return self._part(super().finish())

    @property
    def _length(self) -> int:
        """Characters of the text so far, as it would read if nothing followed."""
        return self._num_told + len(self._text) + len(self._pending_text)

    def _step(self, token: int, begin: int) -> None:
        """Goes on behind a token whose text begins here."""
        before, self._place = self._place, self._thinking.step(self._place, token)
        phase = self._place.phase
        if before.phase is Phase.WITHIN:
            self._closing.append(begin)
        if phase is before.phase:
            del self._closing[: len(self._closing) - self._place.matched]
            return
        if before.phase is Phase.WITHIN:
            self._bounds += [(self._closing[0], Phase.BEFORE), (self._length, phase)]
        elif phase is Phase.WITHIN or before.left[1] == (token,):
            self._bounds.append((self._length, phase))
        else:
            self._bounds = [(0, phase)]
        self._closing = []

    def _part(self, piece: str) -> str:
        """Parts what was handed out, as far as it is known what it is."""
        self._num_told += len(piece)
        self._unparted += piece
        end = self._num_told
        if self._closing:
            end = min(end, self._closing[0])
        if self._bounds[-1][1] is Phase.BEFORE:
            end = min(end, self._bounds[-1][0])
        found = dict.fromkeys(Phase, "")
        ends = [*(place for place, _ in self._bounds[1:]), end]
        for (begin, phase), until in zip(self._bounds, ends, strict=True):
            first, last = (max(0, min(place, end) - self._num_parted) for place in (begin, until))
            found[phase] += self._unparted[first:last]
        self.new_parts = found[Phase.WITHIN], found[Phase.BEHIND]
        self.parts = self.parts[0] + self.new_parts[0], self.parts[1] + self.new_parts[1]
        done = max(0, end - self._num_parted)
        self._unparted, self._num_parted = self._unparted[done:], self._num_parted + done
        return piece


def parts_of(
    tokenizer: PreTrainedTokenizerBase, result: GenerationResult, sampling: SamplingParams
) -> tuple[str, str] | None:
    """Thinking and answer of an output that has ended; None where the target does not think."""
    thinking = thinking_of(tokenizer)
    if thinking is None:
        return None
    text = PartedDecoder(
        tokenizer,
        sampling.stop,
        thinking=thinking,
        place=thinking.behind_prompt(result.prompt_token_ids),
        min_tokens=sampling.min_tokens or 0,
        **sampling.special_tokens,
    )
    text.push(result.token_ids)
    text.finish()
    return text.parts
