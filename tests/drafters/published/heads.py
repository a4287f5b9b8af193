"""Public EAGLE-3 heads at small sizes with random weights, and their drafts in a running engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.load import load_drafter
from specdec.sampling.params import SamplingParams
from tests.checks.public_drafters import TAPS, TINY, Row
from tests.drafters.published.rows import write_small
from tests.drafters.sequential.toy import Noted, noted_run
from tests.drafters.tiny import tiny_target
from tests.helpers.tiny_models import paged_verifier, random_prompts

LAYERS = 6


@dataclass(frozen=True, slots=True)
class Head:
    """A head, and what was drafted.

    Attributes:
        config, tensors: as published, but for sizes; float32.
        target: the model that it drafts for.
        states: its taps, as entries of Transformers' hidden states.
        noted: drafts, and the logits that they were chosen by.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Any
    states: list[int]
    noted: list[Noted]


def published_head(row: Row, folder: Path, k: int = 4) -> Head:
    """Writes a small version of `row`, and has it draft k tokens at a time for three prompts."""
    config, tensors = write_small(row, folder, config=_with_near_taps(row.config))
    target = tiny_target(
        hidden_size=TINY["hidden_size"], vocab_size=TINY["vocab_size"], num_hidden_layers=LAYERS
    )
    verifier: Any = paged_verifier(target)
    drafter: Any = load_drafter(folder, verifier=verifier)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    _, _, noted = noted_run(
        verifier, drafter, random_prompts(3), num_draft_tokens=k, sampling=sampling
    )
    return Head(config, tensors, target, [tap + 1 for tap in drafter.aux_layer_ids], noted)


def likeliest(head: Head) -> list[list[int]]:
    """What is to be drafted by the noted logits, as tokens of the target."""
    found = []
    for one in head.noted:
        ids = one.logits.argmax(-1)
        found.append((ids + head.tensors["d2t"][ids] if "d2t" in head.tensors else ids).tolist())
    return found


def _with_near_taps(config: dict[str, Any]) -> dict[str, Any]:
    """The same with tapped layers of a target of `LAYERS`, as many."""
    return {
        key: _with_near_taps(value)
        if isinstance(value, dict)
        else [min(tap, LAYERS - 2) for tap in range(1, len(value) + 1)]
        if key in TAPS and value
        else value
        for key, value in config.items()
    }
