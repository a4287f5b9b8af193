"""Texts become tokens: long ones outside the event loop, and none beyond what the context needs."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Lock
from typing import Any

from specdec.base.errors import CapacityError
from specdec.sampling.params import SamplingParams
from specdec.serve.limits import CHARACTERS_PER_TOKEN
from specdec.session.prompts import PromptReader

AT_ONCE = 2048
"""Characters that take less time than to hand them over to a thread and back does."""

SHORT = 16_384
"""Characters that are worth a few milliseconds, and so never wait; also of a text's piece."""

PLAUSIBLE = 8
"""Characters per token, above which tokens are counted piece by piece beforehand."""

SLACK = 16
"""Tokens that the two ends of a piece can add to those it has within the text."""


class SmallestFirst:
    """A thread that does what waits, the smallest first."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"specdec {name}")
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers, self._lock = count(), Lock()

    def submit(self, size: int, work: Callable[[], Any]) -> Future[Any]:
        """What becomes of the work; canceled, it is not begun."""
        made: Future[Any] = Future()
        with self._lock:
            heapq.heappush(self._waiting, (size, next(self._numbers), made, work))
        self._thread.submit(self._do_next)
        return made

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for _, _, made, _ in self._waiting:
                made.cancel()
            self._waiting.clear()

    def _do_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            _, _, made, work = heapq.heappop(self._waiting)
        if made.set_running_or_notify_cancel():
            try:
                made.set_result(_guarded(work))
            except Exception as error:
                made.set_exception(error)


def _guarded(work: Callable[[], Any]) -> Any:
    """Does it; a panic of a library in Rust, which is no Exception, is ours to survive."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class Texts:
    """Makes tokens of texts, and texts of tokens."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._short = SmallestFirst("tokenizer")
        # Never two at once, which not all tokenizers stand: those in Rust, after the first.
        fast = getattr(reader.tokenizer, "is_fast", False)
        self._long = SmallestFirst("tokenizer of long texts") if fast else self._short
        reader.tokenizer("a")

    async def run(
        self, size: int, work: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Does what takes the tokenizer, for about so many characters."""
        if size <= AT_ONCE:
            return _guarded(partial(work, *arguments, **options))
        thread = self._short if size <= SHORT else self._long
        return await asyncio.wrap_future(thread.submit(size, partial(work, *arguments, **options)))

    async def tokens(self, prompt: str | list[int], *, special: bool, most: int) -> list[int]:
        """Tokens of a prompt.

        Args:
            most: tokens that it may have; clearly longer texts are refused unread.

        Raises:
            SpecDecError: it does; or see `PromptReader.tokenize`.
        """
        if isinstance(prompt, str):
            await self._check(prompt, most)
        work = partial(self._reader.tokenize, prompt, add_special_tokens=special)
        tokens: list[int] = await self.run(len(prompt), work)
        return tokens

    async def predicted(self, sampling: SamplingParams, text: str, *, most: int) -> SamplingParams:
        """The sampling with the tokens of this text, its prediction; see `tokens`."""
        await self._check(text, most)
        made: SamplingParams = await self.run(len(text), self._reader.with_prediction, sampling)
        return made

    async def chat(
        self, size: int, render: Callable[[], str], *, special: bool, most: int
    ) -> list[int]:
        """Tokens of what a template makes of so many characters; where that is short, in one go."""

        def work() -> str | list[int]:
            text = render()
            if len(text) > SHORT:
                return text
            return self._reader.tokenize(text, add_special_tokens=special)

        made = await self.run(size, work)
        return (
            await self.tokens(made, special=special, most=most) if isinstance(made, str) else made
        )

    def check_length(self, characters: int, most: int) -> None:
        """Raises:
        CapacityError: no text of so many characters has so few tokens.
        """
        if characters > most * CHARACTERS_PER_TOKEN:
            raise self._too_long(f"{characters:,} characters", most)

    async def _check(self, text: str, most: int) -> None:
        self.check_length(len(text), most)
        if len(text) <= PLAUSIBLE * most:
            return
        found = 0
        for start in range(0, len(text), SHORT):
            piece = text[start : start + SHORT]
            work = self._long.submit(len(text) - start, partial(self._count, piece))
            found += await asyncio.wrap_future(work) - SLACK
            if found > most:
                what = f"more than {most:,} tokens in its first {start + len(piece):,} characters"
                raise self._too_long(what, most)

    def _count(self, piece: str) -> int:
        # a lone surrogate is told of with its place, once all is looked at
        text = piece.encode(errors="replace").decode()
        return len(self._reader.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _too_long(self, what: str, most: int) -> CapacityError:
        return CapacityError(
            f"the text has {what} and the limit is {most:,} tokens, of {CHARACTERS_PER_TOKEN}"
            f" characters at most; shorten it"
        )

    def close(self) -> None:
        self._short.close()
        self._long.close()


def characters(given: Any) -> int:
    """Characters of all texts in what was JSON.

    >>> characters([{"role": "user", "content": [{"text": "abc"}]}])
    22
    """
    return sum(len(one) for one in _strings(given))


def _strings(given: Any) -> Iterator[str]:
    waiting = [given]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
