"""Checkpoints on disk: both layouts there and back, variants that public files use, and damage."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from specdec.base.errors import CapacityError, CheckpointError
from tests.drafters.tiny import HIDDEN, TINY, VOCAB, tiny_tensors, write_tiny_dflash
from tests.helpers import quantized

REDUCED = replace(TINY, draft_vocab_size=30, attention_bias=True)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize(
    "config", [TINY, REDUCED, replace(TINY, windows=(4, 4, None), causal=(True, True, False))]
)
def test_round_trip(layout: Any, config: DFlashConfig, tmp_path: Path) -> None:
    """Configuration and every tensor bit survive, also through the other layout."""
    path = write_tiny_dflash(tmp_path / "a", config, layout=layout)
    assert read_checkpoint(path)[0] == config
    assert_same(read_checkpoint(path)[1], tiny_tensors(config))
    other = "speculators" if layout == "z-lab" else "z-lab"
    write_checkpoint(tmp_path / "b", *read_checkpoint(path), layout=other)  # type: ignore[arg-type]
    assert read_checkpoint(tmp_path / "b")[0] == config
    assert_same(read_checkpoint(tmp_path / "b")[1], tiny_tensors(config))


def test_written_dtype_and_vocabulary_map(tmp_path: Path) -> None:
    """`dtype` casts weights, not the map; `t2d` marks the target tokens that `d2t` reaches."""
    write_checkpoint(
        tmp_path / "d", REDUCED, tiny_tensors(REDUCED), layout="speculators", dtype=torch.bfloat16
    )
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16 and stored["d2t"].dtype == torch.long
    assert stored["t2d"].nonzero().flatten().tolist() == list(range(0, 60, 2))
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dtype"] == "bfloat16"


def test_speculators_numbers(tmp_path: Path) -> None:
    """What other software reads: taps one higher, the draft count, the layers' section."""
    path = write_tiny_dflash(
        tmp_path / "d",
        replace(TINY, windows=(4, 4, None), verifier_name="some/target"),
        layout="speculators",
    )
    raw = json.loads((path / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert raw["sliding_window_non_causal"] is True
    assert raw["draft_vocab_size"] == VOCAB
    assert raw["transformer_layer_config"]["num_hidden_layers"] == 3


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {f"model.{name}": tensor for name, tensor in t.items()},
        lambda t: {name.replace("layers.0.", "midlayer."): tensor for name, tensor in t.items()},
        lambda t: (
            t | {"rotary_emb.inv_freq": torch.ones(8), "verifier_norm.weight": torch.ones(HIDDEN)}
        ),
        lambda t: (
            t
            | {
                "d2t": torch.zeros(VOCAB, dtype=torch.long),
                "t2d": torch.ones(VOCAB, dtype=torch.bool),
            }
        ),
    ],
    ids=["model prefix", "midlayer", "tensors of the target", "identity map"],
)
def test_public_variants(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    """Spellings and extras found in public files read as the plain checkpoint."""
    path = write_tiny_dflash(tmp_path / "d")
    rewrite(path, change)
    assert_same(read_checkpoint(path)[1], tiny_tensors())


def test_own_embeddings_and_head(tmp_path: Path) -> None:
    """A checkpoint may bring its own; they are kept."""
    extra = {
        "embed_tokens.weight": torch.rand(VOCAB, HIDDEN),
        "lm_head.weight": torch.rand(VOCAB, HIDDEN),
    }
    path = write_tiny_dflash(tmp_path / "d", tensors=tiny_tensors() | extra)
    assert_same(read_checkpoint(path)[1], tiny_tensors() | extra)


def cut(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "invalid JSON": (
        lambda p: (p / "config.json").write_text("{"),
        r"config\.json of drafter .* is not valid JSON",
    ),
    "not text": (
        lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x00"),
        r"config\.json of drafter .* is not valid JSON",
    ),
    "no object": (
        lambda p: (p / "config.json").write_text("[]"),
        r"config\.json of drafter .* holds no JSON object",
    ),
    "bad value": (lambda p: (p / "config.json").write_text("{}"), "names no architecture"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "there are no weights"),
    "truncated weights": (
        lambda p: cut(p / "model.safetensors", 0.6),
        "'model.safetensors' is damaged",
    ),
    "truncated header": (
        lambda p: cut(p / "model.safetensors", 0.001),
        "'model.safetensors' is damaged",
    ),
    "empty weights": (lambda p: cut(p / "model.safetensors", 0), "'model.safetensors' is damaged"),
    "one tensor missing": (
        lambda p: rewrite(p, lambda t: {n: x for n, x in t.items() if n != "norm.weight"}),
        "tensor norm.weight is missing; config.json asks for 36 tensors",
    ),
    "layer missing": (
        lambda p: rewrite(
            p, lambda t: {n: x for n, x in t.items() if not n.startswith("layers.2")}
        ),
        "tensor layers.2.input_layernorm.weight and 10 more are missing",
    ),
    "wrong shape": (
        lambda p: rewrite(p, lambda t: t | {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}),
        r"tensor fc.weight has shape \[32, 64\], config.json asks for \[32, 96\]",
    ),
    "joined": (
        lambda p: rewrite(
            p, lambda t: t | {"layers.0.self_attn.qkv_proj.weight": torch.zeros(2, 2)}
        ),
        r"tensor layers.0.self_attn.qkv_proj.weight has 2 rows, config.json asks for 128",
    ),
    "gated": (
        lambda p: rewrite(p, lambda t: t | {"layers.0.self_attn.g_proj.weight": torch.zeros(2, 2)}),
        "g_proj.weight is no part of a DFlash drafter",
    ),
    "unknown tensor": (
        lambda p: rewrite(p, lambda t: t | {"markov_head.markov_w1.weight": torch.zeros(2, 2)}),
        "tensor markov_head.markov_w1.weight is no part of a DFlash drafter",
    ),
    "quantized": (
        lambda p: rewrite(p, lambda t: t | {"fc.weight": t["fc.weight"].to(torch.int8)}),
        "tensor fc.weight is torch.int8; config.json has no quantization_config for it",
    ),
    "quantized to floats": (
        lambda p: rewrite(p, lambda t: t | {"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
        "tensor fc.weight is torch.float8_e4m3fn; config.json has no quantization_config for it",
    ),
    "reordered full vocabulary": (
        lambda p: rewrite(p, lambda t: t | {"d2t": torch.ones(VOCAB, dtype=torch.long)}),
        "d2t reorders a full vocabulary",
    ),
    "mask row": (lambda p: (p / "mask_embedding.pt").touch(), "'mask_embedding.pt' is damaged"),
    "mask row of another token": (
        lambda p: torch.save(
            {"mask_token_id": 7, "embedding": torch.zeros(32)}, p / "mask_embedding.pt"
        ),
        "mask_embedding.pt is of token 7, mask_token_id is 60",
    ),
    "mask row of another width": (
        lambda p: torch.save(torch.zeros(31), p / "mask_embedding.pt"),
        "mask_embedding.pt holds no row of 32 numbers",
    ),
    "mask row of NaN": (
        lambda p: torch.save(torch.full((32,), float("nan")), p / "mask_embedding.pt"),
        "mask_embedding.pt holds NaN or infinite values",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str, tmp_path: Path) -> None:
    """Every kind of damage is one line that names the path and the part."""
    path = write_tiny_dflash(tmp_path / "d")
    damage, message = DAMAGE[name]
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "target"), [(0, -1), (29, VOCAB), (5, 8)], ids=["below", "above", "twice"]
)
def test_vocabulary_map_is_checked(token: int, target: int, tmp_path: Path) -> None:
    """An id outside the vocabulary would index out of range, a double be counted twice."""
    path = write_tiny_dflash(tmp_path / "d", REDUCED)
    rewrite(
        path, lambda t: t | {"d2t": t["d2t"].index_fill(0, torch.tensor([token]), target - token)}
    )
    with pytest.raises(
        CheckpointError, match="d2t does not map 30 draft tokens to distinct tokens below 61"
    ):
        read_checkpoint(path)


@pytest.mark.parametrize("failing", ["write_bytes", "write_text"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_leaves_nothing(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or Ctrl-C in the middle leaves neither the folder nor a part of it."""

    def fail(file: Path, **_: Any) -> None:
        file.touch()
        raise error

    monkeypatch.setattr(Path, failing, fail)
    expected = CapacityError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(
        expected, match=r"cannot write '.*/d' \(No space" if isinstance(error, OSError) else None
    ):
        write_tiny_dflash(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_write_refuses(tmp_path: Path) -> None:
    """A taken path and incomplete tensors, before anything is written."""
    path = write_tiny_dflash(tmp_path / "d")
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already; choose a new folder"):
        write_tiny_dflash(path, seed=2)
    assert (path / "model.safetensors").read_bytes() == before
    tensors = tiny_tensors()
    del tensors["fc.weight"]
    with pytest.raises(CheckpointError, match=r"tensor fc\.weight is missing"):
        write_checkpoint(tmp_path / "e", TINY, tensors)
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


QUANTIZED: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], quantized.Written]]] = {
    "compressed int4": (
        compressed(num_bits=4, type="int", group_size=16),
        lambda weight: quantized.packed_integers(weight, 4, 16),
    ),
    "compressed nvfp4": (
        compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda weight: quantized.nvfp4(weight, divides=True),
    ),
    "compressed fp8": (
        compressed(num_bits=8, type="float", strategy="channel"),
        lambda weight: quantized.float8(
            weight, (1, weight.shape[1]), torch.bfloat16, name="weight_scale"
        ),
    ),
    "w4a16_nvfp4": (
        {"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"},
        lambda weight: quantized.nvfp4(weight, divides=False),
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, quantized.bitsandbytes4),
    "quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
        },
        lambda weight: quantized.float8(
            weight, (weight.shape[0], weight.shape[1]), name="weight_scale"
        ),
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda weight: quantized.nvfp4(weight, divides=False),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        lambda weight: quantized.float8(weight, (16, 16)),
    ),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_become_plain_numbers(kind: str, apart: bool, tmp_path: Path) -> None:
    """Products of layers as a publisher quantizes them; either file says the format."""
    path = write_tiny_dflash(tmp_path / "drafter")
    quantization, write = QUANTIZED[kind]
    plain = load_file(path / "model.safetensors")
    stored, numbers = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            written = write(tensor)
            stored |= {f"{module}.{part}": value for part, value in written.parts.items()}
            stored[f"{module}.input_scale"] = torch.tensor(3.0)
            numbers[name] = written.numbers.float()
        else:
            stored[name] = numbers[name] = tensor
    save_file(stored, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    if apart:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    else:
        raw["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    tensors = read_checkpoint(path)[1]
    assert tensors.keys() == numbers.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in numbers.items())


def test_quantizations_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = write_tiny_dflash(tmp_path / "drafter")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(raw | {"quantization_config": {"quant_method": "hqq"}})
    )
    with pytest.raises(
        CheckpointError, match=r"drafter '.*': weights quantized with 'hqq' are not read"
    ):
        read_checkpoint(path)
