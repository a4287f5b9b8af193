"""The text of an output in two parts, its thinking and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec.base.chat.thinking import Phase, Place, Thinking, spelled_tags, thinking_of
from specdec.session.text import IncrementalDecoder, overlap, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.sampling.params import SamplingParams
    from specdec.session.outputs import GenerationResult


class PartedDecoder(IncrementalDecoder):
    """An `IncrementalDecoder` that knows which text is thinking and which answer; tags are neither.

    Args:
        tagged: tags are thinking.
        tokenizer, stop, options: see `IncrementalDecoder`.

    Attributes:
        parts: thinking and answer of all text that was handed out, as far as it is known which.
        new_parts: of these what the last piece brought.
    """

    parts = new_parts = ("", "")

    def __init__(self, *arguments: Any, tagged: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tagged = tagged
        self._unparted = ""  # what was handed out, and not told

    def _told(self, thinking: str, answer: str, count: int) -> None:
        """So many characters are parted, of which the answer is the last."""
        if self._tagged:
            thinking = self._unparted[: count - len(answer)]
        self._unparted = self._unparted[count:]
        self.new_parts = thinking, answer
        self.parts = self.parts[0] + thinking, self.parts[1] + answer


class TokenParted(PartedDecoder):
    """Parted by token ids.

    Args:
        tokenizer, stop, options: see `IncrementalDecoder`.
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
        self._thinking, self._place = thinking, place
        self._num_told = self._num_parted = 0  # characters that were handed out, and parted
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
            in_head = self._bounds[-1][1] is Phase.BEFORE
            edge = self._thinking.head[in_head] if self._thinking.head else None
            if phase is Phase.WITHIN and token == edge:
                bound = (self._length, phase) if in_head else (begin, Phase.BEFORE)
                self._bounds.append(bound)
            return
        if before.phase is Phase.WITHIN:
            if self._bounds[-1][1] is Phase.BEFORE:  # the head of the answer
                self._bounds.pop()
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
        done = max(0, end - self._num_parted)
        self._num_parted += done
        self._told(found[Phase.WITHIN], found[Phase.BEHIND], done)
        return piece


class TextParted(PartedDecoder):
    """Parted by tags that are text like any other, and may be cut into tokens in any way.

    Args:
        tags: what opens and closes the thinking.
        phase: of the output, before its first token.
        triggers: what begins calls, which end the thinking as well.
        tokenizer, stop, options: see `IncrementalDecoder`.
    """

    def __init__(
        self,
        *arguments: Any,
        tags: tuple[str, str],
        phase: Phase,
        triggers: Sequence[str],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._opening, self._phase = tags[0], phase
        self._ends = [tags[1], *triggers]

    def take(self) -> str:
        return self._part(super().take(), end=False)

    def finish(self) -> str:
        return self._part(super().finish(), end=True)

    def _part(self, piece: str, *, end: bool) -> str:
        """Parts what was handed out, but for what may begin a tag."""
        self._unparted += piece
        rest, thinking = self._unparted, ""
        begun = rest.lstrip()
        if self._phase is Phase.BEFORE and begun.startswith(self._opening):
            self._phase, rest = Phase.WITHIN, begun.removeprefix(self._opening)
        elif self._phase is Phase.BEFORE and (end or not self._opening.startswith(begun)):
            self._phase = Phase.BEHIND
        if self._phase is Phase.WITHIN:
            places = {rest.find(one): one for one in self._ends if one in rest}
            held = 0 if end else max(overlap(rest, one) for one in self._ends)
            at = min(places, default=len(rest) - held)
            thinking, rest = rest[:at], rest[at:].removeprefix(self._ends[0])
            self._phase = Phase.BEHIND if places else Phase.WITHIN
        answer = rest if self._phase is Phase.BEHIND else ""
        self._told(thinking, answer, len(self._unparted) - len(rest) + len(answer))
        return piece


def parted_decoder(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    tagged: bool = False,
) -> PartedDecoder | None:
    """What parts an output; None where the target does not think.

    A grammar knows no thinking that is spelled: what it holds from the first token on is an answer,
    unless that is a text that may end with calls.
    """
    options: Any = {"min_tokens": sampling.min_tokens or 0, **sampling.special_tokens}
    options["tagged"] = tagged
    if (thinking := thinking_of(tokenizer)) is not None:
        place = thinking.behind_prompt(prompt)
        return TokenParted(tokenizer, sampling.stop, thinking=thinking, place=place, **options)
    tags, grammar = spelled_tags(tokenizer), sampling.grammar
    triggers = [] if grammar is None else grammar.triggers
    if tags is None or (grammar is not None and not triggers):
        return None
    before = text_of(tokenizer, list(prompt[-32:]), skip_special_tokens=False).rstrip()
    ends = {tags[0]: Phase.WITHIN, tags[1]: Phase.BEHIND}
    phase = next((ends[tag] for tag in ends if before.endswith(tag)), Phase.BEFORE)
    return TextParted(
        tokenizer, sampling.stop, tags=tags, phase=phase, triggers=triggers, **options
    )


def parts_of(
    tokenizer: PreTrainedTokenizerBase,
    result: GenerationResult,
    sampling: SamplingParams,
    *,
    tagged: bool = False,
) -> tuple[str, str] | None:
    """Thinking and answer of an output that has ended; None where the target does not think."""
    text = parted_decoder(tokenizer, result.prompt_token_ids, sampling, tagged=tagged)
    if text is None:
        return None
    text.push(result.token_ids)
    text.finish()
    return text.parts
