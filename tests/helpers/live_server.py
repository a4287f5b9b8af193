"""A server that runs in a thread of the test's own process, with a tiny model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import httpx

from specdec.base.config import CacheConfig, EngineConfig
from specdec.serve.config import ServeConfig
from specdec.serve.front import Front
from specdec.serve.learning.learner import Learner
from specdec.serve.processes.fronts import updates_of
from specdec.serve.processes.setup import Setup
from specdec.serve.server import Server, listen, take_connections
from specdec.session.decoder import SpecDecoder
from specdec.session.link.channel import Channel, Facts
from specdec.session.link.hub import Hub
from specdec.session.link.link import Link
from specdec.session.link.remote import Remote
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.waiting import HANG, wait_until

MODEL = "tiny"
for phase in ("connect", "read", "write", "pool"):  # by default too few for a busy machine
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, HANG)
# Each call of `httpx.get` makes a client, which reads all certificates of authorities anew.
_ssl_context = httpx._transports.default.create_ssl_context
httpx._transports.default.create_ssl_context = lru_cache(_ssl_context)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ name | default('assistant') }}: {% endif %}"
)


def tiny_decoder(**engine: Any) -> SpecDecoder:
    """A tiny target with drafts, and a tokenizer that has a chat template."""
    verifier = paged_verifier(plain_model("llama"), 4)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = {
        "max_num_seqs": 4,
        "num_draft_tokens": 3,
        "seed": 0,
        "cache": CacheConfig(memory_bytes=2**22),
        **engine,
    }
    return SpecDecoder(verifier, tokenizer, random_dflash(verifier), EngineConfig(**config))


class Live:
    """A running server, whose engine and front are threads instead of processes.

    Attributes:
        decoder: serves.
        hub, setup, front, server, learner: its parts.
        url: where it listens.
    """

    def __init__(
        self,
        decoder: SpecDecoder,
        drafter: str | None = None,
        learn_init: str | None = None,
        **config: Any,
    ) -> None:
        self.decoder, settings = decoder, ServeConfig(port=0, **config)
        sock = listen(settings)
        self.url = take_connections(sock)
        ours, theirs = socket.socketpair()
        limits = settings.max_queue, settings.max_queued_tokens
        updates = updates_of(decoder, settings)
        self.learner: Learner | None = None
        if settings.learn_from_requests is not None:
            self.learner = Learner(settings, decoder.verifier.name, learn_init)
        on_end = self.learner.take if self.learner else lambda ended: None
        self.hub = Hub(decoder, on_stop=self._stop, update_drafter=updates, on_end=on_end)
        link = Link(ours, *limits)
        link.channel.send(Setup(Facts.of(decoder), settings, MODEL, drafter).message())
        self.hub.add(link)
        channel = Channel(theirs)
        threads = [threading.Thread(target=self.hub.run, daemon=True)]
        threads[0].start()
        self.setup = Setup.read(channel.first())
        self.front = Front(Remote(channel, self.setup.facts), self.setup)
        self.server = Server(self.front, sock)
        self._loop = asyncio.new_event_loop()
        threads.append(threading.Thread(target=self._serve, daemon=True))
        threads[1].start()
        self._threads = threads
        if self.learner is not None:
            self.learner.start(decoder, self.hub)
        wait_until(lambda: link.ready)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.server.serve_until_stopped())

    def _stop(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self.server.stop)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """What it answers."""
        return httpx.get(self.url + path, **options)

    def options(self, path: str, **options: Any) -> httpx.Response:
        """What it says of what may be asked."""
        return httpx.options(self.url + path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """What it answers to a body."""
        return httpx.post(self.url + path, **options)

    def join(self) -> None:
        """Waits for its end."""
        for thread in reversed(self._threads):
            thread.join(HANG)
            assert not thread.is_alive(), f"the server runs on after {HANG:g} seconds"


@contextmanager
def live_server(
    decoder: SpecDecoder | None = None, drafter: str | None = None, **config: Any
) -> Iterator[Live]:
    """A server, which has ended afterwards."""
    live = Live(decoder or tiny_decoder(), drafter, **{"drain_seconds": 0.0, **config})
    try:
        yield live
    finally:
        live.hub.stop()
        live.join()
        if live.learner is not None:
            live.learner.close()
