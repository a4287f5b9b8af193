"""What a run can launch, compiled and captured beforehand, so that no request waits for a compiler
or a capture.

Requests are made up in the slots of an engine that has none. All of their blocks are the null
block, so a context of any length takes no memory. What is compiled or captured depends on what the
host knows: the size of a batch, and bounds on its lengths.

A server gets ready in this way (`get_ready`): all kernels are compiled at once, by processes beside
this one. As soon as its own are, every step that may be chosen is captured for contexts of any
length, in a greedy batch and in one that samples and filters, which serves all that do less.
Shorter contexts, whose steps are a little faster, are captured while nobody asks for anything.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch

from specdec.base.blocks import BlockShape
from specdec.engine.capture.buckets import batches, lengths
from specdec.engine.capture.compiled import Compiled, Progress
from specdec.engine.capture.prefill_graphs import PrefillGraphs, Spans
from specdec.engine.engine import SpecEngine
from specdec.engine.launch import Launch
from specdec.engine.policy.shapes import ladder, may_have
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk
from specdec.engine.selection import Selection
from specdec.kernels.triton_launch import unavailable_reasons
from specdec.kv_cache import blocks_for
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.model.batch import Context
from specdec.parallel.executor import collective_rpc
from specdec.parallel.group import group_of
from specdec.parallel.plain import on_ranks
from specdec.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

KEYS_PER_KERNEL = 16384
"""Keys after which AITER's paged kernels are compiled anew."""

UNPADDED = 16
"""Eager batches of up to so many requests are launched in every size, on which the splits of
AITER's draft kernel depend.
"""

IDLE_GRAPHS = 384
"""Captured steps beyond which none is captured for shorter contexts; the rest is left to batches
that want something rare.
"""

# apart from those of real requests, and never twice: a batch is known by its requests
_ids = count(-1, -1)


BROAD = SamplingParams(temperature=1.0, top_k=64, top_p=0.9, min_p=0.01)
"""A request whose steps serve all that sample and filter less."""

RARE = (
    SamplingParams(temperature=1.0, top_k=64, top_p=0.9, logprobs=True, top_logprobs=5),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, logit_bias=((0, 1.0),)),
)
"""Requests whose kernels a server compiles, and whose steps it captures once there are some."""

Bounds = Sequence[int] | None
"""On lengths; None takes all that occur."""


@dataclass(frozen=True, slots=True)
class WarmUpShape:
    """One thing to launch.

    Attributes:
        title: what it is, in a few words.
        eager: launches it operation by operation; returns when the device is done.
        captured: the same as its graph, which is captured; None where it never is.
        padded: launches what would be captured, without a graph; None where `eager` launches the
            same kernels.
    """

    title: str
    eager: Callable[[], None]
    captured: Callable[[], None] | None = None
    padded: Callable[[], None] | None = None

    def look(self) -> None:
        """Launches every kernel of it, operation by operation."""
        self.eager()
        if self.padded:
            self.padded()

    def run(self) -> None:
        """Launches it eagerly and then, where it is captured, as its graph."""
        self.eager()
        if self.captured:
            self.captured()


def warm_up_shapes(engine: SpecEngine, sampling: SamplingParams | None = None) -> list[WarmUpShape]:
    """What the engine's configuration can need: prefill, extension, drafting, verification and
    sampling in every shape.

    Args:
        engine: without unfinished requests, from the first `run` to the last.
        sampling: how requests will be decoded; None is greedy.
    """
    sampling = _filled(engine, sampling)
    return [*_prefills(engine, sampling), *_steps(engine, sampling)]


def launch_shape(engine: SpecEngine, sampling: SamplingParams | None, index: int) -> None:
    """Launches one of `warm_up_shapes`, on every rank that has a part of the target."""
    collective_rpc(engine.verifier, _launch_shape, engine, sampling, index)


@on_ranks
def _launch_shape(engine: SpecEngine, sampling: SamplingParams | None, index: int) -> None:
    warm_up_shapes(engine, sampling)[index].run()


class Seconds(NamedTuple):
    """Where the time went until a server was ready: looking what to compile, waiting for those that
    compile, and capturing, while the others compiled.
    """

    looking: float = 0.0
    compiling: float = 0.0
    capturing: float = 0.0


def get_ready(engine: SpecEngine, progress: Progress) -> Seconds:
    """Compiles and captures what a server may need, so that from here on neither holds up a step.

    On a CPU without graphs nothing is compiled or captured, and nothing is done.

    Args:
        engine: without unfinished requests.
        progress: told how far it is.
    """
    if engine.runner.graphs is None and unavailable_reasons(engine.verifier.device):
        return Seconds()
    began, group = perf_counter(), group_of(engine.verifier)
    collective_rpc(engine.verifier, _before_serving, engine)
    shapes = ready_shapes(engine)
    compiled = Compiled(engine, progress)
    try:
        every = (*shapes, *idle_shapes(engine), *_rare(engine))
        with group.alone() if group else nullcontext():
            compiled.look([(shape.title, shape.look) for shape in every])
        looked, wanted = perf_counter(), [n for n, shape in enumerate(shapes) if shape.captured]
        for done, index in enumerate(wanted, start=1):
            compiled.wait(index)
            collective_rpc(engine.verifier, _capture_shape, engine, index)
            progress("capturing", done, len(wanted))
        compiled.finish()
    finally:
        compiled.close()
    collective_rpc(engine.verifier, _serve, engine)
    capturing = perf_counter() - looked - compiled.waited
    seconds = Seconds(looked - began, compiled.waited, capturing)
    logger.info(
        "ready: %.1f s looking what to compile, %.1f s compiling, %.1f s capturing", *seconds
    )
    return seconds


@on_ranks
def _before_serving(engine: SpecEngine) -> None:
    set_serving(engine, False)


@on_ranks
def _capture_shape(engine: SpecEngine, index: int) -> None:
    captured = ready_shapes(engine)[index].captured
    assert captured
    captured()


@on_ranks
def _serve(engine: SpecEngine) -> None:
    set_serving(engine, True)
    if engine.runner.graphs and group_of(engine.verifier) is None:
        shapes = idle_shapes(engine)
        engine.idle_work.extend(partial(_capture_beside, engine, shape) for shape in shapes)


def _capture_beside(engine: SpecEngine, shape: WarmUpShape) -> None:
    """Captures one more shape while the engine has nothing to do, unless many are captured."""
    assert shape.captured and engine.runner.graphs
    if engine.runner.graphs.num_captured >= IDLE_GRAPHS:
        engine.idle_work.clear()
        return
    set_serving(engine, False)
    try:
        shape.captured()
    finally:
        set_serving(engine, True)


def set_serving(engine: SpecEngine, serving: bool) -> None:
    """Says whether steps must not wait for captures, see `ShapeGraphs.serving`."""
    runner = engine.runner
    for graphs in (runner.graphs, runner.guided_graphs, runner.prefill_graphs):
        if graphs is not None:
            graphs.serving = serving


def ready_shapes(engine: SpecEngine) -> list[WarmUpShape]:
    """What has to be there before a request is served, by likelihood: contexts of any length,
    greedy and sampled.
    """
    longest, greedy = [engine.slots.longest], _filled(engine, SamplingParams(temperature=0.0))
    broad, prefills = _filled(engine, BROAD), _prefills(engine, greedy, longest)
    return [*prefills, *_steps(engine, greedy, longest), *_steps(engine, broad, longest)]


def idle_shapes(engine: SpecEngine) -> list[WarmUpShape]:
    """What makes greedy steps of shorter contexts faster, the shortest first."""
    greedy, longest = _filled(engine, SamplingParams(temperature=0.0)), engine.slots.longest
    shorter = [bound for bound in lengths(longest) if bound < longest]
    return [shape for bound in shorter for shape in _steps(engine, greedy, [bound])]


def _rare(engine: SpecEngine) -> Iterator[WarmUpShape]:
    """What is compiled for batches that want more than `BROAD`, or follow a grammar."""
    longest = engine.slots.longest
    blocks = [
        shape for shape in engine.planner.shapes if shape.drafts in (0, 7)
    ] or engine.planner.shapes[:1]
    unguided = [(sampling, False) for sampling in RARE]
    for sampling, guided in (*unguided, (SamplingParams(temperature=0.0), True)):
        filled = _filled(engine, sampling)
        for num_reqs in batches(engine.config.max_num_seqs):
            for block in blocks:
                launch = partial(_decode, engine, num_reqs, block, longest, filled, "now")
                title = f"decode {num_reqs} x {block.rows} rows of rare requests"
                yield WarmUpShape(title, partial(launch, guided=guided))


def _filled(engine: SpecEngine, sampling: SamplingParams | None) -> SamplingParams:
    """With what requests of this target have that do not say."""
    return engine.verifier.defaults.fill(sampling or SamplingParams(), 1)


def _prefills(
    engine: SpecEngine,
    sampling: SamplingParams,
    bounds: Bounds = None,
) -> Iterator[WarmUpShape]:
    """Prompts and what extends them, alone and side by side; then those that are captured, within
    `bounds` where they are given.
    """
    longest, num_reqs = engine.max_model_len - 1, engine.config.max_num_seqs
    most = min(engine.scheduler.max_prefill_tokens, longest)
    powers = {min(2**n, most) for n in range(most.bit_length() + 1)}
    # Triton compiles sizes that 16 divides apart from those that it does not.
    batches_of_spans: list[Spans] = [
        [(0, width)] for width in sorted(powers | {width - 1 for width in powers if width > 1})
    ]
    for bound in _bounds(engine, finer=True):
        end = min(bound, longest)
        batches_of_spans += [
            [(end - width, end)] for width in sorted({1, min(most, end // 2)}) if 0 < width < end
        ]
    if num_reqs > 1 and most > 2:
        batches_of_spans.append([(0, most // 2), (1, 1 + most // 2)])
    num_eager, graphs = len(batches_of_spans), engine.runner.prefill_graphs
    leaves_unread = engine.reading.late and engine.planner.choice is not None
    if graphs:
        batches_of_spans += graphs.spans(num_reqs, most, bounds)
    for index, spans in enumerate(batches_of_spans):
        (start, end), others = spans[0], f" beside {len(spans) - 1} more" if len(spans) > 1 else ""
        title = f"prefill {end - start:,} tokens behind {start:,}{others}"
        launch = partial(_prefill, engine, spans, sampling)
        if not graphs or (bounds is not None and index < num_eager):
            yield WarmUpShape(title, launch)
            continue
        for reads in (True, False) if leaves_unread else (True,):
            captured = partial(launch, captured=True, reads=reads)
            what = title if reads else f"{title}, by the target alone"
            yield WarmUpShape(what, launch, captured, partial(_alone, graphs, captured))


def _alone(graphs: PrefillGraphs, captured: Callable[[], None]) -> None:
    with graphs.only_launched():
        captured()


def _steps(
    engine: SpecEngine,
    sampling: SamplingParams,
    bounds: Bounds = None,
) -> Iterator[WarmUpShape]:
    """Decode steps, by bound, batch and the shape of blocks."""
    eager, most, steady_len = (
        not engine.runner.graphs,
        engine.config.max_num_seqs,
        engine.verifier.attention.steady_len,
    )
    sizes, blocks = batches(most), engine.planner.shapes
    # the last steps of an output offer as many as there is room for
    if not engine.planner.choice and not blocks[0].is_tree:
        arms = range(engine.num_draft_tokens + 1) if eager else ladder(engine.num_draft_tokens)
        blocks = tuple(
            BlockShape(k, budget=blocks[0].budget if blocks[0].budget < k else 0.0) for k in arms
        )
    for bound in _bounds(engine, finer=eager) if bounds is None else bounds:
        for num_reqs in sorted({*sizes, *range(1, min(most, UNPADDED) + 1)}) if eager else sizes:
            for shape in blocks if num_reqs in sizes else blocks[-1:]:
                if engine.planner.choice and not may_have(shape, num_reqs):
                    continue
                title = (
                    f"decode {num_reqs} x {shape.rows} rows{' of trees' * shape.is_tree}, up to"
                    f" {bound:,} tokens"
                )
                contexts: tuple[Context, ...] = (
                    ("now",) if shape.drafts or not engine.runner.max_deferred else ("later", "all")
                )
                for context in contexts:
                    what = title if context in ("now", "later") else f"{title}, all context"
                    for short in (False, True) if steady_len else (False,):
                        launch = partial(_decode, engine, num_reqs, shape, bound, sampling, context)
                        launch = partial(launch, shortest=steady_len - 1 if short else None)
                        captured = None if eager else partial(launch, captured=True)
                        yield WarmUpShape(what + ", one short" * short, launch, captured)


def _bounds(engine: SpecEngine, *, finer: bool) -> list[int]:
    """Bounds on the lengths of sequences; `finer` where kernels see the length itself, not the
    bucket that it falls in.
    """
    longest = engine.slots.longest
    return sorted(
        {*lengths(longest), *(range(KEYS_PER_KERNEL, longest, KEYS_PER_KERNEL) if finer else ())}
    )


@contextmanager
def _with_graphs(engine: SpecEngine, captured: bool) -> Iterator[None]:
    """Launches steps as graphs or operation by operation, and waits for the device."""
    runner = engine.runner
    graphs = runner.graphs, runner.guided_graphs, runner.prefill_graphs
    if not captured:
        runner.graphs = runner.guided_graphs = runner.prefill_graphs = None
    try:
        yield
    finally:
        runner.graphs, runner.guided_graphs, runner.prefill_graphs = graphs
    if engine.verifier.device.type == "cuda":
        torch.cuda.synchronize(engine.verifier.device)


@torch.inference_mode()
def _prefill(
    engine: SpecEngine,
    spans: Spans,
    sampling: SamplingParams,
    *,
    captured: bool = False,
    reads: bool = True,
) -> None:
    """The last chunks of prompts, from start to end; the drafter `reads` them, too."""
    with _with_graphs(engine, captured):
        chunks = []
        for slot, (start, end) in enumerate(spans):
            blocks = blocks_for(end, engine.slots.block_size)
            request = _request(slot, end, sampling, num_blocks=blocks)
            chunks.append(Chunk(request, start, end, admitted=True, last=True))
        engine.runner.prefill(chunks, reads=reads)


@torch.inference_mode()
def _decode(
    engine: SpecEngine,
    num_reqs: int,
    shape: BlockShape,
    bound: int,
    sampling: SamplingParams,
    context: Context,
    *,
    shortest: int | None = None,
    guided: bool = False,
    captured: bool = False,
) -> None:
    """A step of requests whose tokens, with those that it writes, are `bound`; the last has at most
    `shortest` before it.
    """
    runner, slots = engine.runner, engine.slots
    known = [
        max(0, bound - slots.max_seq_len(Selection([_request(0, 1, sampling)]), shape.drafts))
    ] * num_reqs
    if shortest is not None:
        known[-1] = min(known[-1], shortest)
    with _with_graphs(engine, captured):
        requests = [_request(slot, 1, sampling, num_kv_tokens=n) for slot, n in enumerate(known)]
        slots.begin(requests)
        slots.seq_lens.index_copy_(0, slots.slot_indices(requests), slots.tensor(known))
        if runner.drafter:
            for request in requests:
                runner.drafter.begin(request.slot, request.token_ids)
        selection = slots.select(requests)
        if guided:
            selection.plan = selection.plan._replace(guided=True)
        runner.decode(Launch(selection, shape, context), engine.clock)


def _request(
    slot: int, length: int, sampling: SamplingParams, *, num_kv_tokens: int = 0, num_blocks: int = 1
) -> Request:
    """A prompt of `length` tokens on the null block."""
    return Request(
        next(_ids),
        [0] * length,
        sampling,
        seed=0,
        max_total_len=length,
        slot=slot,
        block_ids=[NULL_BLOCK] * num_blocks,
        num_kv_tokens=num_kv_tokens,
    )
