"""Results on standard output, in the order of the prompts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specdec.cli.prompts import Prompt

if TYPE_CHECKING:
    from specdec.session.outputs import GenerationResult, StreamChunk


_OWN = {
    "index", "prompt", "messages", "text", "finish_reason", "error", "token_ids", "logprobs",
    "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "num_prompt_tokens", "seed", "stats",
}  # fmt: skip
"""A record's own names; a field of the prompt's line that has one gets another."""


class BatchWriter:
    """Prints the answers of a batch file, a line for each request, in the order of the requests.

    Args:
        keys: by the index of a prompt, what names it.

    Attributes:
        results: finished results by index of the prompt.
        num_failed: requests without an answer.
    """

    def __init__(self, prompts: Sequence[Prompt], keys: Callable[[int], str], reader: Any) -> None:
        self.results: dict[int, GenerationResult] = {}
        self.num_failed = 0
        self._prompts, self._keys, self._reader = prompts, keys, reader
        self._next = 0  # the first prompt that is not printed

    def write(self, chunks: Iterable[StreamChunk]) -> None:
        """Prints answers as they arrive; on an interrupt also that the others were cut."""
        try:
            for chunk in chunks:
                if chunk.result is not None:
                    self.results[chunk.index] = chunk.result
                    while self._next < len(self._prompts) and self._print(cut=False):
                        pass
        except KeyboardInterrupt:
            while self._next < len(self._prompts):
                self._print(cut=True)
            raise

    def _print(self, *, cut: bool) -> bool:
        """Prints the next request, if all its outputs are there, or none is waited for."""
        request = self._prompts[self._next].request
        outputs = range(self._next, self._next + request.num_outputs)
        whole = all(index in self.results for index in outputs)
        if not (whole or cut):
            return False
        results = [self.results[index] for index in outputs] if whole else None
        line = request.answer(self._keys(self._next), results, self._reader)
        print(json.dumps(line), flush=True)
        answered = line["response"] is not None and line["response"]["status_code"] == 200
        self.num_failed += not answered
        if whole and not answered:
            why = line["response"]["body"]["error"]["message"]
            print(f"specdec: error: {self._prompts[self._next].source}: {why}", file=sys.stderr)
        self._next += len(outputs)
        return True


class ResultWriter:
    """Prints results in the order of the prompts, in whichever order they arrive.

    Args:
        as_json: one object per line instead of text.
        live: show the text of the first unfinished prompt while it grows.

    Attributes:
        results: finished results by index of the prompt.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, as_json: bool = False, live: bool = False
    ) -> None:
        self.results: dict[int, GenerationResult] = {}
        self._prompts = prompts
        self._as_json = as_json
        self._live = live
        self._texts = ["" for _ in prompts]
        self._current = 0  # the first prompt not printed to its end
        self._num_shown = 0  # characters of its text that are printed
        self._titled = False

    @property
    def num_failed(self) -> int:
        """Prompts that ended with an error."""
        return sum(result.error is not None for result in self.results.values())

    def write(self, chunks: Iterable[StreamChunk]) -> None:
        """Prints chunks as they arrive; on an interrupt also the text so far of the rest."""
        try:
            for chunk in chunks:
                self._texts[chunk.index] += chunk.text
                if chunk.result is not None:
                    self.results[chunk.index] = chunk.result
                self._print_ready()
        except KeyboardInterrupt:
            while self._current < len(self._prompts):
                self._print_rest()
            raise

    def _print_ready(self) -> None:
        while self._current < len(self._prompts):
            if self._current in self.results:
                self._print_rest()
            else:
                if self._live:
                    self._print_text()
                return

    def _print_rest(self) -> None:
        """Prints what is left of the current prompt and goes on to the next."""
        result = self.results.get(self._current)
        if self._as_json:
            print(json.dumps(self._record(result)), flush=True)
        else:
            self._print_text()
            print(flush=True)
        if result is not None and result.error is not None:
            source = self._prompts[self._current].source
            print(f"specdec: error: {source}: {result.error}", file=sys.stderr)
        self._current += 1
        self._num_shown, self._titled = 0, False

    def _print_text(self) -> None:
        if len(self._prompts) > 1 and not self._titled:
            self._titled = True
            print(("\n" if self._current else "") + self._title())
        print(self._texts[self._current][self._num_shown :], end="", flush=True)
        self._num_shown = len(self._texts[self._current])

    def _title(self) -> str:
        place = f"[{self._current + 1}/{len(self._prompts)}] "
        return place + shorten(
            self._prompts[self._current].label, shutil.get_terminal_size().columns - len(place)
        )

    def _record(self, result: GenerationResult | None) -> dict[str, Any]:
        content = self._prompts[self._current].content
        record: dict[str, Any] = {
            "index": self._current,
            "prompt" if isinstance(content, str) else "messages": content,
            "text": self._texts[self._current],
        }
        carried = self._prompts[self._current].carried
        record |= {f"given_{key}" if key in _OWN else key: value for key, value in carried.items()}
        if result is None:
            return record | {"finish_reason": "cancelled"}
        names = ["finish_reason", "error", "token_ids", "logprobs", "top_logprobs"]
        names += ["prompt_logprobs", "prompt_top_logprobs"]
        record |= {name: getattr(result, name) for name in names}
        record |= {"num_prompt_tokens": len(result.prompt_token_ids), "seed": result.seed}
        return record | {"stats": result.stats.to_dict()}


def shorten(text: str, width: int) -> str:
    """`text`, or as much of it as fits into `width` characters together with an ellipsis.

    >>> shorten("speculative", 12), shorten("speculative", 6)
    ('speculative', 'specu…')
    """
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
