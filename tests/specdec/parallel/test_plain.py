"""What ranks say to each other: plain fields, sealed; whatever else comes makes nothing and calls
nothing.
"""

import json
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import specdec.engine.lockstep  # noqa: F401 (adds the records of requests)
from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
from specdec.grammar.grammar import Grammar
from specdec.model.scratch import next_token_logits
from specdec.parallel.group import Group
from specdec.parallel.plain import pack, unpack
from specdec.parallel.wire import Message, Wire
from specdec.sampling.params import SamplingParams

KEPT = object()
VALUES: list[Any] = [
    None,
    ["\ud800", True, -(2**70), 0.1, float("inf")],
    Path("a/b"),
    KEPT,
    next_token_logits,
    LoadConfig(device="cpu", tensor_parallel=2),
    EngineConfig(num_draft_tokens=None, cache=CacheConfig(memory_bytes=5, prefix_caching=False)),
    SamplingParams(
        seed=2**62,
        stop=("a",),
        logit_bias=((3, -1.5),),
        grammar=Grammar.regex("a+"),
        prompt_logprobs=0,
    ),
    SamplingParams(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_said_comes_as_it_was(value: Any) -> None:
    said = pack([value, 1], {id(KEPT): 7})
    json.loads(said)
    assert unpack(said, {7: KEPT}) == [value, 1]


def test_other_things_have_no_plain_form() -> None:
    for other in (object(), lambda: None, print, {1}, b"bytes", LoadConfig, deque([1])):
        with pytest.raises(TypeError, match="has no plain form"):
            pack([other], {})


class _Runs:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


HOSTILE: list[bytes] = [
    pickle.dumps(_Runs()),
    b"",
    b"\xff",
    b"[" * 100_000,
    b'{"a": 1}',
    b'{"kept": 9}',
    b'{"path": 5}',
    b'{"function": "os:system"}',
    b'{"function": "antigravity:fly"}',
    b'{"function": "specdec.base.checkpoint.hub:files_of"}',
    b'{"function": "specdec.nowhere:f"}',
    b'{"function": "specdec.model.scratch:next_token_logits.__globals__"}',
    b'{"record": "Path", "fields": []}',
    b'{"record": "SamplingParams", "fields": [["max_tokens", -1]]}',
    b'{"record": "SamplingParams", "fields": [["colour", 1]]}',
    b'{"record": "SamplingParams", "fields": [5]}',
    b'{"record": "EngineConfig", "fields": [["cache", 5]]}',
]


@pytest.mark.parametrize("said", HOSTILE, ids=lambda said: said[:40].decode(errors="replace"))
def test_whatever_else_comes_is_refused(said: bytes) -> None:
    with pytest.raises(RuntimeError, match="a message between ranks is none of specdec's"):
        unpack(said, {})


class _Done:
    def wait(self) -> None:
        pass


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    """What was sent and not heard yet, instead of a group."""
    sent: deque[Any] = deque()

    def broadcast(data: Any, *, async_op: bool = False, **_: Any) -> Any:
        if async_op:
            sent.append(data.clone())
            return _Done()
        return data.copy_(sent.popleft())

    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    return sent


def test_a_message_is_heard_if_it_has_the_seal_of_the_run(sent: deque[Any]) -> None:
    """One that was said with another secret, changed, left out or said again is not; with payload
    and without.
    """
    leader, other, follower = (
        Wire(Group(0, 2, None, None), secret) for secret in (b"ours", b"theirs", b"ours")
    )
    for payload in (b"", b"news"):
        leader.say([1, -2], payload)
        assert follower.hear() == Message([1, -2, *[0] * 9], payload)
    refused = "does not have the seal of this run"
    other.say([1])
    with pytest.raises(RuntimeError, match=refused):
        follower.hear()
    for spoil in (
        lambda: sent[0].add_(1),
        lambda: sent[-1].add_(1),
        lambda: sent.extendleft([sent[1], sent[0]]),
    ):
        leader, follower = (Wire(Group(rank, 2, None, None), b"ours") for rank in (0, 1))
        leader.say([3], b"news")
        spoil()
        with pytest.raises(RuntimeError, match=refused):
            for _ in range(2):
                follower.hear()
        sent.clear()
