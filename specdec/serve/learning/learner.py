"""Trains the drafter on what is served, beside the engine: a thread that keeps finished requests,
starts the training in a process of its own, and hands weights over that are better.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdec.base.errors import SpecDecError, one_line
from specdec.base.files import read_json
from specdec.base.writing import append, make_folder, remove_folder
from specdec.serve.config import ServeConfig
from specdec.serve.learning.journal import RequestJournal, is_kept
from specdec.session.decoder import SpecDecoder
from specdec.session.link.hub import Hub
from specdec.session.link.link import Ended

logger = logging.getLogger(__name__)

_START = """import os, sys, threading
sys.path[:] = {path!r}
os.nice({nice})
def watch():
    while os.read(0, 65536):
        pass
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
from specdec.cli.main import main
sys.exit(main({words!r}))
"""
"""It ends with the server, however that ends: then its input does. Unbuffered: no lock then."""

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_WAITING = 4096  # finished requests that are not yet kept; more are lost
_LOOK_SECONDS = 0.5
_LOG, _REPORT, _WEIGHTS = "log.txt", "learned.json", "drafter"


@dataclass(slots=True)
class Learned:
    """What came of it so far.

    Attributes:
        rounds: trainings that have ended, by what became of them: taken, not better, failed.
        before, after: tau on held-out requests of the last one, by the weights that were served
            then and those that it has trained; 0 before there was one.
    """

    rounds: dict[str, int] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0


@dataclass(slots=True)
class _Served:
    """Verify steps of finished requests since the weights have drafted."""

    steps: int = 0
    tokens: int = 0

    @property
    def tau(self) -> str:
        return f"{self.tokens / self.steps:.2f}" if self.steps else "unknown"


class Learner:
    """Keeps finished requests and learns from them.

    Args:
        config: of the server; it names the folder.
        init: checkpoint whose weights are served; None only keeps requests.
    """

    def __init__(self, config: ServeConfig, model: str, init: str | None) -> None:
        assert config.learn_from_requests is not None
        self._config, self._model, self._init = config, model, init
        self.journal = RequestJournal(config.learn_from_requests, config.learn_limit)
        self._folder = self.journal.folder
        self._ended: queue.Queue[Ended] = queue.Queue(_MOST_WAITING)
        self._closing = threading.Event()
        self._new_tokens, self._served, self._learned = 0, _Served(), Learned()
        self._number = max(map(_number, self._rounds()), default=0)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._full = False

    @property
    def line(self) -> str:
        """Says what is kept, where, and how it is used."""
        device, limit = self._config.learn_device, self._config.learn_limit
        use = "specdec train learn can train its drafter on them"
        use = f"its drafter learns from them on {device}" if device else use
        return (
            f"finished requests are kept in {self._folder}, for its owner alone and at most"
            f" {limit / 2**20:g} MiB; those with store false or a cache_salt are not; {use}"
        )

    def start(self, decoder: SpecDecoder, hub: Hub) -> None:
        """Begins."""
        self._thread = threading.Thread(target=self._run, args=(decoder, hub), daemon=True)
        self._thread.start()

    def take(self, request: Ended) -> None:
        """Takes a finished request, without waiting for the disk."""
        with suppress(queue.Full):
            self._ended.put_nowait(request)

    def close(self) -> None:
        """Keeps what has come, and ends the training that is under way."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.journal.close()

    def _run(self, decoder: SpecDecoder, hub: Hub) -> None:
        while not (self._closing.is_set() and self._ended.empty()):
            with suppress(queue.Empty):
                self._keep(self._ended.get(timeout=_LOOK_SECONDS))
            if not self._closing.is_set():
                self._look(decoder, hub)

    def _keep(self, request: Ended) -> None:
        self._served.steps += len(request.num_emitted)
        self._served.tokens += sum(request.num_emitted)
        if not is_kept(request):
            return
        try:
            if self.journal.add(request):
                self._new_tokens += len(request.output_token_ids)
            self._full = False
        except SpecDecError as error:
            if not self._full:
                logger.warning("learning: requests are not kept: %s", error)
            self._full = True

    def _look(self, decoder: SpecDecoder, hub: Hub) -> None:
        """Starts a round where one is due, and takes over what one that has ended has left."""
        try:
            if self._process is None:
                if self._init is not None and self._new_tokens >= self._config.learn_every:
                    self._begin()
                return
            ended = self._process.poll() is not None
            self._log(self._process)
            if ended:
                process, self._process = self._process, None
                outcome = self._outcome(process, decoder, hub)
                rounds = self._learned.rounds
                rounds[outcome] = rounds.get(outcome, 0) + 1
                hub.tell_learned(asdict(self._learned))
        except SpecDecError as error:
            logger.warning("learning: %s", error)
        except Exception:  # the server goes on without
            logger.exception("learning: a defect")

    def _begin(self) -> None:
        assert self._init is not None
        self._number, self._new_tokens = self._number + 1, 0
        for old in self._rounds():  # but the one that drafts
            if (old / _WEIGHTS).resolve() != Path(self._init).resolve():
                remove_folder(old)
        out = make_folder(self._out, private=True)
        words = ["train", "learn", "--out", str(out), "--model", self._model, "--init", self._init]
        words += ["--answers-from", str(self._folder), "--device", str(self._config.learn_device)]
        if self._config.learn_config is not None:
            words += ["--config", self._config.learn_config]
        start = _START.format(path=sys.path, nice=self._config.learn_nice, words=words)
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in _OF_RANKS},
            umask=0o077,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        text = "learning: %s is trained; served tau %s so far; %s says how far it is"
        logger.warning(text, out.name, self._served.tau, out / _LOG)

    def _log(self, process: subprocess.Popen[bytes]) -> None:
        """Writes down what a round has said."""
        assert process.stdout is not None
        while said := process.stdout.read(65_536):
            append(self._out / _LOG, said.decode("utf-8", "replace"), private=True)

    def _outcome(self, process: subprocess.Popen[bytes], decoder: SpecDecoder, hub: Hub) -> str:
        """What became of a round, in a word; better weights draft from now on."""
        status, out = process.returncode, self._out
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if status < 0 or not (out / _REPORT).exists():
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "failed"
            logger.warning("learning: %s %s; %s: %s", out.name, how, _LOG, _last(out / _LOG))
            return "failed"
        report = read_json(out / _REPORT, way_out="leave the round's folder alone")
        self._learned.before, self._learned.after = report["tau"]
        if not report["better"]:
            logger.warning("learning: %s is not taken: %s", out.name, report["says"])
            return "not better"
        logger.warning("learning: %s is better: %s", out.name, report["says"])
        try:
            decoder.update_drafter(out / _WEIGHTS)
        except SpecDecError as error:
            logger.warning("learning: %s cannot draft: %s", out.name, error)
            return "failed"
        hub.changed_drafter(out.name)
        logger.warning("learning: served tau was %s before", self._served.tau)
        self._init, self._served = str(out / _WEIGHTS), _Served()
        return "taken"

    @property
    def _out(self) -> Path:
        return self._folder / f"learned-{self._number:04d}"

    def _rounds(self) -> list[Path]:
        """Folders of rounds, this one's and those of earlier servers."""
        return sorted(self._folder.glob("learned-[0-9][0-9][0-9][0-9]"))


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _last(log: Path) -> str:
    """The last line of a log, short."""
    with suppress(OSError):
        lines: list[Any] = log.read_text("utf-8", "replace").split("\n")
        return one_line(Exception(next((one for one in reversed(lines) if one.strip()), "empty")))
    return "it cannot be read"
