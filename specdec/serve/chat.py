"""Answers of `/v1/chat/completions`, and their prompts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from specdec.decoder import SpecDecoder
from specdec.engine.outputs import GenerationResult, StreamChunk
from specdec.sampling.logprobs import Top
from specdec.serve.answer import Answer
from specdec.serve.errors import RequestError
from specdec.serve.protocol import Chat, ChatRequest, TokenizeRequest


def chat_tokens(decoder: SpecDecoder, asked: Chat | TokenizeRequest) -> list[int]:
    """The prompt that the model's template makes of messages.

    Raises:
        RequestError: a message is of no use to a text model, or an option of the template is not one.
        SpecDecError: see `SpecDecoder.tokenize`.
    """
    messages = [_as_text(number, message) for number, message in enumerate(asked.messages or [])]
    options = asked.chat_template_kwargs or {}
    own = inspect.signature(decoder.tokenizer.apply_chat_template).parameters
    taken = next((name for name in options if name in own), None)
    if taken is not None:
        raise RequestError(400, f"chat_template_kwargs names {taken!r}, which is no variable of templates; leave it out")
    if asked.continue_final_message and asked.add_generation_prompt and "add_generation_prompt" in asked.model_fields_set:
        message = "continue_final_message goes on with the last message; set add_generation_prompt to false"
        raise RequestError(400, message, param="continue_final_message")
    return decoder.tokenize(
        messages,
        add_special_tokens=bool(asked.add_special_tokens),
        template={
            "add_generation_prompt": asked.add_generation_prompt and not asked.continue_final_message,
            "continue_final_message": asked.continue_final_message,
            **options,
        },
    )


def _as_text(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text, of which OpenAI's form may have several parts."""
    if not isinstance(message.get("role"), str):
        raise RequestError(400, f"message {number} has no role; give one, such as user", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(400, f"message {number} holds a part of type {kind!r}; give text alone", param="messages")
        content = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(400, f"the content of message {number} is a {type(content).__name__}; give text", param="messages")
    return {**message, "content": content or ""}


class ChatCompletion(Answer):
    """See `Answer`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"
    asked: ChatRequest

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer in one piece."""
        whole = super().whole(results)
        return {**whole, "prompt_token_ids": self.prompts[0]} if self.asked.return_token_ids else whole

    def choice(self, result: GenerationResult, index: int, first: GenerationResult) -> dict[str, Any]:
        """An output as a whole."""
        return {
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._logprobs(result.token_ids, result.logprobs or [], result.top_logprobs or []),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, chunk: StreamChunk) -> dict[str, Any]:
        """What came of an output."""
        some = self._logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs) if chunk.token_ids else None
        return {"delta": {"content": chunk.text} if chunk.token_ids or chunk.text else {}, "logprobs": some}

    def _logprobs(self, tokens: Sequence[int], values: Sequence[float], tops: Sequence[Top]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        content = []
        for place, (token, value) in enumerate(zip(tokens, values, strict=True)):
            likely = list(tops[place].items())[: self.asked.top_logprobs] if place < len(tops) else []
            content.append({**self._entry(token, value), "top_logprobs": [self._entry(*one) for one in likely]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        """Bytes are those of the text, none where the token is but a part of a character."""
        name = self.name(token)
        return {"token": name, "logprob": value, "bytes": None if "\ufffd" in name else list(name.encode())}
