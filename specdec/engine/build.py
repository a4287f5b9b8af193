"""What an engine is made of, sized and allocated from the target, the drafter and the config."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from specdec.attention import selector
from specdec.base.blocks import MAX_NODES, BlockShape
from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.registry import PREDICTIONS, import_attribute
from specdec.engine.capture.buckets import BATCH_SIZES, batch_bucket
from specdec.engine.capture.capture import CudaCapture, captures_graphs
from specdec.engine.capture.captured import capture_steps
from specdec.engine.capture.graph_check import check_captured_step
from specdec.engine.capture.prefill_graphs import max_prefill_rows
from specdec.engine.memory import plan_cache
from specdec.engine.policy.budget import VerifyBudget
from specdec.engine.policy.shapes import (
    MAX_TREE_ROWS,
    checked_draft_tokens,
    shapes,
    shared_shapes,
    tree_shape,
)
from specdec.engine.policy.timing import StepTimer
from specdec.engine.requests.prefix import PrefixCache
from specdec.engine.requests.scheduler import Scheduler
from specdec.engine.slots import SlotState
from specdec.engine.step import StepRunner
from specdec.kernels.kernel import check_all
from specdec.kernels.triton_launch import unavailable_reasons
from specdec.kv_cache import BlockPool, PagedKVCache, blocks_for, bytes_per_slot
from specdec.model.core import Drafter, PredictedDrafter, Verifier
from specdec.model.large_keys import fitting_specs
from specdec.parallel.collectives import least
from specdec.parallel.group import group_of

logger = logging.getLogger(__name__)

PREFILL_TOKENS_BESIDE = 2048
"""Prompt tokens of a step beside requests that decode: they wait for the chunk, about ten of their
steps with a model of 8 B on an H200."""


SNAPSHOT_TOKENS = 256
"""Prompt tokens for which a snapshot of recurrent states is worth the step that ends a prompt at a
block's end.
"""


class EngineParts(NamedTuple):
    """The parts of one engine.

    Attributes:
        shapes: of the blocks that steps may have. There are several where they are chosen step by
            step; a chain may be shorter where nothing is left to decode.
        max_model_len: most tokens of prompt and output together.
        pipeline_depth: steps launched before the oldest result is read.
        overshoot: positions past the last token a request may have for which there must be room,
            since launched steps write there.
        timer, kv_cache, pool, scheduler, slots, runner: see their classes.
    """

    shapes: tuple[BlockShape, ...]
    max_model_len: int
    pipeline_depth: int
    overshoot: int
    timer: StepTimer
    kv_cache: PagedKVCache
    pool: BlockPool
    scheduler: Scheduler
    slots: SlotState
    runner: StepRunner


def build_engine(
    verifier: Verifier, drafter: Drafter | None, config: EngineConfig, engine: Callable[..., Any]
) -> EngineParts:
    """Sizes everything, allocates it, and binds the drafter; `engine` makes those that check
    captured steps.

    Raises:
        InvalidInputError: more drafts per step than the drafter can give, drafts without a drafter,
            or a context that goes on where the target's positions end.
        CheckpointError, BackendError: the drafter does not fit the target, or no attention backend
            can serve it.
        CapacityError: the cache budget does not pay for two blocks, or the device does not have it.
    """
    device, block_size = verifier.device, verifier.attention.spec.block_size
    blocks = _shapes(verifier, drafter, config)
    max_drafts, depth = max(shape.drafts for shape in blocks), max(shape.depth for shape in blocks)
    # Where shapes are chosen, trees take what is free.
    reserved = max(shape.drafts for shape in blocks if len(blocks) == 1 or not shape.is_tree)
    if max_drafts == 0:
        drafter = None
    num_lookahead_tokens = drafter.num_lookahead_tokens if drafter else 0
    pipeline_depth = (
        config.pipeline_depth if config.pipeline_depth is not None else int(device.type == "cuda")
    )
    max_model_len = _max_model_len(verifier, config.max_model_len)
    in_flight = pipeline_depth * (depth + 1)
    overshoot = in_flight + max(reserved + 1, num_lookahead_tokens)
    num_tokens = max_model_len + in_flight + max(max_drafts + 1, num_lookahead_tokens)
    max_blocks = blocks_for(num_tokens, block_size)

    if not unavailable_reasons(device) and os.environ.get("TRITON_INTERPRET") != "1":
        from specdec.kernels.triton_compile import say_when_compiling  # it imports Triton

        say_when_compiling()
    check_all(device)
    group, wanted = group_of(verifier), config.graphs
    if group is not None and wanted is None and torch.version.hip:
        # the check would have one rank wait for another's lock, and that one for its collectives
        wanted = False
    check = partial(check_captured_step, engine, verifier)
    captures = captures_graphs(device, wanted, check, verifier.attention.name)
    graph_rows = (
        max(_max_rows(shape, config, chosen=len(blocks) > 1) for shape in blocks) if captures else 0
    )
    prefill_rows = 0
    if captures and verifier.attention.captures_prefill:
        prefill_rows = max_prefill_rows(verifier, config.max_num_seqs)
    target_specs = verifier.kv_specs
    drafter_specs = fitting_specs(verifier, drafter) if drafter else []
    recurrent = bytes_per_slot(target_specs, 1) > 0
    # The slot after the last pads batches; as many snapshots as there may be requests come behind
    # it.
    num_snapshots = config.max_num_seqs if recurrent and config.cache.prefix_caching else 0
    snapshots = range(config.max_num_seqs + 1, config.max_num_seqs + 1 + num_snapshots)
    states = {"num_slots": snapshots.stop, "max_rows": max_drafts + 1}
    num_blocks = plan_cache(
        verifier,
        [*target_specs, *drafter_specs],
        config.cache,
        max_total_tokens=config.max_num_seqs * max_blocks * block_size,
        **states,
        graph_rows=graph_rows,
        prefill_rows=prefill_rows,
    )
    num_blocks = least(num_blocks, group)
    kv_cache = PagedKVCache(
        [*target_specs, *drafter_specs],
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=verifier.attention.spec.kv_dtype,
        device=device,
        **states,
    )
    target_caches = kv_cache.layers[: len(target_specs)]
    drafter_caches = kv_cache.layers[len(target_specs) :]

    pool = BlockPool(num_blocks, snapshots if recurrent else None)
    prefix = PrefixCache(
        pool,
        block_size,
        enabled=config.cache.prefix_caching,
        tokens_ahead=drafter.tokens_ahead if drafter else 0,
        late_context=drafter.late_context if drafter else False,
        reads_late=drafter.reads_late if drafter else False,
        recurrent=recurrent,
    )
    scheduler = Scheduler(
        pool,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens
        or (512 if device.type == "cpu" else verifier.attention.prefill_tokens),
        max_tokens_beside=config.max_prefill_tokens or PREFILL_TOKENS_BESIDE,
        prefix=prefix,
        num_draft_tokens=reserved,
        num_lookahead_tokens=num_lookahead_tokens,
        snapshot_tokens=SNAPSHOT_TOKENS if recurrent else None,
    )
    slots = SlotState(
        max_num_seqs=config.max_num_seqs,
        max_blocks=max_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=verifier.vocab_size,
        device=device,
        num_lookahead_tokens=num_lookahead_tokens,
        rotates_by_length=verifier.length_rule is not None,
    )
    bound = predicted = None
    if drafter:
        bound = drafter.bind(
            verifier,
            drafter_caches,
            max_num_seqs=slots.num_slots,
            max_len=slots.longest,
            draft_sampling=config.draft_sampling,
        )
        predicted = partial(
            _beside, drafter, bound, verifier, num_slots=slots.num_slots, max_len=max_model_len
        )
    budget = None
    if any(shape.budget for shape in blocks) and bound is not None:
        bound.forecasts = True
        budget = VerifyBudget(slots.num_slots, depth, device)
    timer = StepTimer(device, enabled=config.timing)
    taps = drafter.aux_layer_ids if drafter else ()
    runner = StepRunner(
        verifier,
        bound,
        target_caches,
        taps,
        slots,
        timer,
        max_rows=max_drafts + 1,
        trees=any(shape.is_tree for shape in blocks),
        budget=budget,
        predicted=predicted,
    )
    if captures:
        capture = CudaCapture(device)
        capture_steps(runner, slots, capture, prefill_rows, required=bool(config.graphs))
    return EngineParts(
        blocks,
        max_model_len,
        pipeline_depth,
        overshoot,
        timer,
        kv_cache,
        pool,
        scheduler,
        slots,
        runner,
    )


def _beside(*run: Any, **sizes: int) -> PredictedDrafter:
    """What copies predictions beside a run's drafter, see `PREDICTIONS`."""
    made: PredictedDrafter = import_attribute(PREDICTIONS)(*run, **sizes)
    return made


def _max_model_len(verifier: Verifier, asked: int | None) -> int:
    """Most tokens of prompt and output together.

    Raises:
        InvalidInputError: more than the target has positions for.
    """
    usual, extended, most = verifier.context
    if asked is None:
        return usual
    if most is not None and asked > most:
        what = f"max_model_len is {asked:,} and the positions of {verifier.name!r} end at {most:,}"
        raise InvalidInputError(f"{what}; ask for no more")
    if asked > extended:
        logger.warning(
            "max_model_len is %s and %s was made for %s tokens: what it writes beyond may be poor",
            f"{asked:,}",
            verifier.name,
            f"{extended:,}",
        )
    return asked


def _shapes(
    verifier: Verifier, drafter: Drafter | None, config: EngineConfig
) -> tuple[BlockShape, ...]:
    """What the configuration asks for.

    Raises:
        InvalidInputError: more drafts per step than the drafter can give, drafts without a drafter,
            or trees that are not served.
    """
    most = checked_draft_tokens("auto" if config.tree_nodes else config.num_draft_tokens, drafter)
    reasons = tree_reasons(verifier, drafter, config) if config.tree_nodes != 0 else []
    if config.tree_nodes:
        if reasons:
            what = f"tree_nodes is {config.tree_nodes}, but {'; '.join(reasons)}"
            raise InvalidInputError(f"{what}; leave it out for chains")
        assert drafter is not None
        tree = tree_shape(config.tree_nodes, most, forward_for_each=drafter.forward_for_each)
        return (_with_budget(tree, verifier, config),)
    if config.num_draft_tokens == "auto" and most:
        # On a CPU a row costs time, and more rows than the longest chain has may see weights that
        # were rounded otherwise.
        served = (
            0
            if reasons or config.tree_nodes == 0
            else MAX_NODES
            if verifier.device.type == "cuda"
            else most
        )
        assert drafter is not None
        made = shapes(most, trees=served, forward_for_each=drafter.forward_for_each)
        if config.verify_budget is None:
            return made
        _check_budget(verifier, config)
        each = drafter.forward_for_each
        return (*made, *shared_shapes(most, trees=served > 0, forward_for_each=each))
    return (_with_budget(BlockShape(most), verifier, config),)


def _with_budget(shape: BlockShape, verifier: Verifier, config: EngineConfig) -> BlockShape:
    """The shape, of which as many drafts are verified as the configuration says.

    Raises:
        InvalidInputError: the target or the configuration cannot be served so.
    """
    budget = config.verify_budget
    if not isinstance(budget, int | float) or budget >= shape.drafts:
        return shape
    _check_budget(verifier, config)
    return shape._replace(budget=float(budget))


def _check_budget(verifier: Verifier, config: EngineConfig) -> None:
    if reasons := budget_reasons(verifier, config):
        what = f"verify_budget is {config.verify_budget}, but {'; '.join(reasons)}"
        raise InvalidInputError(f"{what}; leave it out to verify all drafts")


def budget_reasons(verifier: Verifier, config: EngineConfig) -> list[str]:
    """All reasons why steps cannot verify more drafts of one request than of another; empty when
    they can.
    """
    reasons = selector.ragged_reasons(verifier.attention)
    if config.draft_sampling == "probabilistic":
        reasons.append("probabilistic drafts are judged as whole blocks")
    return reasons


def tree_reasons(verifier: Verifier, drafter: Drafter | None, config: EngineConfig) -> list[str]:
    """All reasons why drafts cannot form trees; empty when they can."""
    if drafter is None:
        return ["there is no drafter"]
    reasons = [] if drafter.draws_trees else ["the drafter makes chains"]
    if config.draft_sampling == "probabilistic":
        reasons.append("probabilistic drafts form chains")
    return reasons + target_tree_reasons(verifier)


def target_tree_reasons(verifier: Verifier) -> list[str]:
    """Reasons that lie in the target, whatever the drafter."""
    recurrent = bytes_per_slot(verifier.kv_specs, 1) > 0
    reasons = []
    if recurrent:
        reasons = [f"{verifier.name!r} has recurrent layers, whose states follow a chain"]
    return reasons + selector.tree_reasons(verifier.attention)


def _max_rows(shape: BlockShape, config: EngineConfig, *, chosen: bool) -> int:
    """Rows of a captured step; a tree that is `chosen` has at most `MAX_TREE_ROWS`."""
    rows = min(batch_bucket(config.max_num_seqs), BATCH_SIZES[-1]) * shape.rows
    few = shape.is_tree and chosen and not shape.budget
    return min(rows, MAX_TREE_ROWS) if few else rows
