"""Answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specdec.sampling.logprobs import Top
from specdec.serve.answers.answer import Answer
from specdec.serve.answers.token_bytes import TextLength
from specdec.serve.protocol import CompletionRequest
from specdec.session.outputs import GenerationResult, StreamChunk


class Completion(Answer):
    """See `Answer`. `echoes` are texts of prompts, where the request wants them before outputs."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    asked: CompletionRequest

    def __init__(self, *arguments: Any, echoes: Sequence[str] | None = None) -> None:
        super().__init__(*arguments)
        self._echoes = echoes
        self._lengths: dict[int, TextLength] = {}  # of texts named by `text_offset` so far

    def choice(
        self, result: GenerationResult, index: int, first: GenerationResult
    ) -> dict[str, Any]:
        tokens, num_echoed = list(result.token_ids), 0
        values: list[float | None] = [*(result.logprobs or [])]
        tops: list[Top | None] = [*(result.top_logprobs or [])]
        if first.prompt_logprobs is not None and first.prompt_top_logprobs is not None:
            tokens, values = first.prompt_token_ids + tokens, [*first.prompt_logprobs, *values]
            tops, num_echoed = [*first.prompt_top_logprobs, *tops], len(first.prompt_token_ids)
        choice: dict[str, Any] = {"text": self._echo(index) + result.text, "logprobs": None}
        if self.asked.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, tokens, values, tops, num_echoed)
        if self.asked.return_token_ids:
            choice["prompt_token_ids"] = result.prompt_token_ids
        return choice

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"text": self._echo(index), "logprobs": None} if self._echoes is not None else None

    def delta(self, chunk: StreamChunk) -> dict[str, Any]:
        delta: dict[str, Any] = {"text": chunk.text, "logprobs": None}
        if self.asked.logprobs is not None and chunk.token_ids:
            of = chunk.token_ids, chunk.logprobs, chunk.top_logprobs
            delta["logprobs"] = self._logprobs(chunk.index, *of)
        return delta

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.n] if self._echoes is not None else ""

    def _logprobs(
        self,
        index: int,
        tokens: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[Top | None],
        num_echoed: int = 0,
    ) -> dict[str, Any]:
        length = self._lengths.setdefault(index, TextLength())
        echoed = self._pieces_of_prompt(index, tokens[:num_echoed])
        offsets = [length.add(piece) for piece in echoed]
        if num_echoed:
            length.end()
        for token in tokens[num_echoed:]:
            offsets.append(length.add(self.added(index, token)))
            self.begin(index, token)
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": list(values),
            "top_logprobs": list(self._tops(tokens, values, tops)),
            "text_offset": offsets,
        }

    def _pieces_of_prompt(self, index: int, tokens: Sequence[int]) -> Iterator[bytes]:
        """What tokens add to the text of their prompt; a special one may not stand in it."""
        prompt, at = self.asked.prompt[index // self.n], 0
        text = prompt.encode() if isinstance(prompt, str) else None
        for place, token in enumerate(tokens):
            pieces = [self.tokens.of(token, first=first) for first in (False, True)]
            if text is None:
                yield pieces[place == 0]
                continue
            others = b"" if self.tokens.is_special(token) else pieces[0]
            piece = next((one for one in pieces if text.startswith(one, at)), others)
            at += len(piece)
            yield piece

    def _tops(
        self, tokens: Sequence[int], values: Sequence[float | None], tops: Sequence[Top | None]
    ) -> Iterator[dict[str, float] | None]:
        """By text; of tokens that read alike the likeliest counts, the token's own too."""
        for place, (token, value) in enumerate(zip(tokens, values, strict=True)):
            top = tops[place] if place < len(tops) else None
            if value is None:
                yield None
                continue
            named: dict[str, float] = {}
            for one, its_value in (top or {token: value}).items():
                named.setdefault(self._name(one), its_value)
            yield named

    def _name(self, token: int) -> str:
        """Parts of characters by their bytes, unlike in chats: names tell likely tokens apart."""
        name = self.name if self.asked.return_tokens_as_token_ids else self.tokens.name
        return name(token)
