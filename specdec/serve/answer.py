"""What answers have in common: their frame, their usage, and how their drafts fared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from specdec.engine.outputs import GenerationResult, StreamChunk
from specdec.serve.acceptance import meta_info, speculative_decoding
from specdec.serve.protocol import Generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Answer:
    """One answer, whole or in events.

    Args:
        asked: the request.
        model: name of the model.
        prompts: token ids, `asked.n` outputs for each.
        tokenizer: tells the text of single tokens.

    Attributes:
        notes: what the request says and the outputs are not held to.
    """

    kind = ""  # of the object
    chunk_kind = ""  # of its events
    prefix = ""  # of its id

    def __init__(self, asked: Generation, model: str, prompts: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
        self.asked, self.prompts, self.n = asked, prompts, asked.n or 1
        self._frame = {"id": f"{self.prefix}{uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self.notes: list[str] = []
        self._names: dict[int, str] = {}

    def choice(self, result: GenerationResult, index: int, first: GenerationResult) -> dict[str, Any]:
        """An output as a whole; `first` is that of the same prompt that has its log-probabilities."""
        raise NotImplementedError

    def opening(self, index: int) -> dict[str, Any] | None:
        """What begins the events of an output, None where nothing does."""
        raise NotImplementedError

    def delta(self, chunk: StreamChunk) -> dict[str, Any]:
        """What came of an output."""
        raise NotImplementedError

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, result in enumerate(results):
            choice = self.choice(result, index, results[index - index % self.n])
            choices.append({"index": index, **choice, "finish_reason": result.finish_reason, "meta_info": meta_info([result])})
            if self.asked.return_token_ids:
                choices[-1]["token_ids"] = result.token_ids
        return {**self._framed(self.kind, choices), **self._figures(results)}

    def openings(self) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        for index in range(self.n * len(self.prompts)):
            begun = self.opening(index)
            if begun is not None:
                yield self._framed(self.chunk_kind, [{"index": index, **begun, "finish_reason": None}])

    def events(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """Events of what came: none where it shows nothing yet, and one more at the end of an output."""
        if chunk.text or (chunk.token_ids and (chunk.logprobs or self.asked.return_token_ids)):
            choice = {"index": chunk.index, **self.delta(chunk), "finish_reason": None}
            if self.asked.return_token_ids:
                choice["token_ids"] = chunk.token_ids
            yield self._framed(self.chunk_kind, [choice])
        if chunk.result is not None:
            end = self.delta(StreamChunk(chunk.index, "", []))
            yield self._framed(
                self.chunk_kind,
                [
                    {
                        "index": chunk.index,
                        **end,
                        "finish_reason": chunk.result.finish_reason,
                        "meta_info": meta_info([chunk.result]),
                    }
                ],
            )

    def closing(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The event that has no output and the usage of all."""
        return {**self._framed(self.chunk_kind, []), **self._figures(results)}

    def name(self, token: int) -> str:
        """The text of a single token, or its number where the request wants that."""
        if self.asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        if token not in self._names:
            self._names[token] = str(self._tokenizer.decode([token]))
        return self._names[token]

    def _framed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._frame, "object": kind, "choices": choices}

    def _figures(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        prompt, output = sum(map(len, self.prompts)), sum(len(result.token_ids) for result in results)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in results[:: self.n])},
            },
            "meta_info": meta_info(results),
            "metrics": {"speculative_decoding": speculative_decoding(results)},
            **({"warnings": self.notes} if self.notes else {}),
        }
