"""A server that runs in a thread of the test's own process, with a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from specdec.base.config import CacheConfig, EngineConfig
from specdec.serve.config import ServeConfig
from specdec.serve.front import Front
from specdec.serve.server import Server, listen
from specdec.session.decoder import SpecDecoder
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.waiting import HANG, wait_until

MODEL = "tiny"
for phase in ("connect", "read", "write", "pool"):  # five seconds by default, which a busy machine may need
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, HANG)
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

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join(HANG)
        assert not self._thread.is_alive(), f"the server runs on after {HANG:g} seconds"


@contextmanager
def live_server(decoder: SpecDecoder | None = None, drafter: str | None = None, **config: Any) -> Iterator[Live]:
    """A server, which has ended afterwards."""
    live = Live(decoder or tiny_decoder(), drafter, **{"drain_seconds": 0.0, **config})
    try:
        yield live
    finally:
        live.server.stop()
        live.join()
