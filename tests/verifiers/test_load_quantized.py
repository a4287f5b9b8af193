"""Loading targets from files of every kind: what reads them, what becomes of quantized weights, and
which ends are taken.
"""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, PreTrainedModel

from specdec import SpecDecoder
from specdec.base.errors import CheckpointError
from specdec.layers.linear_attention import LinearAttention
from specdec.layers.packed.linear import PackedLinear
from specdec.layers.packed.weight import PackedWeight
from specdec.model.core import Verifier
from tests.helpers import quantized, tiny_composites
from tests.helpers.tiny_models import plain_model, random_prompts, tiny_tokenizer
from tests.verifiers.test_hf import BLOCK, PackedRun, check_logits
from tests.verifiers.test_quantized_checkpoint import BLOCK as SCALED
from tests.verifiers.test_quantized_checkpoint import PLAIN, fp8_files
from tests.verifiers.weights.test_checkpoint import logits, read, verifier_of
from verifiers import load as loading
from verifiers.config.wrappers import read_config, text_config
from verifiers.decoder import DecoderVerifier
from verifiers.formats.lists import Listed
from verifiers.hf import HFVerifier
from verifiers.load import load_verifier

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [*SCALED]}


def load(folder: Path | str, **options: Any) -> Verifier:
    verifier, _ = load_verifier(
        folder, device=torch.device("cpu"), dtype=torch.float32, block_size=BLOCK, **options
    )
    return verifier


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def fp8_target(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A quantized checkpoint with a tokenizer."""
    folder, _ = fp8_files(tmp_path, name, **changes)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def dequantized(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the numbers that a quantized checkpoint of it stands for."""
    twin = copy.deepcopy(model)
    weights = {
        name: weight
        for name, weight in read(folder, model.config, as_stored=False).items()
        if isinstance(weight, Tensor)
    }
    left = twin.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys
    return twin


def check(verifier: Verifier, model: PreTrainedModel) -> None:
    sequence = random_prompts(1, seed=5)[0] + [5, 7, 11]
    (got,) = PackedRun(verifier, [sequence]).forward([(0, 0, len(sequence))])
    check_logits(got, model, sequence)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3"])
def test_our_own_layers_take_weights_from_the_files(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Transformers makes no model."""
    model = plain_model(name)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(
        PreTrainedModel,
        "from_pretrained",
        lambda *args, **options: pytest.fail("transformers read the weights"),
    )
    verifier = load(tmp_path)
    assert isinstance(verifier, DecoderVerifier) and verifier.weight_codes == ()
    check(verifier, model)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "deepseek_v3"])
def test_quantized_weights_become_the_numbers_that_they_stand_for(
    name: str, tmp_path: Path
) -> None:
    """On a CPU; latent attention splits one of them."""
    folder = fp8_target(tmp_path, name)
    model = plain_model(name)
    config = read_config(str(folder))
    verifier = load(folder)
    assert isinstance(verifier, DecoderVerifier)
    assert logits(verifier).equal(
        logits(verifier_of(read(folder, config, as_stored=False), config))
    )
    check(verifier, dequantized(model, folder))


def cohere(folder: Path) -> PreTrainedModel:
    """A model that our own layers do not run."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        CohereConfig(**sizes, initializer_range=0.3, eos_token_id=2)
    ).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["cohere", "llama"])
def test_transformers_modules_are_given_plain_numbers(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Of families without a description, and where our own layers are not wanted; its own
    quantizers take no part.
    """
    from transformers.quantizers import auto

    monkeypatch.setattr(
        auto.AutoHfQuantizer,
        "from_config",
        lambda *args, **options: pytest.fail("a quantizer of transformers"),
    )
    model = cohere(tmp_path / "plain") if name == "cohere" else plain_model(name)
    model.save_pretrained(tmp_path / "plain")

    def write(module: str, weight: Tensor) -> Any:
        return None if module in Listed(PLAIN) else quantized.float8(weight, SCALED)

    folder = tmp_path / "fp8"
    quantized.quantize_files(tmp_path / "plain", folder, FP8, write)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 8]}))
    verifier = load(folder, fuse=name == "cohere")
    assert isinstance(verifier, HFVerifier) and verifier.eos_token_ids == (6, 8)
    model.config.quantization_config = FP8
    check(verifier, dequantized(model, folder))
    path = next(folder.glob("*-0.safetensors"))
    tensors = load_file(path)
    lost = next(key for key in tensors if key.endswith("norm.weight"))
    del tensors[lost]
    save_file(tensors, path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors, the first being '{lost}'"):
        load(folder, fuse=False)


@pytest.mark.parametrize(
    ("name", "part", "dtype"),
    [
        ("llama", "q_proj.weight", torch.int8),
        ("llama", "embed_tokens.weight", torch.float8_e4m3fn),
        ("qwen3_moe", "experts.1.up_proj.weight", torch.bool),
        ("gpt_oss", "sinks", torch.float8_e4m3fn),
        ("cohere", "q_proj.weight", torch.float8_e4m3fn),
        ("cohere", "input_layernorm.weight", torch.int8),
    ],
)
def test_codes_that_nothing_explains_are_refused(
    name: str, part: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """By whichever way weights are read; integers that are no weights of the model pass."""
    if name == "cohere":
        cohere(tmp_path)
    else:
        plain_model(name).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.position_ids": torch.arange(4)}
    tensors["model.layers.0.self_attn.rotary_emb.position_ids"] = torch.arange(4)
    save_file(tensors, path)
    assert load(tmp_path)
    found = next(key for key in tensors if key.endswith(part))
    save_file(tensors | {found: tensors[found].to(dtype)}, path)
    kind = (
        "8-bit floats without a scale"
        if dtype.is_floating_point
        else f"{str(dtype)[6:]} where floats belong"
    )
    with pytest.raises(
        CheckpointError, match=rf"'{found.removesuffix('.weight')}.*' holds {kind}"
    ) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_pickle_of_integers_is_refused(tmp_path: Path) -> None:
    model = cohere(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(
        {name: tensor.to(torch.int8) for name, tensor in model.state_dict().items()},
        tmp_path / "pytorch_model.bin",
    )
    with pytest.raises(CheckpointError, match="holds int8 where floats belong"):
        load(tmp_path)


def test_ends_come_from_the_generation_config_first(tmp_path: Path) -> None:
    """Then from the config, then from the tokenizer."""
    plain_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 7]}))
    change(tmp_path / "config.json", eos_token_id=9)
    assert load(tmp_path).eos_token_ids == (5, 7)
    generation.write_text("{}")
    assert load(tmp_path).eos_token_ids == (9,)
    generation.unlink()
    change(tmp_path / "config.json", eos_token_id=None)
    assert load(tmp_path).eos_token_ids == (2,)
    generation.write_text("[")
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json of target .* is not valid JSON"
    ):
        load(tmp_path)


def test_what_the_model_has_no_use_for_is_left_out(tmp_path: Path, caplog: Log) -> None:
    """And said; a tensor of another shape is refused."""
    model = plain_model("llama")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.more.weight": torch.ones(3)}, path)
    with caplog.at_level(logging.WARNING):
        check(load(tmp_path), model)
    assert (
        "1 tensors of the files are left out, the first being model.layers.0.more.weight"
        in caplog.text
    )
    save_file({**tensors, "model.norm.weight": torch.ones(31)}, path)
    with pytest.raises(
        CheckpointError,
        match=r"'model\.norm\.weight' is \[31\] and the config asks for \[32\]; fetch",
    ):
        load(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].t().contiguous()}, path)
    with pytest.raises(
        CheckpointError,
        match=r"down_proj\.weight' is \[48, 32\] and the config asks for \[32, 48\]",
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("asked", "kept", "stored"),
    [("as-stored", True, True), ("as-stored", False, False), ("bfloat16", True, False)],
)
def test_weights_stay_as_stored_where_that_pays(
    asked: Any, kept: bool, stored: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """And where it is not unwanted; on this CPU the layers have plain numbers anyway."""
    seen: list[tuple[bool, torch.dtype]] = []
    whole = loading._built

    def noted(reading: Any, *rest: Any) -> Any:
        seen.append((reading.as_stored, reading.dtype))
        return whole(reading, *rest)

    monkeypatch.setattr(loading, "_built", noted)
    monkeypatch.setattr(loading, "keeps_packed", lambda device, dtype: kept)
    SpecDecoder.from_pretrained(
        fp8_target(tmp_path, "llama"), drafter=None, device="cpu", weights=asked
    )
    ((as_stored, dtype),) = seen
    assert as_stored == stored and (dtype == torch.bfloat16 or asked == "as-stored")


def test_text_only_is_said_once(tmp_path: Path, caplog: Log) -> None:
    """By whichever way the weights are read."""
    for fuse in (True, False):
        tiny_composites.save(tiny_composites.composite("gemma3"), tmp_path / str(fuse))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(tmp_path / str(fuse), fuse=fuse)
        lines = [
            record.getMessage() for record in caplog.records if record.name.startswith("verifiers")
        ]
        assert lines == ["gemma3 is taken as a text model: text only, without its vision part"]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_linear_attention_whose_projections_are_stored_in_two_ways(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As public files are: the large ones stay packed, the gates of rows plain, and the model is
    that of the numbers.
    """
    model = plain_model(name)
    model.save_pretrained(tmp_path / "plain")
    left = (*PLAIN, "in_proj_a", "in_proj_b", "in_proj_ba")

    def write(module: str, weight: Tensor) -> Any:
        return None if module in Listed(left) else quantized.float8(weight, SCALED)

    quantized.quantize_files(tmp_path / "plain", tmp_path / "fp8", FP8, write)
    model.config.quantization_config = FP8
    config = text_config(model.config)
    expected = logits(verifier_of(read(tmp_path / "fp8", config, as_stored=False), config))

    def packed(weight: Any, bias: Any = None, **options: Any) -> Any:
        return (
            PackedLinear(weight, bias)
            if isinstance(weight, PackedWeight)
            else plain(weight, bias, **options)
        )

    from verifiers.weights import weights

    plain = weights.linear
    for kept in (False, True):  # on a CPU the packed part becomes numbers as well
        monkeypatch.setattr(weights, "linear", packed if kept else plain)
        verifier: Any = verifier_of(read(tmp_path / "fp8", config), config)
        linear: list[Any] = [
            one.attention
            for one in verifier._decoder.layers
            if isinstance(one.attention, LinearAttention)
        ]
        assert len(linear) == 3 and all(
            len(one.linears) == 2 and one.row_gates.out_features == 8 for one in linear
        )
        assert all(isinstance(one.inputs, PackedLinear) == kept for one in linear)
        torch.testing.assert_close(logits(verifier), expected, rtol=1e-3, atol=1e-3)
