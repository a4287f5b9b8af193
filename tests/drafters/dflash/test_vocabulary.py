"""The DFlash drafter's tokens: its vocabulary, sampling, scales and tables of its own."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.dflash.drafter import BoundDFlash, load_dflash
from drafters.training.config import TrainConfig
from drafters.training.shape import make_drafter
from specdec.base.errors import InvalidInputError
from specdec.sampling.noise import Purpose, of_step, uniform
from tests.drafters.dflash.plain import REDUCED, bound, dense_hidden
from tests.drafters.tiny import (
    HIDDEN,
    TINY,
    VOCAB,
    FakeVerifier,
    Rig,
    tiny_drafter,
    tiny_model,
    tiny_tensors,
    write_tiny_dflash,
)
from tests.helpers.bounds import Float64, assert_as_exact

FLOATS = (torch.float32, torch.float64)


def test_reduced_vocabulary() -> None:
    """Drafts are target ids, by the offsets; candidates name those of probabilities."""
    drafter, _, rig = bound(REDUCED)
    batch = rig.batch([3, 5], [9, 14], 4)
    own = drafter.logits(drafter.draft_hidden(batch))
    assert own.shape == (2, 4, 30)
    assert torch.equal(drafter.propose(batch).token_ids, 2 * own.argmax(-1))
    drafter.drafts.draft_sampling = "probabilistic"
    draft = drafter.propose(rig.batch([3, 5], [9, 14], 4, temperature=0.7))
    assert draft.probs is not None and draft.candidate_ids is not None
    assert draft.candidate_ids.shape == draft.probs.shape == (2, 4, 30)
    assert draft.candidate_ids[1, 2].tolist() == list(range(0, 60, 2))
    assert_as_exact(draft.probs, *((own.to(dtype) / 0.7).softmax(-1) for dtype in FLOATS))
    assert set(draft.token_ids.flatten().tolist()) <= set(range(0, 60, 2))


def test_probabilistic_drafts() -> None:
    """Dense probabilities, and tokens drawn with the numbers of positions L+1 .. L+k."""
    drafter, _, rig = bound(draft_sampling="probabilistic")
    batch = rig.batch([3, 5], [9, 14], 6, temperature=1.3)
    logits = drafter.logits(drafter.draft_hidden(batch))
    probs, exact = ((logits.to(dtype) / 1.3).softmax(-1) for dtype in FLOATS)
    draft = drafter.propose(batch)
    assert draft.probs is not None and draft.candidate_ids is None
    assert_as_exact(draft.probs, probs, exact)
    draws = uniform(batch.sampling.seeds, of_step(batch.seq_lens, 6), Purpose.DRAFT)
    expected = (probs.double().cumsum(-1) <= draws[..., None]).sum(-1)
    assert torch.equal(draft.token_ids, expected)
    assert not torch.equal(draft.token_ids, probs.argmax(-1)), "the draws decide nothing here"
    assert drafter.propose(rig.batch([3, 5], [9, 14], 6)).probs is None, (
        "greedy requests alone need no distribution"
    )


@pytest.mark.parametrize(
    ("own_scale", "own_softcap", "scale", "softcap"),
    [
        (None, None, 6.0, 20.0),  # nothing stated: as the target's own embedding module and head
        (None, 5.0, 6.0, 5.0),
        (1.0, None, 1.0, None),  # stated: exactly that
        (2.0, 5.0, 2.0, 5.0),
    ],
)
def test_scale_and_softcap(
    own_scale: float | None, own_softcap: float | None, scale: float, softcap: float | None
) -> None:
    """Targets that scale embeddings and cap logits, with and without the keys."""
    config = replace(
        TINY,
        input_embedding_scale=own_scale,
        final_logit_softcapping=own_softcap,
        output_multiplier=3.0,
    )
    verifier = FakeVerifier()
    verifier.embedding_scale, verifier.final_softcap = 6.0, 20.0
    drafter, _, rig = bound(config, verifier)
    hidden = drafter.draft_hidden(rig.batch([3, 5], [9, 14], 4))
    features = torch.randn(9, config.feature_size, generator=torch.Generator().manual_seed(2))
    block = verifier.embed(torch.tensor([3, *[60] * 7]))
    plain = dense_hidden(tiny_model(config), features, block * scale)
    with Float64():
        exact = dense_hidden(tiny_model(config).double(), features.double(), block.double() * scale)
    assert_as_exact(hidden[0], plain[1:5], exact[1:5])
    raws = [
        3.0 * (hidden.to(dtype) @ verifier.target.lm_head.weight.to(dtype).T) for dtype in FLOATS
    ]
    assert_as_exact(
        drafter.logits(hidden),
        *(raw if softcap is None else softcap * torch.tanh(raw / softcap) for raw in raws),
    )


@pytest.mark.parametrize(
    ("scale", "softcap"), [(None, None), (6.0, 20.0), (None, 5.0), (1.0, None), (6.0, None)]
)
def test_scales_unlike_the_targets(
    scale: float | None, softcap: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training does as the target and refuses them; drafting says which scale it takes."""
    alike = (scale, softcap) in ((None, None), (6.0, 20.0))
    verifier = FakeVerifier()
    verifier.embedding_scale, verifier.final_softcap = 6.0, 20.0
    config = replace(TINY, input_embedding_scale=scale, final_logit_softcapping=softcap)
    path = write_tiny_dflash(tmp_path / "drafter", config)
    train = TrainConfig(out="run", init=str(path))
    assert config.scaled_like(verifier) is alike
    if not alike:
        with pytest.raises(
            InvalidInputError, match="scales embeddings or caps logits unlike its target"
        ):
            make_drafter(train, verifier, None)
    with caplog.at_level(logging.INFO, "drafters.dflash.drafter"):
        load_dflash(path, verifier=verifier)
    assert bool(caplog.messages) is (scale == 1)
    assert all(
        "takes embeddings times 1, the target takes them times 6" in message
        for message in caplog.messages
    )


def test_own_embeddings_and_head(tmp_path: Path) -> None:
    """A checkpoint that brings its own is not run on the target's."""
    verifier = FakeVerifier()
    own = {
        "embed_tokens.weight": torch.rand(VOCAB, HIDDEN),
        "lm_head.weight": torch.rand(VOCAB, HIDDEN),
    }
    drafter = load_dflash(
        write_tiny_dflash(tmp_path / "d", tensors=tiny_tensors() | own), verifier=verifier
    )
    rig = Rig(drafter, verifier)
    assert isinstance(rig.bound, BoundDFlash)
    hidden = rig.bound.draft_hidden(rig.batch([3, 5], [0, 0], 4))
    assert verifier.embedded == []
    assert_as_exact(
        rig.bound.logits(hidden),
        *(hidden.to(dtype) @ own["lm_head.weight"].to(dtype).T for dtype in FLOATS),
    )


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_load(layout: Any, tmp_path: Path) -> None:
    """One loader for both layouts, which drafts like the one in memory."""
    verifier = FakeVerifier()
    drafter = load_dflash(write_tiny_dflash(tmp_path / "d", layout=layout), verifier=verifier)
    assert drafter.aux_layer_ids == (1, 2, 4) and drafter.max_draft_tokens == 7
    assert [(spec.num_kv_heads, spec.head_dim) for spec in drafter.kv_specs] == [(2, 16)] * 3
    assert not any(
        parameter.requires_grad or parameter.is_meta for parameter in drafter.model.parameters()
    )
    other = Rig(tiny_drafter(verifier), verifier)
    expected = other.bound.propose(other.batch([3, 5], [0, 0], 7)).token_ids
    rig = Rig(drafter, verifier)
    assert torch.equal(rig.bound.propose(rig.batch([3, 5], [0, 0], 7)).token_ids, expected)
