"""Requests of unequal numbers of rows, which only the device knows: on torch_ref and triton_fa what
rows have among whole blocks.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.aiter.fa_triton import Layer, Rows, Setup, own_kernel
from specdec.attention.aiter.groups import plan_groups
from specdec.attention.aiter.scratch import Scratch
from specdec.attention.backend import AttentionBackend, AttentionMetadata, TreeRows
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kv_cache import LayerCache
from specdec.model.packing import Packing
from specdec.sampling.trees.trees import ancestors_of
from tests.helpers.attention_case import Case, spec
from tests.helpers.guards import no_host_sync
from tests.helpers.trees import Parents
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()
WIDTH, PARENTS = 9, [0, 0, 1, 1, 2, 3, 5, 0]
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 4, 1]


@pytest.mark.parametrize("window", [None, 70, 6])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", [TorchRefBackend, TritonFaBackend])
def test_as_among_whole_blocks(
    kind: type[AttentionBackend], tree: bool, window: int | None
) -> None:
    """Blocks of nine rows, of which as many are there as a request was given, one at least."""
    windows = frozenset({window})
    backend, reference = (
        one(spec(dtype=torch.float32, num_heads=6, windows=windows, device=DEVICE))
        for one in (kind, TorchRefBackend)
    )
    if kind.ragged_reasons(backend.spec):
        assert kind is TritonFaBackend and window == 6
        return
    torch.manual_seed(0)
    lengths, drafts = torch.tensor([5, 40, 17, 0]), torch.tensor([8, 0, 3, 1])
    packing = Packing.of(drafts.to(DEVICE), WIDTH, 16)
    table = 1 + torch.randperm(39)[:20].view(4, 5).int()
    positions = lengths[:, None] + torch.arange(WIDTH)
    slots = (table.gather(1, positions // 16) * 16 + positions % 16).long()
    ancestors = F.pad(ancestors_of(torch.tensor([PARENTS] * 4), 8), (1, 0)).to(DEVICE)
    depths = torch.tensor([DEPTHS] * 4, device=DEVICE)
    query, key, value = (torch.randn(4, WIDTH, heads, 64, device=DEVICE) for heads in (6, 2, 2))
    keys, values = torch.randn(2, 40, 16, 2, 64, device=DEVICE)
    table, slots, lengths = table.to(DEVICE), slots.to(DEVICE), lengths.to(DEVICE)

    def run(one: AttentionBackend, metadata: AttentionMetadata, sides: list[Tensor]) -> Tensor:
        cache, (q, k, v) = LayerCache(keys.clone(), values.clone()), sides
        return one.run(q, k, v, cache, one.plan(metadata), scale=0.125, window=window)

    whole = AttentionMetadata.uniform(
        WIDTH, (lengths + WIDTH).int(), table, slots.flatten(), max_seq_len=80
    )
    if tree:
        rows = TreeRows(ancestors.flatten(), depths.flatten())
        whole = replace(whole, visibility="ancestors", tree=rows)
    expected = run(reference, whole, [side.flatten(0, 1) for side in (query, key, value)])
    few = replace(
        whole,
        query_start_loc=packing.starts,
        seq_lens=(lengths + packing.drafts + 1).int(),
        slot_mapping=packing.pack(slots),
        num_tokens=16,
        ragged=True,
        tree=TreeRows(packing.pack(ancestors), packing.pack(depths)) if tree else None,
    )
    packed = [packing.pack(side) for side in (query, key, value)]
    with no_host_sync():
        backend.plan(few)
    found = run(backend, few, packed)
    assert (found - packing.pack(expected.view(4, WIDTH, 6, 64))).abs().max() < 2e-6


@pytest.mark.parametrize("tree", [False, True])
def test_as_another_backend_calls_it(tree: bool) -> None:
    """Blocks that see each other, and trees of unequal size, behind a backend that plans for
    both.
    """
    widths, contexts = ([5, 5, 5], [40, 0, 3]) if not tree else ([8, 1, 3], [40, 0, 3])
    lengths = [one + other for one, other in zip(widths, contexts, strict=True)]
    asked = spec(dtype=torch.float32, device=DEVICE)
    trees: list[Parents] = [[0, 0, 1, 1, 2, 3, 5], [], [0, 0]] if tree else []
    case = Case(asked, lengths, widths, uniform=True, causal=tree, trees=trees)
    if tree:
        case.metadata = replace(case.metadata, ragged=True, max_query_len=9)
    (group,) = plan_groups(case.metadata, asked.block_size).groups
    own = TritonFaBackend(asked)
    setup: Setup[Any] = Setup(asked, "plain", None, Scratch(DEVICE), own)
    rows = Rows(case.query, case.new["key"], case.new["value"])
    with torch.inference_mode():
        got = own_kernel(setup, group, Layer(case.filled(), 0.2), rows)
    case.check(got, scale=0.2)
