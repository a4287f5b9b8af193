"""Fitted weights of q and noise: interpolated, used where sampled, never what is output."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.dflash.coupling import Coupling, CouplingTable
from drafters.dflash.drafter import BoundDFlash, DFlashDrafter
from specdec.base.blocks import BlockShape
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.candidates import candidates
from specdec.sampling.trees.trees import best_first
from tests.drafters.tiny import (
    BLOCK,
    TINY,
    FakeVerifier,
    Rig,
    tiny_drafter,
    tiny_model,
    tiny_target,
)
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.guards import no_host_sync
from tests.helpers.tiny_models import paged_verifier

SLOTS = TINY.max_draft_tokens
RAMP = tuple(0.1 * (slot + 1) for slot in range(SLOTS))
FITTED = Coupling(
    (0.5, 0.7, 1.0), (RAMP, (1.0,) * SLOTS, (3.0,) * SLOTS), ((0.0,) * SLOTS, RAMP, (2.0,) * SLOTS)
)


@pytest.mark.parametrize(
    ("temperature", "low", "high", "share"),
    [
        (0.1, 0, 0, 0.0),
        (0.5, 0, 0, 0.0),
        (0.55, 0, 1, 0.25),
        (0.7, 1, 1, 0.0),
        (0.9, 1, 2, 2 / 3),
        (1.0, 2, 2, 0.0),
        (3.0, 2, 2, 0.0),
    ],
)
def test_interpolation(temperature: float, low: int, high: int, share: float) -> None:
    """Between the neighbors in temperature, beyond the ends the outermost; by request."""
    fitted = CouplingTable(FITTED, torch.device("cpu"))
    temperatures = torch.tensor([1.0, temperature])
    with no_host_sync():
        weights = fitted.at(temperatures, SLOTS - 2)
    table = torch.tensor([FITTED.a, FITTED.b])[..., : SLOTS - 2]
    torch.testing.assert_close(weights[:, 0], table[:, 2])
    torch.testing.assert_close(weights[:, 1], (1 - share) * table[:, low] + share * table[:, high])


def test_one_temperature() -> None:
    """Its weights at all of them."""
    one = Coupling((0.7,), (RAMP,), (RAMP,))
    weights = CouplingTable(one, torch.device("cpu")).at(torch.tensor([0.2, 0.7, 2.0]), SLOTS)
    assert torch.equal(weights, torch.tensor(RAMP).expand(2, 3, -1))


def proposed(
    coupling: Coupling | None, shape: BlockShape, temperatures: list[float]
) -> tuple[DraftOutput, BoundDFlash, DecodeBatch]:
    """The drafts of two requests, with what made them."""
    torch.manual_seed(3)
    verifier = FakeVerifier()
    drafter = tiny_drafter(verifier, replace(TINY, coupling=coupling))
    rig = Rig(drafter, verifier, draft_sampling="coupled")
    for request in range(2):
        rig.prefill(request, torch.randn(6, TINY.feature_size), 0)
    batch = rig.batch([5, 9], [6, 6], shape.drafts)
    batch.shape = shape
    batch.sampling = SamplingTensors.of(
        [SamplingParams(temperature=t) for t in temperatures], [7, 8]
    )
    assert isinstance(rig.bound, BoundDFlash)
    with no_host_sync():
        output = rig.bound.propose(batch)
    assert isinstance(rig.bound, BoundDFlash)
    return output, rig.bound, batch


@pytest.mark.parametrize("shape", [BlockShape(5), BlockShape(12, SLOTS)], ids=str)
def test_drafts_follow_the_weights(shape: BlockShape) -> None:
    """Chains and trees are those of the weights at each request's temperature, and of no others."""
    draft, bound, batch = proposed(FITTED, shape, [0.7, 2.0])
    logits = bound.logits(bound.draft_hidden(batch))
    positions = batch.positions(shape.depth + 1)[:, 1:]
    weights = torch.tensor([FITTED.a, FITTED.b])[:, 1:, : shape.depth]
    token_ids, scores = candidates(
        logits, batch.sampling, positions, 12 if shape.is_tree else 1, weights=weights
    )
    expected = (
        token_ids.flatten(1).gather(1, best_first(scores, 12).places)
        if shape.is_tree
        else token_ids.squeeze(-1)
    )
    assert torch.equal(draft.token_ids, expected)
    plain, _, _ = proposed(None, shape, [0.7, 2.0])
    assert not torch.equal(draft.token_ids, plain.token_ids)
    for temperatures in ([0.0, 0.7], [0.0, 0.0]):
        draft, plain = (proposed(coupling, shape, temperatures)[0] for coupling in (FITTED, None))
        assert torch.equal(draft.token_ids[0], plain.token_ids[0]), (
            "a greedy request has no weights"
        )


@pytest.mark.parametrize(
    "shape", [{"num_draft_tokens": 5}, {"tree_nodes": 10}], ids=["chain", "tree"]
)
def test_output_is_plain_decodings(shape: dict[str, Any]) -> None:
    """Whatever the weights, token for token, greedy and sampled requests side by side."""
    verifier = paged_verifier(tiny_target(), block_size=BLOCK)
    drafter = DFlashDrafter(tiny_model(replace(TINY, coupling=FITTED)), verifier)
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=i) for i, t in enumerate((0.0, 0.6, 1.0))
    ]

    def outputs(drafter: Any, **options: Any) -> list[list[int]]:
        engine = tiny_engine(verifier, drafter, max_num_seqs=3, max_model_len=64, **options)
        return finish(engine, *(engine.add_request([3, 1, 4, 1, 5], one) for one in params))

    assert outputs(drafter, **shape) == outputs(None)
