"""Layers for multi-token prediction that go on with training: `specdec train --init mtp`."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.checkpoint import write_folder
from drafters.load import load_drafter
from drafters.mtp.load import load_mtp
from drafters.training.families.choice import trained
from drafters.training.families.mtp import mtp_model
from drafters.training.shape import make_drafter
from drafters.training.stages import run_stages
from drafters.training.target import Target
from specdec.base.errors import CheckpointError, InvalidInputError
from tests.drafters.mtp.test_oracles import TEXT, ours
from tests.drafters.training.figures import log_rows
from tests.drafters.training.small import CPU, sequences
from tests.drafters.training.toy import toy_config, write_prompts, write_target
from tests.helpers import quantized, tiny_predictions
from tests.helpers.tiny_assistants import gemma4_target, sharing, write_assistant
from tests.helpers.tiny_predictions import CASES, PARTS, QWEN, SPECULATORS, reference
from tests.verifiers.test_load_quantized import FP8
from tests.verifiers.test_quantized_checkpoint import BLOCK as SCALED
from tests.verifiers.test_quantized_checkpoint import PLAIN
from verifiers.formats.lists import Listed
from verifiers.load import load_verifier

STEPS = 3
UNWRITTEN = {"mellum", "ernie4_5_moe", "mimo_v2_flash", "nemotron_h"}
INDEXED = {"deepseek_v32", "glm_moe_dsa"}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    verifier, _ = load_verifier(folder, device=CPU, dtype=dtype, block_size=4)
    return verifier


@pytest.mark.parametrize("name", sorted(CASES.keys() - UNWRITTEN - INDEXED))
def test_blocks_are_those_of_transformers_layers(name: str, tmp_path: Path) -> None:
    """And gradients reach all weights, and nothing of the target."""
    ref = reference(name)
    tiny_predictions.write_target(tmp_path, ref, CASES[name][0])
    verifier = loaded(tmp_path)
    config = toy_config(tmp_path / "toy", init="mtp", unroll=STEPS)
    model = mtp_model(config, verifier)
    target = Target(verifier, model.config.target_layer_ids)
    drafter = trained(model, target, config)
    token_ids = torch.randint(3, verifier.vocab_size, (2, 12), generator=torch.manual_seed(3))
    batch, anchors = sequences(token_ids), torch.tensor([[1, 7], [4, 5]])
    context = drafter.context(batch, target.features(batch)[0])
    found = drafter.logits(drafter.hidden(batch, anchors, context).flatten(0, 1))
    expected = []
    for sequence, places in enumerate(anchors.tolist()):
        for place in places:
            text = token_ids[sequence].tolist()
            expected.append(ref.logits(text[: place + 1], text[place + 1 : place + 1 + STEPS]))
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)
    found.square().mean().backward()
    for own, weight in model.named_parameters():
        reached = weight.grad is not None and bool(weight.grad.any())
        assert reached == weight.requires_grad, own
        assert weight.requires_grad or own.endswith("correction_bias")
    assert not verifier.final_norm.weight.requires_grad
    (folder,) = drafter.export(tmp_path / "run")
    hidden = torch.randn(len(TEXT) - 1, verifier.hidden_size)
    with torch.inference_mode():
        written = ours(load_drafter(folder, verifier=verifier), hidden)
        torch.testing.assert_close(written, ours(load_mtp(verifier=verifier), hidden))


def test_gradients_in_bfloat16_reach_what_they_reach_in_float32(tmp_path: Path) -> None:
    """Catches weights, or a head, laid out as only a forward takes them."""
    tiny_predictions.write_target(tmp_path, reference("qwen3_5"), QWEN)
    verifier = loaded(tmp_path, torch.bfloat16)
    config = toy_config(tmp_path / "toy", init="mtp", unroll=STEPS)
    model = mtp_model(config, verifier).bfloat16()
    target = Target(verifier, model.config.target_layer_ids)
    drafter = trained(model, target, config)
    batch, anchors = sequences(torch.arange(3, 15)[None]), torch.tensor([[1, 7]])
    context = drafter.context(batch, target.features(batch)[0])
    hidden = drafter.hidden(batch, anchors, context).flatten(0, 1)
    drafter.logits(hidden).float().square().mean().backward()
    assert all(one.grad is not None and one.grad.any() for one in model.parameters())


@pytest.mark.parametrize("name", sorted(UNWRITTEN | INDEXED))
def test_layers_that_could_not_be_kept_or_trained_are_refused(name: str, tmp_path: Path) -> None:
    tiny_predictions.write_target(tmp_path, reference(name), CASES[name][0])
    config = toy_config(tmp_path / "toy", init="mtp")
    message = "an indexer" if name in INDEXED else "no words in the layout of speculators"
    verifier = loaded(tmp_path)
    with pytest.raises(InvalidInputError, match=f"{message}.*leave --init out"):
        mtp_model(config, verifier)


def toy_with_layers(folder: Path) -> Path:
    """A hybrid toy target that has such a layer, with random weights."""
    write_target(folder, family="qwen3_5")
    config = AutoConfig.from_pretrained(folder)
    one: Any = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layer = AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | one))
    own = {n: x for n, x in layer.state_dict().items() if n.startswith("model.layers.")}
    width = config.hidden_size
    own["projection.weight"] = torch.randn(width, 2 * width) * width**-0.5
    own |= {f"{n}.weight": torch.zeros(width) for n in ("embedding_norm", "hidden_norm", "norm")}
    path = folder / "model.safetensors"
    named = {QWEN.name(n, config.num_hidden_layers): x.contiguous() for n, x in own.items()}
    save_file(load_file(path) | named, path, {"format": "pt"})
    return folder


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return content


def test_quantized_layers_are_trained_in_numbers(tmp_path: Path) -> None:
    """As those of targets in 8-bit floats; catches weights that no optimizer can move."""
    plain = tiny_predictions.write_target(tmp_path / "plain", reference("qwen3_5"), QWEN)

    def write(module: str, weight: Tensor) -> Any:
        return None if module in Listed((*PLAIN, "fc")) else quantized.float8(weight, SCALED)

    said = quantized.quantize_files(plain, tmp_path / "fp8", FP8, write)
    save_file(
        {n: x.float() for n, x in said.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "fp8" / name).write_bytes((plain / name).read_bytes())
    config = toy_config(tmp_path / "toy", init="mtp")
    numbers, whole = (mtp_model(config, loaded(folder)) for folder in (tmp_path / "fp8", plain))
    assert numbers.config == whole.config
    for name, tensor in numbers.named_parameters():
        torch.testing.assert_close(tensor, whole.get_parameter(name))


@pytest.mark.slow
def test_layers_in_a_folder_learn_for_a_target_without_any(answered: Path) -> None:
    config = AutoConfig.from_pretrained(answered / "target")
    layer = AutoModelForCausalLM.from_config(
        type(config)(**config.to_dict() | {"num_hidden_layers": 1})
    )
    width = config.hidden_size
    own = {n: x for n, x in layer.state_dict().items() if n.startswith("model.layers.")}
    own |= {f"{part}.weight": torch.ones(width) for part in PARTS}
    own["projection.weight"] = torch.randn(width, 2 * width) * 0.1
    stated = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "transformer_layer_config": config.to_dict(),
        "num_nextn_predict_layers": 1,
    }
    write_folder(answered / "layers", stated, {SPECULATORS.name(n, 0): x for n, x in own.items()})
    config = toy_config(answered, init=str(answered / "layers"), unroll=STEPS, replay=0.5)
    assert run_stages(("train", "finish"), config)
    rows = log_rows(answered)
    assert float(rows[-1]["tau"]) > float(rows[0]["tau"]) + 0.4
    assert report(answered)["tau_engine"] == report(answered)["tau_replayed"]


@pytest.mark.slow
def test_layers_learn_and_do_in_the_engine_what_training_said(tmp_path: Path) -> None:
    """And go on from what was written. Catches rows, norms or heads unlike the engine's."""
    toy_with_layers(tmp_path / "target")
    write_prompts(tmp_path / "prompts.txt", count=120)
    config = toy_config(tmp_path, init="mtp", unroll=STEPS)
    assert run_stages(("answers", "train", "finish"), config)
    rows = log_rows(tmp_path)
    assert float(rows[-1]["tau"]) > float(rows[0]["tau"]) + 0.3
    assert float(rows[-2]["loss"]) < 0.9 * float(rows[1]["loss"])
    first = report(tmp_path)
    assert list(first["drafts"]) == ["3", "sampled 3"]
    for figures in first["drafts"].values():
        assert figures["tau_engine"] == figures["tau_replayed"]
    further = replace(config, out=str(tmp_path / "further"), init=str(tmp_path / "run" / "drafter"))
    (tmp_path / "further").mkdir()
    (tmp_path / "further" / "answers").symlink_to(tmp_path / "run" / "answers")
    assert run_stages(("train", "finish"), replace(further, max_steps=2))
    again = json.loads((tmp_path / "further" / "report.json").read_text())
    assert again["tau_engine"] == again["tau_replayed"]
    with (tmp_path / "further" / "training" / "log.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["tau"] == rows[-1]["tau"]


@pytest.mark.slow
def test_assistants_and_missing_layers_are_refused(tmp_path: Path, answered: Path) -> None:
    """An assistant has no keys of its own to unroll; a Llama has no such layer."""
    with sharing():
        write_assistant(tmp_path / "assistant", gemma4_target(tmp_path / "gemma", "gemma4_shared"))
        verifier = loaded(tmp_path / "gemma")
        config = toy_config(tmp_path / "toy", init=str(tmp_path / "assistant"))
        with pytest.raises(InvalidInputError, match=r"reads its target's keys.*leave --init out"):
            make_drafter(config, verifier, None)
    with pytest.raises(
        CheckpointError, match="has no layers for multi-token prediction of its own"
    ):
        run_stages(("train",), toy_config(answered, init="mtp"))
