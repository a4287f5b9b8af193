"""The model `specdec` of lm-eval against lm-eval's own `hf` model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from evals.accuracy.lm_eval_model import SpecdecLM
from evals.prompt_sets import load_prompt_set
from evals.report.report import read_report
from specdec.base.errors import InvalidInputError
from specdec.cli.main import main
from specdec.session.decoder import SpecDecoder

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

pytest.importorskip("lm_eval", reason="lm-eval comes with the extra eval")

pytestmark = pytest.mark.slow

GSM8K = Path(os.environ.get("SPECDEC_DATA", ".")) / "gsm8k"

TEXTS = (
    "abcabcabcabc",
    "What is 2 + 2?",
    "x",
    "one two one two one two one",
    "A longer text, with commas, and a full stop.",
)


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[HFLM, SpecdecLM]:
    """The same weights twice."""
    # Its cache of logits mixes up the requests of one text that differ in where the context ends.
    hf = HFLM(
        pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, logits_cache=False
    )
    return hf, SpecdecLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)


def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(kind, {}, one, index, metadata=("task", index, 1))
        for index, one in enumerate(arguments)
    ]


def prompts_of_gsm8k(count: int) -> list[str]:
    """From `$SPECDEC_DATA/gsm8k/test.jsonl` where that is there, else from the bundled problems."""
    data = GSM8K / "test.jsonl"
    name, files = ("gsm8k", {"gsm8k": str(data)}) if data.is_file() else ("bundled", {})
    return [
        f"Question: {item.turns[0]}\nAnswer:"
        for item in load_prompt_set(name, files=files, limit=count).items
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"until": ["ab", "?"], "max_gen_toks": 24},
        {"until": "e", "do_sample": False, "max_gen_toks": 48},
        {"until": [], "max_gen_toks": 7},
        {"until": ["</s>"], "max_gen_toks": 40, "temperature": 0.0},
    ],
)
def test_greedy_generations_equal_those_of_hf(
    arguments: dict[str, Any], models: tuple[HFLM, SpecdecLM]
) -> None:
    """Catches stop strings left in or matched late, a wrong token limit, and special tokens in the
    text.
    """
    requests = [(text, arguments) for text in TEXTS]
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected
    assert any(found)


def test_eight_greedy_generations_equal_those_of_hf(models: tuple[HFLM, SpecdecLM]) -> None:
    """8 GSM8K prompts, few-shot length left out; long outputs of a random model pass through every
    kind of step.
    """
    requests = [
        (text, {"until": ["Question:"], "max_gen_toks": 24}) for text in prompts_of_gsm8k(8)
    ]
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected
    assert len(set(found)) > 4
    assert any(sum(sample.stats.num_accepted) for sample in models[1].samples)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="$SPECDEC_DATA has no gsm8k")
def test_accuracy_of_the_embedded_model_is_the_same_with_drafts(tmp_path: Path) -> None:
    """40 samples of GSM8K in float32."""
    words = f"--tasks gsm8k --data gsm8k={GSM8K} --limit 40 --max-tokens 128 --max-model-len 2048"
    words += f" --max-num-seqs 4 --device cpu --dtype float32 --out {tmp_path / 'run'}"
    assert main(["eval", *words.split()]) == 0
    (task,) = read_report(tmp_path / "run" / "report.json")["tasks"]
    assert task["differences"] == []
    assert task["plain"]["metrics"] == task["speculative"]["metrics"]
    assert task["speculative"]["acceptance"]["tau"] > 1


def test_loglikelihoods_equal_those_of_hf(
    models: tuple[HFLM, SpecdecLM], monkeypatch: Patch
) -> None:
    """Catches scores of the wrong rows; also with forwards so small that a text takes several, and
    an empty context.
    """
    pairs = [(text[:cut], text[cut:]) for text in TEXTS for cut in (0, 1, 4) if len(text) > cut]
    expected = models[0].loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for rows in (1024, 40, 5):
        monkeypatch.setattr("evals.accuracy.scoring.MAX_ROWS", rows)
        found = models[1].loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in found] == [bool(greedy) for _, greedy in expected]


def test_greedy_continuations_are_recognized(models: tuple[HFLM, SpecdecLM]) -> None:
    """Catches a flag that is always false, which random continuations would not show."""
    lm = models[1]
    (text,) = lm.generate_until(
        instances("generate_until", ("abcabc", {"max_gen_toks": 5})), disable_tqdm=True
    )
    pairs = [("abcabc", text), ("abcabc", "zz")]
    assert [
        greedy
        for _, greedy in lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    ] == [True, False]


def test_rolling_loglikelihoods_equal_those_of_hf(models: tuple[HFLM, SpecdecLM]) -> None:
    """Catches windows that overlap or leave tokens out; the last text is longer than the model's
    512 tokens.
    """
    texts = [(text,) for text in (*TEXTS, "The quick brown fox jumps over the lazy dog. " * 25)]
    expected, found = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)) for model in models
    )
    assert found == pytest.approx(expected, abs=1e-3)


def test_prompts_lose_their_beginning_where_the_answer_needs_room(
    models: tuple[HFLM, SpecdecLM],
) -> None:
    """Catches a prompt longer than the model being refused or cut at its end, unlike lm-eval's own
    models.
    """
    requests = [
        ("The quick brown fox jumps over the lazy dog. " * 25, {"until": [], "max_gen_toks": 30})
    ]
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected
    assert len(models[1].samples[-1].prompt_token_ids) == 512 - 30


def test_sampled_answers_depend_on_the_seed_alone(folder: Path) -> None:
    """Catches a shared seed for all requests, and answers that depend on the batch."""

    def answers(seed: int, batch_size: int, texts: Sequence[str]) -> list[str]:
        lm = SpecdecLM(
            pretrained=str(folder), dtype="float32", device="cpu", batch_size=batch_size, seed=seed
        )
        requests = [
            (text, {"max_gen_toks": 16, "do_sample": True, "temperature": 1.0}) for text in texts
        ]
        return lm.generate_until(instances("generate_until", *requests), disable_tqdm=True)

    texts = ("same", "same", "same", "other")
    one = answers(1, 4, texts)
    assert one == answers(1, 1, texts)
    assert one != answers(2, 4, texts)
    assert len(set(one[:3])) == 3


def test_unknown_arguments_are_refused(models: tuple[HFLM, SpecdecLM]) -> None:
    """In one line; those that ask for nothing pass."""
    wrong = {"num_beams": 4, "early_stopping": True, "typical_p": 0.9, "colour": 1}
    for name, value in wrong.items():
        with pytest.raises(InvalidInputError, match=f"generation argument '{name}'.* is not known"):
            models[1].generate_until(
                instances("generate_until", ("x", {name: value})), disable_tqdm=True
            )
    with pytest.raises(
        InvalidInputError, match="max_gen_toks is 600 and the model holds 512 tokens"
    ):
        models[1].generate_until(
            instances("generate_until", ("x", {"max_gen_toks": 600})), disable_tqdm=True
        )
    with pytest.raises(InvalidInputError, match="batch_size is 'many'"):
        SpecdecLM(batch_size="many")
    for argument in (
        {"colour": 1},
        {"parallelize": True},
        {"tensor_parallel_size": 2},
        {"max_model_len": 5},
    ):
        with pytest.raises(InvalidInputError, match=r"^model argument .* is not offered: [^\n]+$"):
            SpecdecLM(**argument)


def test_arguments_that_ask_for_nothing_change_nothing(models: tuple[HFLM, SpecdecLM]) -> None:
    lm = models[1]
    plain, other = (
        lm.generate_until(
            instances("generate_until", ("same", {"max_gen_toks": 8, **more})), disable_tqdm=True
        )
        for more in (
            {},
            {
                "num_beams": 1, "use_cache": False, "pad_token_id": 3, "top_k": -1,
                "length_penalty": 1, "top_p": None,
            },
        )
    )  # fmt: skip
    assert plain == other
    kept = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "min_new_tokens": 3,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
    }
    sampling = lm._sampling({"max_gen_toks": 8, **kept}, seed=0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens) == (
        1.5,
        0.5,
        3,
    )
    assert lm._sampling({}, seed=0).max_tokens == 256
    assert sampling.stop_token_ids == (lm.eot_token_id, 9) and not sampling.skip_special_tokens


def test_texts_at_the_edge(models: tuple[HFLM, SpecdecLM]) -> None:
    assert models[1].loglikelihood(instances("loglikelihood", ("a", ""), ("a", "b")))[0] == (
        0.0,
        True,
    )
    with pytest.raises(InvalidInputError, match="half of a surrogate pair"):
        models[1].generate_until(instances("generate_until", ("a\ud800", {})), disable_tqdm=True)


def test_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lm-eval's own models take it."""

    def load(target: str, **options: Any) -> None:
        raise InvalidInputError(f"asked for {target}")

    monkeypatch.setattr(SpecDecoder, "from_pretrained", load)
    with pytest.raises(InvalidInputError, match="asked for owner/name@v1"):
        SpecdecLM.create_from_arg_string("pretrained=owner/name,revision=v1")


@pytest.mark.parametrize("token", ["e", "70"])
def test_an_answer_begins_behind_its_thinking(folder: Path, token: str) -> None:
    """A text, or the id of a token. Stop strings end the answer, and no thinking."""
    own: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    plain, cut = SpecdecLM(**own), SpecdecLM(**own, think_end_token=token)
    arguments = {"until": [], "max_gen_toks": 60}
    for text, whole in zip(
        TEXTS,
        plain.generate_until(instances("generate_until", *((text, arguments) for text in TEXTS))),
        strict=True,
    ):
        mark = plain.tokenizer.decode([int(token)]) if token.isdigit() else token
        behind = whole.split(mark)[-1].lstrip()
        stop = behind[2:3]
        (found,) = cut.generate_until(
            instances("generate_until", (text, arguments | {"until": [stop]}))
        )
        assert found == (behind.partition(stop)[0] if stop else behind)
        assert cut.samples[-1].text == whole


def test_thinking_is_turned_off_in_the_prompt(folder: Path) -> None:
    """By lm-eval's own names for it, also as text on a command line."""
    chat = [{"role": "user", "content": "x"}]
    template = "{{ messages[0].content }}{% if enable_thinking is false %}-{% endif %}{{ mood }}"
    own: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    own |= {"enable_thinking": False, "chat_template_args": '{"mood": "u"}'}
    model = SpecdecLM(**own)
    model.tokenizer.chat_template = template
    assert model.apply_chat_template(chat) == "x-u"


def test_one_import_makes_the_model_known_to_lm_eval(folder: Path, tmp_path: Path) -> None:
    """lm-eval's own Python API, with a chat template and few-shot examples as turns."""
    from evals.accuracy.bundled_task import bundled_task

    results = lm_eval.simple_evaluate(
        model="specdec",
        model_args=f"pretrained={folder},drafter=ngram,dtype=float32,num_draft_tokens=3"
        ",max_length=4096",
        tasks=[bundled_task(tmp_path)],
        limit=2,
        batch_size=2,
        device="cpu",
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        gen_kwargs={"max_gen_toks": 4},
    )
    assert results is not None
    assert "exact_match,strict-match" in results["results"]["bundled"]
    prompt = results["samples"]["bundled"][0]["arguments"][0][0]
    assert prompt.count("[user]") == 5
    assert prompt.count("[assistant]") == 5
