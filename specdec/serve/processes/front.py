"""The process of a front: HTTP, templates, tokens of texts and texts of tokens."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading

from specdec.serve.front import Front
from specdec.serve.processes.setup import Setup
from specdec.serve.server import LAST_SECONDS, Server
from specdec.session.link.channel import Channel
from specdec.session.link.remote import Remote


def main(link: int, listening: int) -> None:
    """Serves until SIGTERM, which drains, or until the process of the engine ends."""
    for one in (signal.SIGINT, signal.SIGHUP):  # who started this sends SIGTERM when it is to end
        signal.signal(one, signal.SIG_IGN)
    logging.basicConfig(format="specdec: %(message)s", level=logging.WARNING, stream=sys.stderr)
    channel = Channel(socket.socket(fileno=link))
    try:
        setup = Setup.read(channel.first())
    except EOFError:
        return
    front = Front(Remote(channel, setup.facts), setup)
    server = Server(front, socket.socket(fileno=listening))

    def end() -> None:
        late = threading.Timer(setup.config.drain_seconds + 2 * LAST_SECONDS, os._exit, (1,))
        late.daemon = True
        late.start()
        server.stop()

    front.on_end = end
    gc.collect()
    gc.freeze()  # what stays is not looked through again

    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        await server.serve_until_stopped()

    asyncio.run(serve())
