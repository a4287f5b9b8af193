"""Calls that end early, at any instruction: whoever comes next is served, and nobody waits for
ever.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.engine import engine as engine_module
from specdec.engine.requests import scheduler
from specdec.sampling.params import SamplingParams
from specdec.session import callers
from specdec.session import handle as handle_module
from specdec.session import session as session_module
from specdec.session import turns as turns_module
from specdec.session.decoder import SpecDecoder
from specdec.session.session import Session
from specdec.session.turns import Turns
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer
from tests.helpers.waiting import HANG, gated, in_time, wait_until

PROMPT, SAMPLING = [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True)
HOST = (session_module, turns_module, callers, handle_module, engine_module, scheduler)
WATCHED = {str(module.__file__) for module in HOST}


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    config = EngineConfig(max_num_seqs=2, cache=CacheConfig(memory_bytes=2**20))
    return SpecDecoder(paged_verifier(plain_model("llama"), 4), tiny_tokenizer(), None, config)


def is_sound(decoder: SpecDecoder, expected: list[int]) -> bool:
    right = decoder.generate(PROMPT, SAMPLING).token_ids == expected
    session = decoder.session
    return right and not decoder.engine.pool.num_used and session.idle and not session._turns.taken


class Interrupts:
    """An exception where Python asks for signals, as a function begins or one in C has ended, and
    another as it is dealt with.

    Args:
        first: place of the first one in the engine's host code, counted from 1.
        second: of the other, counted from where a session begins to tidy up.
    """

    def __init__(self, first: int, second: int) -> None:
        self.places, self._first, self._second = 0, first, second
        self._hook = self._count  # kept, as Python 3.11 may call it when it has just let it go

    def __enter__(self) -> None:
        sys.setprofile(self._hook)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def tidying(self, work: Callable[..., None]) -> Callable[..., None]:
        """`work`, with the second interrupt from there on, if the first one has come."""

        def tidied(*args: Any) -> None:
            if self.places == self._first:
                sys.setprofile(self._hook)
            work(*args)

        return tidied

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in WATCHED:
            self.places += 1
            if self.places in (self._first, self._first + self._second):
                raise KeyboardInterrupt


# in `__del__`, where Python drops it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("second", [1, 2, 3, 5, 8, 12, 20, 40])
def test_two_interrupts_at_any_two_places(
    decoder: SpecDecoder, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call is right, and all blocks are free."""

    def decode(first: int) -> int:
        interrupts = Interrupts(first, second)
        with monkeypatch.context() as patch, interrupts:
            for name in ("_fail", "_hand_over", "cancel"):
                patch.setattr(Session, name, interrupts.tidying(getattr(Session, name)))
            decoder.generate([PROMPT, [8, 9]], SAMPLING)
        return interrupts.places

    def sweep() -> list[int]:
        expected, broken = decoder.generate(PROMPT, SAMPLING).token_ids, []
        places = decode(-99)  # none of them comes
        assert places > 200
        for first in range(1, places, 5):
            with suppress(KeyboardInterrupt):
                decode(first)
            if not is_sound(decoder, expected):
                broken.append(first)
        return broken

    assert in_time(sweep) == []


def held(turns: Turns) -> Callable[[], None]:
    """The turn, held by another thread; gives what passes it on."""
    let_go, has = threading.Event(), threading.Event()

    def hold() -> None:
        assert turns.claim(sys._getframe())
        has.set()
        let_go.wait()
        with turns._lock:
            turns.pass_on()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    has.wait()

    def pass_on() -> None:
        let_go.set()
        thread.join()

    return pass_on


@pytest.mark.parametrize("given", [False, True], ids=["before", "after"])
def test_who_leaves_hands_on_the_turn(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it waits, before or after it was its turn; another one gets it without
    looking for itself.
    """
    turns, others = Turns(threading.RLock()), []
    monkeypatch.setattr(turns_module, "PATIENCE", HANG)
    let_go = held(turns)

    def other() -> None:
        others.append(
            turns.wait(lambda: False, sys._getframe()) or turns.wait(lambda: False, sys._getframe())
        )

    waits = threading.Thread(target=other, daemon=True)

    class Interrupted:
        def acquire(self, timeout: float = 0) -> bool:
            if timeout:
                monkeypatch.undo()
                monkeypatch.setattr(turns_module, "PATIENCE", HANG)
                waits.start()
                wait_until(lambda: len(turns._waiting) == 2)
                if given:
                    let_go()
                raise TimeoutError
            return True

        def release(self) -> None:
            pass

    monkeypatch.setattr(turns_module.threading, "Lock", Interrupted)
    with pytest.raises(TimeoutError):
        turns.wait(lambda: False, sys._getframe())
    if not given:
        let_go()
    wait_until(lambda: others)
    assert others == [True] and not turns._waiting


def test_a_turn_that_was_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call has ended without passing it on, in a thread that lives or one that does not."""
    monkeypatch.setattr(turns_module, "PATIENCE", 0.001)
    turns = Turns(threading.RLock())
    in_time(lambda: turns.claim(sys._getframe()))
    assert turns.taken and turns.wait(lambda: False, sys._getframe())

    def lose() -> None:
        turns.claim(sys._getframe())

    turns.pass_on()
    lose()
    assert in_time(
        lambda: (
            turns.wait(lambda: False, sys._getframe()) or turns.wait(lambda: False, sys._getframe())
        )
    )


@pytest.fixture
def handler() -> Iterator[list[str]]:
    """What a signal's handler was told when it asked the decoder."""
    said: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    yield said
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["generate", "stream", "step", "submit"])
def test_a_call_from_within_a_step_is_refused(
    decoder: SpecDecoder, handler: list[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the handler of a signal, or a drafter: it would wait for itself;
    what is decoded goes on.
    """
    expected = decoder.generate(PROMPT, SAMPLING).token_ids
    ask: dict[str, Callable[[], object]] = {
        "generate": lambda: decoder.generate([9], SAMPLING),
        "stream": lambda: next(iter(decoder.stream([9], SAMPLING))),
        "step": decoder.session.step,
        "submit": lambda: [decoder.session.submit([9], SAMPLING) for _ in range(3)].pop().result(),
    }

    def on_signal(*_: object) -> None:
        with pytest.raises(
            InvalidInputError, match="this thread is in the midst of a step"
        ) as refused:
            ask[how]()
        handler.append(str(refused.value))

    signal.signal(signal.SIGUSR1, on_signal)
    monkeypatch.setattr(decoder.session, "max_queue", 2)
    step, engine = decoder.engine.step, decoder.engine

    def signalled() -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", signalled)
        assert decoder.generate(PROMPT, SAMPLING).token_ids == expected
    assert handler and is_sound(decoder, expected)


def test_whatever_a_drafter_raises_asynchronous_callers_are_served(
    decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that steps for them goes on."""

    async def ask() -> Any:
        return await asyncio.wait_for(decoder.session.submit(PROMPT, SAMPLING), HANG)

    def leave(*_: object) -> Any:
        raise SystemExit(7)

    expected = decoder.generate(PROMPT, SAMPLING).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.runner, "step", leave)
        with pytest.raises(RuntimeError, match="the engine failed: 7"):
            in_time(lambda: asyncio.run(ask()))
    assert in_time(lambda: asyncio.run(ask())).token_ids == expected


def end_of(program: str) -> tuple[int, str, str]:
    """The status of a program and what it writes."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    return done.returncode, done.stdout, done.stderr


UNFINISHED = """
import asyncio, os, signal, sys, threading
from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.session.forks import tell_of_exit
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer
class Asked:
    def at_exit(self):
        signal.raise_signal(signal.SIGINT)
asked = Asked()
if os.fork():
    status = os.waitstatus_to_exitcode(os.wait()[1])
    tell_of_exit(asked)
    print(status, flush=True)
verifier, config = paged_verifier(plain_model("llama"), 4), EngineConfig(max_num_seqs=8)
decoder = SpecDecoder(verifier, tiny_tokenizer(), None, config)
sampling = SamplingParams(max_tokens=480, ignore_eos=True)
def work():
    while True:
        decoder.generate([8, 9], sampling)
async def main():
    global handle
    handle = decoder.session.submit([5, 6, 7], sampling)
    await anext(handle)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
stream = decoder.stream([4], sampling)
next(iter(stream))
asyncio.run(main())
sys.exit(3)
"""


def test_a_program_that_leaves_work_unfinished_ends_with_its_own_status() -> None:
    """Daemon threads decode, an asynchronous request and a stream are open. An interrupt while it
    ends, as of the process that has waited for the other one, ends it at once: nobody waits for
    threads that decode then, and none of them aborts the process.
    """
    assert end_of(UNFINISHED) == (130, "3\n", "")


UPDATING = """
import hashlib, sys, threading
from specdec.session.link.updates import Updates
def read(name):
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # outside Python, as torch is
begun = threading.Event()
updates = Updates(read, lambda call: call())
updates.begin("another", lambda error: print(f"read, {error}", file=sys.stderr))
begun.wait()
sys.exit(3)
"""


def test_a_program_that_ends_while_weights_are_read_ends_with_its_own_status() -> None:
    assert end_of(UPDATING) == (3, "", "read, None\n")


def test_at_the_end_nobody_decodes(decoder: SpecDecoder) -> None:
    """A step under way is waited for, its thread stops there, and who comes later is told."""
    other = SpecDecoder(decoder.verifier, decoder.tokenizer, None, decoder.engine.config)
    with gated(other.engine, 2) as gate:
        longer = SamplingParams(max_tokens=9, ignore_eos=True)
        thread = threading.Thread(target=other.generate, args=(PROMPT, longer), daemon=True)
        thread.start()
        wait_until(lambda: gate.stands)
        ends = threading.Thread(target=other.session.at_exit, daemon=True)
        ends.start()
        wait_until(lambda: other.session._turns.ending)
        assert ends.is_alive()
    in_time(ends.join)
    assert thread.is_alive() and other.engine.has_work
    with pytest.raises(CapacityError, match="the program is ending"):
        other.generate(PROMPT, SAMPLING)


ENDS = """
import os, sys, tempfile
from specdec.cli import main as cli

class Last:
    def __del__(self):
        os.abort()

def interrupted():
    print("cut", end="")
    return int(sys.argv[1])

held, folder, cli.main = Last(), tempfile.TemporaryDirectory(), interrupted
print(folder.name)
cli.command()
"""


@pytest.mark.parametrize(("status", "code"), [(130, 130), (0, -signal.SIGABRT)])
def test_an_interrupted_command_ends_without_destructors(status: int, code: int) -> None:
    """Of libraries, which abort where a thread is within them; what is to be done at the exit is
    done, and what was printed is written.
    """
    command = [sys.executable, "-c", ENDS, str(status)]
    done = subprocess.run(command, capture_output=True, text=True)
    folder, _, cut = done.stdout.partition("\n")
    assert done.returncode == code, done.stderr
    assert cut == "cut" and not Path(folder).exists()
