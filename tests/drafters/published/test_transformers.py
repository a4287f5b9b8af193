"""The public drafter whose class Transformers has drafts as that class does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils

from tests.checks.public_drafters import Row
from tests.drafters.published.rows import (
    COMPARED,
    PLACES,
    Drafts,
    Published,
    check_drafts,
    published,
    published_rows,
)
from tests.drafters.tiny import input_table

muse: Any = pytest.importorskip("transformers.models.muse_glimmer_assistant")
DFlashCache: Any = vars(cache_utils).get("DFlashCache")  # which older versions lack

WINDOW = 6


@torch.inference_mode()
def their_drafts(case: Published, model: Any) -> dict[int, Drafts]:
    """Behind each of `PLACES`, from its cache, in the type of `model`."""
    target, found, width, known = case.verifier.target, {}, model.config.block_size, 0
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    table, head = input_table(target).to(model.dtype), target.lm_head.weight.to(model.dtype)
    for place in PLACES:
        block = torch.full((1, width), model.config.mask_token_id)
        block[0, 0] = case.text[place]
        cache.set_previous_accepted_tokens(place - known)
        if known:
            cache.crop(-width)
        hidden = model(
            torch.nn.functional.embedding(block, table),
            case.features[None, known:place].to(model.dtype),
            attention_mask=torch.ones(1, place + width, dtype=torch.long),
            position_ids=torch.arange(known, place + width)[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0, 1:]
        known = place
        logits = hidden @ head.T
        found[place] = Drafts(hidden, logits, logits.argmax(-1).tolist())
    return found


@pytest.mark.parametrize(
    "row", published_rows(COMPARED["transformers"]), ids=lambda row: row.checkpoint
)
def test_drafts_are_those_of_transformers(row: Row, tmp_path: Path) -> None:
    """From its own config and names of tensors, with the masks that the class makes."""
    case = published(row, tmp_path / "drafter", window=WINDOW)
    # Its masks count a window's far end in; its flash attention, SGLang and we do not.
    config = muse.MuseGlimmerAssistantConfig.from_pretrained(case.folder, sliding_window=WINDOW - 1)
    model = muse.MuseGlimmerAssistantModel.from_pretrained(
        case.folder, config=config, dtype=torch.float32
    ).eval()
    check_drafts(case, model, their_drafts)
