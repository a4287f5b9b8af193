"""A composition's account of its forecasts on kernels, against plain torch; see
`tests.helpers.triton_interpreter`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.composed.agreement import agreement, agreements
from drafters.composed.calibration import KERNEL, Calibration, Forecasts, check_forecasts
from specdec.model.core import DraftOutput
from specdec.sampling.trees.trees import best_first
from tests.helpers.pairs import pairs
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from drafters.composed import triton_forecasts  # noqa: E402 (only where Triton can run)


def block(seed: int, drafts: int, *, tree: bool, counted: bool) -> DraftOutput:
    """Drafts of two tokens for five requests, so that many are right."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts = torch.randint(drafts + 1, (5,), generator=generator) if counted else None
    if not tree:
        return DraftOutput(
            torch.randint(2, (5, drafts), generator=generator), num_drafts=num_drafts
        )
    best = best_first(-torch.rand(5, 7, 2, generator=generator), drafts)
    return DraftOutput(best.places % 2, num_drafts=num_drafts, tree=best.tree)


def moved(draft: DraftOutput) -> DraftOutput:
    """The same where kernels run."""
    num_drafts = None if draft.num_drafts is None else draft.num_drafts.to(DEVICE)
    return DraftOutput(
        draft.token_ids.to(DEVICE),
        num_drafts,
        tree=None if draft.tree is None else draft.tree.to(DEVICE),
    )


@pytest.mark.parametrize(
    ("sizes", "tree", "counted"),
    pairs([(7, 8), (8, 3), (3, 8), (63, 8), (64, 8), (1, 2)], [False, True], [False, True]),
)
def test_agreement(sizes: tuple[int, int], tree: bool, counted: bool) -> None:
    """Chains and trees, more and fewer than the output has, some of which do not count; a part that
    did not draft has nothing.
    """
    assert KERNEL.runs_on(DEVICE)
    drafts, output = sizes
    for seed in range(2):
        draft = block(seed, drafts, tree=tree, counted=counted)
        generator = torch.Generator().manual_seed(99 + seed)
        token_ids = torch.randint(2, (5, output), generator=generator)
        num_accepted = torch.randint(output, (5,), generator=generator)
        accept: Any = SimpleNamespace(
            token_ids=token_ids.to(DEVICE), num_accepted=num_accepted.to(DEVICE)
        )
        found = agreements({1: moved(draft)}, 2, accept)
        assert (
            found[0].tolist() == [0] * 5
            and found[1].tolist() == agreement(draft, token_ids, num_accepted + 1).tolist()
        )


@pytest.mark.parametrize("num_reqs", [1, 70])
def test_calibration(num_reqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain torch keeps account, over steps of both kinds, with rows that do not count and have
    no numbers.
    """
    ours = Calibration(3, DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(KERNEL, "runs_on", lambda device: False)
        theirs = Calibration(3, torch.device("cpu"))
    generator = torch.Generator().manual_seed(num_reqs)
    for step in range(12):
        # away from the borders of buckets
        told = torch.randint(1, 40, (3, num_reqs), generator=generator) / 4 + 0.1
        agreed, num_accepted = (
            torch.randint(9, (3, num_reqs), generator=generator),
            torch.randint(9, (num_reqs,), generator=generator),
        )
        counts = torch.ones(num_reqs)
        if num_reqs > 1:
            counts[-3:], told[:, -3:] = 0, torch.nan
            told[step % 3, 0] = torch.nan if step % 2 else torch.inf  # of a request that counts
        of_trees = step % 3 == 0
        expected, got = (
            theirs.correct(told, of_trees=of_trees),
            ours.correct(told.to(DEVICE), of_trees=of_trees),
        )
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(
                one.cpu()[:, counts > 0], other[:, counts > 0], equal_nan=True
            )
        best, ours_best = (
            torch.full_like(num_accepted, 7),
            torch.full_like(num_accepted, 7, device=DEVICE),
        )
        theirs.observe(expected, agreed, num_accepted, counts, of_trees=of_trees, best=best)
        there = (tensor.to(DEVICE) for tensor in (agreed, num_accepted, counts))
        ours.observe(
            Forecasts(*(tensor.to(DEVICE) for tensor in expected)),
            *there,
            of_trees=of_trees,
            best=ours_best,
        )
        assert ours_best.tolist() == best.tolist()
        torch.testing.assert_close(ours._sums.cpu(), theirs._sums)
    assert theirs._sums[:, 1].sum(dim=1).min() > 1 and theirs._sums.isfinite().all()


def test_the_check_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, and fails where a kernel is off."""
    found = check_forecasts(DEVICE)
    assert found.error <= found.bound
    right = triton_forecasts.correct
    monkeypatch.setattr(
        triton_forecasts,
        "correct",
        lambda *arguments, **options: [x + 0.01 for x in right(*arguments, **options)],
    )
    found = check_forecasts(DEVICE)
    assert found.error > found.bound
