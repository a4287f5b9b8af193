"""The processes of fronts, as that of the engine sees them; see `specdec.serve.processes.front`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.files import user_path
from specdec.serve.config import ServeConfig
from specdec.serve.learning.learner import Learner
from specdec.serve.processes.setup import Setup
from specdec.serve.server import LAST_SECONDS
from specdec.session.decoder import SpecDecoder
from specdec.session.link.hub import Hub
from specdec.session.link.link import Link

logger = logging.getLogger(__name__)

_START = """import sys
sys.path[:] = {path!r}
from specdec.serve.processes.front import main
main({link}, {listening})
"""

_ALONE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_ALONE |= {"MALLOC_ARENA_MAX": "2"}
"""They use no accelerator and compute nothing; what one thread frees, others take again."""


def updates_of(decoder: SpecDecoder, config: ServeConfig) -> Callable[[str], None] | None:
    """What has a checkpoint of the config's folder draft, by name, if clients may ask for that."""
    if config.drafter_updates is None:
        return None
    folder = user_path(config.drafter_updates).resolve()

    def update(name: str) -> None:
        try:
            path = (folder / name).resolve()
        except (OSError, ValueError):  # a character that no name has, or links without an end
            path = folder
        if path == folder or folder not in path.parents or not path.is_dir():
            what = f"there is no checkpoint {name[:200]!r} in the folder of --drafter-updates"
            raise InvalidInputError(f"{what}; name a folder in it")
        try:
            decoder.update_drafter(path)
        except SpecDecError as error:
            line = str(error).replace(str(path), name).replace(str(folder), "")
            raise type(error)(line) from error

    return update


class Fronts:
    """Starts processes at once, so that they are ready when the engine is, and ends them."""

    def __init__(self, count: int, sock: socket.socket, config: ServeConfig) -> None:
        self._sock, self._limits = sock, (config.max_queue, config.max_queued_tokens)
        self._processes: dict[Link, subprocess.Popen[bytes]] = {}
        for _ in range(count):
            self._start()

    def serve(
        self,
        decoder: SpecDecoder,
        setup: Setup,
        on_ready: Callable[[], object],
        learner: Learner | None = None,
    ) -> bool:
        """Steps the engine for them until a signal, or the engine, ends it; whether that was the
        engine. A second signal ends the process as it ends others, at once.

        Args:
            learner: is given what has ended, and may hand weights over.
        """
        hub = Hub(
            decoder,
            on_ready=on_ready,
            on_loss=lambda link: self._replace(link, hub, setup),
            on_stop=lambda: self._stop(setup.config.drain_seconds + 2 * LAST_SECONDS),
            update_drafter=updates_of(decoder, setup.config),
            on_end=learner.take if learner else None,
        )
        if learner:
            learner.start(decoder, hub)

        def stop(number: int, frame: FrameType | None) -> None:
            if hub.stopping:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            hub.stop()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, stop)
        for link in self._processes:
            link.channel.send(setup.message())
            hub.add(link)
        hub.run()
        if learner:
            learner.close()  # before the engine ends, which it may be giving weights
        return hub.dead

    def close(self) -> None:
        """Ends all: those that have served in good order, and the others at once."""
        for link, process in self._processes.items():
            link.channel.close()
            try:
                process.wait(LAST_SECONDS if link.ready else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> Link:
        ours, theirs = socket.socketpair()
        numbers = {"link": theirs.fileno(), "listening": self._sock.fileno()}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, **numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=list(numbers.values()),
                env={**os.environ, **_ALONE},
            )
        link = Link(ours, *self._limits)
        self._processes[link] = process
        return link

    def _replace(self, link: Link, hub: Hub, setup: Setup) -> None:
        """Says how one has ended, and has another one serve in its place."""
        process = self._processes.pop(link)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if link.fault else 1)  # it has ended, or has nothing more to say
        process.kill()
        status = process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        why = f", for {link.fault}" if link.fault else ""
        lost = f"front process {process.pid} was ended by {how}{why}; its outputs are cancelled"
        if not link.ready:  # nor would the next one be
            hub.die(lost)
            return
        logger.error("%s, and another one is started", lost)
        other = self._start()
        other.channel.send(setup.message())
        hub.add(other)

    def _stop(self, seconds: float) -> None:
        """Has all drain and end, within so many seconds."""
        for process in self._processes.values():
            process.terminate()
        late = threading.Timer(seconds, self._end)
        late.daemon = True
        late.start()

    def _end(self) -> None:
        """What was to end has not, whatever holds it up."""
        for process in self._processes.values():
            process.kill()
        line = "specdec: the server does not end by itself, so it is ended now"
        print(line, file=sys.stderr, flush=True)
        os._exit(1)
