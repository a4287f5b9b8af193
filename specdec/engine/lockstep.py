"""One engine on all ranks of a group: rank 0's decides, and the others' do the same.

Every rank has the same scheduler, fed with the same requests and the same results, so hosts agree
on blocks, prefixes and preemptions without a word. What only rank 0 can know goes with the message
that begins a step: requests that have come or are cancelled, outputs that end at a stop string, and
the shape of blocks, which is chosen by measured times, as is whether the drafter reads. Most steps
need no more than the numbers of one small message. The others read the results of a step when the
next message comes, since only that says where an output ends at a stop string; on an accelerator
the device has the next step to do meanwhile, so nothing waits.
"""

from __future__ import annotations

import struct
from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.launch import Launch
from specdec.engine.requests.admission import OnTokens
from specdec.engine.requests.request import Request, Status
from specdec.engine.selection import Selection
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.model.core import Drafter, Verifier
from specdec.model.weights import Exchange
from specdec.parallel.executor import STEP, Executor, collective_rpc, executor_of
from specdec.parallel.plain import RECORDS, on_ranks, pack, unpack
from specdec.parallel.wire import Message
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDS.update({kind.__name__: kind for kind in (Grammar, SamplingParams)})  # what requests bring


def make_engine(
    verifier: Verifier,
    drafter: Drafter | None = None,
    config: EngineConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> SpecEngine:
    """An engine, on every rank that has a part of the target; see `SpecEngine`.

    Args:
        verifier: the target.
        drafter: the same on every rank; None decodes plainly.
        config: limits and choices.
        tokenizer: of the target; None refuses requests with a grammar.
    """
    return collective_rpc(verifier, _on_this_rank, verifier, drafter, config, tokenizer, keep=True)


@on_ranks
def _on_this_rank(
    verifier: Verifier,
    drafter: Drafter | None,
    config: EngineConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> SpecEngine:
    executor, grammars = executor_of(verifier), None
    if tokenizer is not None:  # ranks have to have a grammar ready in the same step
        options = {"in_threads": executor is None, "limited": executor is None or executor.leads}
        grammars = GrammarCompiler(
            tokenizer, verifier.vocab_size, verifier.eos_token_ids, **options
        )
    if executor is None:
        return SpecEngine(verifier, drafter, config, grammars)
    kind = LeadingEngine if executor.leads else FollowingEngine
    return kind(executor, verifier, drafter, config, grammars)


class _RankEngine(SpecEngine):
    """The engine of one rank.

    Args:
        executor: the group.
        about: see `SpecEngine`.
    """

    def __init__(self, executor: Executor, *about: Any) -> None:
        super().__init__(*about)
        self._executor = executor
        # where outputs end at stop strings, by `_place`
        self._cuts: dict[tuple[int, int], int] = {}


class LeadingEngine(_RankEngine):
    """Rank 0's engine. Arguments as of every rank's."""

    def __init__(self, executor: Executor, *about: Any) -> None:
        super().__init__(executor, *about)
        self._messages: deque[list[Any]] = deque()  # kinds, and what is told of each

    def enqueue(self, request: Request) -> None:
        """See `SpecEngine.enqueue`."""
        self._messages.append(["new", *_told(request)])
        if request.on_tokens is not None:
            request.on_tokens = partial(self._asked, request.on_tokens)
        super().enqueue(request)

    def abort(self, request: Request) -> None:
        """See `SpecEngine.abort`."""
        if request.status is not Status.FINISHED:
            self._messages.append(["abort", request.request_id])
        super().abort(request)

    def reset(self) -> None:
        """See `SpecEngine.reset`."""
        self._messages.append(["reset"])
        super().reset()

    def exchange(self, weights: Exchange) -> None:
        """See `SpecEngine.exchange`."""
        self._messages.append(["exchange"])
        super().exchange(weights)

    def step(self) -> list[Request]:
        """See `SpecEngine.step`.

        Raises:
            SpecDecError: another rank has ended; this one's engine is of no use then.
        """
        with self._executor.together():
            return super().step()

    def _plan(self, batch: Selection) -> Launch:
        launch = super()._plan(batch)
        shape, number = launch.shape, self._executor.number_of(self)
        numbers = [
            STEP, number, shape.drafts, shape.tree_depth, _bits(shape.budget),
            self.timer.enabled + 2 * launch.reads + 4 * launch.tries, *state_of(self),
        ]  # fmt: skip
        cuts = [[*place, keep] for place, keep in self._cuts.items()]
        payload = pack([cuts, list(self._messages)], {}) if cuts or self._messages else b""
        self._executor.say(numbers, payload)
        self._cuts, self._messages = {}, deque()
        return launch

    def _asked(self, on_tokens: OnTokens, request: Request, tokens: list[int]) -> int | None:
        keep: int | None = 0  # where it raises, the others end it before these
        try:
            keep = on_tokens(request, tokens)
        finally:
            if keep is not None:
                self._cuts[_place(request)] = keep
        return keep


class FollowingEngine(_RankEngine):
    """The engine of another rank. Arguments as of every rank's."""

    def __init__(self, executor: Executor, *about: Any) -> None:
        super().__init__(executor, *about)
        self._requests: dict[int, Request] = {}
        self._block, self._flags = BlockShape(0), 0
        self._state: list[int] = []
        self._unread = 0  # launched steps that rank 0 has left unread
        self._reads = False  # rank 0 has read results since the last launch

    @torch.inference_mode()
    def follow(self, message: Message) -> None:
        """Reads what rank 0 has read since its last step, hears its news, and launches the step
        that the message tells of.
        """
        messages = self._take(message)
        if self._reads:
            self._read_results(leave=self._unread)
        for kind, *fields in messages:
            self._hear(kind, fields)
        self._unread, self._reads = self._launch(), True
        self._requests = {
            number: one
            for number, one in self._requests.items()
            if one.status is not Status.FINISHED
        }
        self._touched.clear()

    def _plan(self, batch: Selection) -> Launch:
        """The step that rank 0 has planned."""
        self._check()
        reads, tries = bool(self._flags & 2), bool(self._flags & 4)
        return Launch(batch, self._block, reads=reads, tries=tries)

    def _make_room(self) -> None:
        """Rank 0 says so each time that it has read results before it goes on."""
        self._take(self._executor.hear())
        super()._make_room()

    def _take(self, message: Message) -> Sequence[list[Any]]:
        """Takes over the numbers of a message, and where outputs end; gives the other news."""
        _, _, drafts, tree_depth, bits, self._flags, *state = message.numbers
        self._block, self._state = BlockShape(drafts, tree_depth, _float(bits)), state
        self.timer.enabled = bool(self._flags & 1)
        if not message.payload:
            return ()
        cuts, messages = unpack(message.payload, {})
        self._cuts.update({(number, place): keep for number, place, keep in cuts})
        return list(messages)

    def _hear(self, kind: str, fields: list[Any]) -> None:
        if kind == "new":
            request, asks = _request(*fields)
            if asks:
                request.on_tokens = lambda request, tokens: self._cuts.pop(_place(request), None)
            self.admission.guide(request)
            self._requests[request.request_id] = request
            self.enqueue(request)
        elif kind == "abort":
            self.abort(self._requests[fields[0]])
        elif kind == "exchange":
            assert self.staged is not None
            self.exchange(self.staged)
        else:
            self.reset()
            self._requests.clear()
            self._reads = False

    def _check(self) -> None:
        """Raises where this rank's schedule is not rank 0's, before their collectives mix."""
        own = state_of(self)
        if own != self._state[: len(own)]:
            raise RuntimeError(
                f"this rank's schedule {own} is not rank 0's {self._state[: len(own)]}: a defect of"
                f" specdec"
            )


def state_of(engine: SpecEngine) -> list[int]:
    """What a schedule depends on, in short: free blocks, requests that wait and that work,
    preemptions, unread steps.
    """
    scheduler = engine.scheduler
    num_waiting = len(scheduler.waiting)
    counts = (engine.pool.num_free, num_waiting, len(scheduler.working), scheduler.num_preemptions)
    return [*counts, len(engine.results)]


def _bits(number: float) -> int:
    """A number of 64 bits as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _float(bits: int) -> float:
    """What `_bits` was given."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def _told(request: Request) -> list[Any]:
    """A request that is new, for `_request`."""
    asks = request.on_tokens is not None
    numbers = [request.request_id, request.seed, request.max_total_len, request.rope_len]
    # long ones would take JSON milliseconds
    prompt = b64encode(array("i", request.prompt_token_ids).tobytes()).decode()
    return [numbers, prompt, sorted(request.stop_ids), request.sampling, asks]


def _request(
    numbers: list[int], prompt: str, stop_ids: list[int], sampling: SamplingParams, asks: bool
) -> tuple[Request, bool]:
    """What rank 0 tells of a request, and whether it looks for stop strings.

    Raises:
        RuntimeError: it is no request.
    """
    whole = all(type(number) is int for number in (*numbers, *stop_ids))
    if not (whole and len(numbers) == 4 and isinstance(sampling, SamplingParams)):
        raise RuntimeError("a message between ranks tells of no request")
    number, seed, total, rope_len = numbers
    tokens = array("i", b64decode(prompt)).tolist()
    stops = frozenset(stop_ids)
    request = Request(number, tokens, sampling, seed, total, stop_ids=stops, rope_len=rope_len)
    return request, asks


def _place(request: Request) -> tuple[int, int]:
    """Where in an output tokens are about to be added."""
    return request.request_id, len(request.output_token_ids)
