"""Each public drafter in z-lab's layout drafts as the public `dflash` package does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checks.public_drafters import Row
from tests.drafters.published.rows import (
    COMPARED,
    PLACES,
    Drafts,
    Published,
    our_drafts,
    published,
    published_rows,
)
from tests.drafters.tiny import input_table
from tests.helpers.bounds import Float64, assert_as_exact

reference: Any = pytest.importorskip("dflash.model")

WINDOW = 6


@torch.inference_mode()
def their_drafts(case: Published, model: Any) -> dict[int, Drafts]:
    """Behind each of `PLACES`, from their cache, in the type of `model`."""
    kind = model.dtype
    table, head = (
        matrix.to(kind)
        for matrix in (input_table(case.verifier.target), case.verifier.target.lm_head.weight)
    )
    second = isinstance(model, reference.DFlash2DraftModel)
    cache, known, found = reference._make_cache(model.config), 0, {}
    # The first drafters were trained on what the target's own module gives.
    scale = 1.0 if second else case.verifier.embedding_scale
    for place in PLACES:
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[0, 0] = case.text[place]
        hidden = model(
            target_hidden=case.features[None, known:place].to(kind),
            noise_embedding=torch.nn.functional.embedding(block, table) * scale,
            position_ids=torch.arange(known, place + model.block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, 1:]
        reference._crop_to(cache, place)
        known = place
        logits = model.compute_logits(hidden, lambda rows: rows @ head.T)
        drafts = (
            model.propose(hidden, block[:, 0], lambda rows: rows @ head.T, 0.0)[0]
            if second
            else logits.argmax(-1)
        )
        found[place] = Drafts(hidden[0], logits[0], drafts[0].tolist())
    return found


@pytest.mark.parametrize("row", published_rows(COMPARED["dflash"]), ids=lambda row: row.checkpoint)
def test_drafts_are_those_of_dflash(row: Row, tmp_path: Path) -> None:
    """From its own config and names of tensors; in windows that are shorter than the text."""
    case = published(row, tmp_path / "drafter", window=WINDOW)
    second = "DFlash 2" in row.layout
    kind = reference.DFlash2DraftModel if second else reference.DFlashDraftModel
    config = kind.config_class.from_pretrained(case.folder)
    # Kimi's drafters were trained with YaRN's own amplitude; these keys are their target's.
    for key in ("mscale", "mscale_all_dim"):
        config.rope_parameters.pop(key, None)
    model = kind.from_pretrained(case.folder, config=config, dtype=torch.float32).eval()
    wide = copy.deepcopy(model).double()
    with Float64():
        exact = their_drafts(case, wide)
    ours, plain = our_drafts(case), their_drafts(case, model)
    for place in PLACES:
        assert_as_exact(ours[place].hidden, plain[place].hidden, exact[place].hidden, factor=4)
        if case.verifier.final_softcap is None:
            assert_as_exact(ours[place].logits, plain[place].logits, exact[place].logits, factor=4)
        assert ours[place].token_ids == exact[place].token_ids
    assert len({token for one in ours.values() for token in one.token_ids}) > 3
