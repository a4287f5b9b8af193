"""Each public drafter of blocks in the layout of speculators drafts as that package does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checks.public_drafters import Row
from tests.drafters.published.rows import (
    COMPARED,
    LENGTH,
    PLACES,
    Drafts,
    Published,
    check_drafts,
    published,
    published_rows,
)
from tests.drafters.tiny import input_table
from tests.helpers.speculators_reference import speculators

CLASSES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}


def their_model(case: Published) -> Any:
    """The class of the package with these weights; what a file lacks is the target's."""
    kind = case.config["speculators_model_type"]
    core = speculators(f"models.{kind}.core")
    # The name would be looked up on the network, for a norm that has no part in drafting.
    case.config["speculators_config"]["verifier"]["name_or_path"] = None
    given = {key: value for key, value in case.config.items() if key != "architectures"}
    if given["sample_from_anchor"] is None:  # not stated; readers go by the recommended number
        recommended = given["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        given["sample_from_anchor"] = recommended == given["block_size"]
    config = getattr(core, f"{CLASSES[kind]}SpeculatorConfig")(**given)
    config.transformer_layer_config._attn_implementation = "eager"
    model = getattr(core, f"{CLASSES[kind]}DraftModel")(config).eval()
    target = case.verifier.target
    tables = {"embed_tokens.weight": input_table(target), "lm_head.weight": target.lm_head.weight}
    found = model.load_state_dict(tables | case.tensors, strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith("verifier_") for name in found.missing_keys)
    return model


@torch.inference_mode()
def their_drafts(case: Published, model: Any) -> dict[int, Drafts]:
    """Behind each of `PLACES`, all blocks at once as in training, in the type of `model`."""
    first = 0 if model.config.sample_from_anchor else 1
    width, padded = model.block_size, LENGTH + model.block_size
    kind = next(model.parameters()).dtype
    ones, zeros = torch.ones(1, padded), torch.zeros(1, padded, dtype=torch.long)
    text = torch.nn.functional.pad(case.text, (0, width))[None]
    features = torch.nn.functional.pad(case.features, (0, 0, 0, width))[None].to(kind)
    last = torch.zeros(1, padded, model.hidden_size, dtype=kind)
    hidden, logits, *_ = model._backbone_forward(
        features, text, ones, last, zeros, max_anchors=LENGTH
    )
    found = {}
    for place in PLACES:
        rows = slice(place * width + first, (place + 1) * width)
        found[place] = Drafts(hidden[0, rows], logits[0, rows], [])
        previous = case.text[place].view(1, 1)
        for state, score in zip(hidden[0, rows, None], logits[0, rows, None], strict=True):
            score, state = score[None], state[None]
            if case.config["speculators_model_type"] == "dflash2":
                candidates, edges = model.candidate_selector.select(score, state, previous)
                chosen = candidates.gather(-1, edges.argmax(-1, keepdim=True))[..., 0]
            else:
                if getattr(model, "markov_head", None) is not None:
                    score = score + model.markov_head.block_bias(
                        prev_token_ids=previous, hidden_states=state
                    )
                chosen = score.argmax(-1)
            previous = chosen if model.d2t is None else chosen + model.d2t[chosen]
            found[place].token_ids.append(int(previous))
    return found


@pytest.mark.parametrize(
    "row", published_rows(COMPARED["speculators"]), ids=lambda row: row.checkpoint
)
def test_drafts_are_those_of_speculators(row: Row, tmp_path: Path) -> None:
    """From its own config and names of tensors. Windows are longer than the text, since training
    counts them from the anchor for all rows of a block.
    """
    case = published(row, tmp_path / "drafter")
    model = their_model(case)
    ours = check_drafts(case, model, their_drafts)
    assert len({token for one in ours.values() for token in one.token_ids}) > 3
