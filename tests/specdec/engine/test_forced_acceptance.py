"""Drafts that are accepted at given rates, whatever the target says."""

import pytest
import torch
from torch.nn import functional as F

from specdec.base.blocks import DraftTree
from specdec.engine.acceptance import accept, drawn
from specdec.model.core import DraftOutput
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample
from specdec.sampling.trees.trees import ancestors_of
from tests.helpers.guards import no_host_sync
from tests.specdec.engine.toy_target import START, V, sampling_for


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_forced_drafts_are_accepted(tree: bool, temperature: float) -> None:
    """Catches a wrong number, another branch, drafts that do not count, and a wrong last token."""
    n, k = 12, 7
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(n, k + 1, V, generator=generator)
    drafts = torch.randint(V, (n, k), generator=generator)
    num_drafts = torch.tensor([7, 4, 0] * 4)
    forced = torch.arange(n) % 6
    parents = torch.tensor([0, 0, 1, 2, 3, 3, 5] if tree else range(k)).expand(n, -1)
    depths = torch.tensor([1, 1, 2, 2, 3, 3, 4] if tree else range(1, k + 1)).expand(n, -1)
    ancestors, ranks = ancestors_of(parents, 4), torch.zeros_like(parents)
    shape = DraftTree(parents, depths, ancestors, ranks) if tree else None
    sampling = sampling_for([SamplingParams(temperature=temperature)], n)
    positions = START + F.pad(depths, (1, 0))
    tokens = torch.cat([torch.zeros(n, 1, dtype=torch.int64), drafts], dim=1)
    draft = DraftOutput(drafts, num_drafts=num_drafts, tree=shape)
    with no_host_sync():
        got = accept(tokens, logits, draft, sampling, positions, 4 if tree else k, forced=forced)
    own, _ = sample(logits, sampling, positions + 1)
    deepest = {7: [1, 3, 5, 7], 4: [1, 3], 0: []}  # the first of equal depth
    for request in range(n):
        counted = int(num_drafts[request])
        path = deepest[counted] if tree else [*range(1, counted + 1)]
        path = [0, *path[: int(forced[request])]]
        expected = [int(drafts[request, row - 1]) for row in path[1:]]
        expected.append(int(own[request, path[-1]]))
        assert got.num_accepted[request] == len(path) - 1
        assert got.token_ids[request, : len(path)].tolist() == expected
        assert got.next_anchors[request] == expected[-1]
        if got.path is not None:
            assert got.path[request, : len(path)].tolist() == path


def test_drafts_are_accepted_at_the_rates_given() -> None:
    """Marginal rates by position and kind of request."""
    survival = torch.tensor([[1.0, 0.5, 0.0], [0.9, 0.6, 0.3]], dtype=torch.float64)
    seeds, steps = torch.arange(2000), 20
    lengths = [torch.full_like(seeds, step) for step in range(steps)]
    with no_host_sync():
        counts = torch.stack([drawn(survival, seeds, one) for one in lengths])
    for row, rates in enumerate(survival.tolist()):
        own = counts[:, row::2]
        for place, rate in enumerate(rates):
            spread = (rate * (1 - rate) / own.numel()) ** 0.5
            assert abs(float((own > place).double().mean()) - rate) <= 6 * spread
