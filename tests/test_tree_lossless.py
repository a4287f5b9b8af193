"""Draft trees of every shape, right along every path: plain output, token for token."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from specdec.base.blocks import MAX_NODES, DraftTree
from specdec.base.errors import InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.cache_rows import CacheRows
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.scripted_trees import FIRST, ScriptedTrees
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS, Make
from tests.helpers.trees import random_trees
from tests.test_lossless import case, engine_config, run
from verifiers.config.families import family_of

MAX_TOKENS = 24  # behind fewer, a row that stays where it was may go unseen

QUICK = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
"""One of each kind: fused, windows and softcaps in transformers' own modules, sinks, latent."""

WAYS = [(3, 1, 0), (12, 3, 1), (MAX_NODES, 3, 0), (16, 1, 1), (31, 5, 1)]
"""Drafts of a tree, requests at once, steps whose results are unread."""


def serves_trees(make: Make) -> bool:
    """Whether nothing of a model goes by chains alone."""
    family = family_of(make())
    return not (family.recurrent or family.indexer or family.chunked)


SERVING = [name for name, make in (CONFIGS | LATENT_CONFIGS).items() if serves_trees(make)]


def decode(name: str, drafts: int, batch: int, **changes: Any) -> list[list[int]]:
    """Outputs with trees of other shapes, each right along another path every step."""
    verifier, outputs = case(name, MAX_TOKENS)
    drafter = ScriptedTrees(outputs, random_trees(5, drafts, seed=drafts))
    return run(
        verifier,
        drafter,
        [list(prompt) for prompt in outputs],
        engine_config(batch, tree_nodes=drafts, **changes),
        max_tokens=MAX_TOKENS,
    )


def ways() -> Iterator[Any]:
    """Three ways for the first; of the others one each, so that all meet every way in turn."""
    for number, name in enumerate(SERVING):
        quick = name in QUICK
        for way in WAYS[:3] if name == QUICK[0] else WAYS[number % 5 : number % 5 + 1]:
            yield pytest.param(name, *way, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "drafts", "batch", "depth"), list(ways()))
def test_greedy_equals_generate(name: str, drafts: int, batch: int, depth: int) -> None:
    """Requests join and leave; trees beyond the windows; results at once or late."""
    assert decode(name, drafts, batch, pipeline_depth=depth) == list(
        case(name, MAX_TOKENS)[1].values()
    )


def test_every_draft_is_the_last_of_a_path() -> None:
    """What was right is accepted to the last draft, and nothing behind it."""
    verifier, outputs = case("llama", MAX_TOKENS)
    drafts, prompts = 12, list(outputs)
    shapes = [[(7 * row + seed) % (row + 1) for row in range(drafts)] for seed in range(5)]
    ends: set[tuple[int, int]] = set()
    for start in range(drafts + 1):
        drafter = ScriptedTrees(outputs, shapes, [*range(start, drafts + 1), *range(start)])
        engine = SpecEngine(verifier, drafter, engine_config(5, tree_nodes=drafts))
        requests = [
            engine.add_request(list(prompt), SamplingParams(max_tokens=MAX_TOKENS))
            for prompt in prompts
        ]
        finish(engine)
        for index, request in enumerate(requests):
            rows = [
                drafter.ends[(FIRST * index + step) % (drafts + 1)]
                for step in range(len(request.num_accepted) - 1)
            ]
            assert request.num_accepted[:-1] == [len(drafter.paths[index][row]) - 1 for row in rows]
            ends.update((index, row) for row in rows)
    whole = [index for index, output in enumerate(outputs.values()) if len(output) == MAX_TOKENS]
    assert len(whole) >= 3 and ends >= {
        (index, row) for index in whole for row in range(drafts + 1)
    }


@pytest.mark.parametrize("depth", [0, 1])
def test_many_drafts_in_short_paths(depth: int) -> None:
    """Rows reach far behind a step's tokens, into blocks that nobody else may have."""
    verifier, outputs = case("llama", MAX_TOKENS)
    shapes = [[(row + seed) // 6 for row in range(MAX_NODES)] for seed in range(5)]
    drafter = ScriptedTrees(outputs, shapes)
    assert drafter.max_draft_tokens <= 4
    prompts = [list(prompt) for prompt in outputs]
    config = engine_config(3, tree_nodes=MAX_NODES, pipeline_depth=depth)
    assert run(verifier, drafter, prompts, config, max_tokens=MAX_TOKENS) == list(outputs.values())


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows of the path stay where they were": lambda patch: patch.setattr(
        CacheRows, "move", lambda *_: None
    ),
    "rows lie where their depth says": lambda patch: patch.setattr(
        DecodeBatch, "verification", by_depth
    ),
    "siblings are seen": lambda patch: patch.setattr(DecodeBatch, "verification", causal),
    "a row's place is its position": lambda patch: patch.setattr(
        DecodeBatch, "verification", in_turn
    ),
}
verification = DecodeBatch.verification


def by_depth(self: DecodeBatch, token_ids: Tensor, tree: DraftTree, **options: Any) -> ForwardInput:
    rows = verification(self, token_ids, tree, **options)
    slots = (
        self.slot_mapping(self.shape.rows)
        .view(token_ids.shape)
        .gather(1, F.pad(tree.depths, (1, 0)))
    )
    return replace(rows, metadata=replace(rows.metadata, slot_mapping=slots.flatten()))


def causal(self: DecodeBatch, token_ids: Tensor, tree: DraftTree, **options: Any) -> ForwardInput:
    rows = verification(self, token_ids, tree, **options)
    return replace(rows, metadata=replace(rows.metadata, visibility="causal", tree=None))


def in_turn(self: DecodeBatch, token_ids: Tensor, tree: DraftTree, **options: Any) -> ForwardInput:
    return replace(
        verification(self, token_ids, tree, **options),
        position_ids=self.position_ids(self.shape.rows),
    )


@pytest.mark.parametrize("broken", BREAKS)
def test_these_tests_can_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these mistakes spoils most outputs."""
    BREAKS[broken](monkeypatch)
    right = [
        given == expected
        for given, expected in zip(
            decode("llama", 12, 3), case("llama", MAX_TOKENS)[1].values(), strict=True
        )
    ]
    assert sum(right) < 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3_5", "has recurrent layers, whose states follow a chain"),
        ("deepseek_v32", "an indexer chooses"),
        ("llama4", "layers that attend within chunks"),
    ],
    ids=["recurrent", "indexed", "in chunks"],
)
def test_targets_of_chains_alone(name: str, reason: str) -> None:
    """They say why in one line, and decode chains where the shape is left open."""
    verifier, outputs = case(name, MAX_TOKENS)
    with pytest.raises(
        InvalidInputError, match=rf"^tree_nodes is 12, but .*{reason}.*; leave it out for chains$"
    ):
        decode(name, 12, 3)
    drafter = ScriptedTrees(outputs, random_trees(5, 12))
    engine = SpecEngine(verifier, drafter, engine_config(3, num_draft_tokens="auto"))
    assert len(engine.planner.shapes) > 1 and not any(
        shape.is_tree for shape in engine.planner.shapes
    )
    config = engine_config(3, num_draft_tokens="auto")
    prompts = [list(prompt) for prompt in outputs]
    assert run(verifier, drafter, prompts, config, max_tokens=MAX_TOKENS) == list(outputs.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_chains_and_trees_in_any_order(depth: int) -> None:
    """Large trees, small ones that are their beginning, chains and plain steps."""
    verifier, outputs = case("llama", MAX_TOKENS)
    drafter = ScriptedTrees(outputs, random_trees(5, MAX_NODES))
    drafter.wrong_at = [{1}, {0}, {4}]  # of chains
    engine = SpecEngine(
        verifier, drafter, engine_config(3, num_draft_tokens="auto", pipeline_depth=depth)
    )
    turns = cycle(random.Random(depth).sample(engine.planner.shapes, len(engine.planner.shapes)))
    assert engine.planner.choice is not None
    engine.planner.choice.choose = lambda num_reqs, **_: next(turns)  # type: ignore[method-assign]
    for _ in range(3):
        assert finish(
            engine,
            *(
                engine.add_request(list(prompt), SamplingParams(max_tokens=MAX_TOKENS))
                for prompt in outputs
            ),
        ) == list(outputs.values())
    assert {shape for shape in engine.planner.shapes if shape.is_tree} < set(
        engine.timer.steps_by_shape
    )
