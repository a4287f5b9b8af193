"""Choosing among chains and trees, against the best fixed shape, in made-up worlds with noise and
captures.
"""

import random
from dataclasses import replace
from statistics import mean

import pytest

from specdec.base.blocks import BlockShape
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.draft_acceptance import BlockAcceptance, Path
from specdec.engine.policy.shapes import MAX_TREE_ROWS
from tests.helpers.block_choice_world import MOST, TreeWorld, decode, pace, trees

STEPS, LENGTH = 2000, 150
SURE, FAIR, FLAT, WRONG = (
    (0.75, 0.12, 0.05, 0.02),
    (0.5, 0.2, 0.1, 0.05),
    (0.3, 0.2, 0.15, 0.1),
    (0.02, 0.01, 0.005, 0.002),
)


def large(num_reqs: int, shape: BlockShape) -> float:
    """Milliseconds of a step of a large model: from 32 rows on it computes."""
    rows = num_reqs * shape.rows
    forwards = 5.3 + 0.3 * (shape.drafts > 0) + 0.05 * shape.is_tree
    return forwards + 0.004 * num_reqs + 0.01 * min(32, rows) + 0.023 * max(0, rows - 32)


def small(num_reqs: int, shape: BlockShape) -> float:
    """Of a small one, where kernels take their time whatever they do."""
    return (
        0.72
        + 0.2 * (shape.drafts > 0)
        + 0.03 * shape.is_tree
        + 0.003 * num_reqs
        + 0.0006 * num_reqs * shape.rows
    )


DRAFTS_ARE_BEST = {
    "tree 63": TreeWorld(small, FLAT),
    "tree 63, 4 requests": TreeWorld(small, SURE, lambda step: 4),
    "tree 31": TreeWorld(large, FAIR),
    "tree 15": TreeWorld(large, FLAT, lambda step: 4),
    "tree 7": TreeWorld(small, FAIR, lambda step: 64),
    "tree 3": TreeWorld(large, FLAT, lambda step: 16),
    "7": TreeWorld(small, SURE, lambda step: 64),
    "3": TreeWorld(large, SURE, lambda step: 64),
    "1": TreeWorld(large, FAIR, lambda step: 64),
}
PLAIN_IS_BEST = {
    "wrong drafts": TreeWorld(small, WRONG),
    "wrong drafts, 64 requests": TreeWorld(large, WRONG, lambda step: 64),
    "rows are dear": TreeWorld(lambda num_reqs, shape: 1 + 0.5 * shape.drafts, FLAT),
}


def losses(world: TreeWorld, *, likeliest_first: bool) -> tuple[float, float]:
    """Of the first steps, and of as many after them."""
    choice = trees(likeliest_first=likeliest_first)
    first = decode(world, choice, steps=STEPS, seed=0)
    return first.loss, decode(world, choice, steps=STEPS, seed=1000).loss


def best_of(world: TreeWorld, choice: BlockChoice | None = None) -> BlockShape:
    arms = (
        shape
        for shape in (choice or trees()).arms
        if not shape.is_tree or world.num_reqs(0) * shape.rows <= MAX_TREE_ROWS
    )
    return min(arms, key=lambda shape: pace(world, shape))


@pytest.mark.parametrize(
    ("name", "likeliest_first"), [(name, i % 2 == 0) for i, name in enumerate(DRAFTS_ARE_BEST)]
)
def test_the_best_shape_is_hardly_faster(name: str, likeliest_first: bool) -> None:
    """By less than 5 %."""
    world = DRAFTS_ARE_BEST[name]
    assert str(best_of(world)) == name.partition(",")[0]
    first, later = losses(world, likeliest_first=likeliest_first)
    assert max(first, later) < 0.05


def token_by_token(num_reqs: int, shape: BlockShape) -> float:
    """Milliseconds of a step whose drafts take a forward for each position: from 32 rows on the
    target computes.
    """
    rows = num_reqs * shape.rows
    return (
        1.7 + 0.6 * shape.depth + 0.02 * max(0, rows - 32) + 0.006 * shape.depth * max(0, rows - 64)
    )


@pytest.mark.parametrize(
    ("rate", "num_reqs", "best"),
    [
        (0.95, 1, "tree 31"),
        (0.7, 1, "tree 3"),
        (0.5, 1, "tree 3"),
        (0.85, 8, "tree 3"),
        (0.85, 64, "0"),
    ],
)
def test_the_depth_of_drafts_that_take_a_forward_each_is_chosen(
    rate: float, num_reqs: int, best: str
) -> None:
    """As above; and where no draft pays, plain decoding is not left for more than 2 % of
    the time.
    """
    others = [(1 - rate) * share for share in (0.5, 0.2, 0.1)]
    world = TreeWorld(token_by_token, (rate, *others), lambda step: num_reqs)
    choice = trees(likeliest_first=True, most=7, forward_for_each=True)
    assert str(best_of(world, choice)) == best
    first = decode(world, choice, steps=STEPS, seed=0)
    later = decode(world, choice, steps=STEPS, seed=1000)
    limit = 0.02 if best == "0" else 0.07 if rate == 0.7 else 0.05  # five trees are about as fast
    assert max(first.loss, later.loss) < limit


@pytest.mark.parametrize("name", PLAIN_IS_BEST)
def test_trees_that_do_not_pay_cost_next_to_nothing(name: str) -> None:
    """Under 2 % of plain decoding's time, and 3 % at first."""
    world = PLAIN_IS_BEST[name]
    assert best_of(world) == BlockShape(0)
    first, later = losses(world, likeliest_first=True)
    assert later < 0.02 and first < 0.03


def shape_of(drafts: int) -> BlockShape:
    return BlockShape(drafts, min(drafts, MOST))


def taught(world: TreeWorld, shape: BlockShape) -> BlockAcceptance:
    """What many steps of one shape tell."""
    acceptance, rng = BlockAcceptance(trees().arms), random.Random(0)
    for _ in range(300):
        paths = [world.path(shape, 0, 0.0, rng) for _ in range(32)]
        own = [path for path in paths if path.rows] if shape.is_tree else []
        acceptance.observe(shape, [len(path.rows) for path in paths], own)
    return acceptance


@pytest.mark.parametrize("ranks", [SURE, FAIR, FLAT])
def test_a_large_tree_tells_what_smaller_ones_would_accept(ranks: tuple[float, ...]) -> None:
    """Their drafts are its first, so what it accepted of these counts; a small one promises more of
    a larger one.
    """
    world = TreeWorld(small, ranks)
    acceptance = taught(world, shape_of(63))
    for drafts in (3, 7, 15, 31, 63):
        assert acceptance.expected_tokens(shape_of(drafts)) == pytest.approx(
            world.tokens(shape_of(drafts), 0), rel=0.03
        )
    acceptance = taught(world, shape_of(7))
    assert acceptance.expected_tokens(shape_of(3)) == pytest.approx(
        world.tokens(shape_of(3), 0), rel=0.03
    )
    hoped = [acceptance.expected_tokens(shape_of(drafts)) for drafts in (7, 15, 31, 63)]
    assert hoped == sorted(hoped) and hoped[-1] < 2 * hoped[0]


def test_rows_behind_a_small_tree_are_not_its_own() -> None:
    """A path that leaves the smaller tree at its second draft counts as one that was accepted up to
    there.
    """
    acceptance = BlockAcceptance(trees().arms)
    for _ in range(500):
        acceptance.observe(shape_of(63), [3], [Path([2, 9, 40], [1, 0, 0])])
    tokens = [acceptance.expected_tokens(shape_of(drafts)) for drafts in (3, 7, 15, 31, 63)]
    assert tokens == pytest.approx([2, 2, 3, 3, 4], abs=0.05)


def test_a_batch_that_grows_before_anything_is_known() -> None:
    """Catches a first shape whose time is asked for where nothing tells it."""
    choice = trees()
    for _ in range(5):
        choice.observe(1, BlockShape(0), [0], 1.0)
    choice.observe(1, choice.choose(1), [1], 1.0)
    for _ in range(5):
        choice.observe(2, BlockShape(0), [0, 0], 1.0)
    assert choice.choose(2) in choice.arms


@pytest.mark.parametrize("num_reqs", [17, 64, 300, 600])
def test_trees_of_too_many_rows_are_not_tried(num_reqs: int) -> None:
    """Although rows are free here; smaller ones are, and chains alone where none is left."""
    world = TreeWorld(lambda count, shape: 1.0, FAIR, lambda step: num_reqs)
    chosen = decode(world, trees(), steps=120 if num_reqs >= 300 else 700, seed=0).chosen
    assert all(num_reqs * shape.rows <= MAX_TREE_ROWS for shape in chosen if shape.is_tree)
    assert any(shape.is_tree for shape in chosen) is (num_reqs < 600)


class Requests(TreeWorld):
    """One request after another, whose drafts are as likely as `ranks` say, more or less."""

    def at(self, step: int) -> TreeWorld:
        """The world of the request that a step is for."""
        first = min(0.85, max(0.05, random.Random(step // LENGTH).gauss(self.ranks[0], 0.13)))
        return replace(self, ranks=(first, *(share * (1 - first) for share in self.ranks[1:])))

    def texts(self, step: int) -> tuple[float, ...]:
        return self.at(step).ranks

    def tokens(self, shape: BlockShape, step: int) -> float:
        return TreeWorld.tokens(self.at(step), shape, step)

    def path(self, shape: BlockShape, step: int, mood: float, rng: random.Random) -> Path:
        return TreeWorld.path(self.at(step), shape, step, mood, rng)


def weak(num_reqs: int, shape: BlockShape) -> float:
    """Milliseconds of a step of a model whose drafter was trained for a few minutes."""
    return 1.7 + 0.05 * shape.is_tree + 0.0045 * shape.rows if shape.drafts else 1.36


@pytest.mark.parametrize("first", [0.2, 0.36])
def test_trees_of_a_weak_drafter_are_not_given_up(first: float) -> None:
    """Of requests that differ the best shape of each is hardly faster. The likeliest path tells
    little, as hardly any of its drafts are accepted; the trees do, of which many are.
    """
    losses = []
    for seed in range(4):
        world, choice = Requests(weak, (first, 0.3, 0.12, 0.06)), trees(likeliest_first=True)
        decode(world, choice, steps=600, seed=100 + seed, length=LENGTH)
        losses.append(decode(world, choice, steps=3000, seed=seed, length=LENGTH).loss)
    assert mean(losses) < 0.02


def test_weak_drafts_of_texts_that_are_alike_are_not_given_up() -> None:
    """Catches a choice that judges each text by the little it has seen of it: it lost 3.6 %, since
    it decoded many of them plainly.
    """
    world = TreeWorld(weak, (0.24, 0.07, 0.036, 0.02))
    told = [decode(world, trees(), steps=4000, seed=seed, length=190) for seed in range(5)]
    assert mean(one.loss for one in told) < 0.03
