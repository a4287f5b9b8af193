"""An engine of another process, as its callers see it; `specdec.session.link.hub` is its side."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from specdec.base.errors import CapacityError
from specdec.engine.requests.request import Request, Status
from specdec.sampling.params import SamplingParams
from specdec.session.handle import Handle, Stream
from specdec.session.link.channel import Channel, Facts, Numbers, Rows, error_of, packed, unpacked
from specdec.session.text import IncrementalDecoder, text_of
from specdec.session.thinking import parted_decoder

_FORMS: dict[str, Callable[[Any], Any]] = {
    "num_by_rank": lambda pairs: Counter(dict(pairs)),
    "prompt_top_logprobs": lambda tops: [dict(top) for top in tops],
}
"""Values that a request has at its end and JSON has no word for."""


class Remote:
    """Submits requests to another process, and hands out what comes of them; in one event loop.

    Attributes:
        numbers: the engine's, as it was told last.
        rows: of one of its last steps.
        told: by its kind, called with what a message tells: "totals" of other processes, by their
            numbers, the name of the "drafter" from now on, what came of learning ("learned"), and
            that the engine has failed for good ("dead"), with why where it could not say so.
    """

    def __init__(self, channel: Channel, facts: Facts) -> None:
        self.channel, self.facts = channel, facts
        self.reader, self.admission = facts.reader, facts.admission
        self.numbers, self.rows = Numbers(), Rows("", [])
        self.told: dict[str, Callable[..., object]] = {}
        self._open: dict[int, Handle] = {}
        self._listening: set[int] = set()
        self._touched: dict[Handle, None] = {}
        self._keys = count()
        self._unsent: list[tuple[Any, ...]] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}  # for what is neither output nor count
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.admission.max_model_len

    def begin(self) -> None:
        """Begins to read, and says that callers are served; in their event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.channel.fileno(), self._read)
        self._loop.call_soon(self._read)  # what came before anybody looked
        self.send(("ready",))

    def close(self) -> None:
        """Ends; nobody waits for anything any more."""
        if self._loop is not None:
            self._loop.remove_reader(self.channel.fileno())
            self._loop.remove_writer(self.channel.fileno())
            self._loop = None
            self.channel.close()

    def send(self, message: tuple[Any, ...]) -> None:
        """Sends a message, soon and with all others that come at the same time."""
        if self._loop is None:
            return
        if not self._unsent:
            self._loop.call_soon(self._post)
        self._unsent.append(message)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        index: int,
        incremental: bool,
        stream: Stream,
        parted: bool = False,
        tagged: bool = False,
    ) -> Handle:
        """Queues a request; see `Session.submit`. `parted` tells thinking and answer apart, with
        the tags of the thinking if `tagged`."""
        if self._loop is None:
            raise CapacityError("the engine has ended")
        request = self.admission.new_request(prompt_token_ids, sampling)
        tokenizer = self.reader.tokenizer
        text: IncrementalDecoder | None = None
        special = sampling.special_tokens
        if parted:
            text = parted_decoder(tokenizer, prompt_token_ids, sampling, tagged=tagged)
        if text is None and (incremental or sampling.stop):
            options: Any = {"min_tokens": sampling.min_tokens or 0, **special}
            text = IncrementalDecoder(tokenizer, sampling.stop, **options)
        whole = partial(text_of, tokenizer, **special)
        handle = Handle(self, stream, request, index, text, whole)
        self._open[request.request_id] = handle
        if incremental:
            self._listening.add(request.request_id)
        about = sampling.plain(), packed(request.prompt_token_ids)
        self.send(("new", request.request_id, *about))
        return handle

    def cancel(self, request: Request) -> None:
        """Ends a request, of which nothing more comes; does nothing when it has ended."""
        if self._forget(request.request_id) is not None:
            self.send(("cancel", request.request_id))

    def start(self) -> None:
        """Nothing: the other process steps."""

    def run_until(self, ready: Callable[[], bool]) -> None:
        """Cannot be waited for here."""
        raise RuntimeError("what an engine of another process gives comes in the event loop")

    async def grammar(self, sampling: SamplingParams) -> None:
        """Waits until the grammar of a request can be followed.

        Raises:
            SpecDecError: see `Admission.compiled_grammar`, or it cannot be compiled.
        """
        await self._told("grammar", sampling.plain())

    async def update_drafter(self, name: str) -> None:
        """Waits until the weights of a checkpoint draft.

        Raises:
            SpecDecError: see `SpecDecoder.update_drafter`; the old weights stay.
        """
        await self._told("drafter", name)

    async def _told(self, kind: str, about: Any) -> None:
        """Waits until the other process has done something."""
        key = next(self._keys)
        done = self._waiting[key] = asyncio.get_running_loop().create_future()
        self.send((kind, key, about))
        try:
            await done
        finally:
            del self._waiting[key]
            if done.cancelled():  # as it is with who waits
                self.send(("leave", key))

    def _forget(self, key: int) -> Handle | None:
        self._listening.discard(key)
        return self._open.pop(key, None)

    def _post(self) -> None:
        messages, self._unsent = self._unsent, []
        if self._loop is not None:
            self.channel.send(*messages)
            if self.channel.congested:
                self._loop.add_writer(self.channel.fileno(), self._flush)

    def _flush(self) -> None:
        self.channel.flush()
        if self._loop is not None and not self.channel.congested:
            self._loop.remove_writer(self.channel.fileno())

    def _read(self) -> None:
        """Takes over all that has come, and hands it out: one chunk of each output."""
        try:
            messages = self.channel.receive()
        except EOFError:
            self._end("the process of the engine has ended")
            return
        for kind, *about in messages:
            take = self.told.get(kind) or getattr(self, f"_take_{kind}")
            take(*about)
        touched, self._touched = self._touched, {}
        for handle in touched:
            self._deliver(handle)

    def _take_news(
        self, num_keys: int, more: list[list[Any]], numbers: list[int], integers: bytes
    ) -> None:
        self.numbers, given = Numbers(*numbers), unpacked(integers, num_keys)
        keys, counts, parts = (given[num_keys * part :][:num_keys] for part in range(3))
        at = 3 * num_keys
        step = at + sum(counts)
        for key, num_tokens, num_steps in zip(keys, counts, parts, strict=True):
            handle = self._open.get(key)
            if handle is not None:
                handle.request.steps += given[step : step + num_steps]
                handle.extend(given[at : at + num_tokens])
                self._touched[handle] = None
            at, step = at + num_tokens, step + num_steps
        for kind, key, *about in more:
            handle = self._open.get(key)
            if handle is None:
                continue
            if kind == "scored":
                values, tops = about
                handle.request.logprobs += values
                handle.request.top_logprobs += map(dict, tops)
            else:
                for name, value in about[0].items():
                    setattr(handle.request, name, _FORMS[name](value) if name in _FORMS else value)
                handle.request.status = Status.FINISHED

    def _deliver(self, handle: Handle) -> None:
        request, stream = handle.request, handle.stream
        key = request.request_id
        ended = request.status is Status.FINISHED
        if ended:
            self._forget(key)
        if (ended or (key in self._listening and not stream.paused)) and not handle.deliver():
            self.cancel(request)

    def _take_refused(self, key: int, kind: str, line: str) -> None:
        handle = self._forget(key)
        if handle is not None:
            handle.stream.fail(error_of(kind, line))

    def _take_failed(self, line: str) -> None:
        handles, self._open = self._open, {}
        self._listening, self._touched = set(), {}
        for handle in handles.values():
            handle.stream.fail(RuntimeError(f"the engine failed: {line}"))

    def _take_done(self, key: int, *error: str) -> None:
        waiting = self._waiting.get(key)
        if waiting is None or waiting.done():
            return
        if error:
            waiting.set_exception(error_of(*error))
        else:
            waiting.set_result(None)

    def _take_rows(self, shape: str, spent: list[tuple[int, int]]) -> None:
        self.rows = Rows(shape, spent)

    def _end(self, line: str) -> None:
        self.close()
        self._take_failed(line)
        for key in list(self._waiting):
            self._take_done(key, "RuntimeError", line)
        self.told["dead"](line)
