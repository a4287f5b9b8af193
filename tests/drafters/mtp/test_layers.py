"""Each family's multi-token prediction drafts what transformers' layers make of its weights."""

from pathlib import Path

import pytest
import torch

from drafters.mtp.load import load_mtp
from drafters.sequential.drafter import SequentialDrafter
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.sequential.toy import Noted, noted_run
from tests.helpers.tiny_models import random_prompts
from tests.helpers.tiny_predictions import CASES, Reference, reference, write_target
from verifiers.load import load_verifier

K = 3
FEW = SamplingParams(max_tokens=4, ignore_eos=True)
TOLERANCE = 1e-4
"""Of the largest logit."""


def case(name: str, folder: Path) -> tuple[Reference, Verifier, SequentialDrafter]:
    """Weights on transformers' layers, and read from a file."""
    ref = reference(name)
    write_target(folder, ref, CASES[name][0])
    verifier, _ = load_verifier(
        folder, device=torch.device("cpu"), dtype=torch.float32, block_size=4
    )
    return ref, verifier, load_mtp(verifier=verifier)


def worst(ref: Reference, noted: list[Noted], wrong: str = "") -> float:
    """The largest error of the logits of any draft."""
    errors = []
    for request, length, drafts, logits in noted:
        text = request.token_ids[: length + 1]
        if len(text) > length:
            expected = ref.logits(text, drafts, wrong)
            errors.append(float((logits - expected).abs().max() / expected.abs().max()))
    assert len(errors) >= 4
    return max(errors)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_transformers_layers(name: str, tmp_path: Path) -> None:
    """In an engine, from the whole text; catches a tensor, norm, rotation or window."""
    ref, verifier, drafter = case(name, tmp_path)
    _, _, noted = noted_run(
        verifier, drafter, random_prompts(2, seed=1), num_draft_tokens=K, sampling=FEW
    )
    assert worst(ref, noted) < TOLERANCE


def test_a_wrong_convention_is_noticed(tmp_path: Path) -> None:
    """Hidden states from before a norm, halves the other way round, tokens of their own position:
    none looks like the right one.
    """
    ref, verifier, drafter = case("glm4_moe", tmp_path)
    _, _, noted = noted_run(
        verifier, drafter, random_prompts(2, seed=1), num_draft_tokens=K, sampling=FEW
    )
    errors = {
        wrong: worst(ref, noted, wrong) for wrong in ("hidden", "order", "shift", "recursion")
    }
    assert min(errors.values()) > 100 * TOLERANCE, errors
