"""A process of callers as the engine's process knows it, and requests of its own."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple

from specdec.engine.requests.request import Request
from specdec.sampling.params import SamplingParams
from specdec.session.handle import Handle
from specdec.session.link.channel import MAX_BYTES, Channel, Malformed, Numbers

_NUMBERS = count()


class Output:
    """A request of a caller elsewhere, and how much of it was told."""

    __slots__ = ("handle", "key", "link", "num_logprobs", "num_steps", "num_tokens")

    def __init__(self, link: Link, key: int, handle: Handle) -> None:
        self.link, self.key, self.handle = link, key, handle
        self.num_tokens = self.num_steps = self.num_logprobs = 0


class Link:
    """One process of callers.

    Args:
        max_outputs: unfinished ones, and grammars that it waits for, at most; more ends it.

    Attributes:
        channel: leads there.
        number: its own.
        ready: it serves.
        outputs: its unfinished ones, by its own numbers.
        changed: those of which something is to be told.
        grammars: those that it waits for.
        prompt_tokens: of its unfinished outputs.
        numbers: what it was told last.
        untold: processes whose counts it has not been told as they are.
        fault: what it sent that is no message of this program.
    """

    def __init__(self, sock: socket.socket, max_outputs: int, max_prompt_tokens: int) -> None:
        self.channel, self.ready, self.number = Channel(sock, MAX_BYTES), False, next(_NUMBERS)
        self._max_outputs, self._max_prompt_tokens = max_outputs, max_prompt_tokens
        self.fault: str | None = None
        self.outputs: dict[int, Output] = {}
        self.changed: dict[Request, Output] = {}
        self.grammars: dict[int, Future[Any]] = {}
        self.prompt_tokens, self.numbers = 0, Numbers()
        self.untold: set[int] = set()

    def check_room(self, *, outputs: int = 0, grammars: int = 0, prompt_tokens: int = 0) -> None:
        """Before it gets so many more.

        Raises:
            Malformed: its own limits would have refused that.
        """
        for what, most, asked in (
            ("outputs", self._max_outputs, len(self.outputs) + outputs),
            ("grammars", self._max_outputs, len(self.grammars) + grammars),
            ("prompt tokens", self._max_prompt_tokens, self.prompt_tokens + prompt_tokens),
        ):
            if asked > most:
                raise Malformed(f"it asks for {asked:,} {what} at once and the limit is {most:,}")

    def drop(self, key: int) -> Output | None:
        """Forgets an output; None where it has ended."""
        output = self.outputs.pop(key, None)
        if output is not None:
            self.prompt_tokens -= len(output.handle.request.prompt_token_ids)
            self.changed.pop(output.handle.request, None)
        return output


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        prompt_token_ids, output_token_ids: its tokens.
        sampling, seed: it was decoded with.
        finish_reason: why it has ended.
        num_emitted: tokens of each verify step.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    finish_reason: str | None
    num_emitted: list[int]

    @classmethod
    def of(cls, request: Request) -> Ended:
        """What there is to know of a request."""
        return cls(*(getattr(request, name) for name in cls._fields))
