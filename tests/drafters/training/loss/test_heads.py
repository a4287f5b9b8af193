"""What options make of a head, and how its first weights and tied tables are."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

import drafters.training
from drafters.dflash.model import DFlashModel
from drafters.dflash.tied import checkpoint_names, expanded, tie
from drafters.dflash2.selector import SelectorConfig
from drafters.dspark.markov import MarkovConfig
from drafters.head import HeadConfig, Lattice
from drafters.training.config import TrainConfig, build_config
from drafters.training.data.openings import opening
from drafters.training.loss.heads import new_head
from drafters.xpress.refiner import XPressConfig
from tests.drafters.tiny import TINY, FakeVerifier

RECIPES = Path(drafters.training.__file__).parent / "recipes"


def test_options_name_heads() -> None:
    assert new_head(TrainConfig()) is None
    assert new_head(TrainConfig(head="selector", head_rank=4)) == SelectorConfig(4, 16)
    assert new_head(TrainConfig(head="xpress", head_rank=4)) == XPressConfig(4)
    assert new_head(TrainConfig(head="gated", head_rank=4, head_candidates=0)) == MarkovConfig(
        4, "gated"
    )
    assert new_head(TrainConfig(head="markov", head_rank=4, confidence=0.5)) == MarkovConfig(
        4, has_confidence=True, draft_top_k=16
    )


@pytest.mark.parametrize("path", sorted(RECIPES.iterdir()), ids=lambda path: path.stem)
def test_recipes_are_read(path: Path) -> None:
    """And say what they are called after."""
    config = build_config({"out": "x"}, str(path))
    algorithm = "dflash" if (head := new_head(config)) is None else head.algorithm
    named = {"learn": "dflash", "small_target": "dspark", "target_1.5b": "dspark"}
    assert algorithm == named.get(path.stem, path.stem)


@pytest.mark.parametrize("head", [MarkovConfig(3), SelectorConfig(3, 8)])
def test_tied_tables_are_projections_of_the_targets_own(head: HeadConfig) -> None:
    """While training as when loaded, and the gradient reaches the projection."""
    verifier = FakeVerifier()
    model = DFlashModel(replace(TINY, head=head, tied_tables=True))
    tie(model, verifier)
    names = checkpoint_names(model)
    stored = {name: 0.1 * torch.randn(model.state_dict()[key].shape) for name, key in names.items()}
    model.load_state_dict({names[name]: tensor for name, tensor in stored.items()})
    tables = expanded(stored, verifier)
    whole = DFlashModel(replace(TINY, head=head))
    whole.load_state_dict(tables)
    tied_head, whole_head = (head.head(each, verifier.embed) for each in (model, whole))
    assert not isinstance(tied_head, Lattice) and not isinstance(whole_head, Lattice)
    hidden, previous = torch.randn(5, TINY.hidden_size), torch.randint(TINY.vocab_size, (5,))
    torch.testing.assert_close(
        tied_head.left(hidden, previous, None)[0], whole_head.left(hidden, previous, None)[0]
    )
    torch.testing.assert_close(tied_head.right, whole_head.right)
    left_table = next(
        name for name in stored if name.endswith(("w1.weight", "predecessor_codebook"))
    )
    embeddings = verifier.target.model.embed_tokens.weight
    torch.testing.assert_close(tables[left_table], embeddings @ stored[left_table].T)
    tied_head.right.square().sum().backward()
    assert sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters()) == 1


def test_openings_are_of_all_kinds_and_whole() -> None:
    drawn = [opening(Random(seed)) for seed in range(400)]
    assert len({kind for kind, _ in drawn}) == 9
    assert len({text for _, text in drawn}) > 150
    assert not any("{" in text or "}" in text for _, text in drawn)
    assert {opening(Random(seed), ["list", "chat"])[0] for seed in range(40)} == {"list", "chat"}
