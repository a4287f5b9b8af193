"""Against the public `speculators` package: its classes write the checkpoints, and at every anchor
of a text we draft the same.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from drafters.convert import convert
from drafters.load import load_drafter
from tests.drafters.tiny import Rig, tapped
from tests.helpers.speculators_reference import refined, speculators
from tests.helpers.tiny_models import paged_verifier, plain_model

TAPS, BLOCK, LENGTH = (1, 2), 6, 20
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"selector_rank": 4, "selector_top_k": 5, "conv_group_size": 4},
    "dspark": {
        "markov_rank": 4,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
    "xpress": {"xpress_rank": 4, "num_jacobi_passes": 3},
}
MODULES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "xpress": "XPressDraftModel",
}


def written(folder: Path, kind: str, target: PreTrainedModel) -> Any:
    """A drafter of theirs with random weights, saved by its class."""
    target.save_pretrained(folder / "target")
    vocab_size = target.config.vocab_size
    layers = Qwen3Config(
        vocab_size=vocab_size, hidden_size=target.config.hidden_size, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(speculators(f"models.{kind}.core"), MODULES[kind]).from_training_args(
        layers, draft_vocab_size=vocab_size, block_size=BLOCK, mask_token_id=vocab_size - 1,
        draft_attn_impl="eager", target_layer_ids=[tap + 1 for tap in TAPS],
        verifier_name_or_path=str(folder / "target"), **HEADS[kind],
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if not name.startswith(("verifier_", "embed_tokens", "lm_head")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder / "drafter")
    return model.eval()


@torch.inference_mode()
def their_drafts(model: Any, kind: str, text: Tensor, features: Tensor) -> list[list[int]]:
    """Greedy drafts behind each position but the last ones, of which training makes no anchor."""
    count = LENGTH - BLOCK
    ones = torch.ones(1, LENGTH)
    hidden, logits, *_ = model._backbone_forward(
        features[None], text[None], ones,
        torch.zeros(1, LENGTH, model.config.transformer_layer_config.hidden_size),
        torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=count,
    )  # fmt: skip
    if kind == "xpress":
        before = torch.cat([torch.zeros(1, dtype=torch.long), text])[:count]
        rows, base = (x.view(count, BLOCK, -1) for x in (hidden, logits))
        times = model.config.num_jacobi_passes
        tokens = refined(model.refiner_head, times, text[:count], before, rows, base)
        return cast(list[list[int]], tokens.tolist())
    first = 0 if model.config.sample_from_anchor else 1
    blocks = zip(
        hidden.view(count, BLOCK, -1)[:, first:],
        logits.view(count, BLOCK, -1)[:, first:],
        strict=True,
    )
    found = []
    for anchor, (states, scores) in zip(text.tolist(), blocks, strict=False):
        previous, drafts = torch.tensor([[anchor]]), []
        for state, score in zip(states[:, None, None], scores[:, None, None], strict=True):
            if kind == "dspark":
                score = score + model.markov_head.block_bias(
                    prev_token_ids=previous, hidden_states=state
                )
            if kind == "dflash2":
                candidates, edges = model.candidate_selector.select(score, state, previous)
                previous = candidates.gather(-1, edges.argmax(-1, keepdim=True))[..., 0]
            else:
                previous = score.argmax(-1)
            drafts.append(int(previous))
        found.append(drafts)
    return found


def our_drafts(drafter: Any, text: Tensor, features: Tensor) -> list[list[int]]:
    """The same, from our cache."""
    rig, found = Rig(drafter, drafter.verifier, num_reqs=1), []
    for place in range(LENGTH - BLOCK):
        if place:
            last = slice(place - 1, place)
            rig.prefill(0, features[last], place - 1, text[last])
        batch = rig.batch([int(text[place])], [place], drafter.max_draft_tokens)
        found.append(rig.bound.propose(batch).token_ids[0].tolist())
    return found


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite"])
def test_drafts_are_those_of_speculators(name: str, kind: str, tmp_path: Path) -> None:
    """Catches rows that are scaled as the target scales its own, which no trainer of this layout
    does; so on the way to z-lab's.
    """
    target = plain_model(name)
    theirs, verifier = written(tmp_path, kind, target), paged_verifier(target)
    text = torch.randint(
        0, target.config.vocab_size - 1, (LENGTH,), generator=torch.Generator().manual_seed(2)
    )
    features = tapped(target, text.tolist(), TAPS).detach()
    expected = their_drafts(theirs, kind, text, features)
    convert(tmp_path / "drafter", tmp_path / "z-lab", "z-lab", target=str(tmp_path / "target"))
    for folder in ("drafter", "z-lab"):
        drafter = load_drafter(str(tmp_path / folder), verifier=verifier)
        assert our_drafts(drafter, text, features) == expected, folder
    assert len({draft for drafts in expected for draft in drafts}) > 3, (
        "drafts that hardly differ show nothing"
    )
