"""What `SpecDecoder` takes for prompts and options, and what it refuses in one line."""

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.grammar.grammar import Grammar
from specdec.session.outputs import GenerationResult
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return SpecDecoder(
        paged_verifier(plain_model("llama")), tiny_tokenizer(), None, EngineConfig(max_num_seqs=2)
    )


def test_a_decoder_is_closed_at_the_end_of_a_block(decoder: SpecDecoder) -> None:
    """Also where something is raised there."""
    for error in (None, KeyError):
        with pytest.raises(KeyError) if error else nullcontext(), decoder.plain() as other:
            assert len(other.generate([5, 6, 7], max_tokens=2).token_ids) == 2
            if error:
                raise error
        with pytest.raises(SpecDecError, match="closed"):
            other.generate([5, 6, 7], max_tokens=2)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.int32),
        [np.int64(5), torch.tensor(6), 7],
        (5, 6, 7),
        range(5, 8),
        deque([5, 6, 7]),
        iter([5, 6, 7]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_one_prompt_of_token_ids(decoder: SpecDecoder, ids: Any) -> None:
    """What holds integers in an order is a prompt, whichever library it comes from."""
    result = decoder.generate(ids, max_tokens=4)
    assert result.prompt_token_ids == [5, 6, 7] and {
        type(token) for token in result.prompt_token_ids
    } == {int}
    assert result == decoder.generate([5, 6, 7], max_tokens=4, seed=result.seed)


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor([[5, 6], [7, 8]]),
        [np.array([5, 6]), torch.tensor([7, 8])],
        [range(5, 7), (7, 8)],
        ([5, 6], [7, 8]),
    ],
    ids=["tensor", "arrays", "ranges", "tuple"],
)
def test_many_prompts_of_token_ids(decoder: SpecDecoder, prompts: Any) -> None:
    """Rows of a tensor, and lists of the forms above."""
    assert [result.prompt_token_ids for result in decoder.generate(prompts, max_tokens=2)] == [
        [5, 6],
        [7, 8],
    ]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            {"role": "user", "content": "x"},
            "the input is a dict; a prompt is a string, a list of token ids",
        ),
        ({5, 6}, "the input is a set"),
        (b"abc", "the input is a bytes"),
        (memoryview(b"abc"), "the input is a memoryview"),
        (torch.tensor([5, 6], device="meta"), "a Tensor of the input cannot be read"),
        ([torch.tensor([5, 6]).to_sparse()], "a Tensor of the input cannot be read"),
        (None, "the input is a NoneType"),
        (5, "the input is a int"),
        (torch.tensor(5), "the input is a int"),
        (["a", None], "input 1 is a NoneType"),
        (torch.tensor([5.0]), "input 0 is a float"),
        ([True, False], "a token id is True; it must be an integer"),
        (np.array([], dtype=int), "there is no prompt"),
        ([10**30], "the prompt holds token id 1000"),
        ([], "there is no prompt"),
        ("", "prompt is empty"),
        ([{"role": "user", "content": "hi"}], "no chat template"),
        ([5] * 512, "limit is 512"),
    ],
)
def test_what_is_no_prompt(decoder: SpecDecoder, inputs: Any, said: str) -> None:
    """A mapping is not a list of its keys, bytes are not token ids, and a number is not cut to an
    integer.
    """
    with pytest.raises(SpecDecError) as caught:
        decoder.generate(inputs)
    assert said in str(caught.value)


def test_one_of_many_that_is_no_prompt(decoder: SpecDecoder) -> None:
    """Its result says so, and the others are served."""
    prompts: Any = [[], [1.5, 2], [[7]], ["a", "b"], [5, 6]]
    *bad, good = list[GenerationResult](decoder.generate(prompts, max_tokens=2))
    assert [result.error for result in bad] == [
        "the prompt is empty; give at least one token",
        *(f"a token id is {entry}; it must be an integer" for entry in ("1.5", "[7]", "'a'")),
    ]
    assert good.finish_reason == "length"


def test_a_message_that_is_no_text(decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a template sees it, and where the template itself adds what is no string."""
    monkeypatch.setattr(decoder.tokenizer, "chat_template", "{{ 'user: ' + messages[0].content }}")
    with pytest.raises(SpecDecError, match="the content of message 0 is a int; give text"):
        decoder.generate([{"role": "user", "content": 5}])
    with (
        monkeypatch.context() as patch,
        pytest.raises(SpecDecError, match="refuses these messages: can only concatenate str"),
    ):
        patch.setattr(decoder.tokenizer, "chat_template", "{{ 'user: ' + messages[0].name }}")
        decoder.generate([{"role": "user", "content": "hi", "name": 5}])
    assert (
        decoder.generate([{"role": "user", "content": "hi"}], max_tokens=2).finish_reason
        == "length"
    )


def test_each_input_may_be_decoded_in_its_own_way(decoder: SpecDecoder) -> None:
    """A grammar that fails is its own input's mistake, and the call's where all have it."""
    pytest.importorskip("xgrammar")
    bad = SamplingParams(max_tokens=2, grammar=Grammar.ebnf("root ::= missing"))
    ways = [
        SamplingParams(max_tokens=3, ignore_eos=True),
        bad,
        SamplingParams(max_tokens=5, ignore_eos=True),
    ]
    results = decoder.generate(["a", "b", "c"], ways)
    assert [len(result.token_ids) for result in results] == [3, 0, 5]
    assert "cannot be compiled" in (results[1].error or "") and results[1].bad_input
    for inputs in ("b", ["b", "c"]):
        with pytest.raises(InvalidInputError, match="cannot be compiled"):
            decoder.generate(inputs, bad)
    with pytest.raises(InvalidInputError, match="2 samplings are given for 3 inputs"):
        decoder.generate(["a", "b", "c"], ways[:2])


def test_options_by_other_names_and_types(decoder: SpecDecoder) -> None:
    """Transformers' name of `max_tokens`; a dict is told from `SamplingParams` and
    `EngineConfig`.
    """
    assert len(decoder.generate([5], max_new_tokens=3, ignore_eos=True).token_ids) == 3
    with pytest.raises(
        SpecDecError, match="sampling is a dict; give a SamplingParams, or its fields by name"
    ):
        decoder.generate([5], {"max_tokens": 3})  # type: ignore[call-overload]
    with pytest.raises(SpecDecError, match="the engine's config is a dict; give an EngineConfig"):
        config: Any = {"max_num_seqs": 3}
        SpecDecoder(decoder.verifier, decoder.tokenizer, None, config)
    for drafter in ("ngram", NGramDrafter):
        with pytest.raises(SpecDecError, match=r"drafter is .*; give a Drafter, or"):
            decoder.variant(drafter, EngineConfig())  # type: ignore[arg-type]
    with pytest.raises(SpecDecError, match=r"unknown .* 'temprature' \(known: max_tokens"):
        decoder.generate("abc", temprature=1)
    with pytest.raises(SpecDecError, match="given twice"):
        decoder.generate([5], max_new_tokens=3, max_tokens=3)


@pytest.mark.parametrize("least", [2**62, 2**63, 2**255])
def test_counts_that_no_output_reaches(decoder: SpecDecoder, least: int) -> None:
    """Also those that no tensor can hold."""
    most, ends = 2**255, (1, 2, 3)
    made = decoder.generate([5, 6], max_tokens=most, min_tokens=least, stop_token_ids=ends)
    want = decoder.generate([5, 6], max_tokens=most, min_tokens=10**6, stop_token_ids=ends)
    assert made.finish_reason == "length" and made.token_ids == want.token_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama4", "falcon_h1", "llama_dynamic"])
def test_the_default_type_of_a_program_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """It once failed every request, or rounded factors of weights and of rotations."""
    model, config = plain_model(name), EngineConfig(num_draft_tokens=2, verify_budget=0.5)
    prompts = [[5, 6] * 9, [7, 8] * 9]

    def made() -> list[GenerationResult]:
        verifier = paged_verifier(model)
        drafter = NGramDrafter(max_draft_tokens=2)
        penalties: Any = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "top_logprobs": 2}
        how = SamplingParams(8, 0.8, top_p=0.95, seed=3, logit_bias=((5, 1.5),), **penalties)
        return SpecDecoder(verifier, tiny_tokenizer(), drafter, config).generate(prompts, how)

    want, own = made(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert made() == want
    finally:
        torch.set_default_dtype(own)


@pytest.mark.parametrize("drafted", [0, 2])
@pytest.mark.parametrize("pattern", [None, "[a-z]{5}x+"])
def test_the_default_device_of_a_program_changes_nothing(
    decoder: SpecDecoder, drafted: int, pattern: str | None
) -> None:
    """What is the host's stays there."""
    if pattern:
        pytest.importorskip("xgrammar")
    how = SamplingParams(
        8, 0.8, seed=3, prompt_logprobs=0, grammar=Grammar.regex(pattern) if pattern else None
    )
    want = decoder.generate([5, 6] * 9, how)
    with torch.device("meta"):
        drafter = NGramDrafter(max_draft_tokens=2)
        config = EngineConfig(num_draft_tokens=drafted, max_prefill_tokens=5)
        other = decoder.variant(drafter, config)
        assert other.generate([5, 6] * 9, how).token_ids == want.token_ids


@pytest.mark.parametrize("ids", [[], [-1], [97], [10**30], [1.5]], ids=str)
def test_logits_of_what_is_no_prompt(decoder: SpecDecoder, ids: Any) -> None:
    """Refused as `generate` refuses it, instead of by an index out of range on the device."""
    with pytest.raises(SpecDecError):
        decoder.next_token_logits(ids)
    assert decoder.next_token_logits(torch.tensor([5, 6])).shape == (97,)


def test_paths_devices_and_types_as_objects(tmp_path: Path) -> None:
    """A folder as `Path`, torch's own device and type; a `Path` that is not there is never looked
    for on the hub.
    """
    plain_model("llama").save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    cpu: Any = torch.device("cpu")
    dtype: Any = torch.float32
    loaded = SpecDecoder.from_pretrained(tmp_path / "target", drafter=None, device=cpu, dtype=dtype)
    assert loaded.generate("abc", SamplingParams(max_tokens=2)).finish_reason == "length"
    for target, said in (
        (Path("nowhere"), "'nowhere' is not a folder"),
        (5, "the target is a int; give a folder"),
    ):
        with pytest.raises(SpecDecError, match=said):
            SpecDecoder.from_pretrained(target, device="cpu")  # type: ignore[arg-type]
