"""Sequences that share rows: each is trained as it is in a row of its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.data.dataset import Answer, AnswerSet
from drafters.training.loss.blocks import (
    SequenceBatch,
    anchor_states,
    block_hidden,
    make_blocks,
    sample_anchors,
)
from drafters.training.loss.losses import LossConfig, block_loss
from drafters.training.loss.mask import TILE, BlockAttention, Kind
from drafters.training.loss.packing import Packing, rows_of
from drafters.training.target import Target
from drafters.training.trainer import Trainer
from specdec.base.errors import InvalidInputError
from tests.drafters.tiny import TINY, VOCAB, tiny_model
from tests.drafters.training.small import TinyVerifier, sequences

CPU = torch.device("cpu")
LENGTHS = [13, 20, 9, 16, 5]
MIXED = replace(TINY, windows=(6, None, 5), causal=(True, False, False))
"""Layers with windows, causal ones among them."""


def documents() -> SequenceBatch:
    """Five sequences, each with a prompt of 2 tokens; rows of 32 tokens hold two or three."""
    tokens = torch.randint(VOCAB - 1, (5, 20), generator=torch.Generator().manual_seed(0))
    return sequences(tokens, prompt_lens=[2] * 5, lengths=LENGTHS)


def packed(batch: SequenceBatch, length: int = 32) -> SequenceBatch:
    return replace(batch, packing=Packing.of([batch.lengths_host], length, CPU)[0])


def block_states(
    model: DFlashModel, target: Target, batch: SequenceBatch, *, wide: bool = False
) -> tuple[Tensor, Any]:
    """Hidden states of four blocks of each sequence, [S, 4, K, H], and the blocks."""
    anchors = sample_anchors(
        batch, 4, torch.rand(5, 20, generator=torch.Generator().manual_seed(1))
    )
    blocks = make_blocks(batch, *anchors, num_rows=model.config.max_draft_tokens)
    features, _ = target.features(batch)
    features = features.double() if wide else features
    context = model.context_kv(features, batch.positions)

    def embed(ids: Tensor) -> Tensor:
        return target.embed(ids).to(features.dtype)

    return block_hidden(model, embed, batch, blocks.anchors, context, flex=False), blocks


def test_rows_hold_every_sequence_once_and_no_more_than_fits() -> None:
    source = Random(0)
    for length in (50, 64, 200):
        lengths = [source.randint(1, 50) for _ in range(source.randint(1, 60))]
        rows = rows_of(lengths, length)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        assert all(0 < sum(lengths[index] for index in row) <= length for row in rows)
    even = rows_of([16] * 24, 64)
    assert [len(row) for row in even] == [4] * 6
    with pytest.raises(ValueError, match="longer than a row of 10 tokens"):
        rows_of([11], 10)


@pytest.mark.parametrize("config", [TINY, MIXED], ids=["full", "windows"])
def test_the_losses_of_all_blocks_are_those_of_rows_of_their_own(config: DFlashConfig) -> None:
    """One by one: catches an anchor, a position, a label or a mask of another sequence."""
    target, model = Target(TinyVerifier(), config.target_layer_ids), tiny_model(config)
    wide = tiny_model(config).double()
    losses: list[Tensor] = []
    for batch, net in ((packed(documents()), model), (documents(), model), (documents(), wide)):
        hidden, blocks = block_states(net, target, batch, wide=net is wide)
        weight = target.verifier.model.lm_head.weight.to(hidden.dtype)
        parts = [
            block_loss(rows @ weight.T, labels[None], valid[None], LossConfig())[0]
            for rows, labels, valid in zip(
                hidden.flatten(0, 1)[:, None].unbind(),
                blocks.labels.flatten(0, 1),
                blocks.valid.flatten(0, 1),
                strict=True,
            )
        ]
        losses.append(torch.stack(parts))
    assert int((losses[1] > 0).sum()) == 18, "a short sequence has fewer blocks"
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    exact = losses[2].double()
    assert (losses[0].double() - exact).abs().max() <= 4 * (losses[1].double() - exact).abs().max()


def test_no_token_of_a_sequence_reaches_another() -> None:
    """Bit for bit, whatever the others say."""
    target, model = Target(TinyVerifier(), TINY.target_layer_ids), tiny_model(MIXED)
    batch = packed(documents())
    assert batch.packing is not None
    first, _ = block_states(model, target, batch)
    for kept in range(5):
        others = torch.randint(VOCAB - 1, (5, 20), generator=torch.Generator().manual_seed(7))
        others[kept] = batch.token_ids[kept]
        hidden, _ = block_states(model, target, replace(batch, token_ids=others))
        assert torch.equal(hidden[kept], first[kept])
        assert not torch.equal(hidden[kept - 1], first[kept - 1])


def test_states_before_anchors_are_those_of_their_own_sequence() -> None:
    """A lattice's context; that of the first token is 0."""
    target, model = Target(TinyVerifier(), TINY.target_layer_ids), tiny_model(TINY)
    batch, anchors = documents(), torch.tensor([[0, 1, 4]] * 5)
    own, shared = (
        anchor_states(model, one, target.features(one)[0], anchors)
        for one in (batch, packed(batch))
    )
    torch.testing.assert_close(own, shared)
    assert not own[:, 0].any() and own[:, 1].any()


@pytest.mark.parametrize("kind", [(False, None), (True, 5), (False, 3)])
def test_tiles_of_flex_attention_begin_with_the_sequence(kind: Kind) -> None:
    """Catches a tile that is skipped though a row sees a key in it, one whole that is not, and one
    of another sequence that is read in vain.
    """
    lengths, count, width = [400, 90, 300, 200, 260, 130], 9, 16
    packing = Packing.of([lengths], 700, CPU)[0]
    generator = torch.Generator().manual_seed(0)
    offsets = (torch.rand(6, count, generator=generator) * torch.tensor(lengths)[:, None]).long()
    starts = packing.starts[:, :, None].expand(-1, -1, count)
    anchors = (packing.by_slot(offsets) + starts).flatten(1)
    attention = BlockAttention(anchors, 700, width, flex=True, starts=starts.flatten(1))
    made, mask = attention.block_mask(kind), attention.dense_mask(kind)[:, 0]
    assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
    read = 0
    for row in range(len(mask)):
        for tile in range(-(-mask.shape[1] // TILE)):
            some, whole = (
                set(indices[row, 0, tile, : int(count[row, 0, tile])].tolist())
                for count, indices in (
                    (made.kv_num_blocks, made.kv_indices),
                    (made.full_kv_num_blocks, made.full_kv_indices),
                )
            )
            seen = mask[row, tile * TILE : (tile + 1) * TILE].split(TILE, dim=1)
            assert {place for place, part in enumerate(seen) if part.any()} <= some | whole
            assert all(seen[place].all() for place in whole)
            read += len(some | whole)
    plain = BlockAttention(anchors, 700, width, flex=True).block_mask(kind)
    if kind[1] is None:
        assert plain.full_kv_num_blocks is not None
        assert read < int(plain.kv_num_blocks.sum() + plain.full_kv_num_blocks.sum())


def answers(lengths: Sequence[int]) -> AnswerSet:
    source = Random(0)
    rows = [[source.randrange(VOCAB - 1) for _ in range(length)] for length in lengths]
    made = [Answer(row[:3], row[3:]) for row in rows]
    return AnswerSet(made, device=CPU, max_length=64, bucket=8, mask_token_id=VOCAB - 1)


@pytest.mark.parametrize("changes", [{}, {"kl": 0.5, "loss": "dpace", "replay": 0.5}])
def test_a_run_goes_as_it_does_without(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Loss, matches and gradient of steps on all answers at once, however the step is split."""
    rows = []
    lengths = [12, 30, 7, 22, 41, 18, 9, 33]
    for pack, parts in ((0, 1), (64, 1), (64, 2)):
        config = TrainConfig(
            out=str(tmp_path / f"{pack}-{parts}"),
            batch_size=8,
            anchors=3,
            max_steps=4,
            max_length=48,
            pack_length=pack,
            accumulation=parts,
            **changes,
        )
        target = Target(TinyVerifier(), TINY.target_layer_ids, distribution=config.uses_teacher)
        trainer = Trainer(config, tiny_model(TINY), target, answers(lengths), answers([9]))
        rows.append(trainer.steps(4))
        if pack:
            batch, _ = trainer.batch(0)
            assert batch.packing is not None and len(batch.packing.slots) < len(batch.lengths)
    for name in ("loss", "train_tau", "grad_norm"):
        for row in rows[1:]:
            assert row[name] == pytest.approx(rows[0][name], rel=1e-4), name


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """In the middle of an epoch whose rows are packed anew."""

    def started(name: str) -> Trainer:
        config = TrainConfig(
            out=str(tmp_path / name),
            batch_size=4,
            anchors=3,
            max_length=48,
            pack_length=64,
            lr=0.01,
        )
        target = Target(TinyVerifier(), TINY.target_layer_ids)
        lengths = [12, 30, 7, 22, 41, 18, 9, 33, 25, 14, 38, 20]
        return Trainer(config, tiny_model(TINY), target, answers(lengths), answers([9]))

    whole, killed = started("whole"), started("killed")
    whole.steps(5)
    killed.steps(4)
    (tmp_path / "killed" / "training").mkdir(parents=True)
    killed._save()
    killed = started("killed")
    assert killed.step == 4
    killed.steps(1)
    for name, master in whole.optimizer.masters.items():
        assert torch.equal(killed.optimizer.masters[name], master), name


def test_batches_of_any_length_have_every_answer_once() -> None:
    lengths = list(range(5, 65))
    made = answers(lengths)
    batches = made.epoch(3, 10, mixed=True)
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    sizes = [[made.lengths[index] for index in batch] for batch in batches]
    assert all(size == sorted(size) for size in sizes)
    assert all(max(size) - min(size) > 20 for size in sizes), "any length"


def test_a_row_has_room_for_the_longest() -> None:
    with pytest.raises(InvalidInputError, match=r"pack-length is 1000; .* max-length \(2048\)"):
        TrainConfig(out="x", pack_length=1000)
