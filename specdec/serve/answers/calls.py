"""Answers of chats that may call tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from specdec.serve.answers.chat import ChatCompletion
from specdec.serve.answers.reader import CallReader, Piece
from specdec.serve.answers.transport import line
from specdec.serve.tools import Tools
from specdec.session.outputs import GenerationResult, StreamChunk


class CallCompletion(ChatCompletion):
    """See `Answer`. `tools` are those that may be called."""

    def __init__(self, *arguments: Any, tools: Tools) -> None:
        super().__init__(*arguments)
        self._tools = tools
        self._readers: dict[int, CallReader] = {}
        self._num_calls: Counter[int] = Counter()  # by output
        self.notes = tools.notes

    @property
    def parted(self) -> bool:
        """See `Answer`; of channels the reader tells. A thinking never calls anything."""
        return not self._tools.form.channels

    @property
    def tagged(self) -> bool:
        return not self.asked.separate_reasoning

    def choice(
        self, result: GenerationResult, index: int, first: GenerationResult
    ) -> dict[str, Any]:
        choice = super().choice(result, index, first)
        message, calls, text = choice["message"], list[dict[str, Any]](), ""
        if self.tagged:
            message.pop("reasoning_content", None)
            text = result.reasoning or ""
        for piece in self._pieces(index, message["content"], end=True):
            if piece.kind == "name":
                calls.append(self._call(index, piece))
            elif piece.kind == "arguments":
                calls[-1]["function"]["arguments"] += piece.text
            elif piece.kind == "text" or self.tagged:
                text += piece.text
            elif self.asked.include_reasoning:
                message["reasoning_content"] = message.get("reasoning_content", "") + piece.text
        if calls:
            message["tool_calls"] = calls
        message["content"] = text if text or not calls else None
        return choice

    def reason(self, result: GenerationResult, index: int) -> str:
        called = self._num_calls[index] and not self._readers[index].within
        called = called and result.finish_reason == "stop"
        return "tool_calls" if called else result.finish_reason

    def lines(self, chunk: StreamChunk) -> bytes:
        return b"".join(map(line, self.events(chunk)))

    def changes(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """What came of an output, each name and each piece of arguments by itself."""
        reasoning, content = chunk.parts or ("", chunk.text)
        pieces = self._pieces(chunk.index, content, end=chunk.result is not None)
        deltas = list(self._deltas(chunk.index, pieces))
        if reasoning:
            deltas.insert(0, {"content" if self.tagged else "reasoning_content": reasoning})
        detailed = chunk.token_ids and (chunk.logprobs or self.asked.return_token_ids)
        for number, delta in enumerate(deltas or [{}] if detailed else deltas):
            tokens = StreamChunk(chunk.index, "", [])
            if not number:
                tokens = replace(chunk, text="", parts=None, result=None)
            made = {**super().delta(tokens), "delta": delta}
            if self.asked.return_token_ids:
                made["token_ids"] = tokens.token_ids
            yield made

    def _pieces(self, index: int, text: str, *, end: bool) -> list[Piece]:
        if index not in self._readers:
            self._readers[index] = CallReader(self._tools.form, self._tools.functions)
        return self._readers[index].push(text, end=end)

    def _deltas(self, index: int, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        for kind, group in groupby(pieces, lambda piece: piece.kind):
            some = list(group)
            texts = [piece.text for piece in some]
            if kind == "text" or (kind == "reasoning" and self.tagged):
                yield {"content": "".join(texts)}
            elif kind == "reasoning":
                if self.asked.include_reasoning:
                    yield {"reasoning_content": "".join(texts)}
            elif kind == "name":
                for name in some:
                    call = self._call(index, name)
                    yield {"tool_calls": [{"index": self._num_calls[index] - 1, **call}]}
            else:
                function = {"arguments": "".join(texts)}
                more = {"index": self._num_calls[index] - 1, "function": function}
                yield {"tool_calls": [more]}

    def _call(self, index: int, name: Piece) -> dict[str, Any]:
        """A call that begins."""
        self._num_calls[index] += 1
        about = {"name": name.text, "arguments": ""}
        return {"id": name.call_id, "type": "function", "function": about}
