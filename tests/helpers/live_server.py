"""A server that runs in a thread of the test's own process, with a tiny model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdec.config import CacheConfig, EngineConfig
from specdec.decoder import SpecDecoder
from specdec.serve.config import ServeConfig
from specdec.serve.front import Front
from specdec.serve.server import Server, listen
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer

MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ name | default('assistant') }}: {% endif %}"
)


def tiny_decoder(**engine: Any) -> SpecDecoder:
    """A tiny target with drafts, and a tokenizer that has a chat template."""
    verifier = paged_verifier(plain_model("llama"), 4)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = {"max_num_seqs": 4, "num_draft_tokens": 3, "cache": CacheConfig(memory_bytes=2**22), **engine}
    return SpecDecoder(verifier, tokenizer, random_dflash(verifier), EngineConfig(**config))


class Live:
    """A running server.

    Attributes:
        front, server: its parts.
        url: where it listens.
    """

    def __init__(self, decoder: SpecDecoder, drafter: str | None = None, **config: Any) -> None:
        settings = ServeConfig(port=0, **config)
        self.front = Front(decoder, settings, MODEL, drafter)
        self.server = Server(self.front, listen(settings))
        self.url = self.server.url
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve_until_stopped()), daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)

    def join(self, seconds: float = 30) -> None:
        """Waits for its end."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the server runs on after {seconds} seconds"


def wait_until(done: Any, seconds: float = 30) -> None:
    """Waits for something that another thread does."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"nothing after {seconds} seconds"
        time.sleep(0.005)


@contextmanager
def live_server(decoder: SpecDecoder | None = None, drafter: str | None = None, **config: Any) -> Iterator[Live]:
    """A server, which has ended afterwards."""
    live = Live(decoder or tiny_decoder(), drafter, **{"drain_seconds": 0.0, **config})
    try:
        yield live
    finally:
        live.server.stop()
        live.join()
