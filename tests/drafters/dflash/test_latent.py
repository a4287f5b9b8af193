"""Latent attention (Kimi K3's DSpark, as in vLLM's `dspark_mla.py`) against formulas."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.drafter import BoundDFlash
from drafters.load import load_drafter
from specdec.attention.mla import MlaSpec
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.base.errors import BackendError, CheckpointError
from tests.drafters.tiny import BLOCK as CACHE_BLOCK
from tests.drafters.tiny import HIDDEN, TARGET_LAYERS, VOCAB, FakeVerifier, Rig, check_lossless
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.tiny_models import paged_verifier, plain_model

BLOCK, LAYERS, HEADS, INNER, TAPS, MASK = 7, 2, 4, 48, (0, 2, 4), VOCAB - 1
QUERY_RANK, RANK, NOPE, ROPE, VALUE, MARKOV = 12, 20, 10, 8, 6, 5
CONFIG: dict[str, Any] = {
    "model_type": "k3_dspark",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 50000.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32,
        "rope_theta": 50000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_target_layers": len(TAPS),
    "target_hidden_size": HIDDEN,
    "target_num_hidden_layers": TARGET_LAYERS,
    "target_layer_ids": list(TAPS),
    "mask_token_id": MASK,
    "markov_rank": MARKOV,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def latent_tensors(
    *, tap_norms: bool = False, hidden: int = HIDDEN, vocab: int = VOCAB
) -> dict[str, Tensor]:
    """The published names; `tap_norms` are TorchSpec's."""
    sizes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (hidden, hidden * len(TAPS)),
        "context_norm.weight": (hidden,),
        "final_norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "markov_head.markov_w1.weight": (vocab, MARKOV),
        "markov_head.markov_w2.weight": (vocab, MARKOV),
        "confidence_head.proj.weight": (1, hidden + MARKOV),
        "confidence_head.proj.bias": (1,),
    }
    sizes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(TAPS))} if tap_norms else {}
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (INNER, hidden),
            "mlp.up_proj": (INNER, hidden),
            "mlp.down_proj": (hidden, INNER),
            "self_attn.q_a_proj": (QUERY_RANK, hidden),
            "self_attn.q_a_layernorm": (QUERY_RANK,),
            "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), QUERY_RANK),
            "self_attn.kv_a_proj_with_mqa": (RANK + ROPE, hidden),
            "self_attn.kv_a_layernorm": (RANK,),
            "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
            "self_attn.o_proj": (hidden, HEADS * VALUE),
        }
        sizes |= {f"layers.{i}.{name}.weight": size for name, size in layer.items()}
    generator = torch.Generator().manual_seed(1)
    random = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {
        name: 1 + 0.3 * tensor if "norm" in name else 0.3 * tensor
        for name, tensor in random.items()
    }


def write(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, path / "model.safetensors")
    return path


def latent_verifier() -> FakeVerifier:
    """A target with latent attention of other sizes."""
    verifier = FakeVerifier()
    spec = MlaSpec(
        verifier.device,
        verifier.dtype,
        num_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        block_size=CACHE_BLOCK,
    )
    verifier.attention = TorchRefMlaBackend(spec)  # type: ignore[assignment]
    return verifier


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def frequencies() -> Tensor:
    """YaRN's (arXiv 2309.00071): divided where a wave is longer than the old context."""
    rope = CONFIG["rope_parameters"]
    exponents = torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE

    def place(turns: float) -> float:
        return ROPE * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), ROPE - 1)
    ramp = ((torch.arange(ROPE // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = rope["rope_theta"] ** -exponents
    return plain / 32 * ramp + plain * (1 - ramp)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Neighbors against each other; the amplitudes of YaRN cancel."""
    angles = positions[:, None].double() * frequencies()
    cos, sin = (f(angles).float().to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def expected_hidden(t: dict[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """Final hidden states [B, H] of rows behind features [C, taps * H]."""
    start, width = len(features), len(block)
    own = torch.arange(start, start + width)
    if "fc_norm.0.weight" in t:
        parts = features.chunk(len(TAPS), -1)
        features = torch.cat(
            [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1
        )
    context = rms(features @ t["context_proj.weight"].T, t["context_norm.weight"])
    x = block
    for i in range(LAYERS):
        w = {
            name.removeprefix(f"layers.{i}.").removesuffix(".weight"): tensor
            for name, tensor in t.items()
        }
        normed = rms(x, w["input_layernorm"])
        query = (
            rms(normed @ w["self_attn.q_a_proj"].T, w["self_attn.q_a_layernorm"])
            @ w["self_attn.q_b_proj"].T
        )
        query = query.view(width, HEADS, NOPE + ROPE)
        query = torch.cat([query[..., :NOPE], turned(query[..., NOPE:], own)], -1)
        latent = torch.cat([context, normed]) @ w["self_attn.kv_a_proj_with_mqa"].T
        compressed = rms(latent[:, :RANK], w["self_attn.kv_a_layernorm"])
        key_rope = latent[:, None, RANK:]
        key_rope = turned(key_rope, torch.arange(start + width))
        keys_values = (compressed @ w["self_attn.kv_b_proj"].T).view(-1, HEADS, NOPE + VALUE)
        key = torch.cat([keys_values[..., :NOPE], key_rope.expand(-1, HEADS, -1)], -1)
        scale = (NOPE + ROPE) ** -0.5 * (1 + 0.1 * math.log(32)) ** 2
        weights = (torch.einsum("qhd,khd->hqk", query, key) * scale).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, keys_values[..., NOPE:]).flatten(1)
        x = x + out @ w["self_attn.o_proj"].T
        normed = rms(x, w["post_attention_layernorm"])
        x = (
            x
            + (F.silu(normed @ w["mlp.gate_proj"].T) * (normed @ w["mlp.up_proj"].T))
            @ w["mlp.down_proj"].T
        )
    return rms(x, t["final_norm.weight"])


@pytest.mark.parametrize("tap_norms", [False, True])
def test_hidden_states(tap_norms: bool, tmp_path: Path) -> None:
    """Two requests in one batch, the context in two pieces, all of it in the form of latents."""
    tensors, verifier = latent_tensors(tap_norms=tap_norms), latent_verifier()
    path = write(tmp_path / "drafter", tensors, fc_norm=tap_norms)
    drafter: Any = load_drafter(path, verifier=verifier)
    assert (
        drafter.max_draft_tokens == BLOCK
        and [spec.width for spec in drafter.kv_specs] == [RANK + ROPE] * LAYERS
    )
    rig = Rig(drafter, verifier)
    assert isinstance(rig.bound, BoundDFlash)
    generator = torch.Generator().manual_seed(4)
    lengths, anchors = [13, 22], [3, 5]
    features = [torch.randn(length, HIDDEN * len(TAPS), generator=generator) for length in lengths]
    for request, rows in enumerate(features):
        rig.prefill(request, rows[:9], 0)
        rig.prefill(request, rows[9:], 9)
    hidden = rig.bound.draft_hidden(rig.batch(anchors, lengths, BLOCK))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    for request, rows in enumerate(features):
        block = tensors["embed_tokens.weight"][
            torch.tensor([anchors[request]] + [MASK] * (BLOCK - 1))
        ]
        plain = expected_hidden(tensors, rows, block)
        with Float64():
            exact = expected_hidden(wide, rows.double(), block.double())
        assert_as_exact(hidden[request], plain, exact, factor=4)
        torch.testing.assert_close(hidden[request], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": True}, "DFlash with mla_use_nope True is not supported yet"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate True"),
        ({"aux_hidden_stream": "attn_res"}, "aux_hidden_stream 'attn_res'"),
        ({"qk_rope_head_dim": 7, "qk_nope_head_dim": 9}, "are no sizes of latent attention"),
        ({"kv_lora_rank": None}, "config.json lacks kv_lora_rank"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            "has neither windows nor biases",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Each relative by name."""
    with pytest.raises(CheckpointError, match=message):
        load_drafter(
            write(tmp_path / "drafter", latent_tensors(), **changes), verifier=latent_verifier()
        )


def test_other_attention_is_refused(tmp_path: Path) -> None:
    """Its context has the form of latents, for which the target's backend has no cache."""
    with pytest.raises(
        BackendError,
        match="this drafter has latent attention, and the target's backend 'torch_ref' serves"
        " other",
    ):
        load_drafter(write(tmp_path / "drafter", latent_tensors()), verifier=FakeVerifier())


def test_lossless(tmp_path: Path) -> None:
    """Beside a target with latent attention, in chains and trees."""
    model = plain_model("deepseek_v3")
    verifier = paged_verifier(model, 4)
    hidden, vocab = verifier.hidden_size, verifier.vocab_size
    changes = {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "target_num_hidden_layers": verifier.num_layers,
        "target_layer_ids": [0, 1, 2],
        "mask_token_id": vocab - 1,
    }
    path = write(tmp_path / "drafter", latent_tensors(hidden=hidden, vocab=vocab), **changes)
    check_lossless(model, verifier, path)
