"""Text parts of multimodal checkpoints: the composite's own logits, without its tower, and nothing
lost on the way.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from drafters.ngram import NGramDrafter
from specdec import SpecDecoder
from specdec.base.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from specdec.model.core import Verifier
from tests.helpers.tiny_composites import (
    CONFIGS,
    IMAGE,
    VIDEO,
    change_tensors,
    composite,
    save,
    type_of,
)
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_prompts,
    tiny_tokenizer,
)
from tests.verifiers.test_hf import BLOCK, PackedRun, check_logits
from verifiers.config.families import WRAPPERS
from verifiers.config.wrappers import load_text, media_token_ids, read_config, text_config
from verifiers.hf import HFVerifier, verifier_for
from verifiers.hf_attention import ATTENTION_NAME
from verifiers.load import load_verifier
from verifiers.support import unsupported_reasons

NEEDS = ("gemma4", "qwen3_5", "qwen3_5_moe")
"""Families that only our own layers can run."""

KNOWN = [name for name in CONFIGS if type_of(name) in CONFIG_MAPPING_NAMES]
"""Those that this version of transformers has."""


def load(folder: Path, **options: Any) -> Verifier:
    verifier, _ = load_verifier(
        folder, device=torch.device("cpu"), dtype=torch.float32, block_size=BLOCK, **options
    )
    return verifier


def config_json(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("name", KNOWN)
def test_the_text_part_gives_the_composites_logits(name: str, tmp_path: Path) -> None:
    """To the bit through the same modules, with nothing of the tower and no tensor missing; as
    exact on the paged cache, in two chunks.
    """
    model = composite(name)
    save(model, tmp_path)
    text, missing = load_text(str(tmp_path), read_config(str(tmp_path)), torch.float32, "eager")
    for parameter in (
        text.parameters()
    ):  # out of the file, where they are not aligned and products add up in another order
        parameter.data = parameter.data.clone()
    sequences = [
        [min(token, IMAGE - 1) for token in prompt] + [5, 7, 11]
        for prompt in random_prompts(2, seed=4, longest=30)
    ]
    tokens = torch.tensor([sequences[0]])
    with torch.inference_mode():
        whole = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        got = text.eval()(input_ids=tokens, use_cache=False).logits
    assert missing == [] and torch.equal(got, whole)
    names = [name for name, _ in text.named_parameters()]
    own = ("model.embed", "model.layers.", "model.norm", "lm_head")
    assert names and all(name.startswith(own) for name in names)
    if name in NEEDS:
        return
    verifier = load(tmp_path)
    run = PackedRun(verifier, sequences)
    first = run.forward([(i, 0, len(s) // 2) for i, s in enumerate(sequences)])
    second = run.forward([(i, len(s) // 2, len(s)) for i, s in enumerate(sequences)])
    rows = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    check_logits(torch.cat(rows), model, *sequences)
    assert verifier.eos_token_ids == (2,)


@pytest.mark.parametrize("name", NEEDS)
def test_tokens_of_what_our_own_layers_alone_can_run(name: str, tmp_path: Path) -> None:
    """Those that the composite generates, greedily, in float32,
    with drafts that are mostly wrong.
    """
    model = composite(name)
    save(model, tmp_path)
    decoder = SpecDecoder(load(tmp_path), tiny_tokenizer(), NGramDrafter())
    for prompt in random_prompts(2, seed=8, longest=20):
        prompt = [min(token, IMAGE - 1) for token in prompt]
        expected = plain_greedy(model, prompt, 12)
        assert decoder.generate(prompt, max_tokens=12, temperature=0).token_ids == expected
        assert len(set(expected)) > 3


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_recurrent_layers_never_go_through_transformers_modules(name: str, tmp_path: Path) -> None:
    """Which would forget all between two forwards: not when asked to, and not with projections of
    another kind.
    """
    save(composite(name), tmp_path)
    assert not isinstance(load(tmp_path, fuse=False), HFVerifier)
    model, _ = load_text(str(tmp_path), read_config(str(tmp_path)), torch.float32, ATTENTION_NAME)
    attention = model.model.layers[3].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    with pytest.raises(
        UnsupportedModelError, match="has recurrent layers, which our own layers alone can run"
    ):
        verifier_for(model, name=name, backend=load(tmp_path).attention)


@pytest.mark.parametrize("name", ["gemma3", "llava", "mistral3"])
def test_old_and_new_names_are_read(name: str, tmp_path: Path) -> None:
    """`language_model.model.x`, as files of 2025 have it, and `model.language_model.x`, as later
    ones have.
    """
    old = ("language_model.model.", "language_model.lm_head.")
    new = ("model.language_model.", "lm_head.")
    model = composite(name)
    tokens = torch.tensor([[3, 5, 7, 11]])
    with torch.inference_mode():
        whole = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    for given, wanted in ((old, new), (new, old)):

        def rename(
            key: str, given: tuple[str, ...] = given, wanted: tuple[str, ...] = wanted
        ) -> str:
            return next(
                (
                    b + key.removeprefix(a)
                    for a, b in zip(given, wanted, strict=True)
                    if key.startswith(a)
                ),
                key,
            )

        folder = tmp_path / given[0]
        save(model, folder, rename)
        text, missing = load_text(str(folder), read_config(str(folder)), torch.float32, "eager")
        with torch.inference_mode():
            assert missing == [] and torch.equal(
                text.eval()(input_ids=tokens, use_cache=False).logits, whole
            )


def test_every_wrapper_has_a_tiny_one() -> None:
    """Those apart that are another one under a second name."""
    assert WRAPPERS - set(map(type_of, CONFIGS)) == {"gemma4_unified", "glm46v"}


@pytest.mark.parametrize("part", ["layers.1.mlp.down_proj", "embed_tokens", "norm.weight"])
@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl"])
def test_a_missing_tensor_is_an_error(name: str, part: str, tmp_path: Path) -> None:
    """Whether the text part has a class of its own or comes out of the composite; a missing piece
    of the tower is none.
    """
    save(composite(name), tmp_path)
    change_tensors(tmp_path, lambda key: None if "patch" in key else key)
    load(tmp_path)
    change_tensors(
        tmp_path, lambda key: None if re.search(rf"language_model\.(model\.)?{part}", key) else key
    )
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors, the first being '[\w.]*{part}"):
        load(tmp_path)


def test_what_stands_in_the_outer_config_alone_is_taken_over() -> None:
    """Tied embeddings, quantization, ends and the type; the config itself stays as it is."""
    outer = AutoConfig.for_model(
        "mistral3",
        **{
            **CONFIGS["mistral3"],
            "text_config": {
                "model_type": "mistral",
                "tie_word_embeddings": False,
                "eos_token_id": 2,
            },
        },
        tie_word_embeddings=True,
        quantization_config={"quant_method": "fp8"},
        eos_token_id=[7, 9],
        dtype="bfloat16",
    )
    text: Any = text_config(outer)
    assert (
        text.tie_word_embeddings,
        text.quantization_config["quant_method"],
        text.eos_token_id,
    ) == (True, "fp8", [7, 9])
    assert text.dtype == torch.bfloat16
    assert outer.text_config.tie_word_embeddings is False and not hasattr(
        outer.text_config, "quantization_config"
    )


def test_a_text_model_is_its_own_text_part() -> None:
    model = plain_model("llama")
    assert text_config(model.config) is model.config and media_token_ids(model.config) == {}
    assert [paged_verifier(model, fuse=fuse).media_token_ids for fuse in (True, False)] == [{}, {}]


def test_the_generation_config_names_the_end_first(tmp_path: Path) -> None:
    save(composite("gemma3"), tmp_path)
    config_json(tmp_path, eos_token_id=[4, 5])
    assert load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).eos_token_ids == (4, 5)


def test_tokens_of_pictures_are_refused(tmp_path: Path) -> None:
    """In ids, and in text that the tokenizer turns into such an id; the others are decoded."""
    save(composite("qwen3_vl"), tmp_path)
    decoder = SpecDecoder(load(tmp_path), tiny_tokenizer())
    assert decoder.generate([3, 5, 7], max_tokens=2).token_ids
    with pytest.raises(
        InvalidInputError,
        match=rf"holds token {VIDEO}, which stands for a video; .* runs as a text model",
    ):
        decoder.generate([3, VIDEO, 7])
    character = tiny_tokenizer().decode([IMAGE])
    for ask in (decoder.generate, decoder.next_token_logits):
        with pytest.raises(InvalidInputError, match=rf"token {IMAGE}, which stands for an image"):
            ask(f"a{character}b")
    with pytest.raises(
        InvalidInputError, match=rf"token {IMAGE}, which stands for an image; .* so give text alone"
    ):
        decoder.session.submit([3, IMAGE])
    refused, served = decoder.generate([[3, IMAGE], [3, 5]], max_tokens=1)
    assert refused.finish_reason == "error" and served.finish_reason != "error"


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its type is unknown to transformers, and its file names code of its own, which nobody is
    asked about.
    """
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked on standard input"))
    model = plain_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config_json(
        tmp_path,
        model_type="kimi_k2",
        auto_map={"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"},
    )
    (tmp_path / "foreign.py").write_text("raise SystemExit('code of the repository was run')\n")
    verifier = load(tmp_path)
    assert not isinstance(verifier, HFVerifier)
    sequence = random_prompts(1, seed=6)[0]
    (got,) = PackedRun(verifier, [sequence]).forward([(0, 0, len(sequence))])
    check_logits(got, model, sequence)


@pytest.mark.parametrize(
    "name",
    ["gemma3", "mistral3", "llava", "internvl", "kimi_k25", "qwen3_vl", "glm4v", "glm4v_moe"],
)
def test_accepted(name: str) -> None:
    assert unsupported_reasons(AutoConfig.for_model(name)) == []


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        (
            AutoConfig.for_model("mllama"),
            "multimodal (text_config, vision_config) and its text part is not known to run alone",
        ),
        (AutoConfig.for_model("qwen2_audio"), "its text part is not known to run alone"),
    ],
    ids=["mllama", "qwen2_audio"],
)
def test_refused(config: PreTrainedConfig, phrase: str) -> None:
    """Because nobody has tried its text part."""
    assert phrase in "; ".join(unsupported_reasons(config))
