"""Tokens of prompts: what a tokenizer and its chat template make of texts and messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec.base.chat.history import for_template
from specdec.base.chat.messages import (
    asks_to_continue,
    check_template,
    check_variables,
    readable,
    template_variables,
)
from specdec.base.config import LoadConfig
from specdec.base.errors import InvalidInputError, one_line
from specdec.sampling.params import SamplingParams
from specdec.session.text import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one target.

    Attributes:
        tokenizer: the target's.
        name: the target's, for messages.
        variables: of the chat template, where a prompt does not say them itself.
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, name: str, load: LoadConfig) -> PromptReader:
        """One that reads as a target's loading says, whose template the tokenizer has from now on.

        Raises:
            InvalidInputError: a variable has a name that is taken, or the template is no Jinja.
        """
        if load.chat_template is not None:
            tokenizer.chat_template = load.chat_template
            check_template(tokenizer)
        variables = template_variables(load.chat_template_kwargs)
        check_variables(variables, tokenizer)
        return cls(tokenizer, name, variables)

    @property
    def has_template(self) -> bool:
        """Whether conversations can become prompts."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def stated(self) -> dict[str, Any]:
        """What files of figures or answers say of it."""
        template = getattr(self.tokenizer, "chat_template", None)
        text = template if isinstance(template, str) else json.dumps(template, default=str)
        digest = (
            hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() if template else None
        )
        return {"chat_template": digest, "chat_template_kwargs": dict(self.variables)}

    def tokenize(
        self,
        prompt: Any,
        *,
        add_special_tokens: bool | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a string, token ids or messages; see `SpecDecoder.tokenize`."""
        if isinstance(prompt, str):
            special = add_special_tokens is not False
            return self._ids_of(prompt, add_special_tokens=special) if prompt else token_ids([])
        if prompt and isinstance(prompt[0], dict):
            text = self.chat_text(prompt, template or {"add_generation_prompt": True})
            return self._ids_of(text, add_special_tokens=bool(add_special_tokens))
        return token_ids(prompt)

    def with_prediction(self, sampling: SamplingParams) -> SamplingParams:
        """The prompt with the tokens of its prediction, which go on where the prompt ends."""
        text = sampling.prediction
        if not isinstance(text, str):
            return sampling
        tokens = self._ids_of(text, what="prediction", add_special_tokens=False)
        return replace(sampling, prediction=tuple(tokens))

    def chat_text(self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any]) -> str:
        """The chat template's text of messages, ended by the last one where that continues.

        Raises:
            InvalidInputError: the tokenizer has no template, or it refuses the messages.
        """
        if not self.has_template:
            what = f"the tokenizer of {self.name!r} has no chat template"
            raise InvalidInputError(f"{what}; give text or token ids")
        messages = readable(messages)
        if asks_to_continue(messages):
            go_on = {"add_generation_prompt": False, "continue_final_message": True}
            template = {**template, **go_on}
        known = for_template(messages, self.tokenizer)
        try:
            variables = {**self.variables, **template}
            text = self.tokenizer.apply_chat_template(known, tokenize=False, **variables)
        except Exception as error:  # a template may raise whatever it likes
            what = f"the chat template of {self.name!r} refuses these messages"
            raise InvalidInputError(f"{what}: {one_line(error, 300)}") from error
        assert isinstance(text, str)
        return text

    def _ids_of(self, text: str, *, what: str = "prompt", **options: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start + 1} is half of a surrogate pair; remove it"
            raise InvalidInputError(f"the {what} is not Unicode text: {where}") from error
        try:
            ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        except BaseException as error:  # what panics in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            says = f"the tokenizer of {self.name!r} cannot read the {what}"
            raise InvalidInputError(f"{says}: {one_line(error)}") from error
        return ids
