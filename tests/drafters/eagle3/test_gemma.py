"""An EAGLE-3 head on Gemma 4's layers, against its formulas in plain torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.convert import convert
from drafters.eagle3.config import parse_config
from drafters.fit import fit_of
from specdec.base.errors import CheckpointError
from tests.checks.public_drafters import refusal, rows
from tests.drafters.eagle3.heads import LLAMA, head_tensors, write_head
from tests.drafters.eagle3.test_keys import TARGET
from tests.drafters.eagle3.test_reference import largest_error, run

WIDTH, ROTATED = 16, 8
ROPE = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": ROTATED / WIDTH}
GEMMA: dict[str, Any] = {
    **LLAMA, "architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_unified_text",
    "attention_k_eq_v": True, "final_logit_softcapping": 2.0, "global_head_dim": WIDTH,
    "num_global_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None,
    "layer_types": ["full_attention"], "target_layer_ids": [0, 1, 1, 2, 2], "ttt_length": 7,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}},
}  # fmt: skip


def gemma_logits(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    text: list[int],
    taps: Tensor,
    drafts: list[int],
) -> Tensor:
    """Logits [k, V] of `drafts` after `text`, from all pairs anew; see `heads.paper_logits`."""
    w = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    heads, same = raw["num_attention_heads"], raw["attention_k_eq_v"]
    groups = heads // (raw["num_global_key_value_heads"] if same else raw["num_key_value_heads"])

    def norm(x: Tensor, name: str | None) -> Tensor:
        scaled = x * (x.pow(2).mean(-1, keepdim=True) + raw["rms_norm_eps"]).rsqrt()
        return scaled if name is None else scaled * w[f"{name}.weight"]

    def turned(x: Tensor) -> Tensor:
        """Pairs half a head apart, of which the first `ROTATED / 2` are turned."""
        steps = 1e4 ** (-torch.arange(0, ROTATED, 2) / WIDTH)
        angles = torch.arange(len(x))[:, None] * F.pad(steps, (0, (WIDTH - ROTATED) // 2))
        numbers = torch.complex(x[..., : WIDTH // 2], x[..., WIDTH // 2 :])
        numbers = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([numbers.real, numbers.imag], dim=-1)

    features, tokens, found = taps @ w["fc.weight"].T, [*text[1:], *drafts], []
    for draft in range(len(drafts)):
        pairs = len(text) - 1 + draft
        rows = w["embed_tokens.weight"][tokens[:pairs]] * raw["hidden_size"] ** 0.5
        given = torch.cat([norm(rows, "input_layernorm"), norm(features, "hidden_norm")], dim=-1)

        def heads_of(name: str, given: Tensor = given) -> Tensor:
            return (given @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, WIDTH))

        query = turned(norm(heads_of("q"), "self_attn.q_norm"))
        key = turned(norm(heads_of("k"), "self_attn.k_norm")).repeat_interleave(groups, dim=1)
        value = norm(heads_of("k" if same else "v"), None).repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key)
        seen = torch.ones(pairs, pairs, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        hidden = features + norm(
            attended @ w["self_attn.o_proj.weight"].T, "post_attention_layernorm"
        )
        normed = norm(hidden, "pre_feedforward_layernorm")
        gate = F.gelu(normed @ w["mlp.gate_proj.weight"].T, approximate="tanh")
        product = (gate * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        hidden = (hidden + norm(product, "post_feedforward_layernorm")) * w["layer_scalar"]
        features = torch.cat([features, hidden[-1:]])
        cap = raw["final_logit_softcapping"] or torch.inf
        logits = norm(hidden[-1], "norm") @ w["lm_head.weight"].T
        found.append(logits if cap == torch.inf else torch.tanh(logits / cap) * cap)
    return torch.stack(found)


@torch.inference_mode()
@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_k_eq_v": False, "final_logit_softcapping": None}],
    ids=["keys as values", "values"],
)
def test_its_formulas(changes: dict[str, Any], tmp_path: Path) -> None:
    """Global heads, norms around sublayers, normed values, unscaled scores, a softcap."""
    raw = {**GEMMA, **changes}
    table = dict.fromkeys(
        ("embed_tokens.weight", "lm_head.weight"), (raw["vocab_size"], raw["hidden_size"])
    )
    tensors = head_tensors(raw, table)
    # so small that the norm's epsilon tells whether they are scaled
    tensors["embed_tokens.weight"] *= 0.003
    model, _, noted = run(write_head(tmp_path / "head", raw, tensors))

    def expected(text: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        return gemma_logits(raw, tensors, text, features, drafts)

    assert largest_error(noted, [1, 2, 2, 3, 3], expected, model) < 1e-4


def test_the_public_one_loads_and_fits() -> None:
    """Scaled down, with the names of DeepSpec's class."""
    (row,) = (row for row in rows() if row.layout == "DeepSpec EAGLE-3, Gemma 4")
    assert refusal(row) is None
    assert parse_config(row.config).layers.head_dim == row.config["global_head_dim"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_moe_block": True}, "enable_moe_block True is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"layer_types": ["sliding_attention"]}, "on Gemma's layers all must be full_attention"),
        ({"global_head_dim": None}, "config.json lacks global_head_dim"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0.0; it must be positive"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    """What no such head has, and values that are none."""
    assert said in fit_of({**GEMMA, **changes}, TARGET).problems[0]


def test_it_cannot_be_written(tmp_path: Path) -> None:
    """No layout has words for its layers."""
    source = write_head(tmp_path / "head", GEMMA)
    (source / "config.json").write_text(json.dumps(GEMMA))
    with pytest.raises(
        CheckpointError, match="a head with Gemma's layers can be read, but not written"
    ):
        convert(source, tmp_path / "made", "speculators")
