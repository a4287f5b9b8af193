"""Each public drafter in z-lab's layout drafts as the public `dflash` package does, and so do those
of JetSpec, DeepSpec, SpecForge and XPress, whose network is the same; Markov heads and refiners are
those of the public `speculators`.
"""

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
    check_drafts,
    published,
    published_rows,
)
from tests.drafters.tiny import input_table
from tests.helpers.speculators_reference import refined, speculators

reference: Any = pytest.importorskip("dflash.model")

WINDOW = 6


@torch.inference_mode()
def their_drafts(case: Published, model: Any) -> dict[int, Drafts]:
    """Behind each of `PLACES`, from their cache, in the type of `model`."""
    kind, target = model.dtype, case.verifier.target
    table = case.tensors.get("embed_tokens.weight", input_table(target)).to(kind)
    head = case.tensors.get("lm_head.weight", target.lm_head.weight).to(kind)
    spark = "DSpark" in case.row.layout
    # the anchor's row drafts, too
    first = 0 if spark or case.row.layout == "DeepSpec DFlash" else 1
    second = isinstance(model, reference.DFlash2DraftModel)
    cache, known, found = reference._make_cache(model.config), 0, {}
    # The first drafters were trained on what the target's own module gives.
    scale = 1.0 if second else case.verifier.embedding_scale
    for place in PLACES:
        block = torch.full((1, model.block_size), model.mask_token_id)
        block[0, 0] = case.text[place]
        rows = model(
            target_hidden=case.features[None, known:place].to(kind),
            noise_embedding=torch.nn.functional.embedding(block, table) * scale,
            position_ids=torch.arange(known, place + model.block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        hidden = rows[:, first:]
        reference._crop_to(cache, place)
        known = place
        logits = model.compute_logits(hidden, lambda rows: rows @ head.T)
        anchor = block[:, 0]
        if second:
            drafts = model.propose(hidden, anchor, lambda rows: rows @ head.T, 0.0)[0]
        elif spark:
            drafts = walk(markov_head(case).to(kind), hidden, logits, anchor)
        elif case.row.layout == "XPress":
            base = model.compute_logits(rows, lambda rows: rows @ head.T)
            given = anchor, case.text[place - 1 : place], rows, base
            drafts = refined(refiner(case).to(kind), case.config["xpress_num_passes"], *given)
        else:
            drafts = logits.argmax(-1)
        found[place] = Drafts(hidden[0], logits[0], drafts[0].tolist())
    return found


def markov_head(case: Published) -> Any:
    """The head of the package with the tensors of the file."""
    prefix = "markov_head."
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in case.tensors.items()
        if name.startswith(prefix)
    }
    vocab_size, rank = tensors["markov_w1.weight"].shape
    head = speculators("models.dspark.model_definitions").MarkovHead(
        verifier_vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        markov_rank=rank,
        hidden_size=case.verifier.hidden_size,
    )
    head.load_state_dict(tensors)
    return head


def refiner(case: Published) -> Any:
    """The head of the package with the tensors of the file."""
    names = {
        "w1.": "token_embed.", "w2.": "readout.", "mix.L": "mix_l", "mlp.gate_proj.": "mlp_gate.",
        "mlp.up_proj.": "mlp_up.", "mlp.down_proj.": "mlp_down.",
    }  # fmt: skip
    tensors = {}
    for name, tensor in case.tensors.items():
        if name.startswith("xpress_head."):
            own = name.removeprefix("xpress_head.")
            start = next((start for start in names if own.startswith(start)), "")
            tensors[names.get(start, "") + own.removeprefix(start)] = tensor
    vocab_size, rank = tensors["token_embed.weight"].shape
    head = speculators("models.xpress.model_definitions").XPressRefinerHead(
        verifier_vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        hidden_size=case.verifier.hidden_size,
        block_size=case.config["block_size"],
        rank=rank,
        mlp_ratio=len(tensors["mlp_gate.weight"]) // rank,
    )
    head.load_state_dict(tensors)
    return head


def walk(head: Any, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor) -> Any:
    """Drafts [1, k], each by the correction of the one before it."""
    found = [anchor]
    for place in range(logits.shape[1]):
        one = slice(place, place + 1)
        bias = head.block_bias(prev_token_ids=found[-1][:, None], hidden_states=hidden[:, one])
        found.append((logits[:, one] + bias)[:, 0].argmax(-1))
    return torch.stack(found[1:], dim=1)


ROWS = published_rows([*COMPARED["dflash"], *COMPARED["dflash, and heads of speculators"]])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.checkpoint)
def test_drafts_are_those_of_dflash(row: Row, tmp_path: Path) -> None:
    """From its own config and names of tensors; in windows that are shorter than the text."""
    case = published(row, tmp_path / "drafter", window=WINDOW)
    second = "DFlash 2" in row.layout
    kind = reference.DFlash2DraftModel if second else reference.DFlashDraftModel
    config = kind.config_class.from_pretrained(case.folder)
    # Kimi's drafters were trained with YaRN's own amplitude; these keys are their target's.
    for key in ("mscale", "mscale_all_dim"):
        config.rope_parameters.pop(key, None)
    if row.layout == "JetSpec":
        config.is_causal = config.dflash_config["causal_head"]
    model = kind.from_pretrained(case.folder, config=config, dtype=torch.float32).eval()
    ours = check_drafts(case, model, their_drafts, logits=case.verifier.final_softcap is None)
    assert len({token for one in ours.values() for token in one.token_ids}) > 3
