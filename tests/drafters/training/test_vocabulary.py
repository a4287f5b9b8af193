"""A reduced vocabulary, and embeddings and a head of the drafter's own: trained, saved, served."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.training.config import TrainConfig
from drafters.training.data.dataset import Answer, AnswerSet, read_answers
from drafters.training.loss.losses import LossConfig
from drafters.training.loss.objective import Objective
from drafters.training.loss.vocabulary import DraftLabels, give_vocabulary, most_frequent
from drafters.training.stages import run_stages
from drafters.training.target import Target
from drafters.training.trainer import Trainer
from drafters.vocabulary import target_ids
from specdec.base.errors import InvalidInputError, SpecDecError
from tests.drafters.tiny import TINY, VOCAB, tiny_model
from tests.drafters.training.figures import log_rows
from tests.drafters.training.small import TinyVerifier
from tests.drafters.training.toy import VOCAB as TOY_VOCAB
from tests.drafters.training.toy import toy_config

DRAFTED = torch.tensor([2, 3, 7, 8])
"""Tokens of nine."""


def test_the_tokens_are_those_that_answers_have_most_often() -> None:
    """Not prompts; of those as frequent the first ones."""
    answers = [Answer([5] * 9, [1, 7, 7, 3]), Answer([2, 4, 4, 4], [7, 3, 8], spans=[(1, 3)])]
    made = AnswerSet(answers, device=torch.device("cpu"), max_length=64, bucket=8, mask_token_id=60)
    assert {i: n for i, n in enumerate(made.counts(VOCAB).tolist()) if n} == {
        1: 1, 3: 2, 4: 2, 7: 3, 8: 1,
    }  # fmt: skip
    tokens, share = most_frequent(made, 4, VOCAB)
    assert tokens.tolist() == [1, 3, 4, 7] and share == pytest.approx(8 / 9)


def test_no_label_counts_behind_one_that_cannot_be_drafted() -> None:
    labels = DraftLabels(DRAFTED - torch.arange(4), 9)
    given = torch.tensor([[2, 8, 7], [3, 0, 2], [6, 3, 3], [8, 7, 0]])
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    own, counted = labels(given, valid)
    assert own[counted].tolist() == [0, 3, 2, 1, 3]
    assert counted.tolist() == [
        [True] * 3, [True, False, False], [False] * 3, [True, False, False],
    ]  # fmt: skip
    whole = DraftLabels(None, 9)
    assert whole.columns is None and whole(given, valid) == (given, valid)


@pytest.mark.parametrize("part", ["kl", "tv", "nla"])
def test_the_target_has_its_probabilities_of_all_tokens(part: str) -> None:
    """Catches a distribution that is scaled up over the drafter's tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, theirs = torch.randn(2, 5, 3, 6, generator=generator)
    head = torch.randn(9, 6, generator=generator)
    factors: dict[str, Any] = {"ce": 0.0, part: 1.0, "gamma": 1e9}
    config = LossConfig(**factors)
    objective = Objective(
        lambda h: h @ head[DRAFTED].T, config, teacher=lambda h: h @ head.T, columns=DRAFTED
    )
    labels = torch.zeros(5, 3, dtype=torch.long)
    loss, weight, _ = objective(hidden, labels, labels == 0, labels, theirs)
    q = (hidden @ head[DRAFTED].T).softmax(-1)
    p = (theirs @ head.T).softmax(-1)
    whole = torch.zeros_like(p).index_copy(-1, DRAFTED, q)
    expected = {
        "kl": (p[..., DRAFTED] * (p[..., DRAFTED] / q).log()).sum(),
        "tv": (0.5 * (p - whole).abs().sum(-1)).sum(),
        "nla": -torch.minimum(p, whole).sum(-1).log().sum(),
    }
    assert float(weight) == pytest.approx(15)
    torch.testing.assert_close(loss, expected[part])


def test_the_head_is_rows_of_the_targets() -> None:
    verifier: Any = TinyVerifier()
    verifier.hidden_size = TINY.hidden_size
    model = tiny_model(replace(TINY, draft_vocab_size=20))
    tokens = torch.arange(20) * 3
    give_vocabulary(model, verifier, tokens)
    assert model.d2t is not None and model.lm_head is not None
    assert torch.equal(target_ids(model.d2t), tokens)
    assert torch.equal(model.lm_head.weight, verifier.model.lm_head.weight[tokens])
    verifier.head = lambda hidden: F.linear(hidden, torch.ones(VOCAB, 32), torch.ones(VOCAB))
    with pytest.raises(InvalidInputError, match="adds a bias"):
        give_vocabulary(model, verifier, tokens)


def test_a_killed_run_goes_on_with_its_tokens(tmp_path: Path) -> None:
    """To the same bits; other tokens are refused."""
    answers = [Answer([1, 2], list(range(i, i + 12))) for i in range(8)]

    def started(name: str, tokens: torch.Tensor) -> Trainer:
        made = AnswerSet(
            answers, device=torch.device("cpu"), max_length=64, bucket=8, mask_token_id=VOCAB - 1
        )
        config = TrainConfig(out=str(tmp_path / name), batch_size=4, anchors=3, lr=0.01, kl=0.5)
        verifier: Any = TinyVerifier()
        verifier.hidden_size = TINY.hidden_size
        model = tiny_model(replace(TINY, draft_vocab_size=len(tokens)))
        assert model.lm_head is not None
        model.lm_head.requires_grad_(False)
        give_vocabulary(model, verifier, tokens)
        target = Target(verifier, TINY.target_layer_ids, distribution=True)
        return Trainer(config, model, target, made, made)

    kept = torch.arange(3, 17)
    whole, killed = started("whole", kept), started("killed", kept)
    whole.steps(4)
    killed.steps(3)
    (tmp_path / "killed" / "training").mkdir(parents=True)
    killed._save()
    killed = started("killed", kept)
    killed.steps(1)
    for name, master in whole.optimizer.masters.items():
        assert torch.equal(killed.optimizer.masters[name], master), name
    with pytest.raises(InvalidInputError, match="holds a run with draft tokens"):
        started("killed", kept + 1)


def drafts_of(folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((folder / "run" / "report.json").read_text())[
        "drafts"
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"kl": 0.3, "tv": 0.2, "stop_after": 1e-9, "log_every": 5},
        {"head": "markov", "head_rank": 8, "confidence": 0.2, "head_candidates": 8},
    ],
    ids=["stopped", "head"],
)
def test_a_reduced_vocabulary_drafts_in_the_engine_as_in_training(
    answered: Path, changes: dict[str, Any]
) -> None:
    """Catches labels, trees, noise or a map of other tokens, also behind a stop."""
    config = toy_config(answered, draft_vocab=40, max_steps=40, **changes)
    if config.stop_after:
        assert not run_stages(("train",), config)
        config = replace(config, stop_after=None)
    assert run_stages(("train", "finish"), config)
    assert float(log_rows(answered)[-1]["tau"]) > 1.3
    for name, figures in drafts_of(answered).items():
        assert figures["tau_engine"] == pytest.approx(figures["tau_replayed"], rel=0.02), name
    answers = read_answers(answered / "run" / "answers", "train")
    counts = torch.zeros(TOY_VOCAB).long()
    for answer in answers:
        counts += torch.tensor(list(answer.answer_ids)).bincount(minlength=TOY_VOCAB)
    kept = counts.argsort(descending=True, stable=True)[:40].sort().values
    for name in ("drafter", "drafter-speculators"):
        shape, tensors = read_checkpoint(answered / "run" / name)
        assert shape.draft_vocab_size == 40 and tensors["lm_head.weight"].shape == (40, 32)
        assert torch.equal(target_ids(tensors["d2t"]), kept)
        stored = load_file(answered / "run" / name / "model.safetensors")
        assert stored["t2d"].nonzero().flatten().equal(kept)


@pytest.mark.slow
def test_a_drafter_with_ends_of_its_own_is_a_beginning(toy: Path, answered: Path) -> None:
    """The target's own, so that nothing changes, but for what it can draft; they are kept."""
    shape, tensors = read_checkpoint(toy / "run" / "drafter")
    target = load_file(toy / "target" / "model.safetensors")
    ends = {
        "lm_head.weight": target["lm_head.weight"],
        "embed_tokens.weight": target["model.embed_tokens.weight"],
    }
    before = drafts_of(toy)["7"]["tau_replayed"]
    write_checkpoint(answered / "own", shape, tensors | ends)
    config = toy_config(answered, init=str(answered / "own"), max_steps=2, lr=1e-9)
    assert run_stages(("train", "finish"), config)
    assert float(log_rows(answered)[0]["tau"]) == pytest.approx(before, rel=1e-3)
    _, trained = read_checkpoint(answered / "run" / "drafter")
    for name, tensor in ends.items():
        assert torch.equal(trained[name], tensor), name
    tokens = torch.arange(24) + 20
    ends["lm_head.weight"], ends["d2t"] = target["lm_head.weight"][tokens], torch.full((24,), 20)
    write_checkpoint(answered / "few", replace(shape, draft_vocab_size=24), tensors | ends)
    few = replace(config, out=str(answered / "again"), init=str(answered / "few"))
    (answered / "again").mkdir()
    (answered / "again" / "answers").symlink_to(answered / "run" / "answers")
    assert run_stages(("train", "finish"), few)
    _, trained = read_checkpoint(answered / "again" / "drafter")
    assert torch.equal(target_ids(trained["d2t"]), tokens)
    with pytest.raises(InvalidInputError, match="drafts 24 tokens, and draft-vocab is 30"):
        run_stages(("train",), replace(few, draft_vocab=30))


@pytest.mark.slow
def test_other_tokens_or_too_many_are_refused(answered: Path) -> None:
    with pytest.raises(SpecDecError, match="draft-vocab is 64; it must be below the target's 64"):
        run_stages(("train",), toy_config(answered, draft_vocab=64))
    with pytest.raises(InvalidInputError, match="tied-tables is True; it must be left out"):
        toy_config(answered, draft_vocab=40, tied_tables=True, head="selector")
