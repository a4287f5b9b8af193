"""What answers have in common: their frame, their usage, and how their drafts fared."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any
from uuid import uuid4

from specdec.serve.answers.acceptance import meta_info, prediction_details, speculative_decoding
from specdec.serve.answers.token_bytes import TokenBytes
from specdec.serve.answers.transport import escaped, line
from specdec.serve.errors import RequestError
from specdec.serve.protocol import Generation
from specdec.session.outputs import GenerationResult, StreamChunk

_TEXT = uuid4().hex
"""Stands for a text, and in nothing else."""


class Answer:
    """One answer, whole or in events.

    Args:
        prompts: token ids, `asked.n` outputs for each.

    Attributes:
        notes: what the request says and the outputs are not held to.
    """

    kind = ""  # of the object
    chunk_kind = ""  # of its events
    prefix = ""  # of its id
    last = b"data: [DONE]\n\n"  # of a stream

    def __init__(
        self, asked: Generation, model: str, prompts: Sequence[list[int]], tokens: TokenBytes
    ) -> None:
        self.asked, self.prompts, self.n = asked, prompts, asked.n or 1
        made = f"{self.prefix}{uuid4().hex}", int(time.time())
        self._frame = {"id": made[0], "created": made[1], "model": model}
        self.notes: list[str] = []
        self.tokens = tokens
        self._begun: set[int] = set()  # outputs of which a token was told that shows
        self._counts: Counter[int] = Counter()  # of tokens that events have told of, by output
        options = asked.stream_options
        self._usage = options is not None and options.continuous_usage_stats
        self._frames: dict[int, list[bytes]] = {}  # of events of one text, by output and part

    @property
    def parted(self) -> bool:
        """Whether thinking and answer are told apart."""
        return False

    @property
    def tagged(self) -> bool:
        """Whether the tags of a thinking that is told apart belong to it."""
        return False

    def choice(
        self, result: GenerationResult, index: int, first: GenerationResult
    ) -> dict[str, Any]:
        """An output as a whole; `first`, of the same prompt, has the prompt's log-probabilities."""
        raise NotImplementedError

    def opening(self, index: int) -> dict[str, Any] | None:
        """What begins the events of an output, None where nothing does."""
        raise NotImplementedError

    def delta(self, chunk: StreamChunk) -> dict[str, Any]:
        """What came of an output."""
        raise NotImplementedError

    def reason(self, result: GenerationResult, index: int) -> str:
        """Why an output has ended."""
        return result.finish_reason

    def shown(self, chunk: StreamChunk) -> StreamChunk:
        """What of it is told."""
        return chunk

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, result in enumerate(results):
            choice = self.choice(result, index, results[index - index % self.n])
            end = {"finish_reason": self.reason(result, index), "meta_info": meta_info([result])}
            choices.append({"index": index, **choice, **end})
            if self.asked.return_token_ids:
                choices[-1]["token_ids"] = result.token_ids
        return {**self._framed(self.kind, choices), **self._figures(results)}

    def num_logprobs(self, results: Sequence[GenerationResult]) -> int:
        """How many log-probabilities the answer has, about."""
        count = 0
        for result in results:
            of_prompt = result.prompt_logprobs, result.prompt_top_logprobs
            for values, tops in ((result.logprobs, result.top_logprobs), of_prompt):
                widest = max(map(len, filter(None, tops or ())), default=0)
                count += len(values or ()) * (1 + widest)
        return count

    def openings(self) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        for index in range(self.n * len(self.prompts)):
            begun = self.opening(index)
            if begun is not None:
                yield self._event([{"index": index, **begun, "finish_reason": None}])

    def opening_lines(self) -> bytes:
        return b"".join(map(line, self.openings()))

    def failure(self, error: RequestError) -> bytes:
        """What ends a stream in which something failed."""
        return line(error.body)

    def lines(self, chunk: StreamChunk) -> bytes:
        """`events` as they are sent. Most hold a text alone, and differ in nothing else."""
        if chunk.result or chunk.logprobs or self.asked.return_token_ids or self._usage:
            return b"".join(map(line, self.events(chunk)))
        if chunk.parts is None:
            return self._line(chunk.index, chunk.text, 1)
        parts = enumerate(self.shown(chunk).parts or ())
        return b"".join(self._line(chunk.index, text, part) for part, text in parts)

    def _line(self, index: int, text: str, part: int) -> bytes:
        """An event that holds a text alone, of the thinking or of the answer."""
        if not text:
            return b""
        key = 2 * index + part
        if key not in self._frames:
            parts = ("", _TEXT) if part else (_TEXT, "")
            delta = self.delta(StreamChunk(index, _TEXT, [], parts=parts))
            made = line(self._event([{"index": index, **delta, "finish_reason": None}]))
            self._frames[key] = made.split(f'"{_TEXT}"'.encode())
        before, after = self._frames[key]
        return before + escaped(encode_basestring(text)).encode(errors="replace") + after

    def events(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """Events of what came: none where it shows nothing, one more at an output's end."""
        self._counts[chunk.index] += len(chunk.token_ids)
        for change in self.changes(self.shown(chunk)):
            yield self._event([{"index": chunk.index, **change, "finish_reason": None}])
        if chunk.result is not None:
            end = self.delta(StreamChunk(chunk.index, "", []))
            reason, figures = self.reason(chunk.result, chunk.index), meta_info([chunk.result])
            last = {"index": chunk.index, **end, "finish_reason": reason, "meta_info": figures}
            yield self._event([last]) | self._warnings

    def changes(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """What came of an output, none where it shows nothing yet."""
        text = chunk.text if chunk.parts is None else "".join(chunk.parts)
        if text or (chunk.token_ids and (chunk.logprobs or self.asked.return_token_ids)):
            choice = self.delta(chunk)
            if self.asked.return_token_ids:
                choice["token_ids"] = chunk.token_ids
            yield choice

    def closing(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The event that has no output and the usage of all."""
        return {**self._framed(self.chunk_kind, []), **self._figures(results)}

    def name(self, token: int) -> str:
        """The text of a single token, or its number where the request wants that."""
        if self.asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.tokens.text(token)

    def added(self, index: int, token: int) -> bytes:
        """What a token adds to the text of an output, as the next one that is told of."""
        hidden = self._hides(token)
        return b"" if hidden else self.tokens.of(token, first=index not in self._begun)

    def begin(self, index: int, token: int) -> None:
        """Takes note of a token that was told of."""
        if index not in self._begun and not self._hides(token):
            self._begun.add(index)

    def _hides(self, token: int) -> bool:
        return self.asked.skip_special_tokens is not False and self.tokens.is_special(token)

    def _framed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": kind, "choices": choices}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = self._framed(self.chunk_kind, choices)
        if self._usage:
            event["usage"] = _usage(sum(map(len, self.prompts)), self._counts.total())
        return event

    @property
    def _warnings(self) -> dict[str, Any]:
        return {"warnings": self.notes} if self.notes else {}

    def _figures(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        output = sum(len(result.token_ids) for result in results)
        usage = _usage(sum(map(len, self.prompts)), output)
        cached = sum(result.num_cached_tokens for result in results[:: self.n])
        if self.asked.prediction is not None:
            usage["completion_tokens_details"] = prediction_details(results)
        return {
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}},
            "meta_info": meta_info(results),
            "metrics": {"speculative_decoding": speculative_decoding(results)},
            **self._warnings,
        }


def _usage(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
