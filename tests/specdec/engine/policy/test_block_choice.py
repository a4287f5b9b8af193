"""Choosing k: it finds the fastest, gives drafts up that do not pay, and takes them up again."""

import random
from collections import Counter
from collections.abc import Callable
from math import ceil

import pytest

from specdec.base.blocks import BlockShape
from specdec.engine.capture.buckets import BATCH_SIZES
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.draft_acceptance import AcceptanceEstimate, Path
from specdec.engine.policy.shapes import ladder, shapes, shared_shapes
from specdec.engine.policy.step_times import Samples, StepSize
from tests.helpers.block_choice_world import MOST, chains

Rate = Callable[[int], float]


Cost = Callable[[int], float]


RATES: dict[str, Rate] = {
    "wrong": lambda position: 0.0,
    "poor": lambda position: 0.3,
    "fair": lambda position: 0.7,
    "good": lambda position: 0.95,
    "short": lambda position: 0.9 if position < 4 else 0.05,
}


COSTS: dict[str, Cost] = {
    "cheap": lambda k: 1 + 0.004 * k,
    "usual": lambda k: 1 + 0.1 * (k > 0) + 0.02 * k,
    "steep": lambda k: 1 + 0.3 * k,
}


def simulate(
    choice: BlockChoice, rate: Rate, cost: Cost, *, steps: int, batch: int = 1, seed: int = 0
) -> tuple[list[int], float, float]:
    """The k of every step, tokens per request, and seconds, disturbed by up to a tenth."""
    rng = random.Random(seed)
    chosen, tokens, total = [], 0, 0.0
    for _ in range(steps):
        k = choice.choose(batch).drafts
        accepted = [next((j for j in range(k) if rng.random() >= rate(j)), k) for _ in range(batch)]
        seconds = cost(k) * (1 + 0.1 * rng.random())
        choice.observe(batch, BlockShape(k), accepted, seconds)
        chosen.append(k)
        tokens += sum(accepted) + batch
        total += seconds
    return chosen, tokens / batch, total


def speed(rate: Rate, cost: Cost, k: int) -> float:
    """Tokens per second of a fixed k, with the mean disturbance."""
    alive, tokens = 1.0, 1.0
    for position in range(k):
        alive *= rate(position)
        tokens += alive
    return tokens / (1.05 * cost(k))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rate", RATES)
def test_converges_to_the_fastest_k(rate: str, cost: str, batch: int) -> None:
    """After 150 steps it decodes within 5 % of the best fixed k, whatever that is, with everything
    it tries on the way.
    """
    best = max(speed(RATES[rate], COSTS[cost], k) for k in ladder(MOST))
    choice = chains()
    simulate(choice, RATES[rate], COSTS[cost], steps=150, batch=batch)
    _, tokens, seconds = simulate(choice, RATES[rate], COSTS[cost], steps=600, batch=batch, seed=1)
    assert tokens / seconds > 0.95 * best


@pytest.mark.parametrize("rate", ["wrong", "fair"])
def test_gives_up_drafts_that_cannot_pay(rate: str) -> None:
    """Drafts that are always wrong, or a verification as dear as so many plain steps: nearly every
    step is plain.
    """
    cost = COSTS["usual"] if rate == "wrong" else lambda k: 1.0 + k
    chosen, tokens, seconds = simulate(chains(), RATES[rate], cost, steps=400)
    assert chosen[100:].count(0) > 0.85 * 300
    assert tokens / seconds > 0.93 * speed(RATES[rate], cost, 0)


def test_follows_acceptance_up_and_down() -> None:
    """Drafts that become right are used within 50 steps of the change, and those that become wrong
    dropped within 250.
    """
    choice, cost = chains(), COSTS["usual"]
    chosen, _, _ = simulate(choice, RATES["wrong"], cost, steps=400)
    assert chosen[-50:].count(0) > 40
    chosen, _, _ = simulate(choice, RATES["good"], cost, steps=300)
    assert chosen[50:].count(MOST) > 0.9 * 250
    chosen, _, _ = simulate(choice, RATES["wrong"], cost, steps=400)
    assert chosen[250:].count(0) > 0.8 * 150


def test_times_that_have_changed_are_noticed() -> None:
    """A verification that becomes dear is given up, and taken up once it is cheap again, although
    nobody used it meanwhile.
    """
    choice = chains()
    simulate(choice, RATES["fair"], COSTS["cheap"], steps=60)
    chosen, _, _ = simulate(choice, RATES["fair"], lambda k: 1.0 + 6 * (k > 0) + 0.1 * k, steps=200)
    assert chosen[-100:].count(0) > 90
    chosen, _, _ = simulate(choice, RATES["fair"], COSTS["cheap"], steps=4000)
    assert sum(k >= 4 for k in chosen[-200:]) > 180


def test_the_first_step_of_a_kind_does_not_count() -> None:
    """It pays for memory and for choosing kernels, which no later step does."""
    samples = Samples()
    for step, seconds in enumerate((100.0, 1.0, 2.0)):
        samples.observe(seconds, step)
        assert samples.seconds is None and samples.last == seconds
    samples.observe(1.5, 3)
    assert samples.seconds == 1.0, "disturbances only lengthen a step"


def test_a_disturbed_measurement_does_not_last() -> None:
    """The machine is busy while plain decoding is measured first: drafts that never pay are given
    up all the same.
    """
    choice = chains()
    simulate(choice, RATES["wrong"], lambda k: 20.0, steps=5)
    chosen, _, _ = simulate(choice, RATES["wrong"], COSTS["usual"], steps=200)
    assert chosen[100:].count(0) > 85


def test_every_batch_size_has_its_own_times() -> None:
    """What is free for one request may be dear for many: the choices do not get mixed up."""
    choice = chains()
    for _ in range(30):
        alone, _, _ = simulate(choice, RATES["good"], COSTS["cheap"], steps=20)
        many, _, _ = simulate(choice, RATES["good"], lambda k: 1.0 + 2 * k, steps=20, batch=32)
    assert alone.count(MOST) > 15
    assert many.count(0) > 15


def test_what_is_not_measured_is_estimated_from_what_is() -> None:
    """By rows, between steps that must be shorter and steps that must be longer; plain decoding at
    its lower bound.
    """

    def size(num_reqs: int, k: int) -> StepSize:
        return StepSize(num_reqs, num_reqs * (k + 1), min(k, 1), False)

    step = size(2, 3)  # 8 rows
    small, large = {size(1, 3): 1.0}, {size(4, 3): 2.0}  # 4 and 16 rows
    assert step.estimate(small | large) == pytest.approx(1 + 4 / 12)
    assert (step.estimate(small), step.estimate(large), step.estimate({})) == (1.0, 2.0, None)
    longest = small | {size(1, 7): 1.5} | large
    assert step.estimate(longest) == pytest.approx(1.5), "the longest below"
    shortest = small | {size(3, 3): 1.6} | large
    assert step.estimate(shortest) == pytest.approx(1 + 0.6 * 4 / 8), "the shortest above"
    assert step.estimate({size(64, 0): 9.0}) is None, "a plain step is no bound above drafts"
    assert step.estimate({size(1, 15): 9.0}) is None, "nor are more rows of fewer requests"
    assert size(2, 0).estimate({size(1, 0): 1.0, size(4, 0): 2.0}) == 1.0
    assert size(2, 0).estimate({size(4, 1): 2.0}) == 2.0


def test_more_drafts_are_not_expected_to_take_less_time() -> None:
    """Of a chain as of a tree, wherever a measured tree says how long a shorter chain takes."""
    choice = BlockChoice(shapes(15, trees=63), likeliest_first=True)
    for shape, seconds in ((BlockShape(0), 0.007), (BlockShape(7, 7), 0.048)):
        for _ in range(5):
            choice.observe(2, shape, [0, 0], seconds)
    found = {one.shape: one.milliseconds for one in choice.estimates()}
    chains, trees = [0, 1, 3, 7, 15], [3, 7, 15]
    assert [found[str(k)] for k in chains] == sorted(found[str(k)] for k in chains)
    assert [found[f"tree {k}"] for k in trees] == sorted(found[f"tree {k}"] for k in trees)
    assert found["15"] >= found["7"] > 30


def test_a_disturbed_plain_step_makes_no_other_look_slow() -> None:
    """It takes no longer than one with drafts, so what was not measured does not either."""
    choice = BlockChoice(shapes(15, trees=63), likeliest_first=True)
    for shape, seconds in ((BlockShape(0), 0.023), (BlockShape(7, 7), 0.009)):
        for _ in range(5):
            choice.observe(1, shape, [0], seconds)
    found = {one.shape: one.milliseconds for one in choice.estimates()}
    assert found["0"] == found["tree 7"] == found["tree 15"] == pytest.approx(9)


def test_what_an_estimate_makes_look_bad_is_tried_in_the_end() -> None:
    """Between a dear k and a cheap one the time is a guess; a long run measures it, once that costs
    next to nothing.
    """
    costs = {0: 1.0, 1: 1.4, 3: 1.5, 7: 1.6, 15: 9.0}
    choice = chains()
    for k in (0, 15):
        for _ in range(4):
            choice.observe(1, BlockShape(k), [k], costs[k])
    for _ in range(64):
        choice.observe(1, BlockShape(3), [1], costs[3])
        choice.observe(1, BlockShape(3), [3], costs[3])
    chosen, _, _ = simulate(choice, RATES["fair"], costs.__getitem__, steps=200)
    assert 7 not in chosen and chosen.count(3) > 150
    chosen, _, _ = simulate(choice, RATES["fair"], costs.__getitem__, steps=20000)
    assert chosen[-500:].count(7) > 450


def decode_copies(*, told: bool) -> tuple[float, dict[bool, list[int]]]:
    """Tokens per second where every other five steps copy; and the drafts of steps that do and of
    others, once some are known.
    """
    rng, choice, tokens, seconds = random.Random(0), BlockChoice(shapes(31, trees=0)), 0, 0.0
    chosen: dict[bool, list[int]] = {False: [], True: []}
    for step in range(1200):
        copies = step // 5 % 2 == 0
        expected_accepted = (14.0 if copies else 0.2) if told else 0.0
        k = choice.choose(1, expected_accepted=expected_accepted).drafts
        accepted = next(
            (place for place in range(k) if rng.random() > (0.98 if copies else 0.1)), k
        )
        choice.observe(
            1, BlockShape(k), [accepted], 1 + 0.1 * k, expected_accepted=expected_accepted
        )
        if step >= 200:
            chosen[copies].append(k)
            tokens, seconds = tokens + accepted + 1, seconds + 1 + 0.1 * k
    return tokens / seconds, chosen


def test_a_sure_copy_gets_a_long_block_and_a_text_without_one_none() -> None:
    """Without what is expected, it takes blocks that are too long for the one and too short
    for the other.
    """
    fast, chosen = decode_copies(told=True)
    assert (
        sorted(chosen[True])[len(chosen[True]) // 10] >= 15
        and sum(chosen[False]) / len(chosen[False]) < 1
    )
    slow, chosen = decode_copies(told=False)
    assert fast > 1.2 * slow and sum(chosen[False]) / len(chosen[False]) > 3


def test_a_new_batch_size_begins_with_what_others_have_shown() -> None:
    """A batch that drains meets 13 sizes; most of their 78 kinds of steps, each a graph to capture,
    need not be tried.
    """
    choice, tried = chains(), set()
    ratios = []
    for drain in range(3):
        took = least = 0.0
        for batch in sorted(BATCH_SIZES[:13], reverse=True):

            def cost(k: int, batch: int = batch) -> float:
                return (
                    0.6
                    + 0.003 * batch
                    + (k > 0) * (0.3 + 0.002 * batch + 0.001 * max(0, batch * (k + 1) - 64))
                )

            chosen, tokens, seconds = simulate(
                choice, RATES["fair"], cost, steps=8, batch=batch, seed=drain
            )
            tried |= {(batch, k) for k in chosen}
            took += seconds
            least += tokens / max(speed(RATES["fair"], cost, k) for k in ladder(MOST))
        ratios.append(least / took)
    assert len(tried) < 40
    assert ratios[0] > 0.8 and ratios[2] > 0.93


@pytest.mark.parametrize(("per_row", "shared"), [(0.05, True), (0.001, False)])
def test_budgets_are_chosen_where_rows_are_dear(per_row: float, shared: bool) -> None:
    """A tree gives more tokens with each draft, and more with a budget; every row takes time."""
    arms = (*shapes(15, trees=15), *shared_shapes(15, trees=True))
    choice, chosen = BlockChoice(arms), Counter[BlockShape]()
    for step in range(1200):
        shape = choice.choose(32)
        better = 1.2 if shape.budget else 1.1 if shape.is_tree else 1.0
        accepted = min(2 * better * (shape.mean_rows - 1) ** 0.4, shape.drafts)
        share = accepted - int(accepted)
        kept = [int(accepted) + (place < 32 * share) for place in range(32)]
        # those of a smaller tree are among its rows
        rows = [max(j, min(15, ceil((j / 2.2) ** 2.5))) for j in range(1, 16)]
        paths = [Path(rows[:n], [0] * n) for n in kept] if shape.is_tree else []
        seconds = 1e-3 * (1 + 32 * per_row * shape.mean_rows)
        choice.observe(32, shape, kept, seconds, paths=paths)
        chosen[shape] += step > 600
    assert bool(chosen.most_common(1)[0][0].budget) == shared, chosen
    assert choice.choose(4).budget == 0


def test_plain_steps_tell_nothing_of_how_texts_differ() -> None:
    """Catches steps without drafts that count as ones whose first draft was refused."""
    weights = []
    for plain in (0, 50):
        estimate = AcceptanceEstimate(3)
        for _ in range(20):
            for accepted in (1, 0, 1, 0, 1, 0, 1, 0):
                estimate.observe(1, [accepted])
            for _ in range(plain):
                estimate.observe(0, [0])
            weights.append(estimate.fade())
    assert weights[19] == weights[39]
