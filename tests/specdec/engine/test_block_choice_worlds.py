"""Choosing k against the best fixed k, in made-up worlds with noise, and texts and batches that
change.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specdec.base.blocks import BlockShape
from specdec.engine.policy.block_choice import WINDOW, WINDOW_STEPS
from tests.helpers.block_choice_world import MOST, Outcome, Time, World, chains, decode, pace

STEPS = 2000


def accelerator(plain: float, draft: float, row: float) -> Time:
    """Milliseconds of a step that reads weights, drafts, and from 64 rows on computes."""
    return lambda num_reqs, k: (
        plain + 0.003 * num_reqs + draft * (k > 0) + row * max(0, num_reqs * (k + 1) - 64)
    )


PLAIN_IS_BEST = {
    "wrong drafts": World(accelerator(0.72, 0.25, 0.0012), lambda position, step: 0.0),
    "one that samples": World(accelerator(0.72, 0.45, 0.0012), lambda position, step: 0.3),
    "8 that sample": World(
        accelerator(0.75, 0.4, 0.0012), lambda position, step: 0.3, lambda step: 8
    ),
    "32 that sample": World(
        accelerator(0.8, 0.4, 0.0012), lambda position, step: 0.3, lambda step: 32
    ),
    "64 that sample": World(
        accelerator(0.9, 0.5, 0.0016), lambda position, step: 0.35, lambda step: 64
    ),
    "rows are dear": World(lambda num_reqs, k: 1 + 0.5 * k, lambda position, step: 0.4),
}
DRAFTS_ARE_BEST = {
    "15, one request": World(accelerator(0.72, 0.25, 0.0012), lambda position, step: 0.83),
    "15, 32 requests": World(
        accelerator(0.72, 0.25, 0.0006), lambda position, step: 0.8, lambda step: 32
    ),
    "7, 64 requests": World(
        accelerator(0.9, 0.25, 0.0012), lambda position, step: 0.8, lambda step: 64
    ),
    "7, drafts that are right six times": World(
        lambda num_reqs, k: 0.6 + 0.1 * (k > 0) + 0.02 * k,
        lambda position, step: 0.9 if position < 6 else 0.3,
        lambda step: 8,
    ),
    "3, drafts that are right three times": World(
        lambda num_reqs, k: 0.6 + 0.1 * (k > 0) + 0.03 * k,
        lambda position, step: 0.85 if position < 3 else 0.1,
    ),
    "a batch that shrinks": World(
        accelerator(0.72, 0.25, 0.0006),
        lambda position, step: 0.75,
        lambda step: max(1, 64 - step * 65 // STEPS),
    ),
}
TEXTS_CHANGE = {
    "for the better": World(
        accelerator(0.72, 0.25, 0.0012), lambda position, step: 0.1 if step < STEPS / 2 else 0.85
    ),
    "for the worse": World(
        accelerator(0.72, 0.25, 0.0012), lambda position, step: 0.85 if step < STEPS / 2 else 0.1
    ),
    "for the better, 32 requests": World(
        accelerator(0.8, 0.35, 0.0012),
        lambda position, step: 0.3 if step < STEPS / 2 else 0.85,
        lambda step: 32,
    ),
    "for the worse, 32 requests": World(
        accelerator(0.8, 0.35, 0.0012),
        lambda position, step: 0.85 if step < STEPS / 2 else 0.3,
        lambda step: 32,
    ),
}
WORLDS = PLAIN_IS_BEST | DRAFTS_ARE_BEST | TEXTS_CHANGE


def losses(world: World, seed: int) -> tuple[float, float]:
    """Of the first steps, and of as many after them."""
    choice = chains()
    first = decode(world, choice, steps=STEPS, seed=seed)
    return first.loss, decode(world, choice, steps=STEPS, seed=seed + 1000).loss


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PLAIN_IS_BEST)
def test_drafts_that_do_not_pay_cost_next_to_nothing(name: str, seed: int) -> None:
    """Under 2 % of plain decoding's time; 3 % where samples of one request tell little."""
    world = PLAIN_IS_BEST[name]
    assert min(range(MOST + 1), key=lambda k: pace(world, BlockShape(k))) == 0
    first, later = losses(world, seed)
    assert max(first, later) < (0.03 if name == "one that samples" else 0.02)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", DRAFTS_ARE_BEST)
def test_the_best_fixed_k_is_hardly_faster(name: str, seed: int) -> None:
    """By less than 5 %."""
    world = DRAFTS_ARE_BEST[name]
    assert pace(world, BlockShape(0)) > 1.3 * min(pace(world, BlockShape(k)) for k in (3, 7, 15))
    assert max(losses(world, seed)) < 0.05


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TEXTS_CHANGE)
def test_texts_that_change_are_followed(name: str, seed: int) -> None:
    """Less than 7 % behind someone who knows at every step which k is best; with many requests
    less than 6 %.
    """
    first, later = losses(TEXTS_CHANGE[name], seed)
    assert max(first, later) < (0.06 if "32" in name else 0.07)


LENGTH = 100
"""Steps of a request."""


def of_requests(rates: Sequence[float], time: Time) -> World:
    """Requests one behind the other, of which each accepts otherwise."""
    rng = random.Random(0)
    drawn = [rng.choice(rates) for _ in range(2 * STEPS // LENGTH)]
    return World(time, lambda position, step: drawn[step // LENGTH])


@pytest.mark.parametrize(
    ("time", "rates", "most"),
    [
        (accelerator(0.72, 0.25, 0.0012), (0.05, 0.2, 0.4, 0.6, 0.8, 0.9), 0.05),
        (lambda num_reqs, k: 6.7 + (k > 0) * (3 + k), (0.05, 0.2, 0.4, 0.6, 0.8, 0.9), 0.08),
        (lambda num_reqs, k: 6.7 + (k > 0) * (3 + k), (0.05, 0.05, 0.1, 0.9), 0.1),
        (lambda num_reqs, k: 6.7 + (k > 0) * (3 + k), (0.02, 0.05, 0.1, 0.2), 0.025),
    ],
    ids=["an accelerator", "a CPU", "one in four is good", "none is good"],
)
def test_each_request_is_followed(time: Time, rates: Sequence[float], most: float) -> None:
    """Behind someone who knows how each accepts, less is lost than by a choice that is not told of
    new requests; where no draft pays, no more.
    """
    world = of_requests(rates, time)
    told = decode(world, chains(), steps=2 * STEPS, seed=0, length=LENGTH)
    alone = decode(world, chains(), steps=2 * STEPS, seed=0)
    assert told.loss < most and (told.loss < 0.8 * alone.loss or max(rates) < 0.5)
    window = max(1000 * WINDOW, WINDOW_STEPS * world.time(1, 0))
    assert told.worst(window) < 0.025


def slowed(world: World, plain: float) -> World:
    """The same where a plain step of the first batch takes so many milliseconds."""
    factor = plain / world.time(world.num_reqs(0), 0)
    return replace(world, time=lambda num_reqs, k: factor * world.time(num_reqs, k))


def any_batch(seed: int) -> Callable[[int], int]:
    """Requests that come and go, up to 64."""
    sizes = (1, 2, 5, 8, 16, 24, 32, 64)
    return lambda step: random.Random(seed * STEPS + step // 40).choice(sizes)


@pytest.mark.parametrize("name", WORLDS)
def test_no_few_seconds_are_lost(name: str) -> None:
    """Trying costs at most 2 % against plain decoding over any 5 seconds, the first included,
    whatever drafts are worth; where a step takes 5 ms, over any 12.5 seconds.
    """
    quick = slowed(replace(WORLDS[name], num_reqs=any_batch(7)), 1.0)
    assert decode(quick, chains(), steps=2 * STEPS, seed=1).worst(1000 * WINDOW) < 0.02
    if name in PLAIN_IS_BEST:
        slower = decode(slowed(WORLDS[name], 5.0), chains(), steps=2 * STEPS, seed=0)
        assert slower.worst(5 * WINDOW_STEPS) < 0.02


@pytest.mark.parametrize("reading", [0.0, 1.0, 8.0, 30.0, 100.0])
@pytest.mark.parametrize("draft", [0.5, 2.0, 3.5])
def test_what_is_read_before_drafts_counts_as_theirs(reading: float, draft: float) -> None:
    """Texts that change and drafts that are never right, before which a step without any takes
    `reading` milliseconds longer.
    """
    choice, plain, num_reqs = chains(), 1.5, 32
    took = lost = 0.0
    behind = list[tuple[float, float]]()
    may_draft, trials = False, 0
    for step in range(30_000):
        shape = choice.choose(num_reqs, fresh=num_reqs if step % 200 == 0 else 0)
        wanted = shape.drafts > 0
        prepares, may_draft = wanted and not may_draft, wanted
        block = BlockShape(0) if prepares else shape
        extra = reading * prepares + draft * block.drafts
        behind.append((took, extra))
        took, lost, trials = took + plain + extra, lost + extra, trials + prepares
        seconds = (plain + extra) / 1000
        choice.observe(num_reqs, block, [0] * num_reqs, seconds, prepares=prepares)
    assert lost < 0.01 * took and trials > 1
    most = Outcome([], 0.0, behind).worst(1000 * WINDOW)
    assert most < 0.02 + reading / (1000 * WINDOW)
