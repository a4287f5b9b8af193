"""EAGLE-3 heads that go on with training: `specdec train --init HEAD`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.eagle3.checkpoint import read_checkpoint
from drafters.eagle3.config import parse_config
from drafters.training.families.choice import trained
from drafters.training.families.eagle3 import Eagle3Model
from drafters.training.loss.memory import LOGIT_BYTES, saved_bytes
from drafters.training.stages import run_stages
from drafters.training.state import load_state
from drafters.training.trainer import Trainer
from specdec.cli.main import main
from tests.drafters.eagle3.heads import (
    LLAMA,
    SGLANG,
    SPECULATORS,
    head_tensors,
    paper_logits,
    write_head,
)
from tests.drafters.tiny import VOCAB as TINY_VOCAB
from tests.drafters.tiny import write_tiny_dflash
from tests.drafters.training.figures import log_rows
from tests.drafters.training.small import CPU, sequences, small_trainer
from tests.drafters.training.toy import VOCAB, as_flags, toy_config
from tests.helpers.guards import no_host_sync

STEPS = 4
OWN = {**LLAMA, "vocab_size": VOCAB}
SGLANGS = {
    **SGLANG,
    **OWN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    "draft_vocab_size": 32,
}
QWEN: dict[str, Any] = {
    **SPECULATORS,
    "transformer_layer_config": {
        **OWN,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    },
    "draft_vocab_size": VOCAB,
    "norm_before_residual": True,
    "fc_norm": True,
    "norm_output": True,
    "embed_requires_grad": True,
}
TINY = {**SGLANGS, "vocab_size": TINY_VOCAB, "draft_vocab_size": 30}


def tiny_head(verifier: Any) -> Eagle3Model:
    """A random head for the target of `small_trainer`."""
    return Eagle3Model(parse_config(TINY), head_tensors(TINY), verifier, STEPS)


def eagle_trainer(folder: Path, **changes: Any) -> Trainer:
    return small_trainer(folder, make=tiny_head, **changes)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_blocks_and_gradients_are_the_papers(tmp_path: Path) -> None:
    """Catches rows of another position or token, states that later rows are not given, keys of
    other blocks, and gradients that stop on the way.
    """
    trainer = eagle_trainer(tmp_path)
    model, target, verifier = trainer.model, trainer.target, trainer.target.verifier
    token_ids = torch.randint(TINY_VOCAB, (2, 14), generator=torch.Generator().manual_seed(3))
    batch, anchors = sequences(token_ids), torch.tensor([[1, 5, 6], [2, 8, 9]])
    drafter = trained(model, target, trainer.config)
    features, _ = target.features(batch)
    hidden = drafter.hidden(batch, anchors, drafter.context(batch, features))
    found = drafter.logits(hidden.flatten(0, 1))
    found.square().mean().backward()
    ours = gradients(model)
    tensors = {name: one.detach().clone() for name, one in model.named_parameters()}
    for one in tensors.values():
        one.requires_grad_()
    table = verifier.model.model.embed_tokens.weight
    rows = []
    for sequence, places in enumerate(anchors.tolist()):
        for place in places:
            text = token_ids[sequence].tolist()
            drafts = text[place + 1 : place + 1 + STEPS]
            given = features[sequence, :place]
            rows.append(paper_logits(TINY, tensors, table, text[: place + 1], given, drafts))
    expected = torch.stack(rows).view_as(found)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    expected.square().mean().backward()
    assert ours.keys() == tensors.keys()
    for name, one in tensors.items():
        torch.testing.assert_close(ours[name], one.grad, atol=1e-4, rtol=1e-3, msg=name)
        assert ours[name].any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_every_weight_and_nothing_of_the_target(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """And does not make the host wait."""
    changes: dict[str, Any] = {"kl": 0.5, "replay": 0.5, "loss": "dpace"}
    trainer = eagle_trainer(tmp_path, dtype=dtype, weight_decay=0.0, lr=0.1, **changes)
    target = trainer.target.verifier.model
    before = [
        {n: x.clone() for n, x in one.state_dict().items()} for one in (trainer.model, target)
    ]
    trainer.batch(0)  # an epoch's order goes to the device once
    with no_host_sync():
        trainer._forward_backward(0, torch.zeros(4))
    trainer.optimizer.accumulate()
    trainer.steps(2)
    moved = {n: not torch.equal(x, before[0][n]) for n, x in trainer.model.state_dict().items()}
    assert [name for name in moved if not moved[name]] == ["d2t"]
    assert all(torch.equal(x, before[1][n]) for n, x in target.state_dict().items())
    assert not any(parameter.requires_grad for parameter in target.parameters())


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "ema": 0.9, "replay": 0.5}])
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Catches drafts, anchors or moments that depend on where a run was cut."""
    states = []
    for folder, ends in ((tmp_path / "whole", (6,)), (tmp_path / "cut", (2, 5, 6))):
        for end in ends:
            run = eagle_trainer(folder, max_steps=6, log_every=1, eval_every=1e9, **changes)
            if end < 6:
                run.steps(end - run.step)
                run.tau = 1.0
                run._save()
            else:
                assert run.run()
        state = load_state(folder / "run" / "training", CPU)
        assert state is not None and state["step"] == 6
        states.append(state["optimizer"])
    for kind in ("masters", *(["means"] if changes else [])):
        for name, tensor in states[0][kind].items():
            assert torch.equal(tensor, states[1][kind][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (SGLANGS, {"accumulation": 2}),
        (QWEN, {"kl": 0.3, "ema": 0.8}),
        ({**SGLANGS, "bias": True}, {"loss": "dpace"}),
    ],
    ids=["sglang", "speculators", "biased"],
)
def test_a_head_learns_and_does_in_the_engine_what_training_said(
    answered: Path, raw: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Catches windows, norms, taps, tokens or sampling unlike the engine's, and a lossy export."""
    head = write_head(answered / "head", raw)
    config = toy_config(answered, init=str(head), unroll=STEPS, **changes)
    assert run_stages(("train", "finish"), config)
    report = json.loads((answered / "run" / "report.json").read_text())
    assert list(report["drafts"]) == ["4", "sampled 4"]
    assert run_stages(("finish",), replace(config, finish_prompts=2))  # over the first export
    for figures in report["drafts"].values():
        assert figures["tau_engine"] == figures["tau_replayed"]
    rows = log_rows(answered)
    assert float(rows[0]["tau"]) < 1.1 and float(rows[-1]["tau"]) > 1.5
    assert float(rows[-2]["loss"]) < 0.9 * float(rows[1]["loss"])
    folders = sorted((answered / "run").glob("drafter*"))
    names = {"bias": ["sglang"], "eagle_config": ["drafter", "sglang"]}
    layouts = next((found for key, found in names.items() if key in raw), ["drafter"])
    assert [path.name.split("-")[-1] for path in folders] == layouts
    before, after = (read_checkpoint(path) for path in (head, folders[0]))
    assert replace(after[0], layers=before[0].layers) == replace(
        before[0],
        verifier_name=after[0].verifier_name,
        stated_taps=after[0].stated_taps,
        max_draft_tokens=after[0].max_draft_tokens,
    )
    assert after[0].taps(6) == before[0].taps(6)
    for name, tensor in before[1].items():
        stays = name in ("d2t", "embed_tokens.weight")
        assert torch.equal(tensor, after[1][name]) == stays, name
    for other in folders[1:]:
        same = read_checkpoint(other)
        assert all(torch.equal(tensor, same[1][name]) for name, tensor in after[1].items())
        assert same[0].taps(6) == after[0].taps(6)


def peagle(folder: Path) -> Path:
    changes = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
    return write_head(folder, {**SPECULATORS, **changes, "mask_token_id": 5})


REFUSED: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "parallel": (peagle, {}, "has masks, by which all drafts are made at once"),
    "another target": (lambda path: write_head(path, SPECULATORS), {}, "does not fit"),
    "head": (
        lambda path: write_head(path, SGLANGS),
        {"head": "markov"},
        "head is 'markov', and drafter",
    ),
    "packed": (
        lambda path: write_head(path, SGLANGS),
        {"pack_length": 4096},
        "pack-length is 4096, and drafter",
    ),
    "a block": (write_tiny_dflash, {"unroll": 3}, "unroll is 3, and DFlash drafters write a block"),
    "steps": (
        lambda path: write_head(path, SGLANGS),
        {"unroll": 65},
        "unroll is 65; it must be at most 64",
    ),
    "more than sglang says": (
        lambda path: write_head(path, {**SGLANGS, "bias": True}),
        {"unroll": 8},
        "unroll is 8; it must be at most 7",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_trained_is_said_in_a_line(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    """Before any answer is written."""
    write, changes, message = REFUSED[why]
    same = {"model": str(toy / "target"), "prompts": (str(toy / "prompts.txt"),)}
    init = str(write(tmp_path / "head"))
    config = toy_config(toy, **same, init=init, out=str(tmp_path / "run"), **changes)
    assert main(["train", *as_flags(config)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1]
    assert not list((tmp_path / "run").glob("answers/*.gz"))


def test_memory_is_what_a_step_takes(tmp_path: Path) -> None:
    """Catches weights that are counted for each sequence, and blocks that are not."""
    trainer = eagle_trainer(tmp_path, batch_size=12, anchors=6, ema=0.9)
    said = trainer.drafter.memory(32, 1)
    batch = sequences(torch.randint(TINY_VOCAB, (12, 32)))
    features, _ = trainer.target.features(batch)
    anchors = torch.arange(4, 10).expand(12, -1)

    def step() -> Tensor:
        return trainer.drafter.hidden(batch, anchors, trainer.drafter.context(batch, features))

    taken = saved_bytes(trainer.model, step)
    assert said.activations == pytest.approx(taken, rel=0.01)
    count = sum(one.numel() for one in trainer.model.parameters())
    assert (said.target, said.weights, said.optimizer) == (7, 2 * 4 * count, 5 * 4 * count)
    assert said.logits == 12 * 6 * STEPS * 30 * LOGIT_BYTES


def test_a_step_is_the_same_however_it_is_split(tmp_path: Path) -> None:
    """Catches a network of another forward's weights, and keys that blocks of another one left."""
    whole, split = (
        eagle_trainer(tmp_path / str(parts), accumulation=parts, replay=0.5) for parts in (1, 4)
    )
    for one, other in zip(*(list(run.steps(3).items()) for run in (whole, split)), strict=True):
        if one[0] in ("loss", "train_tau", "grad_norm"):
            assert one[1] == pytest.approx(other[1], rel=1e-4), one[0]
