"""Answers of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specdec.base.chat.thinking import Phase, Thinking
from specdec.serve.answers.acceptance import meta_info
from specdec.serve.answers.chat import ChatCompletion
from specdec.serve.answers.reader import CallReader
from specdec.serve.answers.transport import escaped
from specdec.serve.errors import RequestError
from specdec.serve.responses.items import Items
from specdec.serve.responses.protocol import ResponsesRequest
from specdec.serve.tools import Tools
from specdec.session.outputs import GenerationResult, StreamChunk


class ResponseAnswer(ChatCompletion):
    """See `Answer`."""

    kind, prefix, last = "response", "resp_", b""

    def __init__(
        self,
        *arguments: Any,
        request: ResponsesRequest,
        tools: Tools | None,
        thinking: Thinking | None,
    ) -> None:
        super().__init__(*arguments)
        self._request, self._thinking, self._items = request, thinking, Items()
        self._tools = tools
        self._reader = None if tools is None else CallReader(tools.form, tools.functions)
        self._number = 0  # of the next event
        self.notes = [] if tools is None else tools.notes

    @property
    def parted(self) -> bool:
        """See `Answer`; of channels the reader tells."""
        return self._tools is None or not self._tools.form.channels

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        (result,) = results
        content = result.text if result.content is None else result.content
        for _ in self._came((result.reasoning or "", content), result):
            pass
        return self._response(result)

    def openings(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response(None)}

    def opening_lines(self) -> bytes:
        return self._written(self.openings())

    def lines(self, chunk: StreamChunk) -> bytes:
        result = chunk.result
        made = self._written(self._came(chunk.parts or ("", chunk.text), result))
        if result is None:
            return made
        response = self._response(result)
        event = {"type": f"response.{response['status']}", "response": response}
        return made + self._written([event])

    def failure(self, error: RequestError) -> bytes:
        about = error.body["error"]
        response = self._response(None) | {"status": "failed"}
        response["error"] = {"code": "server_error", "message": about["message"]}
        event = {name: about[name] for name in ("code", "message", "param")}
        ended = {"type": "response.failed", "response": response}
        return self._written([{"type": "error", **event}, ended])

    def _came(
        self, parts: tuple[str, str], result: GenerationResult | None
    ) -> Iterator[dict[str, Any]]:
        reasoning, content = parts
        if reasoning and self.asked.include_reasoning:
            yield from self._items.add("reasoning", reasoning)
        if self._reader is not None:
            for piece in self._reader.push(content, end=result is not None):
                if piece.kind == "reasoning" and not self.asked.include_reasoning:
                    continue
                yield from self._items.add(piece.kind, piece.text, piece.call_id)
        elif content:
            yield from self._items.add("text", content)
        if result is not None:
            yield from self._items.close(_status(result))

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        made = b""
        for event in events:
            numbered = {**event, "sequence_number": self._number}
            self._number += 1
            text = escaped(json.dumps(numbered, ensure_ascii=False))
            made += f"event: {event['type']}\ndata: {text}\n\n".encode(errors="replace")
        return made

    def _response(self, result: GenerationResult | None) -> dict[str, Any]:
        """The object of a response; of one that goes on without a result."""
        asked, request = self.asked, self._request
        long = result is not None and result.finish_reason == "length"
        made: dict[str, Any] = {
            "id": self._frame["id"],
            "object": self.kind,
            "created_at": self._frame["created"],
            "status": "in_progress" if result is None else _status(result),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if long else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._frame["model"],
            "output": list(self._items.done),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning_effort, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            **self._warnings,
        }
        if result is not None:
            made |= {"usage": self._tokens(result), "meta_info": meta_info([result])}
        return made

    def _tokens(self, result: GenerationResult) -> dict[str, Any]:
        prompt, output = len(result.prompt_token_ids), len(result.token_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": result.num_cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._thought(result)},
            "total_tokens": prompt + output,
        }

    def _thought(self, result: GenerationResult) -> int:
        """Tokens of the thinking, those that open and close it among them."""
        if not self.parted:
            return sum(self._in_analysis(result.token_ids))
        if self._thinking is None or not result.reasoning:
            return 0
        place = self._thinking.behind_prompt(result.prompt_token_ids)
        for number, token in enumerate(result.token_ids):
            if place.phase is Phase.BEHIND:
                return number
            place = self._thinking.step(place, token)
        return len(result.token_ids)

    def _in_analysis(self, token_ids: Sequence[int]) -> Iterator[bool]:
        """Whether each token of an output of messages thinks."""
        head, thinks = "", False
        for text in map(self.tokens.text, token_ids):
            head, before = head + text, thinks
            thinks = thinks if text != "<|message|>" else "<|channel|>analysis" in head
            if text == "<|end|>":
                head, thinks = "", False
            yield before or thinks


def _status(result: GenerationResult) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"
