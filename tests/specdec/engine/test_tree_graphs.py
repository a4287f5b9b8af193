"""Steps of draft trees and of coupled chains: nothing waits, captured ones do the same, and a path
leaves what a chain would.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from drafters.dflash2.selector import SelectorConfig
from drafters.dspark.markov import MarkovConfig
from drafters.head import HeadConfig
from drafters.suffix.drafter import SuffixDrafter
from specdec.base.blocks import DraftTree
from specdec.engine import acceptance, step
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.step import StepRunner
from specdec.model.batch import DecodeBatch
from specdec.model.core import AcceptOutput, Drafter, DraftOutput, VerifyOutput
from specdec.sampling import scores
from specdec.sampling.params import SamplingParams
from specdec.sampling.scores import penalized
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.guards import no_host_sync
from tests.helpers.pairs import in_turns
from tests.helpers.recorder import Recorder, refuse
from tests.helpers.scripted_trees import BoundTrees, ScriptedTrees
from tests.helpers.tiny_models import random_dflash
from tests.helpers.tree_engine import DRAFTS, MAX_TOKENS, SAMPLINGS, TREES, TreeCase, finish, tokens

HEADS: dict[str, HeadConfig] = {
    "tree over edges": SelectorConfig(8, 6),
    "chain of a head with a state": MarkovConfig(8, "rnn"),
}


@pytest.fixture(scope="module")
def case() -> TreeCase:
    return TreeCase()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_step_never_waits(case: TreeCase, sampling: str) -> None:
    """Draft, verify, accept, moves and commit under the guard, of scripted trees and of DFlash's;
    coupled chains, too.
    """
    drafters = [
        ScriptedTrees(case.outputs_of(sampling), TREES),
        random_dflash(case.verifier),
        random_dflash(case.verifier),
    ]
    drafters += [random_dflash(case.verifier, head=head) for head in HEADS.values()]
    drafters.append(ComposedDrafter([SuffixDrafter(), random_dflash(case.verifier)]))
    for drafter, changes in zip(
        drafters, ({}, {}, {"tree_nodes": 0}, {}, {"tree_nodes": 0}, {}), strict=True
    ):
        engine = case.engine(drafter, pipeline_depth=1, draft_sampling="coupled", **changes)
        engine.runner.host_may_look = False  # as on an accelerator
        launch, launches = engine.runner.step, list[bool]()

        def guarded(
            batch: DecodeBatch, launch: Any = launch, launches: list[bool] = launches
        ) -> Any:
            launches.append(batch.shape.is_tree)
            with no_host_sync():
                return launch(batch)

        engine.runner.step = guarded  # type: ignore[method-assign]
        options = {**SAMPLINGS[sampling], "max_tokens": 12}
        assert tokens(case.run(engine, **options)) == [
            output[:12] for output in tokens(case.plain[sampling])
        ]
        assert set(launches) == {not changes}


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    in_turns(["scripted", "dflash", "coupled chain", "composed", *HEADS], list(SAMPLINGS)),
)
def test_captured_equals_eager(case: TreeCase, drafter: str, sampling: str) -> None:
    """Recorded operations replayed, without any Python of a step, in a batch that is padded;
    results read one step late.
    """
    scripted = ScriptedTrees(case.outputs_of(sampling), TREES)
    made: Drafter = (
        scripted if drafter == "scripted" else random_dflash(case.verifier, head=HEADS.get(drafter))
    )
    if drafter == "composed":
        made = ComposedDrafter([SuffixDrafter(), made])
    engine = case.engine(
        made, pipeline_depth=1, max_num_seqs=3, **({"tree_nodes": 0} if "chain" in drafter else {})
    )
    engine.runner.graphs = StepGraphs(
        recorder := Recorder(), engine.slots, engine.runner.step_table
    )
    engine.slots.decode_batch = refuse  # type: ignore[assignment, method-assign]
    requests = [
        engine.add_request(
            prompt,
            SamplingParams(max_tokens=MAX_TOKENS - 2 * seed, seed=seed, **SAMPLINGS[sampling]),
        )
        for seed, prompt in enumerate(case.prompts)
    ]
    finish(engine, *requests)
    expected = [
        output[: MAX_TOKENS - 2 * seed] for seed, output in enumerate(tokens(case.plain[sampling]))
    ]
    assert tokens(requests) == expected
    assert recorder.num_replays == engine.timer.num_steps > 3
    assert 4 in {shape.num_reqs for shape in engine.runner.graphs.graphs}, (
        "three requests and one that pads"
    )


def test_a_path_leaves_the_context_of_a_chain(case: TreeCase) -> None:
    """What DFlash would draft next does not depend on how the text came about: token by token, or
    along paths of trees.
    """

    def proposals(ends: list[int] | None) -> dict[tuple[int, int], list[int]]:
        engine = case.engine(random_dflash(case.verifier, block_size=DRAFTS + 1))
        bound, found = engine.runner.drafter, dict[tuple[int, int], list[int]]()
        script = ScriptedTrees(case.outputs, TREES, ends)
        scripted = BoundTrees(script, case.verifier, engine.slots.num_slots, engine.slots.longest)
        assert bound is not None
        propose, begin = bound.propose, bound.begin

        def instead(batch: DecodeBatch) -> DraftOutput:
            own = propose(batch)
            for slot, length, row in zip(
                batch.slots.tolist(), batch.seq_lens.tolist(), own.token_ids.tolist(), strict=True
            ):
                found[slot, length] = row
            return scripted.propose(batch)

        bound.propose, bound.begin = instead, scripted.begin  # type: ignore[method-assign]
        assert begin(0, []) is None  # DFlash has nothing to do there
        assert tokens(case.run(engine)) == list(case.outputs.values())
        return found

    token_by_token, along_paths = proposals([0]), proposals(None)
    common = token_by_token.keys() & along_paths.keys()
    assert len(common) > 20 and len(along_paths) < 0.6 * len(token_by_token)
    assert [along_paths[key] for key in common] == [token_by_token[key] for key in common]


def by_rows(
    fed: Tensor,
    logits: Tensor,
    draft: Any,
    sampling: Any,
    positions: Tensor,
    *others: Any,
    **named: Any,
) -> AcceptOutput:
    """Acceptance with the noise of rows in place of positions."""
    return acceptance.accept(
        fed,
        logits,
        draft,
        sampling,
        positions[:, :1] + torch.arange(positions.shape[1]),
        *others,
        **named,
    )


def of_rows_before(
    logits: Tensor,
    sampling: SamplingTensors,
    fed: Tensor,
    positions: Tensor,
    tree: DraftTree | None,
) -> Tensor:
    """The penalties of a chain."""
    return penalized(logits, sampling, fed, positions)


BREAKS = [("penalized", scores, "penalized", of_rows_before), ("sampled", step, "accept", by_rows)]


@pytest.mark.parametrize(("sampling", "module", "name", "broken"), BREAKS, ids=["penalty", "noise"])
def test_what_follows_rows_would_be_noticed(
    case: TreeCase,
    sampling: str,
    module: Any,
    name: str,
    broken: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A penalty that counts the rows before, noise of a row: each spoils outputs."""
    monkeypatch.setattr(module, name, broken)
    requests = case.run(case.scripted(sampling), **SAMPLINGS[sampling])
    assert tokens(requests) != tokens(case.plain[sampling])


def test_features_left_in_place_would_be_noticed(
    case: TreeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of a block in place of the path's."""
    follow = StepRunner._follow

    def unmoved(
        self: StepRunner,
        batch: DecodeBatch,
        path: Tensor,
        fed: Tensor,
        verify: VerifyOutput,
        packing: None,
    ) -> Any:
        moved, _ = follow(self, batch, path, fed, verify, packing)
        assert verify.aux_hidden is not None
        hidden = verify.aux_hidden.view(*fed.shape, -1)[:, : path.shape[1]].flatten(0, 1)
        return moved, VerifyOutput(verify.logits, hidden)

    monkeypatch.setattr(StepRunner, "_follow", unmoved)
    with pytest.raises(AssertionError):
        test_a_path_leaves_the_context_of_a_chain(case)
