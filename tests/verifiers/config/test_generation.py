"""What a checkpoint asks of requests: as Transformers' `generate` has it, or said in a line."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from drafters.ngram import NGramDrafter
from specdec.base.config import CacheConfig, EngineConfig, GenerationSource
from specdec.base.errors import CheckpointError
from specdec.grammar.grammar import Grammar
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import (
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
    tiny_tokenizer,
)
from verifiers.config.generation import generation_of
from verifiers.load import load_verifier

PROMPT = [5, 6, 7]
MOST = 24
END = 6
"""The ninth token that the model writes after the prompt."""

Log = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return plain_model("llama")


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(
    folder: Path,
    file: Any,
    config: dict[str, Any] | None = None,
    source: GenerationSource | None = "model",
) -> Verifier:
    """The target with such a generation_config.json, None for none, and such changes of its
    config.json.
    """
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if file is not None:
        path.write_text(file if isinstance(file, str) else json.dumps(file))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    device = torch.device("cpu")
    return load_verifier(folder, device=device, dtype=torch.float32, generation_config=source)[0]


def decoder_of(verifier: Verifier, drafter: Drafter | None = None, **engine: Any) -> SpecDecoder:
    config = EngineConfig(max_num_seqs=3, cache=CacheConfig(memory_bytes=2**22), **engine)
    return SpecDecoder(verifier, tiny_tokenizer(), drafter, config)


def written(folder: Path, model: PreTrainedModel, prompt: list[int] = PROMPT) -> list[int] | None:
    """What `generate` writes when the folder is loaded; None where it refuses its file."""
    fallback = (
        {}
        if (folder / "generation_config.json").exists()
        else {"config_file_name": "config.json", "_from_model_config": True}
    )
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, **fallback)
        return plain_greedy(model, prompt, MOST)
    except (ImportError, RuntimeError, TypeError, ValueError):
        return None
    finally:
        model.generation_config = before


def lines(log: Log) -> list[str]:
    return [
        record.getMessage()
        for record in log.records
        if record.name == "verifiers.config.generation"
    ]


CHANGING = {
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [53],
    "begin_suppress_tokens": [53],
    "bad_words_ids": [[53]],
    "sequence_bias": [[[53], -9.0]],
    "forced_eos_token_id": 9,
    "exponential_decay_length_penalty": [3, 5.0],
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 1,
    "num_beams": 4,
    "guidance_scale": 1.5,
    "watermarking_config": {"greenlist_ratio": 0.5, "bias": 5.0},
    "max_time": 0.0,
    "stop_strings": ["a"],
    "token_healing": True,
    "forced_bos_token_id": 9,
    "typical_p": 0.5,
    "cache_implementation": "quantized",
}
HOLDING: dict[str, Any] = {"repetition_penalty": 1.3, "min_new_tokens": 20, "min_length": 20}
SAME: dict[str, Any] = {
    "renormalize_logits": True,
    "max_length": 5,
    "max_new_tokens": 7,
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": [],
    "sequence_bias": None,
    "cache_implementation": "hybrid",
    "early_stopping": True,
    "nobody_knows_this": [1],
    "transformers_version": "4.1",
}


@pytest.mark.parametrize(
    "entries",
    [
        *({name: value} for name, value in HOLDING.items()),
        SAME,
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_what_holds_is_as_in_generate(
    entries: dict[str, Any], folder: Path, model: PreTrainedModel, caplog: Log
) -> None:
    """Token for token, with drafts; of what changes nothing here, nothing is said."""
    verifier = load(folder, {"eos_token_id": [END, 2], **entries})
    result = decoder_of(verifier, NGramDrafter(max_draft_tokens=4)).generate(
        PROMPT, max_tokens=MOST
    )
    assert result.token_ids == written(folder, model)
    said = [
        f"{name} {entries[name]} where a request names none" for name in HOLDING.keys() & entries
    ]
    assert all(words in line for words, line in zip(said, lines(caplog), strict=True))


def test_what_is_not_to_be_had_is_named(folder: Path, caplog: Log) -> None:
    verifier = load(folder, {"eos_token_id": [END, 2], **CHANGING})
    (line,) = lines(caplog)
    assert "generation_config 'none' leaves it aside" in line
    _, _, lost = line.partition("generate would apply ")
    assert all(re.search(rf"(^|, ){entry} ", lost) for entry in CHANGING)
    assert decoder_of(verifier).generate(PROMPT, max_tokens=MOST).token_ids[-1] == END


@pytest.mark.parametrize(
    ("k", "nodes"), [(0, 0), (4, 0), (None, 7)], ids=["plain", "chain", "tree"]
)
def test_a_penalty_and_a_least_length_hold_in_every_block(
    k: int | None, nodes: int, folder: Path, model: PreTrainedModel
) -> None:
    """Several prompts side by side, whose own tokens the penalty counts."""
    verifier = load(
        folder,
        {"eos_token_id": [2, *range(3, VOCAB, 5)], "repetition_penalty": 1.2, "min_new_tokens": 7},
    )
    prompts = random_prompts(5, seed=4)
    want = [written(folder, model, prompt) for prompt in prompts]
    assert {len(one) < MOST for one in want if one is not None} == {True} and min(
        map(len, filter(None, want))
    ) > 7
    engine = {"num_draft_tokens": k, **({"tree_nodes": nodes} if nodes else {})}
    results = decoder_of(verifier, random_dflash(verifier) if k != 0 else None, **engine).generate(
        prompts, max_tokens=MOST
    )
    assert [result.token_ids for result in results] == want


def test_what_a_request_says_wins(folder: Path, model: PreTrainedModel) -> None:
    """Neutral values, too; and the file may be left aside."""
    file = {"eos_token_id": [END, 2], "repetition_penalty": 1.3, "min_new_tokens": 20}
    plain = written(folder, model)
    assert plain is not None and plain[8] == END
    decoder = decoder_of(load(folder, file))
    explicit: dict[str, Any] = {"repetition_penalty": 1.0, "min_tokens": 0}
    assert decoder.generate(PROMPT, max_tokens=MOST, **explicit).token_ids == plain[:9]
    for named, left in (
        ("repetition_penalty", "min_new_tokens"),
        ("min_tokens", "repetition_penalty"),
    ):
        load(folder, {"eos_token_id": [END, 2], left: file[left]})
        made = decoder.generate(PROMPT, max_tokens=MOST, **{named: explicit[named]})
        assert made.token_ids == written(folder, model)
    aside = decoder_of(load(folder, file, source="none"))
    assert aside.generate(PROMPT, max_tokens=MOST).token_ids == plain[:9]


def test_a_least_length_of_the_file_gives_way(folder: Path) -> None:
    """To what a request wants at most, to a grammar, and to a stop string."""
    decoder = decoder_of(load(folder, {"eos_token_id": 2, "min_new_tokens": 20}))
    assert len(decoder.generate(PROMPT, max_tokens=4).token_ids) == 4
    made = decoder.generate(PROMPT, max_tokens=MOST, grammar=Grammar.regex("ab"))
    assert (made.text, made.finish_reason) == ("ab", "stop")
    whole = decoder.generate(PROMPT, max_tokens=MOST)
    made = decoder.generate(PROMPT, max_tokens=MOST, stop=whole.text[4])
    assert len(made.token_ids) <= 5 and made.finish_reason == "stop"
    assert len(whole.token_ids) >= 20


def test_without_the_file_config_json_counts(
    folder: Path, model: PreTrainedModel, caplog: Log
) -> None:
    """As in `generate`, but for how it would sample: other things may be called top_k there."""
    verifier = load(folder, None, {"repetition_penalty": 1.3, "num_beams": 4, "top_k": 2})
    assert verifier.defaults == SamplingDefaults(1.3)
    (line,) = lines(caplog)
    assert line.startswith(
        f"config.json of target {str(folder)!r}: repetition_penalty 1.3 where a request names none,"
        f" as in"
    )
    assert "generate would apply num_beams 4" in line
    assert load(folder, {"eos_token_id": 2}).defaults == SamplingDefaults()
    nested = {
        "eos_token_id": None,
        "text_config": {"eos_token_id": [4, 5], "repetition_penalty": 1.2},
    }
    found = generation_of("x", None, nested, vocab_size=VOCAB)
    assert (found.ends, found.defaults.repetition_penalty) == ((4, 5), 1.2)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"repetition_penalty": "1.3"}, "repetition_penalty is '1.3'; it must be a number"),
        ({"repetition_penalty": True}, "repetition_penalty is True; it must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must lie in"),
        (
            {"repetition_penalty": {"a": [1]}},
            "repetition_penalty is {'a': [1]}; it must be a number",
        ),
        ('{"repetition_penalty": 1e400}', "repetition_penalty is inf; it must lie in"),
        ('{"temperature": NaN}', "temperature is nan; it must be 0"),
        ({"min_new_tokens": 2.5}, "min_new_tokens is 2.5; it must be an integer"),
        ({"min_new_tokens": -4}, "min_new_tokens is -4; it must be 0 or more"),
        ({"min_length": [3]}, "min_length is [3]; it must be an integer"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": -1}, "temperature is -1.0; it must be 0"),
        ({"top_p": 7}, "top_p is 7.0; it must lie in"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be an integer"),
        ({"min_p": 1}, "min_p is 1.0; it must lie in"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; it must be true or false"),
    ],
)
def test_what_no_request_could_ask_is_one_line(file: Any, words: str, folder: Path) -> None:
    """With the way out, which works."""
    with pytest.raises(CheckpointError) as error:
        load(folder, file)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(
        "; correct it, or leave it aside with generation_config 'none'"
    )
    assert load(folder, file, source="none").defaults == SamplingDefaults()


@pytest.mark.parametrize(
    "file", ["[]", "[", '"x"', "{" * 10_000, '{"eos_token_id": 1' + "0" * 5000 + "}"]
)
def test_what_is_no_object_is_one_line(file: str, folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json of target .*; fetch or write it again$"
    ):
        load(folder, file)


STRANGE = ["2", True, 1.5, [[2]], {"a": 1}, float("inf"), [2, None], ["2"]]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_an_end_that_is_no_token_is_one_line(value: Any) -> None:
    """Catches ends that never come, and errors at the first request."""
    for file, config, of_tokenizer in (
        ({"eos_token_id": value}, {}, 2),
        ({}, {"eos_token_id": value}, 2),
        (None, {"text_config": {"eos_token_id": value}}, 2),
        ({"eos_token_id": 2}, {}, value),
    ):
        tokenizer = SimpleNamespace(eos_token_id=of_tokenizer, eos_token="</s>")
        with pytest.raises(
            CheckpointError, match="it must be a token id or a list of them, so correct the file"
        ):
            generation_of("x", file, config, vocab_size=VOCAB, tokenizer=tokenizer)


def test_the_embedded_model_is_read_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.load.embedded_model_path", lambda: folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STRANGE}))
    with pytest.raises(
        CheckpointError, match=r"eos_token_id in generation_config\.json of target 'embedded' is .*"
    ):
        load_verifier("embedded", device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("value", [-1, 10**9, 1e30, VOCAB, [], [-1, VOCAB]], ids=repr)
def test_an_end_that_no_text_has_is_said(value: Any, folder: Path, caplog: Log) -> None:
    """And the next source counts."""
    verifier = load(folder, {"eos_token_id": value}, {"eos_token_id": END})
    assert verifier.eos_token_ids == (END,)
    *strange, last, _ = lines(caplog)
    assert (
        "names no token that ends texts, so generate would go on; outputs end with 6, as"
        " config.json has it" in last
    )
    assert len(strange) == (value != []) and all(
        "which no text has: ids lie in [0, 97)" in line for line in strange
    )
    assert decoder_of(verifier).generate(PROMPT, max_tokens=MOST).finish_reason == "stop"


def test_an_end_among_others_that_no_text_has(folder: Path, model: PreTrainedModel) -> None:
    """Catches a least length that names it, which is refused for every request."""
    verifier = load(folder, {"eos_token_id": [-1, float(END), VOCAB], "min_new_tokens": 3})
    assert verifier.eos_token_ids == (END,)
    assert decoder_of(verifier).generate(PROMPT, max_tokens=MOST).token_ids == written(
        folder, model
    )


def test_no_end_at_all_is_said(folder: Path, caplog: Log) -> None:
    found = generation_of(
        "x", {}, {}, vocab_size=VOCAB, tokenizer=SimpleNamespace(eos_token_id=None)
    )
    assert found.ends == () and found.notes == [
        "nothing in 'x' names a token that ends texts: outputs go on to max_tokens; see"
        " stop_token_ids"
    ]


def test_an_end_that_only_the_tokenizer_names(
    folder: Path, model: PreTrainedModel, caplog: Log
) -> None:
    """Outputs go on as those of `generate` do; a line says so,
    and the server is told of the end.
    """
    verifier = load(folder, {"eos_token_id": END})
    assert (verifier.eos_token_ids, verifier.defaults.served_ends) == ((END,), (2,))
    (line,) = lines(caplog)
    assert (
        "ends texts with 2 ('</s>'), which generation_config.json does not name: specdec serve"
        " stops there, too" in line
    )
    assert load(folder, {"eos_token_id": [END, 2]}).defaults.served_ends == ()
    assert load(folder, {"eos_token_id": END}, source="none").defaults.served_ends == (2,)


def test_of_a_model_that_gets_no_requests_nothing_is_said(folder: Path, caplog: Log) -> None:
    """Such as a draft model, whose file may hold anything."""
    verifier = load(
        folder,
        {"eos_token_id": [END, -1], "repetition_penalty": "1.3", "num_beams": 4},
        source=None,
    )
    assert (verifier.defaults, lines(caplog)) == (SamplingDefaults(served_ends=(2,)), [])


def test_how_the_file_samples_is_for_the_server(folder: Path) -> None:
    """Python and the other commands decode greedily until they are told; a file that rules sampling
    out gives nothing.
    """
    file = {"eos_token_id": 2, "temperature": 0.6, "top_k": -1, "top_p": 0.95, "min_p": None}
    sampled = (("temperature", 0.6), ("top_k", 0), ("top_p", 0.95))
    for do_sample in (None, True):
        verifier = load(folder, {**file, "do_sample": do_sample})
        assert verifier.defaults == SamplingDefaults(sampled=sampled)
        assert verifier.defaults.fill(SamplingParams(), 3) == SamplingParams()
    assert load(folder, {**file, "do_sample": False}).defaults == SamplingDefaults()
