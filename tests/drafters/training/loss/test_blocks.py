"""Training's parts against definitions written out: mask, leak, anchors, replay, optimizer."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.dflash.layers import compile_layer
from drafters.training.config import TrainConfig
from drafters.training.data.dataset import Answer, AnswerSet
from drafters.training.loss.blocks import block_hidden, make_blocks, next_anchors, sample_anchors
from drafters.training.loss.evaluate import replay
from drafters.training.loss.mask import TILE, BlockAttention, Kind, use_flex
from drafters.training.optimizer import MasterOptimizer
from drafters.training.target import Target
from specdec.base.errors import InvalidInputError
from tests.drafters.tiny import TINY, VOCAB, input_table, tiny_model, tiny_target
from tests.drafters.training.small import TinyVerifier, sequences
from tests.helpers.bounds import assert_as_exact

KINDS: list[Kind] = [(False, None), (True, None), (True, 5), (False, 3)]


ANCHORS = torch.tensor([[2, 7, 8, 19], [0, 0, 4, 11]])  # the second sequence has two invalid blocks


CONTEXT, WIDTH = 20, 4


def sees(anchor: int, row: int, block: int, key: int, causal: bool, window: int | None) -> bool:
    """The rule, for one query and one key."""
    if key < CONTEXT:
        return key < anchor and (window is None or anchor + row - key < window)
    key_block, key_row = divmod(key - CONTEXT, WIDTH)
    if key_block != block or (causal and key_row > row):
        return False
    return window is None or abs(row - key_row) < window


class Products(TorchDispatchMode):
    """Notes the shapes of the matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[tuple[int, ...], ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.shapes.append(tuple(tuple(part.shape) for part in args[-2:]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_dense_mask_is_the_rule(kind: Kind) -> None:
    """Catches a wrong bound, window or block in the predicate."""
    mask = BlockAttention(ANCHORS, CONTEXT, WIDTH, flex=False).dense_mask(kind)
    for sequence, anchors in enumerate(ANCHORS.tolist()):
        for query in range(len(anchors) * WIDTH):
            block, row = divmod(query, WIDTH)
            expected = [
                sees(anchors[block], row, block, key, *kind) for key in range(mask.shape[-1])
            ]
            assert mask[sequence, 0, query].tolist() == expected


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_equals_dense_mask(kind: Kind) -> None:
    """Catches a difference between the CUDA path's mask and the one of all other tests."""
    rows = ANCHORS.shape[1] * WIDTH
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, rows, 4, 16, generator=generator)
    key, value = (torch.randn(2, CONTEXT + rows, 2, 16, generator=generator) for _ in "kv")
    dense = BlockAttention(ANCHORS, CONTEXT, WIDTH, flex=False)
    flex = BlockAttention(ANCHORS, CONTEXT, WIDTH, flex=True)(kind, query, key, value)
    assert_as_exact(
        flex,
        dense(kind, query, key, value),
        dense(kind, query.double(), key.double(), value.double()),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(300, 40, 16), (256, 32, 12), (512, 30, 7)])
def test_tiles_of_flex_attention_leave_nothing_out(kind: Kind, sizes: tuple[int, int, int]) -> None:
    """Catches a tile that is skipped though a row sees a key in it, or one whole that is not."""
    context, blocks, width = sizes
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(260 if context == 300 else 200, (3, blocks), generator=generator)
    anchors = anchors.sort(-1).values
    anchors[1, blocks // 2 :] = 0  # those that are not valid
    attention = BlockAttention(anchors, context, width, flex=True)
    made, mask = attention.block_mask(kind), attention.dense_mask(kind)[:, 0]
    assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
    rows = mask.shape[1]
    for sequence, tile in itertools.product(range(3), range(-(-rows // TILE))):
        some, whole = (
            set(indices[sequence, 0, tile, : int(count[sequence, 0, tile])].tolist())
            for count, indices in (
                (made.kv_num_blocks, made.kv_indices),
                (made.full_kv_num_blocks, made.full_kv_indices),
            )
        )
        seen = list(mask[sequence, tile * TILE : (tile + 1) * TILE].split(TILE, dim=1))
        assert not some & whole
        assert {place for place, part in enumerate(seen) if part.any()} <= some | whole
        assert all(seen[place].all() for place in whole)
        if kind == (False, None):  # and nothing is read in vain
            assert {place for place, part in enumerate(seen) if part.any()} == some | whole
            in_context = enumerate(seen[: context // TILE])
            assert {place for place, part in in_context if part.all()} == whole


def mixed(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In place of attention."""
    return query + (key + value).repeat(1, 1, 2, 1)


def test_compiled_layers_have_the_gradient_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part of a layer that is lost before its attention or behind it; what torch makes of
    the parts is its own affair, and would take it 15 s.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled, exact = (
        tiny_model(replace(TINY, windows=(None,), causal=(False,))) for _ in range(3)
    )
    exact.double()
    for layer in compiled.layers:
        compile_layer(layer)
    embeddings = torch.randn(2, 12, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    gradients = []
    for model in (compiled, plain, exact):
        rows = embeddings.to(model.norm.weight.dtype)
        hidden = model.block_forward(rows, torch.arange(12), mixed)
        hidden.square().sum().backward()
        found = [x.grad.flatten() for x in model.layers.parameters() if x.grad is not None]
        gradients.append(torch.cat([hidden.detach().flatten(), *found]))
    assert_as_exact(*gradients)


def test_flex_is_refused_where_it_cannot_train() -> None:
    assert not use_flex("auto", torch.device("cpu"))
    with pytest.raises(InvalidInputError, match="choose dense"):
        use_flex("flex", torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"windows": (6, 6, None), "causal": (True, True, False)}, {"sample_from_anchor": True}],
)
def test_no_feature_at_or_after_the_anchor_reaches_a_block(changes: dict[str, Any]) -> None:
    """Catches a leak of what a live run does not know yet: it would raise tau in training alone."""
    model = tiny_model(replace(TINY, **changes))
    target = tiny_target()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB - 1, (1, 24), generator=generator)
    batch = sequences(tokens, [3], [24])
    anchors = torch.tensor([[5, 11, 17]])
    features = torch.randn(1, 24, TINY.feature_size, generator=generator)

    def hidden(features: Tensor) -> Tensor:
        context = model.context_kv(features, torch.arange(24))
        return block_hidden(
            model,
            lambda ids: F.embedding(ids, input_table(target)),
            batch,
            anchors,
            context,
            flex=False,
        )

    with torch.no_grad():
        before = hidden(features)
        for block, anchor in enumerate(anchors[0].tolist()):
            changed = features.clone()
            changed[:, anchor:] += 100.0
            assert torch.equal(hidden(changed)[:, block], before[:, block])
            changed[:, anchor - 1] += 100.0
            assert not torch.equal(hidden(changed)[:, block], before[:, block])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_frozen_head_is_multiplied_once_for_all_blocks(dtype: torch.dtype) -> None:
    """Catches hidden states that are not contiguous, which torch multiplies slowly."""
    target, model = Target(TinyVerifier(), TINY.target_layer_ids), tiny_model().to(dtype)
    batch = sequences(torch.arange(40).view(2, 20) % VOCAB)
    context = model.context_kv(target.features(batch)[0].to(dtype), torch.arange(20))
    anchors = torch.tensor([[3, 9, 12], [2, 5, 8]])
    hidden = block_hidden(
        model, lambda ids: target.embed(ids).to(dtype), batch, anchors, context, flex=False
    )
    hidden = hidden.detach().requires_grad_()
    weight = torch.randn(VOCAB, hidden.shape[-1], dtype=dtype)
    with Products() as products:
        F.linear(hidden.flatten(0, 1), weight).sum().backward()
    rows = hidden.shape[:-1].numel()
    assert products.shapes == [
        ((rows, hidden.shape[-1]), (hidden.shape[-1], VOCAB)),
        ((rows, VOCAB), tuple(weight.shape)),
    ]


def test_anchors_are_answer_positions_with_a_successor() -> None:
    """Catches anchors in the prompt, on the last token, twice, or always the same."""
    batch = sequences(torch.zeros(3, 30, dtype=torch.long), [4, 20, 28], [30, 25, 30])
    found: list[set[int]] = [set(), set(), set()]
    for seed in range(40):
        anchors, valid = sample_anchors(
            batch, 5, torch.rand(3, 30, generator=torch.Generator().manual_seed(seed))
        )
        assert valid.sum(dim=1).tolist() == [5, 4, 1]
        assert (anchors[~valid] == 0).all()
        for sequence in range(3):
            chosen = anchors[sequence][valid[sequence]].tolist()
            assert chosen == sorted(set(chosen))
            found[sequence] |= set(chosen)
    assert found == [set(range(4, 29)), {20, 21, 22, 23}, {28}]


def test_replayed_blocks_begin_where_a_run_would_go_on() -> None:
    """Catches blocks behind the wrong token, or where no answer's token follows."""
    batch = sequences(torch.arange(24).view(2, 12), [3, 2], [10, 12])
    anchors, valid = torch.tensor([[3, 7, 8], [5, 6, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    blocks = make_blocks(batch, anchors, valid.bool(), num_rows=4)
    accepted = torch.tensor([[4, 0, 1], [2, 0, 0]])
    found = next_anchors(blocks, accepted, batch)
    assert found[0].tolist() == [[8, 8, 0], [7, 8, 0]]
    assert found[1].tolist() == [[True, True, False], [True, True, False]]


def test_labels_follow_the_anchor_and_end_with_the_answer() -> None:
    """Catches labels shifted by one, and labels from the padding."""
    tokens = torch.arange(100, 112)[None]
    batch = sequences(tokens, [3], [10])
    blocks = make_blocks(batch, torch.tensor([[3, 7]]), torch.tensor([[True, True]]), num_rows=4)
    assert blocks.labels[0, 0].tolist() == [104, 105, 106, 107]
    assert blocks.valid.tolist() == [[[True] * 4, [True, True, False, False]]]
    assert blocks.previous[0, 0].tolist() == [103, 104, 105, 106]


def test_replay_walks_as_a_live_run_would() -> None:
    """Catches a replay that averages anchors, or miscounts the last step."""
    target, model = Target(TinyVerifier(), TINY.target_layer_ids), tiny_model()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB - 1, (40,), generator=generator).tolist()
    lengths = [(5, 40), (9, 12), (3, 25), (6, 8)]
    answers = [Answer(tokens[:p], tokens[p:n]) for p, n in lengths]
    for repeat in range(
        2
    ):  # words that the random drafter says after some anchors, so that it is right now and then
        for answer in answers:
            ids = [*answer.prompt_ids, *answer.answer_ids]
            for anchor in (*range(len(answer.prompt_ids), len(ids) - 2, 5 + repeat), len(ids) - 3):
                ids[anchor + 1 : anchor + 3] = one_block(model, target, ids, anchor)[:2]
            answer.answer_ids = ids[len(answer.prompt_ids) :]
    steps, emitted = [], []
    for answer in answers:
        ids, anchor, count = [*answer.prompt_ids, *answer.answer_ids], len(answer.prompt_ids), 0
        while anchor < len(ids) - 1:
            accepted = 0
            for draft, true in zip(
                one_block(model, target, ids, anchor), ids[anchor + 1 :], strict=False
            ):
                if draft != true:
                    break
                accepted += 1
            anchor += accepted + 1
            count += 1
        steps.append(count)
        emitted.append(len(answer.answer_ids) - 1)
    answer_set = AnswerSet(
        answers,
        device=torch.device("cpu"),
        max_length=99,
        bucket=8,
        mask_token_id=TINY.mask_token_id,
    )
    result = replay(model, target, answer_set, TrainConfig(batch_size=2, anchors=7, loss_rows=11))
    assert sorted(
        (count, chain[0]) for count, chain in zip(result.num_emitted, result.num_steps, strict=True)
    ) == sorted(zip(emitted, steps, strict=True))
    assert sum(steps) < sum(emitted), "the test needs accepted drafts"
    assert result.tau() == sum(emitted) / sum(steps)


def one_block(model: Any, target: Target, ids: list[int], anchor: int) -> list[int]:
    """Greedy drafts after `anchor`, from the tokens before it alone."""
    batch = sequences(torch.tensor([ids[: anchor + 1]]))
    with torch.no_grad():
        context = model.context_kv(target.features(batch)[0], torch.arange(anchor + 1))
        hidden = block_hidden(
            model, target.embed, batch, torch.tensor([[anchor]]), context, flex=False
        )
        return [int(token) for token in target.head(hidden)[0, 0].argmax(dim=-1)]


def test_master_weights_keep_updates_that_bfloat16_would_lose() -> None:
    """Catches rounded weights, gradients that are not summed, a mean over wrong weights."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = MasterOptimizer(model, lr=1e-3, weight_decay=0.0, clip=1e9)
    model.bfloat16()
    norm = torch.zeros(())
    for _ in range(10):
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.accumulate()
        norm = optimizer.step(torch.tensor(8.0), 0.5)
    # two backward passes of 1 each, over a weight of 8
    assert norm.item() == pytest.approx(math.sqrt(4 * (2 / 8) ** 2))
    torch.testing.assert_close(
        optimizer.masters["weight"], torch.full((1, 4), 1 - 10 * 0.5e-3), rtol=0, atol=1e-5
    )
    assert torch.equal(model.weight, optimizer.masters["weight"].bfloat16())
    assert (model.weight < 1).all()


def test_the_running_mean_is_that_of_the_weights_and_goes_on_from_its_state() -> None:
    """Catches a mean that is not used, that stays in the model, or is lost between two runs."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "clip": 1e9, "ema": 0.6}
    optimizer = MasterOptimizer(model, **settings)
    mean = model.weight.detach().clone()
    for step in range(1, 9):
        if step == 5:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = MasterOptimizer(model, **settings)
            optimizer.load_state_dict(state)
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(torch.tensor(1.0), 1.0)
        mean = torch.lerp(mean, model.weight.detach(), 1 - min(0.6, (1 + step) / (10 + step)))
    now = model.weight.detach().clone()
    with optimizer.averaged():
        torch.testing.assert_close(model.weight.detach(), mean)
    assert torch.equal(model.weight, now) and not torch.equal(now, mean)


def test_muon_moves_matrices_by_what_is_orthogonal_and_goes_on_from_its_state() -> None:
    """Catches an optimizer that is not used, moves vectors, or loses momentum."""
    torch.manual_seed(0)
    start = torch.nn.Linear(8, 16)
    gradients = [
        [torch.randn_like(parameter) for parameter in start.parameters()] for _ in range(3)
    ]

    def optimizer_of() -> MasterOptimizer:
        return MasterOptimizer(
            copy.deepcopy(start), lr=1e-2, weight_decay=0.0, clip=1e9, kind="muon"
        )

    def step(optimizer: MasterOptimizer, number: int) -> None:
        for master, gradient in zip(optimizer.masters.values(), gradients[number], strict=True):
            master.grad.copy_(gradient)  # type: ignore[union-attr]
        optimizer.step(torch.tensor(1.0), 1.0)

    one = optimizer_of()
    step(one, 0)
    matrix, vector = (
        master - parameter.detach()
        for master, parameter in zip(one.masters.values(), start.parameters(), strict=True)
    )
    # 1 each were the iteration exact
    values = torch.linalg.svdvals(matrix) / (1e-2 * 0.2 * math.sqrt(16))
    assert values.min() > 0.6
    assert values.max() < 1.3
    # AdamW's first step
    torch.testing.assert_close(vector, -1e-2 * gradients[0][1].sign(), rtol=1e-4, atol=0)
    step(one, 1)
    again = optimizer_of()
    again.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer in (one, again):
        step(optimizer, 2)
    assert all(
        torch.equal(*pair)
        for pair in zip(one.masters.values(), again.masters.values(), strict=True)
    )


def test_answers_that_cannot_be_trained_on_are_counted() -> None:
    """Catches answers silently dropped, and a mask token that is a real word."""
    kinds = {"device": torch.device("cpu"), "max_length": 6, "bucket": 4}
    answers = [Answer([1, 2], [3, 4, 5]), Answer([1], [2]), Answer([1, 2, 3], [4, 5, 6, 7])]
    kept = AnswerSet(answers, **kinds, mask_token_id=9)  # type: ignore[arg-type]
    assert (len(kept), kept.num_too_long, kept.num_too_short, kept.num_masked) == (1, 1, 1, 0)
    with pytest.raises(InvalidInputError, match="mask-token 4 occurs in 1 of 1 answers"):
        AnswerSet(answers, **kinds, mask_token_id=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="none of 2 answers can be used: 1 are longer"):
        AnswerSet(answers[1:], **kinds, mask_token_id=9)  # type: ignore[arg-type]
    batch = kept.take([0], torch.tensor([0]), 5)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert (batch.prompt_lens.tolist(), batch.lengths.tolist(), batch.lengths_host) == (
        [2],
        [5],
        [5],
    )


def test_an_epoch_has_every_answer_once_in_batches_of_like_length() -> None:
    """Catches answers left out or repeated, and an order that a resumed run loses."""
    answers = [Answer([0], [1] * (2 + i % 40)) for i in range(80)]
    answer_set = AnswerSet(
        answers, device=torch.device("cpu"), max_length=99, bucket=1, mask_token_id=9
    )
    first, again, second = (answer_set.epoch(seed, 8) for seed in (1, 1, 2))
    assert first == again != second
    assert sorted(i for batch in first for i in batch) == list(range(80))
    spread = [
        answer_set.longest(batch) - min(answer_set.lengths[i] for i in batch) for batch in first
    ]
    assert max(spread) <= 4
    assert first != sorted(first, key=answer_set.longest)


def test_every_answer_of_a_conversation_is_trained_and_nothing_else() -> None:
    """Catches anchors in what the user says, and labels beyond the end of an answer."""
    answers = [
        Answer(range(10, 22), range(30, 34), spans=((2, 5), (8, 10))),
        Answer(range(40, 43), range(50, 55)),
    ]
    kinds = {"device": torch.device("cpu"), "max_length": 99, "bucket": 8, "mask_token_id": 9}
    some = AnswerSet(answers, **kinds)  # type: ignore[arg-type]
    batch = some.take([0, 1], torch.tensor([0, 1]), 16)
    anchors, valid = sample_anchors(batch, 16, torch.rand(2, 16))
    blocks = make_blocks(batch, anchors, valid, num_rows=3)
    found = [
        {int(a): [int(x) for x, ok in zip(labels, rows, strict=True) if ok]
         for a, good, labels, rows in zip(*one, strict=True) if good}
        for one in zip(anchors, valid, blocks.labels, blocks.valid, strict=True)
    ]  # fmt: skip
    assert found[0] == {2: [13, 14], 3: [14], 8: [19], 12: [31, 32, 33], 13: [32, 33], 14: [33]}
    assert found[1] == {3: [51, 52, 53], 4: [52, 53, 54], 5: [53, 54], 6: [54]}
