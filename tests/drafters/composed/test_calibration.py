"""What forecasts become, against running means, and which drafts an output agrees with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.composed.agreement import agreement
from drafters.composed.calibration import LEAST, MEMORY, PRIOR, Calibration, Forecasts
from drafters.composed.drafter import BoundComposed
from specdec.model.core import DraftOutput, VerifyOutput
from specdec.sampling.trees.trees import best_first
from tests.drafters.composed.rig import Fixed, rig_of
from tests.helpers.guards import no_host_sync


def test_promises_are_put_right() -> None:
    """The second part is right all along; soon it is the second's turn."""
    rig = rig_of(Fixed([3, 4, 5], [3.0, 3.0]), Fixed([7, 8, 9], [0.5, 0.5]))
    turns = []
    for _ in range(8):
        batch = rig.batch([1, 1], [3, 3], 3)
        draft = rig.bound.propose(batch)
        assert draft.part is not None
        turns.append(int(draft.part[0]))
        assert draft.part.tolist() == [turns[-1]] * 2
        # of which the chosen drafts are accepted as far as they go
        right = torch.tensor([[1, 7, 8, 20]] * 2)
        taken = torch.tensor([2, 2]) if turns[-1] else torch.tensor([0, 0])
        output = right[:, 1:]
        accept = type("Accept", (), {"token_ids": output, "num_accepted": taken})()
        rig.bound.commit(
            batch,
            torch.cat([batch.anchors[:, None], draft.token_ids], dim=1),
            accept,
            VerifyOutput(torch.zeros(0)),
        )
    assert turns[0] == 0 and turns[-1] == 1 and sorted(turns) == turns


def test_drafts_that_may_have_gone_on_are_not_held_against_a_part() -> None:
    """The first errs; the second has all that came out, and nobody knows how much more."""
    rig = rig_of(
        Fixed([7, 9, 9], [3.5, 3.5]), Fixed([7, 8, 9], [3.0, 3.0]), Fixed([7, 6, 9], [3.0, 3.0])
    )
    batch = rig.batch([1, 1], [3, 3], 3)
    draft = rig.bound.propose(batch)
    accept = type(
        "Accept",
        (),
        {"token_ids": torch.tensor([[7, 8, 0, 0]] * 2), "num_accepted": torch.tensor([1, 1])},
    )()
    rig.bound.commit(
        batch,
        torch.cat([batch.anchors[:, None], draft.token_ids], dim=1),
        accept,
        VerifyOutput(torch.zeros(0)),
    )
    assert isinstance(rig.bound, BoundComposed)
    found = rig.bound.calibration.correct(
        torch.tensor([[3.5], [3.0], [3.0]]), of_trees=False
    ).corrected
    assert found[1, 0] == 3 and found[2, 0] < 3 and found[0, 0] < 3


def test_calibration_against_running_means() -> None:
    """Errors by drafter and forecast, chains apart from trees; padding leaves no trace."""
    calibration = Calibration(2, torch.device("cpu"))
    forecasts = torch.tensor([[2.0, 2.0, 9.0], [2.0, 0.0, 0.5]])
    # what a model may make of rows that only pad a batch
    none = Forecasts(*torch.full((3, 2, 1), torch.nan))
    agreed, num_accepted = torch.tensor([[1, 4, 0], [3, 1, 5]]), torch.tensor([9, 9, 9])
    told, counts = Forecasts(forecasts, forecasts, forecasts), torch.tensor([1.0, 1.0, 0.0])
    with no_host_sync():
        for _ in range(2):
            calibration.observe(told, agreed, num_accepted, counts, of_trees=False)
            calibration.observe(
                none, agreed[:, :1], num_accepted[:1], torch.zeros(1), of_trees=False
            )
            # or a head that overflows
            calibration.observe(
                none, agreed[:, :1], num_accepted[:1], torch.ones(1), of_trees=False
            )
        found, shifts = calibration.correct(forecasts, of_trees=False)[1:]
    kept = 1 - 1 / MEMORY

    def late(errors: list[float]) -> float:
        sums = (sum(errors) * (kept ** len(errors) + 1), len(errors) * (kept ** len(errors) + 1))
        return sums[0] / (sums[1] + PRIOR)

    expected = [
        [2 + late([-1.0, 2.0]), 2 + late([-1.0, 2.0]), 9.0],
        [2 + late([1.0]), late([1.0]), 0.5],
    ]
    torch.testing.assert_close(found, torch.tensor(expected))
    torch.testing.assert_close(shifts.exp(), (found / forecasts.clamp(min=LEAST)).clamp(LEAST, 1))
    torch.testing.assert_close(calibration.correct(forecasts, of_trees=True).corrected, forecasts)
    for _ in range(3 * MEMORY):
        calibration.observe(told, agreed, num_accepted, counts, of_trees=True)
    assert calibration.correct(forecasts, of_trees=True).corrected[1, 0].item() == pytest.approx(
        3, abs=0.05
    )


def walked(draft: DraftOutput, row: int, output: list[int]) -> int:
    """Tokens of `output` that a path from the anchor has."""
    count = draft.token_ids.shape[1] if draft.num_drafts is None else int(draft.num_drafts[row])
    here, taken = 0, 0
    while taken < len(output):
        parents = (
            range(count)
            if draft.tree is None
            else [int(parent) for parent in draft.tree.parents[row, :count]]
        )
        if draft.tree is None:
            following = [i + 1 for i in parents if i == here]
        else:
            following = [i + 1 for i, parent in enumerate(parents) if parent == here]
        found = [i for i in following if int(draft.token_ids[row, i - 1]) == output[taken]]
        if not found:
            break
        here, taken = found[0], taken + 1
    return taken


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**20), tree=st.booleans())
def test_agreement_against_a_walk(seed: int, tree: bool) -> None:
    """Chains and trees, some of whose drafts do not count, and outputs that end early."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.randint(2, (5, 5), generator=generator)
    num_drafts = torch.randint(8, (5,), generator=generator)
    draft = DraftOutput(
        torch.randint(2, (5, 7), generator=generator), num_drafts=num_drafts if seed % 2 else None
    )
    if tree:
        best = best_first(-torch.rand(5, 4, 2, generator=generator), 7)
        draft = DraftOutput(best.places % 2, num_drafts=draft.num_drafts, tree=best.tree)
    counts = torch.randint(1, 6, (5,), generator=generator)
    with no_host_sync():
        found = agreement(draft, output, counts)
    assert found.tolist() == [
        walked(draft, row, output[row, : counts[row]].tolist()) for row in range(5)
    ]
