"""Fronts in processes of their own: what becomes of requests when one ends, or does not read."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.serve.answers.stream import Wire
from specdec.serve.config import ServeConfig, fronts_for
from specdec.serve.processes.setup import Setup
from specdec.session.link.channel import MAX_BYTES, Channel, Facts, Numbers, packed, unpacked
from specdec.session.link.hub import Hub
from specdec.session.link.link import Link
from tests.helpers.forked import Forked
from tests.helpers.live_server import live_server, tiny_decoder
from tests.helpers.processes import below
from tests.helpers.served import is_draining, serving
from tests.helpers.waiting import HANG, wait_until

LONG = {"prompt": "abc", "max_tokens": 480, "ignore_eos": True, "temperature": 0, "n": 64}
SHORT = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
URL = "/v1/completions"


@pytest.mark.parametrize(
    ("max_num_seqs", "cores", "fronts"),
    [(1, 64, 1), (64, 64, 1), (65, 64, 2), (256, 64, 4), (256, 16, 4), (256, 8, 2), (256, 2, 1)],
)
def test_many_requests_have_more_fronts_where_there_are_cores(
    max_num_seqs: int, cores: int, fronts: int
) -> None:
    assert fronts_for(max_num_seqs, cores) == fronts


def fronts_of(server: Forked) -> set[int]:
    return below(server.pid) - {server.pid}


def answers(url: str) -> bool:
    """Whether a new connection is served."""
    try:
        return httpx.post(url + URL, json=SHORT).status_code == 200
    except httpx.TransportError:
        return False


def assert_cut(lines: Iterator[str]) -> None:
    """A stream ends without its end."""
    with pytest.raises(httpx.TransportError):
        list(lines)


@pytest.mark.slow
def test_processes_that_stop_or_are_killed() -> None:
    """Another front takes the place of one that is killed; one that stops holds up nobody, and
    counts are those of all. Who waits for an engine that is killed is told, and its fronts end.
    """
    with serving(ServeConfig(port=0, front_processes=2)) as (server, url):
        with httpx.stream("POST", url + URL, json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            killed = next(one for one in fronts_of(server) if _is_connected(one, stream))
            os.kill(killed, signal.SIGKILL)
            assert_cut(lines)
        wait_until(lambda: len(fronts_of(server) - {killed}) == 2)
        with httpx.stream("POST", url + URL, json=LONG | {"stream": True, "n": 1}) as stream:
            lines = stream.iter_lines()
            next(lines)
            stopped = next(one for one in fronts_of(server) if _is_connected(one, stream))
            os.kill(stopped, signal.SIGSTOP)
            wait_until(lambda: answers(url))
            os.kill(stopped, signal.SIGCONT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(lambda: min(_status(url, "finished") for _ in range(8)) > 1)
        wait_until(lambda: _status(url, "running") == 0)
        fronts = fronts_of(server)
        assert killed not in fronts
        with httpx.stream("POST", url + URL, json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGSTOP)
            server.send_signal(signal.SIGKILL)
            *_, event, end = [line for line in lines if line]
        assert "the process of the engine has ended" in event and end == "data: [DONE]"
        wait_until(lambda: not any(below(one) for one in fronts))
        said = f"front process {killed} was ended by SIGKILL; its outputs are cancelled"
        assert said in server.stderr.read()


def _status(url: str, name: str) -> int:
    """A number of all fronts, as whichever answers knows."""
    return int(httpx.get(url + "/status").json()[name])


def _is_connected(pid: int, stream: httpx.Response) -> bool:
    """Whether a process has the other end of a connection."""
    port = stream.extensions["network_stream"].get_extra_info("client_addr")[1]
    found = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    with open("/proc/net/tcp") as table:
        inodes = {row.split()[9] for row in table if row.split()[2].endswith(f":{port:04X}")}
    return any(f"socket:[{inode}]" in found for inode in inodes)


TAKEN_OVER = """import socket, sys, time
sys.path[:] = {path!r}
from specdec.session.link.channel import Channel
channel = Channel(socket.socket(fileno={link}))
channel.first()
channel.send(("ready",), ("nonsense", {listening}))
while True:
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_front_that_says_nonsense_is_ended_and_another_one_serves() -> None:
    """Until a signal drains the server: what is unfinished goes on, and it ends in good order."""
    with serving(ServeConfig(port=0), TAKEN_OVER) as (server, url):
        wait_until(lambda: answers(url) or server.poll() is not None)
        with httpx.stream("POST", url + URL, json=LONG | {"stream": True, "n": 1}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGHUP)
            wait_until(lambda: is_draining(url))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(HANG) == 0
        (line,) = server.stderr.read().splitlines()
        assert "was ended by SIGKILL, for a message is ['nonsense'" in line


REGEX = b'{"kind":"regex","text":"a+"}'


def _framed(text: bytes, raw: bytes = b"") -> bytes:
    return struct.pack("<Ii", len(text), len(raw)) + text + raw


class _Code:
    """A pickle that makes a folder where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_what_is_no_message_ends_its_sender_alone(tmp_path: Path) -> None:
    """The engine makes nothing of it, and serves the others."""
    code, tokens = pickle.dumps(_Code(tmp_path / "made")), packed([5, 6, 7])
    new = _framed(b'["new",1,{}]', tokens)
    told = [
        code,
        _framed(code),
        len(code).to_bytes(8, "little") + code,  # as pickles were sent once
        _framed(b'["new",1,{}]', b"abc"),
        struct.pack("<Ii", MAX_BYTES + 1, -1),
        struct.pack("<Ii", 1, MAX_BYTES),
        _framed(b'{"ready":1}'),
        _framed(b"[" * 60_000),
        _framed(b'["new",' + b"1" * 60_000 + b"]"),
        _framed(b'["__init__"]', tokens),
        _framed(b'["new","1",{}]', tokens),
        _framed(b'["new",1,{"grammar":1}]', tokens),
        _framed(b'["new",1,{"max_tokens":-1}]', tokens),
        _framed(b'["new",1,{"unknown":1}]', tokens),
        new + new,
        b"".join(_framed(b'["new",%d,{}]' % key, packed([5])) for key in range(4)),
        _framed(b'["new",1,{}]', packed([5] * 9)),
        new + _framed(b'["new",2,{}]', packed([5] * 6)),
        b"".join(_framed(b'["grammar",%d,{"grammar":%b}]' % (key, REGEX)) for key in range(4)),
        _framed(b'["grammar",1,{}]')[:4] + struct.pack("<i", -1) + b'["grammar",1,{}]',
        _framed(b'["totals",1]'),
    ]
    decoder, left, faults, kept = tiny_decoder(), list(told), list[str | None](), list[Any]()
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    want = decoder.generate([5, 6, 7], sampling).token_ids

    def next_one(lost: Link | None = None) -> None:
        if lost is not None:
            faults.append(lost.fault)
        if left:
            ours, theirs = socket.socketpair()
            theirs.sendall(left.pop(0))
            kept.append(theirs)
            hub.add(Link(ours, 3, 8))

    hub = Hub(decoder, on_loss=next_one)
    ours, theirs = socket.socketpair()
    hub.add(Link(ours, 3, 8))
    next_one()
    thread = threading.Thread(target=hub.run, daemon=True)
    thread.start()
    wait_until(lambda: len(faults) == len(told) or not thread.is_alive())
    assert len(faults) == len(told) and None not in faults and not (tmp_path / "made").exists()
    channel = Channel(theirs)
    channel.send(("new", 1, sampling.plain(), tokens))
    got: list[int] = []

    def read() -> bool:
        for _, num_keys, more, _, integers in channel.receive():
            numbers = unpacked(integers, num_keys)
            got.extend(numbers[3:][: numbers[1]] if num_keys else [])
            if more:
                return True
        return False

    wait_until(read)
    hub.stop()
    channel.close()
    thread.join(HANG)
    assert not thread.is_alive()
    assert got == want


@pytest.mark.parametrize("kinds", [("new", "new", "grammar"), ("grammar", "grammar", "new")])
def test_outputs_and_grammars_have_rooms_of_their_own(kinds: tuple[str, ...]) -> None:
    """A front that has as many of one as it may, and asks for the other, is not ended."""
    pytest.importorskip("xgrammar")
    ours, theirs = socket.socketpair()
    faults, channel = list[str | None](), Channel(theirs)
    hub = Hub(tiny_decoder(), on_loss=lambda lost: faults.append(lost.fault))
    hub.add(Link(ours, 2, 6))
    thread = threading.Thread(target=hub.run, daemon=True)
    thread.start()
    guided = SamplingParams(grammar=Grammar.regex("a+")).plain()
    output = SamplingParams(max_tokens=3, ignore_eos=True).plain(), packed([5, 6, 7])
    about: dict[str, tuple[Any, ...]] = {"new": output, "grammar": (guided,)}
    channel.send(*((kind, key, *about[kind]) for key, kind in enumerate(kinds)))
    told = set[int]()

    def read() -> bool:
        for kind, *given in channel.receive():
            ended = [key for name, key, *_ in given[1] if name == "end"] if kind == "news" else []
            told.update(given if kind == "done" else ended)
        return told == {0, 1, 2}

    wait_until(read)
    hub.stop()
    channel.close()
    thread.join(HANG)
    assert not thread.is_alive() and not faults


@pytest.mark.parametrize("cancelled", [False, True])
def test_nobody_is_left_with_outputs_of_others_that_have_ended(cancelled: bool) -> None:
    """Limits and gauges count them."""
    hub, channels = Hub(tiny_decoder(max_num_seqs=1)), list[Channel]()
    for _ in range(2):
        ours, theirs = socket.socketpair()
        hub.add(Link(ours, 3, 9))
        channels.append(Channel(theirs))
    thread = threading.Thread(target=hub.run, daemon=True)
    thread.start()
    sampling = SamplingParams(max_tokens=400 if cancelled else 5, ignore_eos=True)
    output, told = (sampling.plain(), packed([5, 6, 7])), [0]

    def outputs() -> list[int]:
        channels[0].receive()
        told.extend(Numbers(*one[3]).outputs for one in channels[1].receive() if one[0] == "news")
        return told

    channels[0].send(*(("new", key, *output) for key in range(3)))
    wait_until(lambda: any(outputs()))
    if cancelled:
        channels[0].send(*(("cancel", key) for key in range(3)))
    wait_until(lambda: outputs()[-1] == 0)
    hub.stop()
    for channel in channels:
        channel.close()
    thread.join(HANG)
    assert not thread.is_alive()


def test_outputs_that_nobody_reads_go_on_and_are_told_at_once() -> None:
    """More than sockets hold: the engine waits for nobody."""
    decoder = tiny_decoder(max_num_seqs=8)
    ours, theirs = socket.socketpair()
    link, channel = Link(ours, count := 6, 3 * count), Channel(theirs)
    for sock, side in ((ours, socket.SO_SNDBUF), (theirs, socket.SO_RCVBUF)):
        sock.setsockopt(socket.SOL_SOCKET, side, 4096)
    hub = Hub(decoder)
    hub.add(link)
    thread = threading.Thread(target=hub.run, daemon=True)
    thread.start()
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    result = decoder.generate([5, 6, 7], sampling)
    asked = sampling.plain(), packed([5, 6, 7])
    channel.send(*(("new", key, *asked) for key in range(count)))
    wait_until(lambda: link.outputs and decoder.session.idle)
    got: dict[int, list[int]] = {key: [] for key in range(count)}
    ends: set[int] = set()
    messages = 0

    def read() -> bool:
        nonlocal messages
        for kind, num_keys, more, _, integers in channel.receive():
            assert kind == "news"
            messages += 1
            numbers = unpacked(integers, num_keys)
            given = iter(numbers[3 * num_keys :])
            for key, more_tokens in zip(numbers[:num_keys], numbers[num_keys:], strict=False):
                if key not in got:
                    break
                got[key] += [next(given) for _ in range(more_tokens)]
            ends.update(key for name, key, *_ in more if name == "end")
        return len(ends) == count

    wait_until(read)
    assert all(tokens == result.token_ids for tokens in got.values())
    assert messages < result.stats.num_steps
    channel.close()
    thread.join(HANG)
    assert not thread.is_alive()


def test_who_reads_no_answers_is_not_heard() -> None:
    """What waits for it does not grow, and it gets all once it reads."""
    ours, theirs = socket.socketpair()
    hub, link, channel = Hub(tiny_decoder()), Link(ours, 8, 64), Channel(theirs)
    hub.add(link)
    for sock, side in ((ours, socket.SO_SNDBUF), (theirs, socket.SO_RCVBUF)):
        sock.setsockopt(socket.SOL_SOCKET, side, 4096)
    waiting, rounds, each = list[int](), 50, 100
    for _ in range(rounds):
        channel.send(*(("new", key, {}, packed([10**6])) for key in range(each)))
        hub._exchange(0.0)
        waiting.append(len(link.channel._going))
    assert 0 < waiting[rounds // 2] == waiting[-1]
    answers = 0
    while answers < rounds * each:
        hub._exchange(0.0)
        channel.flush()
        answers += sum(kind == "refused" for kind, *_ in channel.receive())


def test_counts_that_nobody_reads_do_not_pile_up() -> None:
    """Of what another front tells, one that reads slowly is told the latest."""
    hub, links, fars = Hub(tiny_decoder()), list[Link](), list[Channel]()
    for _ in range(2):
        ours, theirs = socket.socketpair()
        links.append(Link(ours, 8, 64))
        fars.append(Channel(theirs))
        hub.add(links[-1])
    for number in range(40):
        fars[0].send(("totals", {"count": number, "text": "a" * 2**20}))
        while fars[0].congested:
            hub._exchange(0.0)
            fars[0].flush()
        hub._exchange(0.0)
        assert len(links[1].channel._going) < 2**21
    told: list[int] = []
    while told[-1:] != [39]:
        told += [totals["count"] for _, _, totals in fars[1].receive()]
        hub._exchange(0.0)
    assert told == sorted(told)


def test_a_slow_client_gets_less_often_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not read is put together, and it gets all; also one that knows no chunks."""
    monkeypatch.setattr(Wire, "may_write", lambda wire: False)
    asked = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    body = json.dumps(asked | {"n": 3, "stream": True})
    with live_server() as live:
        host, _, port = live.url.removeprefix("http://").rpartition(":")
        kind = "Content-Type: application/json"
        head = f"POST {URL} HTTP/1.0\r\n{kind}\r\nContent-Length: {len(body)}"
        with socket.create_connection((host, int(port)), timeout=HANG) as client:
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            answer = b"".join(iter(lambda: client.recv(65_536), b""))
        want = live.post(URL, json=asked).json()["choices"][0]["text"]
    lines = answer.partition(b"\r\n\r\n")[2].decode().splitlines()
    events: list[Any] = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events[::2]}
    assert texts == dict.fromkeys(range(3), want) and len(events) == 6
    assert "data: [DONE]" in lines


def test_what_follows_the_first_message_is_kept() -> None:
    """As numbers that an engine at work tells a front before it serves."""
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    numbers = list(range(300_000))  # more than that
    one.send(("first", b""), ("second", None), ("third", packed(numbers)))
    assert one.congested
    got = [other.first()]
    while len(got) < 3:
        one.flush()
        got += other.receive()
    assert got[:2] == [["first", b""], ["second", None]]
    assert got[2][0] == "third" and unpacked(got[2][1]) == numbers and not one.congested
    one.send(("last",))
    one.close()
    assert other.receive() == [["last"]]
    with pytest.raises(EOFError):
        other.receive()
    other.close()


@pytest.mark.parametrize("seed", [0, None])
def test_fronts_draw_seeds_of_their_own(seed: int | None) -> None:
    """Of requests that bring none; one that follows another begins no sequence anew."""
    setup = Setup(Facts.of(tiny_decoder(seed=seed)), ServeConfig(), "tiny")
    drawn = [
        Setup.read(list(setup.message())).facts.admission.new_request([5], SamplingParams()).seed
        for _ in range(16)
    ]
    assert len(set(drawn)) == 16
    again = Setup(Facts.of(tiny_decoder(seed=seed)), ServeConfig(), "tiny")
    first = Setup.read(list(again.message())).facts.admission.new_request([5], SamplingParams())
    assert (first.seed == drawn[0]) == (seed is not None)
