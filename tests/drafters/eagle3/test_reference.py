"""Drafts of EAGLE-3 heads in an engine against the paper, and against `speculators`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.load import load_drafter
from drafters.sequential.drafter import SequentialDrafter
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import (
    LLAMA,
    SGLANG,
    SPECULATORS,
    head_tensors,
    paper_logits,
    write_head,
)
from tests.drafters.eagle3.theirs import Logits, masked, their_head, unrolled
from tests.drafters.sequential.toy import Noted, noted_run
from tests.helpers.speculators_reference import speculators
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts


def largest_error(
    noted: list[Noted], hidden_states: list[int], expected: Logits, model: Any
) -> float:
    """Of the logits that drafts were chosen by, relative to the largest.

    Args:
        noted: the drafts.
        hidden_states: taps, as entries of Transformers' hidden states.
        expected: logits [k, V'] of a text up to the anchor, the features of all before it, and
            drafts.
        model: the target.
    """
    errors = []
    for request, length, drafts, logits in noted:
        text = request.token_ids[: length + 1]
        if len(text) <= length:
            continue  # surplus of a request that had ended
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        right = expected(
            text, torch.cat([states[index][0] for index in hidden_states], dim=-1), drafts
        )
        errors.append(float((logits - right).abs().max() / right.abs().max()))
    assert len(errors) > 5
    return max(errors)


def run(path: Path, k: int = 4) -> tuple[Any, SequentialDrafter, list[Noted]]:
    """The target, a head from a folder, and what it drafts."""
    model = plain_model("llama")
    verifier = paged_verifier(model)
    drafter = load_drafter(path, verifier=verifier)
    assert isinstance(drafter, SequentialDrafter)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    _, _, noted = noted_run(
        verifier, drafter, random_prompts(3), num_draft_tokens=k, sampling=sampling
    )
    return model, drafter, noted


TAPS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "usual": ({}, [2, 2, 1]),  # entries 2, 4 // 2 and 4 - 3
    "sglang's": (
        {
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
                "use_aux_hidden_state": True,
            }
        },
        [1, 2, 3],
    ),
    "heads that divide no width": ({"num_attention_heads": 6, "head_dim": 8}, [2, 2, 1]),
    "DeepSpec's": ({"target_layer_ids": [0, 1, 1, 2, 2]}, [1, 2, 2, 3, 3]),
}


@torch.inference_mode()
@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("own_embeddings", [False, True])
def test_the_papers_formulas(taps: str, own_embeddings: bool, tmp_path: Path) -> None:
    """sglang's layout, a reduced vocabulary; other taps, or another position, are noticed."""
    changes, states = TAPS[taps]
    raw = {**SGLANG, **changes}
    extra = (
        {"embed_tokens.weight": (LLAMA["vocab_size"], LLAMA["hidden_size"])}
        if own_embeddings
        else {}
    )
    tensors = head_tensors(raw, extra)
    model, drafter, noted = run(write_head(tmp_path / "head", raw, tensors))
    assert drafter.max_draft_tokens == 7
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def expected(text: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        return paper_logits(raw, tensors, table, text, features, drafts)

    def late(text: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        """Pairs of a position's features and its own token."""
        return paper_logits(raw, tensors, table, [text[0], *text[:-1]], features, drafts)

    assert largest_error(noted, states, expected, model) < 1e-4
    assert all(token % 2 == 0 for one in noted for token in one.drafts)
    assert largest_error(noted, [state + 1 for state in states], expected, model) > 1e-2
    assert largest_error(noted, states, late, model) > 1e-2


COPIED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual after the norm": {
        "norm_before_residual": True,
        "draft_vocab_size": LLAMA["vocab_size"],
    },
    "all taps normed, two layers": {
        "norm_before_fc": True,
        "transformer_layer_config": {**LLAMA, "num_hidden_layers": 2},
    },
    "EAGLE-3.1": {
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 3],
    },
    "Qwen3": {
        "transformer_layer_config": {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 1},
        "embed_requires_grad": True,
    },
    "a copied partial factor": {"transformer_layer_config": {**LLAMA, "rope_parameters": COPIED}},
    "windows": {
        "transformer_layer_config": {
            **{**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2},
            **{
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
                "use_sliding_window": True,
            },
        }
    },
    "biases": {"transformer_layer_config": {**LLAMA, "attention_bias": True, "mlp_bias": True}},
}
PARALLEL = {
    "speculators_model_type": "peagle",
    "architectures": ["PEagleSpeculator"],
    "mask_token_id": 3,
}
P_EAGLE = {
    "plain": {},
    "normed": {"norm_before_residual": True, "fc_norm": True},
    "windows": VARIANTS["windows"],
}
P_EAGLE["as of speculators 0.6, a copied partial factor"] = VARIANTS["a copied partial factor"] | {
    "num_depths": 8
}


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_eagle3(variant: str, tmp_path: Path) -> None:
    """The logits of every draft are those of its own unrolled steps."""
    speculators("models.eagle3.core")
    raw = {**SPECULATORS, **VARIANTS[variant]}
    tensors = head_tensors(raw, {"lm_head.weight": (raw["draft_vocab_size"], LLAMA["hidden_size"])})
    # Its unrolled steps leave a window where it is at the first of them; in decoding it goes along.
    model, _, noted = run(
        write_head(tmp_path / "head", raw, tensors), k=1 if variant == "windows" else 4
    )
    table = model.get_input_embeddings().weight
    expected = unrolled(*their_head(raw, {"embed_tokens.weight": table, **tensors}))
    assert largest_error(noted, raw["eagle_aux_hidden_state_layer_ids"], expected, model) < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("variant", P_EAGLE)
def test_speculators_peagle(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of every draft are those of its masks, in one forward."""
    speculators("models.peagle.core")
    raw = {**SPECULATORS, **PARALLEL, **P_EAGLE[variant]}
    tensors = head_tensors(raw)
    model, drafter, noted = run(write_head(tmp_path / "head", raw, tensors), k=3)
    assert drafter.max_draft_tokens == 3
    table = model.get_input_embeddings().weight
    expected = masked(*their_head(raw, {"embed_tokens.weight": table, **tensors}), monkeypatch)
    assert largest_error(noted, raw["eagle_aux_hidden_state_layer_ids"], expected, model) < 1e-4
