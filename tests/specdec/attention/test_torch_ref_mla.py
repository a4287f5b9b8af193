"""torch_ref for latent attention against its definition, keys and values built head by head,
position by position.
"""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.attention.mla import IndexerRows, IndexerSpec, MlaRows, MlaSpec, UpProjection
from specdec.attention.selector import select_backend, tree_reasons
from specdec.attention.torch_ref import fa as torch_ref
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.base.errors import BackendError, InvalidInputError
from specdec.kv_cache import LatentCache, LatentLayerSpec, blocks_for
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.trees import Parents, path_to, random_trees, with_trees

BLOCK, HEADS, RANK, NOPE, ROPE, VALUE = 4, 3, 8, 6, 4, 5
INDEX_HEADS, INDEX_DIM, TOPK = 6, 6, 5
SCALE = 0.3
LENGTHS = [9, 5, 14]


def spec(**changes: object) -> MlaSpec:
    """A small request to a backend."""
    values: dict[str, object] = {
        "device": torch.device("cpu"), "dtype": torch.float32, "num_heads": HEADS,
        "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE, "block_size": BLOCK,
        "indexer": IndexerSpec(num_heads=INDEX_HEADS, head_dim=INDEX_DIM, topk=TOPK),
    }  # fmt: skip
    return MlaSpec(**{**values, **changes})  # type: ignore[arg-type]


class Case:
    """Three sequences on scattered blocks of a cache full of what others left; their last rows are
    new.
    """

    def __init__(
        self,
        kind: str,
        *,
        causal: bool = True,
        topk: int = TOPK,
        dtype: torch.dtype = torch.float32,
        trees: Sequence[Parents] = (),
    ) -> None:
        torch.manual_seed(0)
        uniform = kind == "uniform"
        self.causal, self.trees = causal, trees
        self.widths = (
            [len(parents) + 1 for parents in trees]
            if trees
            else [3, 3, 3]
            if uniform
            else [7, 1, 4]
        )
        indexer = IndexerSpec(num_heads=INDEX_HEADS, head_dim=INDEX_DIM, topk=topk)
        self.backend = TorchRefMlaBackend(spec(indexer=indexer, dtype=dtype))
        counts = [blocks_for(n, BLOCK) for n in LENGTHS]
        tables = torch.split(torch.randperm(sum(counts)) + 1, counts)
        self.slots = [
            table[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK
            for table, n in zip(tables, LENGTHS, strict=True)
        ]
        self.cache: LatentCache = self.backend.cache_spec.allocate(
            sum(counts) + 1, BLOCK, dtype, torch.device("cpu")
        )
        self.cache.latent.normal_()  # what nobody wrote must not matter
        self.cache.index_key.view(dtype).normal_()
        table = torch.zeros(3, 5, dtype=torch.int32)
        for i in range(3):
            table[i, : counts[i]] = tables[i].int()
        self.metadata = AttentionMetadata(
            query_start_loc=torch.tensor(
                [0, *itertools.accumulate(self.widths)], dtype=torch.int32
            ),
            seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.cat([s[-w:] for s, w in zip(self.slots, self.widths, strict=True)]),
            num_reqs=3,
            num_tokens=sum(self.widths),
            max_query_len=max(self.widths),
            max_seq_len=16 if uniform else max(LENGTHS),
            visibility="causal" if causal else "full",
            query_lens=None if uniform else self.widths,
            seq_lens_host=None if uniform else LENGTHS,
        )
        if trees:
            self.metadata = with_trees(self.metadata, trees)

    def context(self, stored: Tensor, vectors: Tensor) -> list[Tensor]:
        """`vectors` [sum(LENGTHS), size] of every position by sequence, those of the context stored
        in the cache.
        """
        by_sequence = list(vectors.to(stored.dtype).split(LENGTHS))
        for x, slots, width in zip(by_sequence, self.slots, self.widths, strict=True):
            stored.flatten(0, 1)[slots[:-width]] = x[:-width]
        return by_sequence

    def new(self, vectors: list[Tensor]) -> Tensor:
        """The packed new rows."""
        return torch.cat([x[-w:] for x, w in zip(vectors, self.widths, strict=True)])

    def positions(self) -> list[tuple[int, int]]:
        """Sequence and position of every packed row."""
        return [
            (i, n - w + j)
            for i, (n, w) in enumerate(zip(LENGTHS, self.widths, strict=True))
            for j in range(w)
        ]

    def seen(self, sequence: int, position: int) -> list[int]:
        """Positions a row may attend to; the cache's, where drafts of a tree share one."""
        if self.trees:
            context = LENGTHS[sequence] - self.widths[sequence]
            return [
                *range(context),
                *(context + row for row in path_to(self.trees[sequence], position - context)),
            ]
        return list(range(position + 1 if self.causal else LENGTHS[sequence]))


@pytest.fixture(params=["uniform", "ragged", "grouped"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Equally many rows per request; different numbers, request by request; the same, padded to one
    call.
    """
    if request.param == "grouped":
        monkeypatch.setattr(torch_ref, "_size_class", lambda *_: (0,))
    return str(request.param)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_attention_equals_the_definition(kind: str, causal: bool, sparse: bool) -> None:
    """Extension of a context, causal and bidirectional blocks, all positions and chosen ones, rows
    with fewer than topk.
    """
    check_attention(Case(kind, causal=causal), sparse=sparse)


def test_rows_of_a_tree_see_what_is_above_them() -> None:
    """Behind contexts of several lengths, none too, without an indexer; with one, trees are
    refused.
    """
    case = Case("uniform", trees=random_trees(3, 4))
    assert LENGTHS[1] == 5
    check_attention(case, sparse=False)
    assert tree_reasons(TorchRefMlaBackend(spec(indexer=None))) == []
    assert "indexer" in tree_reasons(case.backend)[0]


def check_attention(case: Case, *, sparse: bool) -> None:
    """Random rows on random latents, as exact as the definition."""
    latents = case.context(case.cache.latent, torch.randn(sum(LENGTHS), RANK + ROPE))
    latent = case.new(latents)
    num_rows = len(latent)
    rows = MlaRows(
        torch.randn(num_rows, HEADS, NOPE),
        torch.randn(num_rows, HEADS, ROPE),
        latent[:, :RANK],
        latent[:, RANK:],
    )
    up = UpProjection(key=torch.randn(HEADS, NOPE, RANK), value=torch.randn(HEADS, RANK, VALUE))
    chosen = [case.seen(i, p) for i, p in case.positions()]
    selected = torch.full((num_rows, TOPK), -1, dtype=torch.int32)
    if sparse:
        chosen = [
            [c[j] for j in torch.randperm(len(c)).tolist()[: TOPK - row % 2]]
            for row, c in enumerate(chosen)
        ]
        for row, places in enumerate(chosen):
            selected[row, torch.randperm(TOPK)[: len(places)]] = torch.tensor(
                places, dtype=torch.int32
            )
    got = case.backend.run(
        rows,
        up,
        case.cache,
        case.backend.plan(case.metadata),
        scale=SCALE,
        selected=selected if sparse else None,
    )
    assert got.shape == (num_rows, HEADS, VALUE)
    plain, exact = (
        definition(case, rows, up, latents, chosen, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_exact(got, plain, exact)


def definition(
    case: Case,
    rows: MlaRows,
    up: UpProjection,
    latents: list[Tensor],
    chosen: list[list[int]],
    dtype: torch.dtype,
) -> Tensor:
    """Attention [num_tokens, HEADS, VALUE] of every row to its `chosen` positions, computed in
    `dtype`.
    """
    query = torch.cat([rows.query_nope, rows.query_rope], dim=-1).to(dtype)
    outputs = []
    for row, (i, _) in enumerate(case.positions()):
        compressed, rotated = latents[i][chosen[row]].to(dtype).split([RANK, ROPE], dim=-1)
        for head in range(HEADS):
            key, value = up.key[head].to(dtype), up.value[head].to(dtype)
            scores = torch.cat([compressed @ key.T, rotated], dim=-1) @ query[row, head] * SCALE
            outputs.append(scores.softmax(0) @ (compressed @ value))
    return torch.stack(outputs).unflatten(0, (-1, HEADS))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("topk", [1, TOPK, 14, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_equals_the_definition(
    kind: str, causal: bool, topk: int, dtype: torch.dtype
) -> None:
    """The best positions a row sees, all of them when topk suffices, -1 for the rest; the new keys
    end up in the cache.

    Whole numbers, whose scores every type holds exactly: of positions that score the same, any may
    be chosen.
    """
    case = Case(kind, causal=causal, topk=topk, dtype=dtype)
    stored = case.cache.index_key.view(dtype)
    keys = case.context(stored, torch.randint(-9, 10, (sum(LENGTHS), INDEX_DIM)))
    num_rows = sum(case.widths)
    rows = IndexerRows(
        query=torch.randint(-9, 10, (num_rows, INDEX_HEADS, INDEX_DIM)).to(dtype),
        key=case.new(keys),
        weights=torch.randint(-9, 10, (num_rows, INDEX_HEADS)).float(),
    )
    got = case.backend.select(rows, case.cache, case.backend.plan(case.metadata))
    assert got.dtype == torch.int32
    assert got.shape == (num_rows, topk)
    for row, (i, position) in enumerate(case.positions()):
        products = rows.query[row].double() @ keys[i].double().T
        scores = (rows.weights[row].double()[:, None] * products.relu()).sum(0).tolist()
        seen, places = case.seen(i, position), [p for p in got[row].tolist() if p != -1]
        assert len(set(places)) == len(places)
        assert set(places) <= set(seen)
        assert sorted(scores[p] for p in places) == sorted(scores[p] for p in seen)[-topk:]
    for x, slots in zip(keys, case.slots, strict=True):
        assert torch.equal(stored.flatten(0, 1)[slots], x)


def test_nothing_waits_for_the_device() -> None:
    """Plan, selection and attention of a decoding step under the guard."""
    case = Case("uniform", causal=True)
    num_rows = sum(case.widths)
    index = IndexerRows(
        torch.randn(num_rows, INDEX_HEADS, INDEX_DIM),
        torch.randn(num_rows, INDEX_DIM),
        torch.randn(num_rows, INDEX_HEADS),
    )
    rows = MlaRows(
        torch.randn(num_rows, HEADS, NOPE),
        torch.randn(num_rows, HEADS, ROPE),
        torch.randn(num_rows, RANK),
        torch.randn(num_rows, ROPE),
    )
    up = UpProjection(key=torch.randn(HEADS, NOPE, RANK), value=torch.randn(HEADS, RANK, VALUE))
    with no_host_sync():
        plan = case.backend.plan(case.metadata)
        case.backend.run(
            rows,
            up,
            case.cache,
            plan,
            scale=SCALE,
            selected=case.backend.select(index, case.cache, plan),
        )


def test_what_it_stores_and_serves() -> None:
    """Bytes per token, the backend of a drafter beside it,
    and refusals by name with every reason.
    """
    backend = select_backend("auto", spec())
    assert isinstance(select_backend("torch_ref", spec()), TorchRefMlaBackend)
    assert TorchRefMlaBackend(spec()).cache_spec == LatentLayerSpec(
        width=RANK + ROPE, index_bytes=4 * INDEX_DIM
    )
    assert TorchRefMlaBackend(spec(indexer=None)).cache_spec == LatentLayerSpec(width=RANK + ROPE)
    assert backend.name == "torch_ref"
    assert backend.mha_backend is TorchRefBackend
    with pytest.raises(BackendError, match=r"int8.*8-bit|int8.*float8_e4m3fn cache"):
        select_backend("torch_ref", spec(dtype=torch.int8, cache_dtype=torch.float8_e4m3fn))
    with pytest.raises(InvalidInputError, match="unknown latent attention backend 'rocm_aiter_fa'"):
        select_backend("rocm_aiter_fa", spec())
