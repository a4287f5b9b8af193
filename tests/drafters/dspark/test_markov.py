"""DSpark's heads: their formulas, the authors' drafts, and what a trained confidence forecasts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.model import DFlashModel
from drafters.dspark.markov import MarkovConfig
from drafters.head import Lattice, left_sides
from tests.drafters.heads import (
    ANCHORS,
    LENGTHS,
    PaperMarkov,
    backbone,
    head_tensors,
    headed,
    with_head,
)
from tests.drafters.tiny import HIDDEN, VOCAB
from tests.helpers.bounds import assert_as_exact
from tests.helpers.speculators_reference import speculators

KINDS = ("vanilla", "gated", "rnn")
FULL = MarkovConfig(8, has_confidence=True)


def test_state_dict_is_the_checkpoint(tmp_path: Path) -> None:
    """Names and shapes are the public ones; ModelOpt leaves out the module's name."""
    config = with_head(FULL, draft_vocab_size=30)
    shapes = {name: list(tensor.shape) for name, tensor in DFlashModel(config).state_dict().items()}
    assert shapes["markov_head.markov_w1.weight"] == [VOCAB, 8] and shapes[
        "markov_head.markov_w2.weight"
    ] == [30, 8]
    assert shapes["confidence_head.proj.weight"] == [1, HIDDEN + 8] and shapes[
        "confidence_head.proj.bias"
    ] == [1]
    config = with_head(replace(FULL, kind="gated"))
    headed(tmp_path / "ours", config)
    read = read_checkpoint(tmp_path / "ours")[1]
    assert read["markov_head.gate_proj.weight"].shape == (8, HIDDEN + 8)
    short = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
    theirs = {
        next((name.replace(a, b) for a, b in short.items() if a in name), name): tensor
        for name, tensor in read.items()
    }
    assert "markov_w1.weight" in theirs and "confidence_proj.bias" in theirs
    save_file(theirs, tmp_path / "ours" / "model.safetensors")
    again = read_checkpoint(tmp_path / "ours")[1]
    assert again.keys() == read.keys() and all(
        again[name].equal(tensor) for name, tensor in read.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind: str) -> None:
    """Corrections behind known tokens, as in training, against the paper's slot by slot."""
    config = with_head(replace(FULL, kind=kind), sample_from_anchor=True)
    tensors, model = head_tensors(config), DFlashModel(config)
    model.load_state_dict(tensors)
    assert config.head is not None
    head = config.head.head(model, lambda tokens: tokens)
    assert not isinstance(head, Lattice)
    hidden, previous = torch.randn(2, 5, HIDDEN), torch.randint(VOCAB, (2, 5))
    ours = left_sides(head, hidden, previous) @ head.right.T
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = []
    for weights, states in ((tensors, hidden), (wide, hidden.double())):
        paper = [PaperMarkov(config.head, weights) for _ in range(2)]  # type: ignore[arg-type]
        expected.append(
            torch.stack(
                [
                    torch.stack(
                        [paper[i].correction(states[i, j], int(previous[i, j])) for j in range(5)]
                    )
                    for i in range(2)
                ]
            )
        )
    assert_as_exact(ours, *expected)


@pytest.mark.parametrize("kind", KINDS)
def test_as_speculators(kind: str) -> None:
    """The public heads take our weights by name, and say the same."""
    public = speculators("models.dspark.model_definitions")
    config = with_head(replace(FULL, kind=kind), sample_from_anchor=True)
    model = DFlashModel(config)
    model.load_state_dict(head_tensors(config))
    assert config.head is not None
    head: Any = config.head.head(model, lambda tokens: tokens)
    theirs = public.MarkovHead(
        verifier_vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        markov_rank=8,
        hidden_size=HIDDEN,
        head_type=kind,
    )
    theirs.load_state_dict(model.get_submodule("markov_head").state_dict())
    confidence = public.ConfidenceHead(HIDDEN + 8)
    confidence.load_state_dict(model.get_submodule("confidence_head").state_dict())
    hidden, previous = torch.randn(2, 5, HIDDEN), torch.randint(VOCAB, (2, 5))
    ours = left_sides(head, hidden, previous) @ head.right.T
    plain = theirs.block_bias(prev_token_ids=previous, hidden_states=hidden)
    wide = theirs.double().block_bias(prev_token_ids=previous, hidden_states=hidden.double())
    assert_as_exact(ours, plain, wide)
    features = torch.cat([hidden, theirs.float().prev_embeddings(previous)], dim=-1)
    expected = confidence(features).sigmoid()
    assert_as_exact(
        head.confidences(hidden, previous),
        expected,
        confidence.double()(features.double()).sigmoid(),
    )


def authors_chain(config: Any, request: int, k: int) -> list[int]:
    """DeepSpec's sampling at temperature 0: one slot after the other, over the whole vocabulary."""
    hidden, logits = backbone(config, request)
    paper, previous, drafts = PaperMarkov(config.head, head_tensors(config)), ANCHORS[request], []
    for slot in range(k):
        previous = int((logits[slot] + paper.correction(hidden[slot], previous)).argmax())
        drafts.append(previous)
    return drafts


@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize(
    ("kind", "from_anchor"), [("vanilla", True), ("vanilla", False), ("gated", True), ("rnn", True)]
)
def test_drafts_are_the_authors(kind: str, from_anchor: bool, k: int, tmp_path: Path) -> None:
    """In either alignment; a row too late, or the wrong token before, drafts otherwise."""
    config = with_head(MarkovConfig(8, kind), sample_from_anchor=from_anchor)
    drafter, rig = headed(tmp_path / "drafter", config)
    draft = drafter.propose(rig.batch(ANCHORS, LENGTHS, k))
    assert draft.probs is None and draft.forecast is None
    found = [authors_chain(config, request, k) for request in range(2)]
    assert draft.token_ids.tolist() == found
    plain = [backbone(config, request)[1][:k].argmax(-1).tolist() for request in range(2)]
    assert found != plain, "the head decides nothing here"
    if kind != "rnn":  # of which there is one alignment alone
        shifted = replace(config, sample_from_anchor=not from_anchor)
        assert found != [authors_chain(shifted, request, k) for request in range(2)], (
            "nor does the alignment"
        )


def test_candidates_that_are_the_whole_vocabulary(tmp_path: Path) -> None:
    """Restricted to so many candidates, as without; restricted to one, as without a head."""
    full = with_head(MarkovConfig(8), sample_from_anchor=True)
    for top_k, expected in (
        (VOCAB, [authors_chain(full, r, 7) for r in range(2)]),
        (1, [backbone(full, r)[1][:7].argmax(-1).tolist() for r in range(2)]),
    ):
        config = with_head(MarkovConfig(8, draft_top_k=top_k), sample_from_anchor=True)
        drafter, rig = headed(tmp_path / str(top_k), config)
        assert drafter.propose(rig.batch(ANCHORS, LENGTHS, 7)).token_ids.tolist() == expected


def test_reduced_vocabulary(tmp_path: Path) -> None:
    """W1 has a row for each token of the target, W2 for each that can be drafted."""
    for top_k in (None, 30):
        config = with_head(
            MarkovConfig(8, draft_top_k=top_k), sample_from_anchor=True, draft_vocab_size=30
        )
        drafter, rig = headed(tmp_path / str(top_k), config)
        batch = rig.batch(ANCHORS, LENGTHS, 7)
        hidden = drafter.draft_hidden(batch)
        logits, tensors = drafter.logits(hidden), head_tensors(config)
        for request in range(2):
            paper = PaperMarkov(config.head, tensors)  # type: ignore[arg-type]
            previous, expected = ANCHORS[request], []
            for slot in range(7):
                column = (
                    logits[request, slot] + paper.correction(hidden[request, slot], previous)
                ).argmax()
                previous = 2 * int(column)  # the tiny drafter's map
                expected.append(previous)
            assert drafter.propose(batch).token_ids[request].tolist() == expected


def test_bytes_that_a_step_reads(tmp_path: Path) -> None:
    """W1 is read by rows; W2 whole for eight slots, or by rows for few candidates."""
    plain = headed(
        tmp_path / "plain", with_head(MarkovConfig(8, draft_top_k=5), sample_from_anchor=True)
    )[0].drafter
    full = headed(tmp_path / "full", with_head(MarkovConfig(8), sample_from_anchor=True))[0].drafter
    assert full.weight_bytes - plain.weight_bytes == 8 * (VOCAB * 8 * 4)
    own = sum(
        tensor.nbytes for name, tensor in full.model.state_dict().items() if "markov" not in name
    )
    assert plain.weight_bytes == own + VOCAB * HIDDEN * 4  # and the borrowed head


@pytest.mark.parametrize("sees_token", [True, False])
def test_forecast(sees_token: bool, tmp_path: Path) -> None:
    """The expected number of accepted drafts, if each is kept with the head's confidence."""
    config = with_head(
        MarkovConfig(8, has_confidence=True, confidence_sees_token=sees_token),
        sample_from_anchor=True,
    )
    drafter, rig = headed(tmp_path / "drafter", config)
    drafter.forecasts = True
    draft, tensors = drafter.propose(rig.batch(ANCHORS, LENGTHS, 5)), head_tensors(config)
    assert draft.forecast is not None and draft.forecast.dtype == torch.float32
    for request in range(2):
        hidden, _ = backbone(config, request)
        kept, expected = 1.0, 0.0
        for slot, previous in enumerate([ANCHORS[request], *draft.token_ids[request, :4].tolist()]):
            features = [hidden[slot]] + [
                tensors["markov_head.markov_w1.weight"][previous]
            ] * sees_token
            logit = (
                tensors["confidence_head.proj.weight"][0] @ torch.cat(features)
                + tensors["confidence_head.proj.bias"]
            )
            kept *= logit.sigmoid().item()
            expected += kept
        assert float(draft.forecast[request]) == pytest.approx(expected, rel=1e-4)
