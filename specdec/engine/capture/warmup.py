"""Everything that a run can launch, launched once beforehand, so that no request waits for a compiler or a capture.

Requests are made up in the slots of an engine that has none. All of their blocks are the null block, so a context of any length
takes no memory. What is compiled or captured depends on what the host knows: the size of a batch, and bounds on its lengths.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from specdec.base.blocks import BlockShape
from specdec.engine.capture.buckets import batches, lengths
from specdec.engine.engine import SpecEngine
from specdec.engine.policy.block_choice import MOST_TREE_ROWS, ladder
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk
from specdec.engine.selection import Selection
from specdec.kv_cache import blocks_for
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.model.batch import Context
from specdec.parallel.mirror import everywhere
from specdec.parallel.plain import on_ranks
from specdec.sampling.params import SamplingParams

KEYS_PER_KERNEL = 16384
"""Of AITER's paged kernels, which are compiled anew for each further so many keys."""

UNPADDED = 16
"""Eager batches of up to so many requests are launched in every size, on which the splits of AITER's draft kernel depend."""

_ids = count(-1, -1)  # apart from those of real requests, and never twice: a batch is known by its requests


class WarmUpShape(NamedTuple):
    """One thing to launch.

    Attributes:
        title: what it is, in a few words.
        run: launches it, eagerly and then, where steps are captured, as its graph; returns when the device is done.
    """

    title: str
    run: Callable[[], None]


def warm_up_shapes(engine: SpecEngine, sampling: SamplingParams | None = None) -> list[WarmUpShape]:
    """What the engine's configuration can need: prefill, extension, drafting, verification and sampling in every shape.

    Args:
        engine: without unfinished requests, from the first `run` to the last.
        sampling: how requests will be decoded; None is greedy.
    """
    sampling = engine.verifier.defaults.fill(sampling or SamplingParams(), 1)
    return [*_prefills(engine, sampling), *_steps(engine, sampling)]


def launch_shape(engine: SpecEngine, sampling: SamplingParams | None, index: int) -> None:
    """Launches one of `warm_up_shapes`, on every rank that has a part of the target."""
    everywhere(engine.verifier, _launch_shape, engine, sampling, index)


@on_ranks
def _launch_shape(engine: SpecEngine, sampling: SamplingParams | None, index: int) -> None:
    warm_up_shapes(engine, sampling)[index].run()


def _prefills(engine: SpecEngine, sampling: SamplingParams) -> Iterator[WarmUpShape]:
    """Prompts and what extends them, alone and side by side; then those that are captured."""
    longest, num_reqs = engine.max_model_len - 1, engine.config.max_num_seqs
    most = min(engine.scheduler.max_prefill_tokens, longest)
    powers = {min(2**n, most) for n in range(most.bit_length() + 1)}
    # Triton compiles sizes that 16 divides apart from those that it does not.
    batches_of_spans = [[(0, width)] for width in sorted(powers | {width - 1 for width in powers if width > 1})]
    for bound in _bounds(engine, finer=True):
        end = min(bound, longest)
        batches_of_spans += [[(end - width, end)] for width in sorted({1, min(most, end // 2)}) if 0 < width < end]
    if num_reqs > 1 and most > 2:
        batches_of_spans.append([(0, most // 2), (1, 1 + most // 2)])
    if engine.runner.prefill_graphs:
        batches_of_spans += engine.runner.prefill_graphs.spans(num_reqs, most)
    for spans in batches_of_spans:
        (start, end), others = spans[0], f" beside {len(spans) - 1} more" if len(spans) > 1 else ""
        title = f"prefill {end - start:,} tokens behind {start:,}{others}"
        yield WarmUpShape(title, partial(_prefill, engine, spans, sampling))


def _steps(engine: SpecEngine, sampling: SamplingParams) -> Iterator[WarmUpShape]:
    """Decode steps, by bound, batch and the shape of blocks."""
    eager, most, steady_len = not engine.runner.graphs, engine.config.max_num_seqs, engine.verifier.attention.steady_len
    sizes, blocks = batches(most), engine.shapes
    if not engine.block_choice and not blocks[0].is_tree:  # the last steps of an output offer as many as there is room for
        blocks = tuple(map(BlockShape, range(engine.num_draft_tokens + 1) if eager else ladder(engine.num_draft_tokens)))
    for bound in _bounds(engine, finer=eager):
        for num_reqs in sorted({*sizes, *range(1, min(most, UNPADDED) + 1)}) if eager else sizes:
            for shape in blocks if num_reqs in sizes else blocks[-1:]:
                if shape.is_tree and engine.block_choice and num_reqs * shape.rows > MOST_TREE_ROWS:
                    continue
                title = f"decode {num_reqs} x {shape.rows} rows{' of trees' * shape.is_tree}, up to {bound:,} tokens"
                contexts: tuple[Context, ...] = ("now",) if shape.drafts or not engine.runner.most_deferred else ("later", "all")
                for context in contexts:
                    launch = partial(_decode, engine, num_reqs, shape, bound, sampling, context)
                    what = title if context in ("now", "later") else f"{title}, all context"
                    yield WarmUpShape(what, launch)
                    if steady_len:
                        yield WarmUpShape(f"{what}, one short", partial(launch, shortest=steady_len - 1))


def _bounds(engine: SpecEngine, *, finer: bool) -> list[int]:
    """Bounds on the lengths of sequences; `finer` where kernels see the length itself, not the bucket that it falls in."""
    longest = engine.slots.longest
    return sorted({*lengths(longest), *(range(KEYS_PER_KERNEL, longest, KEYS_PER_KERNEL) if finer else ())})


@torch.inference_mode()
def _prefill(engine: SpecEngine, spans: Sequence[tuple[int, int]], sampling: SamplingParams) -> None:
    """The last chunks of prompts, from start to end."""
    runner, block_size = engine.runner, engine.slots.block_size

    def launch() -> None:
        chunks = []
        for slot, (start, end) in enumerate(spans):
            request = _request(slot, end, sampling, num_blocks=blocks_for(end, block_size))
            chunks.append(Chunk(request, start, end, admitted=True, last=True))
        runner.prefill(chunks)

    graphs, runner.prefill_graphs = runner.prefill_graphs, None
    try:
        launch()
    finally:
        runner.prefill_graphs = graphs
    if graphs:
        launch()
    _wait(engine)


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
) -> None:
    """A step of requests whose tokens, with those that it writes, are `bound`; the last has at most `shortest` before it."""
    runner, slots = engine.runner, engine.slots
    known = [max(0, bound - slots.max_seq_len(Selection([_request(0, 1, sampling)]), shape.drafts))] * num_reqs
    if shortest is not None:
        known[-1] = min(known[-1], shortest)

    def launch() -> None:
        requests = [_request(slot, 1, sampling, num_kv_tokens=length) for slot, length in enumerate(known)]
        slots.begin(requests)
        slots.seq_lens.index_copy_(0, slots.slot_indices(requests), slots.tensor(known))
        if runner.drafter:
            for request in requests:
                runner.drafter.begin(request.slot, request.token_ids)
        runner.decode(slots.select(requests), shape, engine.clock, context=context)

    graphs, runner.graphs = runner.graphs, None
    try:
        launch()
    finally:
        runner.graphs = graphs
    if graphs:
        launch()
    _wait(engine)


def _request(slot: int, length: int, sampling: SamplingParams, *, num_kv_tokens: int = 0, num_blocks: int = 1) -> Request:
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


def _wait(engine: SpecEngine) -> None:
    if engine.verifier.device.type == "cuda":
        torch.cuda.synchronize(engine.verifier.device)
