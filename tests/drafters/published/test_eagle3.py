"""Each public EAGLE-3 head in the layout of speculators drafts as that package does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checks.public_drafters import Row
from tests.drafters.eagle3.test_reference import largest_error
from tests.drafters.eagle3.theirs import masked, their_head, unrolled
from tests.drafters.published.heads import Head, likeliest, published_head
from tests.drafters.published.rows import COMPARED, published_rows


def reference(head: Head) -> tuple[Any, list[Tensor]]:
    """Its class, told which layers are tapped, since this has no part in what it computes."""
    taps = {"eagle_aux_hidden_state_layer_ids": head.states}
    return their_head(head.config | taps, head.tensors)


@torch.inference_mode()
@pytest.mark.parametrize(
    "row", published_rows(COMPARED["speculators, EAGLE-3"]), ids=lambda row: row.target
)
def test_drafts_are_those_of_unrolled_steps(row: Row, tmp_path: Path) -> None:
    """From its own config and names of tensors; the logits of every draft."""
    head = published_head(row, tmp_path / "head")
    expected = unrolled(*reference(head))
    assert largest_error(head.noted, head.states, expected, head.target) < 1e-4
    assert [one.drafts for one in head.noted] == likeliest(head)


@torch.inference_mode()
@pytest.mark.parametrize(
    "row", published_rows(COMPARED["speculators, P-EAGLE"]), ids=lambda row: row.target
)
def test_drafts_are_those_of_masks(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a head that drafts all in one forward."""
    head = published_head(row, tmp_path / "head")
    expected = masked(*reference(head), monkeypatch)
    assert largest_error(head.noted, head.states, expected, head.target) < 1e-4
    assert [one.drafts for one in head.noted] == likeliest(head)
