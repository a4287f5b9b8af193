"""Which checkpoints have layers for multi-token prediction, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.load import load_drafter
from drafters.mtp.load import load_mtp
from specdec import SpecDecoder
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CheckpointError
from specdec.model.core import Verifier
from tests.drafters.mtp.test_layers import case
from tests.drafters.mtp.test_oracles import TEXT, close, ours, write_speculators
from tests.helpers import quantized, tiny_composites
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_prompts,
    tiny_tokenizer,
)
from tests.helpers.tiny_predictions import CASES, QWEN, reference, write_target
from tests.test_lossless import run as decode
from tests.verifiers.test_load_quantized import FP8
from tests.verifiers.test_quantized_checkpoint import BLOCK as SCALED
from tests.verifiers.test_quantized_checkpoint import PLAIN
from verifiers.formats.lists import Listed
from verifiers.load import load_verifier

K = 3


def load(folder: Path) -> Verifier:
    verifier, _ = load_verifier(
        folder, device=torch.device("cpu"), dtype=torch.float32, block_size=4
    )
    return verifier


def config(**changes: Any) -> EngineConfig:
    options: dict[str, Any] = {"max_num_seqs": 3, "max_prefill_tokens": 13, "num_draft_tokens": K}
    return EngineConfig(**{**options, "cache": CacheConfig(memory_bytes=2**22), **changes})


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe", "deepseek_v3"])
def test_output_is_that_of_the_target(name: str, tmp_path: Path) -> None:
    """A hybrid, one with experts, one with latents, by name: batches and chunks."""
    ref = reference(name)
    write_target(tmp_path, ref, CASES[name][0])
    decoder = SpecDecoder.from_pretrained(
        tmp_path,
        drafter="mtp",
        device="cpu",
        dtype="float32",
        attention="torch_ref",
        block_size=4,
        engine=config(),
    )
    prompts = random_prompts(4)
    results = decoder.generate(prompts, max_tokens=24)
    assert [result.token_ids for result in results] == [
        plain_greedy(ref.target, prompt, 24) for prompt in prompts
    ]
    assert all(result.stats.num_drafted for result in results)


def test_sampled_output_with_preemption_is_that_of_the_target(tmp_path: Path) -> None:
    """What a seed writes does not change with drafts, or where a cache is too small for all."""
    _, verifier, drafter = case("glm4_moe", tmp_path)
    memory = (
        4
        * 30
        * sum(
            spec.bytes_per_token(torch.float32) for spec in [*verifier.kv_specs, *drafter.kv_specs]
        )
    )
    prompts, sampling = random_prompts(4), {"temperature": 1.0, "seed": 3, "max_tokens": 24}
    plain = decode(verifier, None, prompts, config(num_draft_tokens=0), **sampling)
    assert (
        decode(
            verifier, drafter, prompts, config(cache=CacheConfig(memory_bytes=memory)), **sampling
        )
        == plain
    )


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
def test_quantized_layers_are_read_as_those_of_the_target(name: str, tmp_path: Path) -> None:
    """8-bit floats, experts one by one: the logits of a file with plain numbers."""

    def write(module: str, weight: Tensor) -> Any:
        return (
            None
            if module in Listed((*PLAIN, "fc", "eh_proj"))
            else quantized.float8(weight, SCALED)
        )

    ref = reference(name)
    plain = write_target(tmp_path / "plain", ref, CASES[name][0])
    numbers = quantized.quantize_files(plain, tmp_path / "fp8", FP8, write)
    drafting = [
        file for file in numbers if not file.startswith("model.layers.") or ".layers.4." in file
    ]
    assert any(numbers[file].dtype == torch.float64 and "layers" in file for file in drafting)
    (tmp_path / "fp8" / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    (tmp_path / "fp8" / "tokenizer_config.json").write_bytes(
        (plain / "tokenizer_config.json").read_bytes()
    )
    save_file(
        {file: tensor.float() for file, tensor in numbers.items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    hidden = torch.randn(
        len(TEXT) - 1, ref.target.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    packed, wide = (
        ours(load_mtp(verifier=load(folder)), hidden) for folder in (tmp_path / "fp8", plain)
    )
    torch.testing.assert_close(packed, wide, rtol=1e-5, atol=1e-5)


def test_layers_of_a_multimodal_checkpoint_are_found(tmp_path: Path) -> None:
    """Beside a composite's tensors, built from its text part's config, with its RoPE."""
    model: Any = tiny_composites.composite("qwen3_5")
    tiny_composites.save(model, tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    text = model.config.text_config
    ref = reference("qwen3_5", rope_parameters=text.rope_parameters)
    assert ref.target.config.rope_parameters != plain_model("qwen3_5").config.rope_parameters
    path = tmp_path / "model.safetensors"
    own = {
        QWEN.name(name, text.num_hidden_layers): tensor.contiguous()
        for name, tensor in ref.tensors().items()
    }
    save_file(load_file(path) | own, path, {"format": "pt"})
    verifier = load(tmp_path)
    hidden = torch.randn(
        len(TEXT) - 1, text.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        expected = verifier.head(
            ref.out(ref.row(verifier.embed(torch.tensor(TEXT[1:])), hidden))[0]
        )
        assert close(ours(load_mtp(verifier=verifier), hidden), expected)


def test_a_target_without_such_layers_is_refused(tmp_path: Path) -> None:
    """By its type, by its files, by what runs it."""
    verifier = paged_verifier(plain_model("llama"))
    with pytest.raises(
        CheckpointError, match="of type 'llama' has no layers for multi-token prediction of its own"
    ):
        load_mtp(verifier=verifier)
    with pytest.raises(CheckpointError, match="runs on transformers' modules"):
        load_mtp(verifier=paged_verifier(plain_model("gemma2"), fuse=False))
    ref = reference("qwen3_5")
    write_target(tmp_path, ref, CASES["qwen3_5"][0], own=False)
    with pytest.raises(CheckpointError, match="holds no layers for multi-token prediction"):
        load_mtp(verifier=load(tmp_path))


def test_a_file_that_is_incomplete_is_refused(tmp_path: Path) -> None:
    """The tensor is named, and so is one of another shape."""
    ref = reference("qwen3_5")
    write_target(tmp_path, ref, CASES["qwen3_5"][0])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "mtp.fc.weight"},
        path,
        {"format": "pt"},
    )
    with pytest.raises(
        CheckpointError, match=r"it lacks 1 tensors, the first being 'projection\.weight'"
    ):
        load_mtp(verifier=load(tmp_path))
    save_file(tensors | {"mtp.norm.weight": torch.zeros(3)}, path, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"'norm\.weight' is \[3\] and the config asks for \[32\]"
    ):
        load_mtp(verifier=load(tmp_path))


def test_layers_of_another_target_are_refused(tmp_path: Path) -> None:
    """By the width that its config states, before a tensor is read."""
    write_speculators(tmp_path / "layers", reference("qwen3"))
    path = tmp_path / "layers" / "config.json"
    entries = json.loads(path.read_text())
    entries["transformer_layer_config"]["hidden_size"] = 64
    path.write_text(json.dumps(entries))
    with pytest.raises(
        CheckpointError,
        match="it was made for a target whose hidden_size is 64; that of 'qwen3' is 32",
    ):
        load_drafter(tmp_path / "layers", verifier=paged_verifier(plain_model("qwen3")))
