"""Where in an output a model thinks, told by the ids of the tokens that open and close it.

Published forms: `<think>` and `</think>` (DeepSeek-R1, Qwen3, GLM-4.5, MiniMax-M2, ERNIE 4.5 and
many others), `[THINK]` (Magistral), `<seed:think>` (Seed-OSS), `<|START_THINKING|>` (Command A),
`<|channel>thought` (Gemma 4), and the channels analysis and final of gpt-oss's harmony.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.base.chat.messages import PROBE, rendering, template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMS = (
    (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
    ("<|channel>thought\n", "<channel|>", ""),
)
"""What opens the thinking, what closes it, and what opens an answer without any."""


class Phase(Enum):
    """Phase of an output: nothing has begun, it is thinking, or it answers."""

    BEFORE = "before"
    WITHIN = "within"
    BEHIND = "behind"


class Place(NamedTuple):
    """Where an output stands.

    Attributes:
        phase: of the output.
        left: while nothing has begun, what is left of the forms of a beginning that fit so far, the
            thinking's, that of an answer, and the thinking's behind its lead; None where it fits no
            more.
        num_thought: tokens of the thinking so far.
        matched: of these the last ones that begin what closes it.
    """

    phase: Phase
    left: tuple[tuple[int, ...] | None, ...] = (None, None, None)
    num_thought: int = 0
    matched: int = 0


WITHIN, BEHIND = Place(Phase.WITHIN), Place(Phase.BEHIND)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tokens between which a model thinks.

    Attributes:
        opening, closing: what opens and closes the thinking.
        answering: what opens an answer without thinking; nothing in most forms.
        added: tokens that the tokenizer takes for no text, such as those of turns.
        lead: blanks that may stand before the opening: GLM-4.5 begins its turns with a line break.
        head: what begins and ends the heads of messages that name their channels; else nothing.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    answering: tuple[int, ...]
    added: frozenset[int]
    lead: tuple[int, ...]
    head: tuple[int, ...]

    @property
    def start(self) -> Place:
        """Where an output stands before its first token, if its prompt has not begun it."""
        led = (*self.lead, *self.opening) if self.lead else None
        return Place(Phase.BEFORE, (self.opening, self.answering or None, led))

    @property
    def first(self) -> frozenset[int]:
        """Tokens with which a thinking may begin."""
        return frozenset((self.opening[0], *self.lead[:1]))

    def behind_prompt(self, prompt: Sequence[int]) -> Place:
        """Where an output begins: templates may open the thinking, or close it.

        The prompt's last token that is no text tells: a turn's comes behind the user's text.
        """
        at = next((at for at in reversed(range(len(prompt))) if prompt[at] in self.added), -1)
        behind = (self.closing, BEHIND), (self.answering, BEHIND)
        for form, place in ((self.opening, WITHIN), *behind):
            last = max((i for i, token in enumerate(form) if token in self.added), default=-1)
            begin = at - last
            if form and begin >= 0 and tuple(prompt[begin : begin + len(form)]) == form:
                return place
        return self.start

    def step(self, place: Place, token: int) -> Place:
        """The place behind one more token."""
        if place.phase is Phase.BEHIND:
            return place
        if place.phase is Phase.BEFORE:
            left = tuple(form[1:] if form and form[0] == token else None for form in place.left)
            opening, answering, led = left
            if () in (opening, led):
                return WITHIN
            if answering == () or left == (None, None, None):
                return BEHIND
            return Place(Phase.BEFORE, left)
        matched = _matched(self.closing, place.matched, token)
        if matched == len(self.closing):
            return BEHIND
        return Place(Phase.WITHIN, num_thought=place.num_thought + 1, matched=matched)


def _matched(form: tuple[int, ...], matched: int, token: int) -> int:
    """How many tokens of `form` the last tokens are, after `matched` of them and one more."""
    known = (*form[:matched], token)
    return next(n for n in range(len(known), -1, -1) if known[len(known) - n :] == form[:n])


@lru_cache(maxsize=4)
def thinking_of(tokenizer: PreTrainedTokenizerBase) -> Thinking | None:
    """How a model with this tokenizer thinks; None where its vocabulary has no token for that."""
    added = {one.content: token for token, one in tokenizer.added_tokens_decoder.items()}
    for texts in _FORMS:
        forms = [_ids(tokenizer, added, text) for text in texts]
        if forms[0] and forms[1]:
            lead = _ids(tokenizer, {}, _lead(tokenizer, texts[0]))
            head = (added["<|start|>"], added["<|message|>"]) if texts is _FORMS[0] else ()
            return Thinking(forms[0], forms[1], forms[2], frozenset(added.values()), lead, head)
    return None


def spelled_tags(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """What opens and closes a thinking, where the chat template has it and it is no token, as with
    OLMo 3, Hunyuan and models on Llama's vocabulary; None elsewhere."""
    if thinking_of(tokenizer) is not None or "think>" not in template_of(tokenizer):
        return None
    return "<think>", "</think>"


def switch(*, on: bool) -> dict[str, Any]:
    """The variables by which templates turn the thinking on or off: those of Qwen3 and GLM, of
    DeepSeek, Granite and Kimi, of Command A, and Seed-OSS's budget."""
    made: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking", "reasoning"), on)
    return made if on else made | {"thinking_budget": 0}


def has_switch(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template heeds these variables."""
    template = template_of(tokenizer)
    if template not in _switched:
        user = [{"role": "user", "content": "a"}]
        ways = ({"add_generation_prompt": True, **switch(on=on)} for on in (True, False))
        on, off = (rendering(tokenizer, user, **variables) for variables in ways)
        _switched[template] = on != off
    return _switched[template]


_switched: dict[str, bool] = {}
"""By template."""


def _lead(tokenizer: PreTrainedTokenizerBase, opening: str) -> str:
    """The blanks with which the chat template begins a turn that thinks."""
    user = {"role": "user", "content": "a"}
    thought = {"role": "assistant", "content": "b", "reasoning_content": PROBE}
    begun = rendering(tokenizer, [user], add_generation_prompt=True, **switch(on=True))
    whole = rendering(tokenizer, [user, thought], **switch(on=True))
    lead, found, _ = whole.removeprefix(begun).partition(opening)
    return lead if whole.startswith(begun) and found and not lead.strip() else ""


def _ids(tokenizer: PreTrainedTokenizerBase, added: dict[str, int], text: str) -> tuple[int, ...]:
    """Tokens of a form, none where one between brackets is no token of its own."""
    ids: tuple[int, ...] = ()
    while text:
        name = next((name for name in added if text.startswith(name)), None)
        if name is None:
            if text[0] in "<[":
                return ()
            name = text[: min(at for at in (text.find("<"), len(text)) if at > 0)]
            ids += tuple(tokenizer(name, add_special_tokens=False)["input_ids"])
        else:
            ids += (added[name],)
        text = text[len(name) :]
    return ids
