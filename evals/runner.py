"""Many prompts through one engine: a pass over a prompt set."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from evals.prompt_sets import Item, PromptSet
from specdec.base.errors import SpecDecError
from specdec.base.metrics import AcceptanceStats
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request, Status
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.handle import Handle
from specdec.session.session import Session

OnStep = Callable[[list[Request]], None]
"""Called after every step with all requests of the turn; its time is part of the measurement."""

OnTurn = Callable[[int, int], OnStep]
"""Called before every turn with its number, from 0, and how many conversations have it."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one request from where it gets its place: to its first token, and to its last."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a system made of one turn of a conversation: output tokens, verify steps (none when it
    tells nothing of them), when it came, where that is known, and what went wrong.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    stats: AcceptanceStats
    latency: Latency | None = None
    num_cached_tokens: int = 0  # of the prompt
    error: str | None = None


Generate = Callable[[Sequence[list[int]], Sequence[SamplingParams], OnStep | None], list[Answer]]
"""Decodes prompts that each have their own sampling; results come in their order."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a set: answers, turn by turn, and the seconds of decoding, prefill included."""

    answers: list[Answer]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Tokens output."""
        return sum(len(answer.token_ids) for answer in self.answers)


def num_captured(engine: SpecEngine) -> int:
    """Steps and prefills that an engine has captured."""
    runner = engine.runner
    kinds = (runner.graphs, runner.guided_graphs, runner.prefill_graphs)
    return sum(graphs.num_captured for graphs in kinds if graphs is not None)


@contextmanager
def nothing_old_collected() -> Iterator[None]:
    """Keeps Python's collector from looking through what is there already, 0.1 seconds and more at
    a time; `specdec serve` does the same.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_set(
    decoder: SpecDecoder,
    prompts: PromptSet,
    sampling: SamplingParams,
    *,
    raw: bool = False,
    on_turn: OnTurn | None = None,
    generate: Generate | None = None,
) -> Pass:
    """Decodes every turn of every item; a later turn sees the same system's answers.

    The clock runs while the system decodes; tokenizing and making texts are outside it.

    Args:
        sampling: how to decode; item `i` uses `sampling.seed + i`.
        raw: continue the text as it is, without the chat template; later turns are then left out.
        generate: another system to decode with; None takes the decoder's own.

    Raises:
        SpecDecError: a prompt cannot be served.
    """
    generate = generate or partial(_decode, decoder.session)
    seed = sampling.seed or 0
    histories: dict[int, list[dict[str, str]]] = {index: [] for index in range(len(prompts.items))}
    answers: list[Answer] = []
    seconds = 0.0
    for turn in range(1 if raw else prompts.num_turns):
        asked = prompts.asked(turn)
        for index in asked:
            histories[index].append({"role": "user", "content": prompts.items[index].turns[turn]})
        inputs = [_tokens(decoder, prompts.items[index], histories[index], raw) for index in asked]
        samplings = [replace(sampling, seed=seed + index) for index in asked]
        on_step = on_turn(turn, len(asked)) if on_turn else None
        with nothing_old_collected():
            started = time.perf_counter()
            results = generate(inputs, samplings, on_step)
            seconds += time.perf_counter() - started
        for index, result in zip(asked, results, strict=True):
            if result.error is not None:
                raise SpecDecError(f"{prompts.name} {prompts.items[index].item_id}: {result.error}")
            answers.append(result)
            text = decoder.tokenizer.decode(result.token_ids, skip_special_tokens=True)
            histories[index].append({"role": "assistant", "content": text})
    return Pass(answers, seconds)


def max_total_tokens(
    decoder: SpecDecoder, prompts: PromptSet, max_tokens: int, *, raw: bool = False
) -> int:
    """Most tokens of prompt and output together, over all items and turns, to size a cache by."""
    longest = 0
    for item in prompts.items:
        turns = item.turns[:1] if raw else item.turns
        history = [{"role": "user", "content": "\n".join(turns)}]
        # An answer read back may take more tokens than it had, and a turn brings its template.
        per_turn = max_tokens if len(turns) == 1 else 2 * max_tokens + 64
        longest = max(longest, len(_tokens(decoder, item, history, raw)) + len(turns) * per_turn)
    return longest


def _tokens(decoder: SpecDecoder, item: Item, said: list[dict[str, str]], raw: bool) -> list[int]:
    return decoder.tokenize(item.turns[0] if raw else said)


def _decode(
    session: Session,
    inputs: Sequence[list[int]],
    samplings: Sequence[SamplingParams],
    on_step: OnStep | None,
) -> list[Answer]:
    """Queues everything and steps until it is done; whatever ends this early empties the engine."""
    handles: list[Handle] = []
    try:
        for prompt, sampling in zip(inputs, samplings, strict=True):
            handles.append(session.submit(prompt, sampling, incremental=False, text=False))
        requests = [handle.request for handle in handles]
        clock = _Clock(requests)

        def follow() -> None:
            clock.look()
            if on_step is not None:
                on_step(requests)

        session.run_until(lambda: session.idle, follow)
    finally:
        for handle in handles:
            handle.cancel()
    results = [handle.result() for handle in handles]
    return [
        Answer(prompt, one.token_ids, one.stats, latency, one.num_cached_tokens, one.error)
        for prompt, one, latency in zip(inputs, results, clock.latencies, strict=True)
    ]


def behind_hits(decoder: SpecDecoder, concurrency: int) -> Generate:
    """Decodes so many prompts at a time, each of which the prefix cache has just been given."""

    def generate(
        inputs: Sequence[list[int]], samplings: Sequence[SamplingParams], on_step: OnStep | None
    ) -> list[Answer]:
        results: list[Answer] = []
        for start in range(0, len(inputs), concurrency):
            prompts = inputs[start : start + concurrency]
            asked = samplings[start : start + concurrency]
            _decode(decoder.session, prompts, [one.at_most(1) for one in asked], None)
            results += _decode(decoder.session, prompts, asked, on_step)
        return results

    return generate


class _Clock:
    """Notes after every step which requests got a place, their first token, their last one.

    Args:
        requests: in the order in which the scheduler takes them.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.latencies: list[Latency | None] = [None] * len(requests)
        # One that decoding for room in the queue has begun with has an unknown start.
        self._waiting = deque((i, r) for i, r in enumerate(requests) if r.status is Status.WAITING)
        self._silent: list[tuple[int, Request]] = []  # with a place, and no token yet
        self._writing: list[tuple[int, Request]] = []
        self._started: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._before = time.perf_counter()

    def look(self) -> None:
        """Called after every step; a request that it gave a place began where the step did."""
        now = time.perf_counter()
        while self._waiting and self._waiting[0][1].status is not Status.WAITING:
            index, request = self._waiting.popleft()
            self._started[index] = self._before
            self._silent.append((index, request))
        begun = [one for one in self._silent if one[1].output_token_ids]
        if begun:
            self._silent = [one for one in self._silent if not one[1].output_token_ids]
            self._first |= dict.fromkeys((index for index, _ in begun), now)
            self._writing += begun
        ended = [index for index, one in self._writing if one.status is Status.FINISHED]
        for index in ended:
            start = self._started[index]
            self.latencies[index] = Latency(self._first[index] - start, now - start)
        if ended:
            self._writing = [one for one in self._writing if one[1].status is not Status.FINISHED]
        self._before = now
