"""Layers of other programs' drafters, from their own files to hidden states, against formulas
written down here.

Sources: MiMo-V2.6's `dflash` folder as Modular's MAX reads it, vLLM's `laguna_dflash.py`, DFlare as
vLLM's and speculators' classes of that name have it, DeepSpec's `modeling/dspark/gemma4`,
Transformers' `muse_glimmer_assistant`.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.config.layout import parse_config
from drafters.dflash.drafter import BoundDFlash
from drafters.dspark.markov import MarkovConfig
from drafters.load import load_drafter
from drafters.training.config import TrainConfig
from drafters.training.shape import make_drafter
from specdec.base.errors import CheckpointError, InvalidInputError
from tests.drafters.tiny import (
    HIDDEN,
    TARGET_LAYERS,
    TINY,
    VOCAB,
    FakeVerifier,
    Rig,
    check_lossless,
    input_table,
    tiny_target,
    write_tiny_dflash,
)
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.tiny_models import paged_verifier

BLOCK, HEADS, KV_HEADS, WIDTH, INNER, LAYERS, TAPS, WINDOW = 8, 4, 2, 16, 48, 2, (1, 2, 4), 6
MASK = VOCAB - 1
SHARED: dict[str, Any] = {
    "block_size": BLOCK, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
OWN = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
SLIDING = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": WINDOW}
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": SHARED
    | SLIDING
    | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "v_head_dim": WIDTH,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "use_sliding_window": True,
        "is_causal": False,
        "num_target_layers": TARGET_LAYERS,
        "target_hidden_size": HIDDEN,
        "add_swa_attention_sink_bias": True,
        "dflash_config": OWN
        | {
            "num_anchors": 4096,
            "loss_decay_gamma": 7.0,
            "attention_value_scale": 0.612,
            "attention_sink_bias": True,
        },
    },
    "laguna": SHARED
    | SLIDING
    | {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "draft_vocab_size": VOCAB,
        "gating": "per-head",
        "num_experts": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
        "dflash_config": OWN | {"causal": True},
    },
    "muse": SHARED
    | SLIDING
    | OWN
    | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "dflare": SHARED
    | {
        "architectures": ["DFlareDraftModel"],
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "dflare_config": OWN,
    },
    "lfm2": SHARED
    | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "model_type": "qwen3",
        "markov_rank": 0,
        "rope_theta": 1e4,
        "rope_is_neox_style": False,
        "dflash_config": OWN | {"num_target_layers": TARGET_LAYERS},
    },
    "neighbors in a part": SHARED
    | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "rope_scaling": {"rope_type": "default", "rope_theta": 1e4, "rope_dim": WIDTH // 2},
        "is_neox_style": False,
        "dflash_config": OWN,
    },
    "gemma": SHARED
    | OWN
    | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "markov_rank": 0,
        "enable_confidence_head": False,
        "num_anchors": 512,
        "layer_types": ["full_attention"] * LAYERS,
        "head_dim": 4,
        "global_head_dim": WIDTH,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": KV_HEADS,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": 30.0,
        "sliding_window": 1024,
        "num_target_layers": TARGET_LAYERS,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


def tensor_sizes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the files of this kind."""
    query, kv = HEADS * WIDTH, KV_HEADS * WIDTH
    sizes: dict[str, tuple[int, ...]] = {"norm.weight": (HIDDEN,)}
    encoder = {"muse": ("encoder.fc", "encoder.output_norm_enc")}.get(kind, ("fc", "hidden_norm"))
    sizes[f"{encoder[1]}.weight"] = (HIDDEN,)
    if kind == "dflare":
        sizes["layer_fusion_weights"] = (LAYERS, len(TAPS))
    else:
        sizes[f"{encoder[0]}.weight"] = (HIDDEN, HIDDEN * len(TAPS))
    if kind == "laguna":
        sizes |= {f"aux_hidden_norms.{i}.weight": (HIDDEN,) for i in range(len(TAPS))}
    for i in range(LAYERS):
        attention, layer = f"layers.{i}.self_attn.", f"layers.{i}."
        sizes |= {f"{layer}{name}_layernorm.weight": (HIDDEN,) for name in ("post_attention",)}
        sizes[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        sizes |= {f"{attention}{name}_norm.weight": (WIDTH,) for name in "qk"}
        sizes |= {f"{layer}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        sizes |= {
            f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{attention}o_proj.weight": (HIDDEN, query),
        }
        if kind == "laguna":
            sizes |= {
                f"{attention}qkv_proj.weight": (query + 2 * kv, HIDDEN),
                f"{attention}g_proj.weight": (HEADS, HIDDEN),
            }
            continue
        sizes |= {
            f"{attention}q_proj.weight": (query, HIDDEN),
            f"{attention}k_proj.weight": (kv, HIDDEN),
        }
        if kind != "gemma":
            sizes[f"{attention}v_proj.weight"] = (kv, HIDDEN)
        if kind == "mimo":
            sizes[f"{attention}attention_sink_bias"] = (HEADS,)
        if kind == "dflare":
            sizes |= {f"{attention}{name}_proj_target.weight": (kv, HIDDEN) for name in "kv"}
        if kind == "gemma":
            sizes |= {
                f"{layer}{name}_feedforward_layernorm.weight": (HIDDEN,) for name in ("pre", "post")
            }
            sizes[f"{layer}layer_scalar"] = (1,)
    if kind == "gemma":
        sizes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    return sizes


def random_tensors(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, size in tensor_sizes(kind).items():
        random = torch.randn(size, generator=generator)
        tensors[name] = (
            1 + 0.3 * random
            if "norm" in name or "scalar" in name
            else random
            if "sink" in name
            else 0.3 * random
        )
    return tensors


def write(path: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    """A folder as its publisher has it; MiMo's embedding of the mask lies beside the tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    if kind == "mimo":
        torch.save({"mask_token_id": MASK, "embedding": mask_row()}, path / "mask_embedding.pt")
    return path


def mask_row() -> Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return normed if weight is None else normed * weight


def rope(x: Tensor, positions: Tensor, theta: float, turned: int, spread: int) -> Tensor:
    """`turned` leading numbers of heads [..., D] in halves, by `theta ** (-2i / spread)`."""
    frequencies = theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / spread)
    angles = positions[:, None].double() * frequencies
    cos, sin = (
        torch.cat([f(angles)] * 2, -1).float().to(x.dtype)[:, None] for f in (torch.cos, torch.sin)
    )
    part, rest = x[..., :turned], x[..., turned:]
    low, high = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-high, low], -1) * sin, rest], -1)


def rotated(kind: str, x: Tensor, positions: Tensor) -> Tensor:
    if kind == "mimo":
        return rope(x, positions, 10000.0, WIDTH // 2, WIDTH // 2)
    if kind in ("lfm2", "neighbors in a part"):  # as complex numbers
        width = WIDTH if kind == "lfm2" else WIDTH // 2
        angles = positions[:, None, None].double() * 1e4 ** -(
            torch.arange(0, width, 2, dtype=torch.float64) / width
        )
        neighbors = torch.view_as_complex(
            x[..., :width].double().reshape(*x.shape[:-1], -1, 2).contiguous()
        )
        part = (
            torch.view_as_real(neighbors * torch.polar(torch.ones_like(angles), angles))
            .flatten(-2)
            .to(x.dtype)
        )
        return torch.cat([part, x[..., width:]], -1)
    # pairs lie half a head apart, and of their frequencies the highest quarter is not zero
    if kind == "gemma":
        pairs = WIDTH // 8
        order = [*range(pairs), *range(WIDTH // 2, WIDTH // 2 + pairs)]
        out = x.clone()
        out[..., order] = rope(x[..., order], positions, 1e6, 2 * pairs, WIDTH)
        return out
    return rope(x, positions, 1e6 if kind == "dflare" else 5e5, WIDTH, WIDTH)


def expected_hidden(kind: str, t: dict[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """Final hidden states [B, H] of the rows `block` behind `features` [C, taps * H]."""
    start, width = len(features), len(block)
    before, own = torch.arange(start), torch.arange(start, start + width)
    positions = torch.cat([before, own])
    taps = features.view(start, len(TAPS), HIDDEN)
    if kind == "laguna":
        taps = torch.stack(
            [rms(taps[:, i], t[f"aux_hidden_norms.{i}.weight"]) for i in range(len(TAPS))], 1
        )
    fc, norm = (
        ("encoder.fc", "encoder.output_norm_enc") if kind == "muse" else ("fc", "hidden_norm")
    )
    x = block
    for i in range(LAYERS):
        layer = {
            name.removeprefix(f"layers.{i}."): tensor
            for name, tensor in t.items()
            if name.startswith(f"layers.{i}.")
        }
        attention = {
            name.split(".")[1]: tensor
            for name, tensor in layer.items()
            if name.startswith("self_attn.")
        }
        if kind == "laguna":
            parts = attention["qkv_proj"].split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH])
            attention |= dict(zip(("q_proj", "k_proj", "v_proj"), parts, strict=True))
        if kind == "dflare":
            context = rms(
                torch.einsum("t,cth->ch", t["layer_fusion_weights"][i].softmax(-1), taps),
                t["hidden_norm.weight"],
            )
        else:
            context = rms(taps.flatten(1) @ t[f"{fc}.weight"].T, t[f"{norm}.weight"])
        if kind == "laguna":
            context = rms(context, layer["input_layernorm.weight"])
        normed = rms(x, layer["input_layernorm.weight"])
        of_context = "_proj_target" if kind == "dflare" else "_proj"
        values = "k" if kind == "gemma" else "v"
        key = torch.cat(
            [context @ attention[f"k{of_context}"].T, normed @ attention["k_proj"].T]
        ).view(-1, KV_HEADS, WIDTH)
        value = torch.cat(
            [context @ attention[f"{values}{of_context}"].T, normed @ attention[f"{values}_proj"].T]
        )
        value = value.view(-1, KV_HEADS, WIDTH)
        query = rotated(
            kind,
            rms((normed @ attention["q_proj"].T).view(-1, HEADS, WIDTH), attention["q_norm"]),
            own,
        )
        key = rotated(kind, rms(key, attention["k_norm"]), positions)
        if kind == "gemma":
            value = rms(value)
        if kind == "mimo":
            value = value * 0.612
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(HEADS // KV_HEADS, 1))
        scores = scores * (1.0 if kind == "gemma" else WIDTH**-0.5)
        distance = own[:, None] - positions
        hidden = (
            distance.abs() >= WINDOW
            if kind in ("mimo", "laguna", "muse")
            else torch.zeros_like(distance).bool()
        )
        if kind == "laguna":
            hidden = hidden | (distance < 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        if kind == "mimo":
            scores = torch.cat(
                [scores, attention["attention_sink_bias"][:, None, None].expand(-1, width, 1)], -1
            )
        weights = scores.softmax(-1)[..., : start + width]
        out = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(HEADS // KV_HEADS, 1))
        if kind == "laguna":
            out = out * F.softplus(normed @ attention["g_proj"].T)[..., None]
        out = out.flatten(1) @ attention["o_proj"].T
        after = layer["post_attention_layernorm.weight"]
        gelu = partial(F.gelu, approximate="tanh")
        act: Callable[[Tensor], Tensor] = gelu if kind == "gemma" else F.silu
        x = x + (rms(out, after) if kind == "gemma" else out)
        given = rms(x, layer["pre_feedforward_layernorm.weight"] if kind == "gemma" else after)
        gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        output = (act(given @ gate.T) * (given @ up.T)) @ down.T
        x = (
            (x + rms(output, layer["post_feedforward_layernorm.weight"])) * layer["layer_scalar"]
            if kind == "gemma"
            else x + output
        )
    return rms(x, t["norm.weight"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_hidden_states(kind: str, tmp_path: Path) -> None:
    """From its files to the states of a block, of two requests in one batch, the context in two
    pieces and longer than a window.
    """
    verifier, tensors = FakeVerifier(), random_tensors(kind)
    # which Muse's drafter does not want
    verifier.embedding_scale = HIDDEN**0.5 if kind in ("gemma", "muse") else 1.0
    drafter: Any = load_drafter(write(tmp_path / "drafter", kind, tensors), verifier=verifier)
    rig = Rig(drafter, verifier)
    assert isinstance(rig.bound, BoundDFlash)
    generator = torch.Generator().manual_seed(4)
    lengths, anchors = [13, 22], [3, 5]
    features = [torch.randn(length, HIDDEN * len(TAPS), generator=generator) for length in lengths]
    for request, rows in enumerate(features):
        rig.prefill(request, rows[:9], 0)
        rig.prefill(request, rows[9:], 9)
    hidden = rig.bound.draft_hidden(rig.batch(anchors, lengths, drafter.max_draft_tokens))
    table = tensors.get("embed_tokens.weight", input_table(verifier.target))
    exact_tensors = {name: tensor.double() for name, tensor in tensors.items()}
    first = BLOCK - drafter.max_draft_tokens
    for request, rows in enumerate(features):
        block = table[torch.tensor([anchors[request]] + [MASK] * (BLOCK - 1))]
        if kind == "mimo":
            block = torch.cat([block[:1], mask_row().expand(BLOCK - 1, -1)])
        if kind == "gemma":
            block = block * HIDDEN**0.5
        plain = expected_hidden(kind, tensors, rows, block)[first:]
        with Float64():
            exact = expected_hidden(kind, exact_tensors, rows.double(), block.double())[first:]
        assert_as_exact(hidden[request], plain, exact, factor=4)
        torch.testing.assert_close(hidden[request], plain, atol=1e-4, rtol=1e-4)


def test_formulas_of_muse_are_transformers(tmp_path: Path) -> None:
    """The names, and who sees whom."""
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    tensors = random_tensors("muse")
    raw = {
        name: value
        for name, value in CONFIGS["muse"].items()
        if name not in ("architectures", "model_type")
    }
    theirs = muse.MuseGlimmerAssistantModel(muse.MuseGlimmerAssistantConfig(**raw)).eval()
    theirs.load_state_dict(tensors)
    features, block = torch.randn(11, HIDDEN * len(TAPS)), torch.randn(BLOCK, HIDDEN)
    positions = torch.arange(11 + BLOCK)
    distance = (positions[-BLOCK:, None] - positions).abs()
    mask = torch.where(distance < WINDOW, 0.0, -torch.inf)[None, None]
    masks = {"full_attention": None, "sliding_attention": mask}
    hidden = theirs(
        block[None], features[None], attention_mask=masks, position_ids=positions[None]
    ).last_hidden_state[0]
    torch.testing.assert_close(
        hidden, expected_hidden("muse", tensors, features, block), atol=1e-4, rtol=1e-4
    )


def test_writing_and_training_are_refused(tmp_path: Path) -> None:
    """By the name of what they do not know."""
    config, tensors = read_checkpoint(
        write(tmp_path / "drafter", "laguna", random_tensors("laguna"))
    )
    with pytest.raises(
        CheckpointError, match="with gated attention and norms of taps can be read, but not written"
    ):
        write_checkpoint(tmp_path / "written", config, tensors)
    train = TrainConfig(out=str(tmp_path / "run"), init=str(tmp_path / "drafter"))
    with pytest.raises(
        InvalidInputError,
        match="has gated attention and norms of taps, which training does not know",
    ):
        make_drafter(train, None, None)


@pytest.mark.parametrize("kind", [*CONFIGS, "convolutions"])
def test_lossless(kind: str, tmp_path: Path) -> None:
    """Whatever such a drafter proposes, in chains and trees, the output is the target's own."""
    if kind == "convolutions":
        path = write_tiny_dflash(
            tmp_path / "drafter", replace(TINY, conv_kernel_size=2, conv_group_size=4)
        )
    else:
        path = write(tmp_path / "drafter", kind, random_tensors(kind))
    target = tiny_target()
    verifier = paged_verifier(target, block_size=4)
    check_lossless(target, verifier, path)


def test_dspark_on_gemmas_layers() -> None:
    """DeepSpec's other drafter for Gemma 4 is the same backbone with a Markov head."""
    config = parse_config(CONFIGS["gemma"] | {"markov_rank": 8, "markov_head_type": "vanilla"})
    assert config.gemma and config.sample_from_anchor and config.max_draft_tokens == BLOCK
    assert isinstance(config.head, MarkovConfig) and config.head.rank == 8
