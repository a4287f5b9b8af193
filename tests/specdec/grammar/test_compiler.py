"""Grammars are compiled in a process of its own: with limits, in a fair order, for no longer than
somebody waits.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("xgrammar")

import xgrammar

from specdec.base.errors import CapacityError, InvalidInputError
from specdec.grammar import compiler as compiler_module
from specdec.grammar import queues as queues_module
from specdec.grammar import worker
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.limits import MAX_SECONDS, QUEUES, QUICK_SECONDS
from specdec.grammar.process import Ended, TooSlow, ask, reason_of
from specdec.grammar.queues import Job, Queues, queues
from specdec.sampling.params import SamplingParams
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.waiting import HANG, wait_until

TOKENIZER = tiny_tokenizer()


def long(name: str) -> Grammar:
    """What takes seconds of a processor."""
    return Grammar.choice([f"{name}{number}" for number in range(90_000)])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, [TOKENIZER.eos_token_id])


def children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:  # it has ended
        return []


def compiling() -> list[int]:
    """Processes that compile."""
    process = queues().process._process
    return (
        []
        if process is None
        else [child for watch in children(process.pid) for child in children(watch)]
    )


def has_read() -> bool:
    """Whether something compiles, and has its text."""
    with suppress(ProcessLookupError):
        return any(os.getpriority(os.PRIO_PROCESS, one) for one in compiling())
    return False


def held() -> bool:
    """Whether something compiles, which then stands still and is never done."""
    for one in compiling():
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
            return True
    return False


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.ebnf("root ::= missing"), "missing"),
        (Grammar.ebnf("root ::= " + "(" * 100_000), "cannot be compiled"),
        (Grammar.regex("(?=a)" * 3000 + "b"), "nested too deeply"),
        (Grammar.regex("(?=.{1,60000}b)a{3,60000}c"), "states"),
    ],
)
def test_refused(compiler: GrammarCompiler, grammar: Grammar, message: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidInputError, match=message) as caught:
            compiler.compiled(grammar).result(HANG)
        assert "\n" not in str(caught.value)
    assert grammar in compiler._jobs


@pytest.mark.parametrize("again", [2.0, -1.0])
def test_both_ways_give_the_same(
    compiler: GrammarCompiler, again: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules that are compiled again, and what was compiled."""
    grammar = Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^x+$", "maxLength": 3}},
        }
    )
    monkeypatch.setattr(worker, "AGAIN_SECONDS", again)
    monkeypatch.setattr(worker.time, "process_time", lambda: 0.0)
    again_asked, text = worker._compiled(compiler._library(frozenset()).compiler, grammar)
    assert again_asked == (again > 0)
    made = (
        compiler._library(frozenset()).compiler.compile_grammar(text)
        if again_asked
        else xgrammar.CompiledGrammar.deserialize_json(text, compiler._library(frozenset()).info)
    )
    assert made.serialize_json() == compiler.compiled(grammar).result(HANG).serialize_json()


def test_limits_of_a_process() -> None:
    """Of memory and of a processor's time."""
    code = "from specdec.grammar import worker; worker._limit({}); {}"
    run = [sys.executable, "-c"]
    out = subprocess.run(
        [*run, code.format(100, "bytearray(2**31)")], capture_output=True, text=True, timeout=HANG
    )
    assert "MemoryError" in out.stderr
    assert (
        subprocess.run([*run, code.format(0.05, "\nwhile True: pass")], timeout=HANG).returncode
        == -signal.SIGPROF
    )


def test_what_takes_too_long(compiler: GrammarCompiler) -> None:
    with (
        queues().process.open(compiler._library(frozenset()).vocabulary) as link,
        pytest.raises(TooSlow, match="20 seconds"),
    ):
        ask(link, compiler._library(frozenset()).vocabulary, long("a"), 0.01)


def test_a_crash_is_of_one_grammar(compiler: GrammarCompiler) -> None:
    """The compiling process, then the one that begins it."""
    vocabulary = compiler._library(frozenset()).vocabulary
    with ThreadPoolExecutor() as threads, queues().process.open(vocabulary) as link:
        asked = threads.submit(ask, link, vocabulary, long("a"), 600)
        wait_until(has_read)
        wait_until(held)
        os.kill(compiling()[0], signal.SIGKILL)
        with pytest.raises(InvalidInputError, match="ended the process"):
            asked.result(HANG)
    process = queues().process._process
    assert process is not None
    process.kill()
    process.wait()
    assert compiler.compiled(Grammar.regex("a+b")).result(HANG)
    assert queues().process._process is not process


def test_nobody_waits(compiler: GrammarCompiler) -> None:
    """It is compiled as long as one does."""
    grammar = long("b")
    one, other = compiler.compiled(grammar), compiler.compiled(grammar)
    wait_until(held)
    assert one.cancel() and not compiler._jobs[grammar].stopped
    assert other.cancel() and compiler._jobs[grammar].stopped
    wait_until(lambda: not compiling())
    again = compiler.compiled(grammar)
    assert not compiler._jobs[grammar].stopped
    again.cancel()
    wait_until(lambda: not compiling())


def test_no_process(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose fault that is not."""

    def end(*_: Any) -> None:
        raise Ended

    monkeypatch.setattr(queues().process, "open", end)
    grammar = Grammar.regex("a+c")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended twice"):
            compiler.compiled(grammar).result(HANG)
    monkeypatch.undo()
    assert compiler.compiled(grammar).result(HANG)


@pytest.fixture
def own_queues() -> Iterator[Queues]:
    made = Queues()
    yield made
    made.close()


def test_small_ones_pass_giants(own_queues: Queues) -> None:
    """Giants hold up what comes after them in their own queue; in a queue the shorter go first."""
    go_on, order = Event(), list[int]()

    def giant(job: Job, seconds: float) -> str:
        if seconds < MAX_SECONDS:
            raise TooSlow("")
        assert go_on.wait(HANG)
        return "late"

    def added(size: int, work: Any) -> Future[Any]:
        job = Job(size, work)
        own_queues.add(job)
        own = job.join()
        assert own is not None
        return own

    giants = [added(10**6, giant) for _ in range(3)]
    assert added(10, lambda job, seconds: "soon").result(HANG) == "soon"
    hold = Event()
    held = [added(1, lambda job, seconds: hold.wait(HANG)) for _ in range(QUEUES[QUICK_SECONDS])]
    later = [added(size, lambda job, seconds: order.append(job.size)) for size in (9000, 10, 3000)]
    hold.set()
    for one in [*held, *later]:
        one.result(HANG)
    assert sorted(order) == [10, 3000, 9000] and order[-1] == 9000
    assert not any(one.done() for one in giants)
    go_on.set()
    assert [one.result(HANG) for one in giants] == ["late"] * 3
    with pytest.raises(TooSlow):

        def endless(job: Job, seconds: float) -> None:
            raise TooSlow("")

        added(1, endless).result(HANG)


def test_too_many_wait(own_queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues_module, "MAX_WAITING", 2)
    hold, begun = Event(), [Event() for _ in range(QUEUES[QUICK_SECONDS])]

    def wait(event: Event) -> Any:
        def work(job: Job, seconds: float) -> None:
            event.set()
            hold.wait(HANG)

        return work

    for one in begun:
        own_queues.add(Job(1, wait(one)))
        assert one.wait(HANG)
    for _ in range(2):
        own_queues.add(Job(1, wait(Event())))
    with pytest.raises(CapacityError, match="2 grammars wait"):
        own_queues.add(Job(1, wait(Event())))
    hold.set()


def test_after_a_fork(compiler: GrammarCompiler) -> None:
    """The child has queues and a process of its own."""
    assert compiler.compiled(Grammar.regex("a+d")).result(HANG)
    before = queues()
    queues_module._after_fork()
    compiler.after_fork()
    try:
        assert queues() is not before and compiler.compiled(Grammar.regex("a+e")).result(HANG)
    finally:
        before.close()


EXIT = """
import sys, threading
from specdec.grammar.grammar import Grammar
from specdec.grammar.queues import Job, queues
from specdec.grammar.process import Vocabulary, ask

vocabulary, begun = Vocabulary(lambda: open(sys.argv[1]).read()), threading.Event()

def work(job, seconds):
    with queues().process.open(vocabulary) as link:
        job.on_stop = lambda: link.shutdown(2)
        begun.set()
        words = [f"v{number}" for number in range(90_000)]
        return ask(link, vocabulary, Grammar.choice(words), 600)

job = Job(1, work)
own = job.join()
queues().add(job)
begun.wait()
print(queues().process._process.pid, flush=True)
sys.exit(7)
"""


def test_an_interpreter_that_ends_waits_for_nothing(
    compiler: GrammarCompiler, tmp_path: Path
) -> None:
    """And leaves nothing behind."""
    (tmp_path / "info.json").write_text(compiler._library(frozenset()).info.serialize_json())
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, tmp_path / "info.json"],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (ended.returncode, ended.stderr) == (7, "")
    wait_until(lambda: not Path(f"/proc/{int(ended.stdout)}").exists())


def test_the_process_comes_without_torch() -> None:
    """Which takes seconds, and makes a fork slow; nor do rules of any kind need it."""
    code = (
        "from specdec.grammar import worker; import sys; worker._library()\n"
        "from specdec.grammar.grammar import Grammar; from specdec.grammar.rules import rules_of\n"
        "for one in (Grammar.calls('hermes', {'f': None}), Grammar.json_object()): rules_of(one)\n"
        "print('torch._C' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert (ran.stdout, ran.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("/a/b.cc:83: Parser error:\nit is wrong"), KeyError(), ValueError("\n\n")],
    ids=repr,
)
def test_one_line(error: Exception) -> None:
    assert re.fullmatch(
        r"the grammar of kind regex cannot be compiled: (it is wrong|KeyError|ValueError)",
        reason_of("regex", error),
    )


def test_waiting_in_the_callers_thread_can_be_interrupted(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C lets go of what compiles."""
    from specdec.engine.requests.admission import Admission

    admission = object.__new__(Admission)
    admission.grammars = compiler
    compiles, let_go, compiled = Event(), Event(), compiler.compiled

    def endless(link: socket.socket, *_: object) -> None:
        compiles.set()
        link.recv(1)  # until it is let go of
        let_go.set()
        raise Ended

    def waited(grammar: Grammar) -> Future[Any]:
        own = compiled(grammar)

        def interrupted() -> Any:
            """A signal itself may come before the wait, which then does not end."""
            assert compiles.wait(HANG)
            raise KeyboardInterrupt

        monkeypatch.setattr(own, "result", interrupted)
        return own

    monkeypatch.setattr(compiler_module, "ask", endless)
    monkeypatch.setattr(compiler, "compiled", waited)
    with pytest.raises(KeyboardInterrupt):
        admission.wait_for_grammar(SamplingParams(grammar=long("c")))
    assert let_go.wait(HANG)
