"""Answers of `/v1/chat/completions`, and their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec.base.chat.messages import asks_to_continue, check_variables, readable
from specdec.base.chat.thinking import has_switch, spelled_tags, thinking_of
from specdec.base.errors import InvalidInputError
from specdec.sampling.logprobs import Top
from specdec.serve.answers.answer import Answer
from specdec.serve.errors import RequestError
from specdec.serve.protocol import Chat, ChatRequest, TokenizeRequest
from specdec.session.outputs import GenerationResult, StreamChunk
from specdec.session.prompts import PromptReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_text(
    reader: PromptReader, asked: Chat | TokenizeRequest, tools: Sequence[dict[str, Any]] = ()
) -> Callable[[], str]:
    """What makes the prompt of messages and tools, by the model's template.

    Raises:
        RequestError: a message is not for a text model, or an option not of the template.
    """
    try:
        messages = readable(asked.messages or [])
        continues = asks_to_continue(messages)
    except InvalidInputError as error:
        raise RequestError(str(error), "messages") from error
    variables = asked.variables
    check_variables(variables, reader.tokenizer)
    said = asked.model_fields_set
    if continues and not asked.continue_final_message and "continue_final_message" in said:
        message = "the last message asks to be continued, and continue_final_message is false"
        raise RequestError(f"{message}; leave one out", "continue_final_message")
    continues = continues or asked.continue_final_message
    if continues and asked.add_generation_prompt and "add_generation_prompt" in said:
        message = "an answer that goes on with the last message has no new beginning"
        way_out = "set add_generation_prompt to false"
        raise RequestError(f"{message}; {way_out}", "add_generation_prompt")
    options: dict[str, Any] = {"continue_final_message": continues}
    options["add_generation_prompt"] = asked.add_generation_prompt and not continues
    if tools:
        options["tools"] = list(tools)
    return partial(reader.chat_text, messages, options | variables)


def unheeded(asked: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What a chat asks of the thinking in vain."""
    thinks = thinking_of(tokenizer) is not None or spelled_tags(tokenizer) is not None
    if asked.switched is not False or not thinks or has_switch(tokenizer):
        return []
    return ["the thinking is not turned off: the chat template has no known switch for it"]


class ChatCompletion(Answer):
    """See `Answer`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"
    asked: ChatRequest

    @property
    def parted(self) -> bool:
        return self.asked.separate_reasoning

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        whole = super().whole(results)
        more = {"prompt_token_ids": self.prompts[0]} if self.asked.return_token_ids else {}
        return whole | more

    def choice(
        self, result: GenerationResult, index: int, first: GenerationResult
    ) -> dict[str, Any]:
        content = result.text if result.content is None else result.content
        message = {"role": "assistant", "content": content, "refusal": None}
        if result.reasoning and self.asked.include_reasoning:
            message["reasoning_content"] = result.reasoning
        of = index, result.token_ids, result.logprobs or [], result.top_logprobs or []
        return {"message": message, "logprobs": self._logprobs(*of)}

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, chunk: StreamChunk) -> dict[str, Any]:
        of = chunk.index, chunk.token_ids, chunk.logprobs, chunk.top_logprobs
        some = self._logprobs(*of) if chunk.token_ids else None
        reasoning, content = chunk.parts or ("", chunk.text)
        delta = {"content": content} if content or (chunk.token_ids and not reasoning) else {}
        if reasoning and self.asked.include_reasoning:
            delta["reasoning_content"] = reasoning
        return {"delta": delta, "logprobs": some}

    def shown(self, chunk: StreamChunk) -> StreamChunk:
        """The chunk without a thinking that is not wanted."""
        if chunk.parts is None or self.asked.include_reasoning or self.tagged:
            return chunk
        return replace(chunk, parts=("", chunk.parts[1]))

    def _logprobs(
        self, index: int, tokens: Sequence[int], values: Sequence[float], tops: Sequence[Top]
    ) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        content = []
        for place, (token, value) in enumerate(zip(tokens, values, strict=True)):
            top = tops[place] if place < len(tops) else {}
            likely = list(top.items())[: self.asked.top_logprobs]
            others = [self._entry(index, *one) for one in likely]
            content.append({**self._entry(index, token, value), "top_logprobs": others})
            self.begin(index, token)
        return {"content": content, "refusal": None}

    def _entry(self, index: int, token: int, value: float) -> dict[str, Any]:
        """Bytes are those that the token adds, so that joined they are the text."""
        added = list(self.added(index, token))
        return {"token": self.name(token), "logprob": value, "bytes": added}
