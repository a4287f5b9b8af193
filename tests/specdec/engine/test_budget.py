"""Steps that verify the likeliest drafts of a batch: the output is that of plain decoding whatever
rule shares out the rows.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from drafters.dspark.markov import MarkovConfig
from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.engine import acceptance
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.engine.policy.budget import VerifyBudget
from specdec.model.batch import DecodeBatch
from specdec.model.core import AcceptOutput, Drafter, DraftOutput
from specdec.model.packing import Packing
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.guards import guard_steps
from tests.helpers.pairs import in_turns
from tests.helpers.recorder import Recorder, refuse
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, random_prompts
from tests.helpers.tree_engine import SAMPLINGS, TREES, TreeCase, finish, tokens

Rule = Callable[[DecodeBatch, DraftOutput, int], Tensor]

DRAFTERS: dict[str, tuple[Callable[[TreeCase, str], Drafter], dict[str, Any]]] = {
    "scripted tree": (lambda case, name: ScriptedTrees(case.outputs_of(name), TREES), {}),
    "scripted chain": (
        lambda case, name: ScriptedDrafter(case.outputs_of(name), 6, [{3}, {1, 4}, set()]),
        {"tree_nodes": None},
    ),
    "dflash": (lambda case, name: random_dflash(case.verifier), {}),
    "dflash chain": (lambda case, name: random_dflash(case.verifier), {"tree_nodes": None}),
    "head": (lambda case, name: random_dflash(case.verifier, head=MarkovConfig(8, "rnn")), {}),
    "copies": (lambda case, name: NGramDrafter(max_draft_tokens=6), {"tree_nodes": None}),
    "composed": (
        lambda case, name: ComposedDrafter([SuffixDrafter(), random_dflash(case.verifier)]),
        {},
    ),
}


@pytest.fixture(scope="module")
def case() -> TreeCase:
    return TreeCase()


def engine_of(case: TreeCase, drafter: str, sampling: str, **changes: Any) -> SpecEngine:
    make, own = DRAFTERS[drafter]
    return case.engine(make(case, sampling), **{"verify_budget": 2.5, **own, **changes})


def ruled(engine: SpecEngine, rule: Rule) -> list[list[int]]:
    """Has another rule share out rows; gives what it decided, step by step."""
    decided: list[list[int]] = []

    def allot(batch: DecodeBatch, draft: DraftOutput, total: int) -> Tensor:
        drafts = rule(batch, draft, total)
        assert int(drafts.sum()) == total and int(drafts.max()) <= batch.k
        decided.append(drafts.tolist())
        return drafts

    assert engine.runner.budget is not None
    engine.runner.budget.allot = allot  # type: ignore[method-assign]
    return decided


def best(worth: Tensor, total: int) -> Tensor:
    """As many drafts as have the highest of `worth` [num_reqs, k]."""
    chosen = worth.flatten().argsort(descending=True)[:total] // worth.shape[1]
    return chosen.bincount(minlength=len(worth))


def at_random(batch: DecodeBatch, draft: DraftOutput, total: int) -> Tensor:
    return best(torch.rand(draft.token_ids.shape), total)


def by_token(batch: DecodeBatch, draft: DraftOutput, total: int) -> Tensor:
    """Reads the drafts that it judges: those of small ids are verified."""
    return best(-draft.token_ids.double(), total)


def reading(outputs: dict[tuple[int, ...], list[int]], engine: SpecEngine, sign: int) -> Rule:
    """Knows what the target will write: verifies most where drafts are right, or wrong."""

    def rule(batch: DecodeBatch, draft: DraftOutput, total: int) -> Tensor:
        by_slot = {one.slot: one for one in engine.scheduler.working}
        worth = torch.zeros(draft.token_ids.shape)
        for row, slot in enumerate(batch.slots.tolist()):
            request = by_slot[slot]
            whole = [*request.prompt_token_ids, *outputs[tuple(request.prompt_token_ids)], -1]
            start = int(batch.seq_lens[row]) + 1
            right = [
                int(token) == whole[min(start, len(whole) - 1)]
                for token in draft.token_ids[row, :1].tolist()
            ]
            worth[row] = sign * sum(right)
        return best(worth + torch.rand(worth.shape) / 2, total)

    return rule


@pytest.mark.parametrize(("drafter", "sampling"), in_turns(DRAFTERS, list(SAMPLINGS)))
def test_as_plain_decoding(case: TreeCase, drafter: str, sampling: str) -> None:
    """Tokens and log-probabilities, from half a draft of a request on; nothing waits."""
    for budget in (0.5, 3.5) if "scripted" in drafter else (2.5,):
        engine = engine_of(case, drafter, sampling, verify_budget=budget, pipeline_depth=1)
        assert engine.planner.shapes[0].budget == budget
        engine.runner.host_may_look = False  # as on an accelerator
        guard_steps(engine)
        requests = case.run(engine, **SAMPLINGS[sampling])
        assert tokens(requests) == tokens(case.plain[sampling])
        for request, plain in zip(requests, case.plain[sampling], strict=True):
            assert request.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["scripted tree", "scripted chain"])
def test_any_rule_is_exact(case: TreeCase, drafter: str, sampling: str) -> None:
    """Budgets at random, by the drafts that they judge, and by what the target will write."""
    torch.manual_seed(0)
    outputs = case.outputs_of(sampling)
    for number in range(4):
        engine = engine_of(case, drafter, sampling)
        rules = [
            at_random,
            by_token,
            reading(outputs, engine, 1),
            reading(outputs, engine, -1),
        ]
        decided = ruled(engine, rules[number])
        assert tokens(case.run(engine, **SAMPLINGS[sampling])) == tokens(case.plain[sampling])
        assert len({tuple(drafts) for drafts in decided}) > 2


def test_seeds_do_not_depend_on_budgets() -> None:
    """A thousand sampled requests, whose drafts are mostly right and come by the gated token."""
    verifier, prompts = paged_verifier(plain_model("llama")), random_prompts(1000, seed=3)
    samplings = [SamplingParams(5, 1.0, seed=seed) for seed in range(len(prompts))]

    def run(drafter: Drafter | None, **changes: Any) -> list[list[int]]:
        cache = CacheConfig(memory_bytes=2**24)
        config = EngineConfig(max_num_seqs=100, num_draft_tokens=None, cache=cache, **changes)
        engine = SpecEngine(verifier, drafter, config)
        if drafter:
            ruled(engine, by_token)
        requests = [
            engine.add_request(prompt, sampling)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        found = tokens(finish(engine, *requests))
        accepted = sum(sum(request.num_accepted) for request in requests)
        assert accepted > 1000 or drafter is None
        return found

    plain = run(None)
    outputs = {tuple(prompt): output for prompt, output in zip(prompts, plain, strict=True)}
    assert run(ScriptedDrafter(outputs, 4, [{2}, set()]), verify_budget=1.5) == plain
    assert len({tuple(output) for output in plain}) > 950


def test_a_wrong_place_would_be_noticed(case: TreeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the noise of their neighbors."""
    of_packed = acceptance._of_packed
    monkeypatch.setattr(
        acceptance, "_of_packed", lambda a, b, positions, d: of_packed(a, b, positions + 1, d)
    )
    engine = engine_of(case, "scripted tree", "sampled")
    assert tokens(case.run(engine, **SAMPLINGS["sampled"])) != tokens(case.plain["sampled"])


@pytest.mark.parametrize("sampling", ["greedy", "filtered", "sampled"])
@pytest.mark.parametrize("drafter", ["scripted tree", "dflash chain", "head"])
def test_captured_equals_eager(case: TreeCase, drafter: str, sampling: str) -> None:
    """Recorded operations replayed, in a batch that is padded; each step has its own shares."""
    engine = engine_of(case, drafter, sampling, pipeline_depth=1, max_num_seqs=3)
    engine.runner.host_may_look = False
    engine.runner.graphs = StepGraphs(
        recorder := Recorder(), engine.slots, engine.runner.step_table
    )
    engine.slots.decode_batch = refuse  # type: ignore[assignment, method-assign]
    requests = case.run(engine, **SAMPLINGS[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    assert recorder.num_replays == engine.timer.num_steps > 3
    assert {shape.block.budget for shape in engine.runner.graphs.graphs} >= {2.5}


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption(case: TreeCase, depth: int) -> None:
    """A cache far too small."""
    per_block = 4 * sum(spec.bytes_per_token(torch.float32) for spec in case.verifier.kv_specs)
    cache = CacheConfig(memory_bytes=36 * per_block)
    engine = engine_of(case, "scripted tree", "greedy", pipeline_depth=depth, cache=cache)
    assert tokens(case.run(engine)) == list(case.outputs.values())
    assert engine.scheduler.num_preemptions > 0


def batch_of(slots: int, k: int) -> DecodeBatch:
    """Requests in the first slots; nothing but slots and k is read."""
    shape, none = BlockShape(k, budget=1.0), torch.empty(0)
    sampling, at = SamplingTensors.neutral(slots, torch.device("cpu")), torch.arange(slots)
    return DecodeBatch(
        slots=at,
        anchors=at,
        seq_lens=at,
        block_table=none,
        shape=shape,
        max_seq_len=0,
        block_size=1,
        max_model_len=9,
        sampling=sampling,
    )


def test_rows_go_where_drafts_are_accepted() -> None:
    """By what the drafter says at first; then by what was accepted of a request, and of a depth."""
    batch, budget = batch_of(3, 4), VerifyBudget(4, 4, torch.device("cpu"))
    sure, unsure = [0.9, 0.8, 0.7, 0.6], [0.6, 0.3, 0.1, 0.01]
    scores = torch.tensor([sure, unsure, sure]).log()
    draft = DraftOutput(torch.zeros(3, 4, dtype=torch.int64), scores=scores)
    assert budget.allot(batch, draft, 6).tolist() in ([3, 0, 3], [3, 1, 2], [2, 1, 3])
    assert budget.allot(batch, draft, 12).tolist() == [4, 4, 4]

    def learn(accepted: list[int]) -> None:
        budget.survival(batch, draft)
        packing = Packing.of(torch.full((3,), 4), 5, 15)
        none = torch.zeros(3, dtype=torch.int64)
        kept = torch.tensor(accepted)
        budget.learn(batch, draft, packing, AcceptOutput(none[:, None], kept, none, none > 0))

    for _ in range(20):
        learn([0, 1, 4])
    told = budget.survival(batch, draft)
    assert told[0, 0] < 0.4 < told[1, 0] and told[2, 3] > 0.6
    assert (told.diff(dim=1) <= 0).all()
    budget.begin(torch.tensor([0]))
    assert budget.survival(batch, draft)[0, 0] > 0.6, "another request"
    for _ in range(100):
        learn([1, 1, 1])
    told = budget.survival(batch, draft)
    assert told[2, 0] > 0.8 and told[2, 1] < 0.2, "nothing behind the first draft"


def test_padding_and_drafts_that_do_not_count_come_last() -> None:
    batch, budget = batch_of(4, 3), VerifyBudget(4, 3, torch.device("cpu"))
    draft = DraftOutput(torch.zeros(4, 3, dtype=torch.int64))
    draft.num_drafts = torch.tensor([3, 1, 0, 3])
    assert budget.allot(batch, draft, 4).tolist() == [3, 1, 0, 0]
    assert int(budget.allot(batch, draft, 9).sum()) == 9


def test_what_is_refused(case: TreeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its reason; a budget that all drafts fit in is none."""
    for budget in (0, -1, float("nan"), "2"):
        with pytest.raises(InvalidInputError, match=r"verify_budget is .*above 0"):
            EngineConfig(verify_budget=budget)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"budget is 2\.5, but probabilistic drafts"):
        engine_of(case, "dflash chain", "greedy", draft_sampling="probabilistic")
    refusing = ["rocm_aiter_mla_sparse takes equally many rows of all requests"]
    monkeypatch.setattr(type(case.verifier.attention), "ragged_reasons", lambda spec: refusing)
    with pytest.raises(InvalidInputError, match=r"mla_sparse takes equally many .* leave it out"):
        engine_of(case, "dflash chain", "greedy")
    monkeypatch.undo()
    assert not engine_of(case, "dflash", "greedy", verify_budget=14).planner.shapes[0].budget
    with pytest.raises(InvalidInputError, match="is chosen; say num_draft_tokens or tree_nodes"):
        EngineConfig(verify_budget=2)
    with pytest.raises(InvalidInputError, match="is given; give a number"):
        EngineConfig(num_draft_tokens=3, verify_budget="auto")


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_chosen_beside_other_shapes(
    case: TreeCase, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with a budget and without one, in turn, give the output of plain decoding."""
    changes = {"num_draft_tokens": "auto", "tree_nodes": None, "verify_budget": "auto"}
    drafter = random_dflash(case.verifier, block_size=8)
    engine = case.engine(drafter, pipeline_depth=1, **changes)
    choice, arms, steps = engine.planner.choice, engine.planner.shapes, count()
    assert choice is not None and engine.k == "auto with budgets"
    assert [shape.budget for shape in arms if shape.budget] == [1, 2, 3, 5]
    monkeypatch.setattr(choice, "choose", lambda *_, **__: arms[-1 - next(steps) % len(arms)])
    requests = case.run(engine, **SAMPLINGS[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    assert len(engine.timer.steps_by_shape) > 5
    guided = engine.planner.guided_choice
    assert guided is not None and not any(shape.budget for shape in guided.arms)
