"""`specdec generate` with a real engine, and beside plain decoding."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.ngram import load_ngram
from evals.bench.compare import WARMUP_TOKENS, Comparison, compare, format_comparison
from evals.divergence import Divergence, first_divergence
from evals.speed import Speed
from specdec.base.blocks import BlockShape
from specdec.base.config import DraftSampling, EngineConfig
from specdec.base.metrics import AcceptanceStats
from specdec.cli.main import main
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer
from tests.specdec.cli.fake_decoder import use

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def tiny_decoder() -> SpecDecoder:
    """A real engine around a tiny random model."""
    verifier = paged_verifier(plain_model("llama"))
    config = EngineConfig(max_num_seqs=2, max_model_len=128, num_draft_tokens=None)
    return SpecDecoder(verifier, tiny_tokenizer(), load_ngram(None, verifier=verifier), config)


def test_the_command_prints_what_the_api_returns(
    tiny_decoder: SpecDecoder, monkeypatch: Patch, capsys: Capture
) -> None:
    expected = tiny_decoder.generate(
        ["one", "two two two"], max_tokens=30, ignore_eos=True, seed=5, logprobs=True
    )
    use(monkeypatch, tiny_decoder)
    line = [
        "generate", "one", "two two two", "--max-tokens", "30", "--ignore-eos", "--seed", "5",
        "--json", "--logprobs",
    ]  # fmt: skip
    assert main(line) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert isinstance(expected, list)
    for record, result in zip(records, expected, strict=True):
        assert record["text"] == result.text
        assert record["token_ids"] == result.token_ids
        assert record["logprobs"] == pytest.approx(result.logprobs, abs=1e-4)
        assert record["stats"] == result.stats.to_dict()
        assert (record["finish_reason"], record["seed"], record["num_prompt_tokens"]) == (
            "length",
            5,
            len(result.prompt_token_ids),
        )


def test_compare_reports_both_sides(
    tiny_decoder: SpecDecoder, monkeypatch: Patch, capsys: Capture
) -> None:
    use(monkeypatch, tiny_decoder)
    line = [
        "generate", "abcabc", "xyz", "--model", "m", "--max-tokens", "12", "--ignore-eos",
        "--compare", "--repeats", "2",
    ]  # fmt: skip
    assert main([*line, "--stream"]) == 0
    text = capsys.readouterr().out
    plain, speculative = text.split("speculative\n", 1)
    assert plain.startswith("plain\n")
    for expected in [
        "ratio",
        "tau",
        "mean over the prompts",
        "identical",
        "range of tokens/s",
        "drafts offered: ",
    ]:
        assert expected in speculative, text
    assert max(map(len, text.splitlines())) <= 80

    assert main([*line, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["identical"] is True
    assert record["drafter"] == "ngram"
    assert record["sampling"]["seed"] == 0
    assert record["plain"]["num_tokens"] == record["speculative"]["num_tokens"] == [24, 24]
    assert record["acceptance"]["num_emitted"] == 22  # all but the first token of each prompt
    medians = [record[side]["tokens_per_second"]["median"] for side in ("plain", "speculative")]
    assert record["ratio"] == pytest.approx(medians[1] / medians[0])


def test_positions_that_few_steps_offered_are_left_out() -> None:
    """Catches "100 %, 100 %, 0 %" of a position that one step offered, and a count that does not
    belong to its rate.
    """
    stats = AcceptanceStats(
        num_drafted=[1] * 6 + [3] * 4 + [0],
        num_accepted=[1] * 3 + [0] * 3 + [3] * 4 + [0],
        num_emitted=[2] * 3 + [1] * 3 + [4] * 4 + [1],
    )
    assert stats.num_offered == [10, 4, 4]
    speed = Speed([10], [1.0])
    decoder: Any = SimpleNamespace(
        verifier=SimpleNamespace(name="m", device="cpu", dtype=torch.float32),
        engine=SimpleNamespace(planner=SimpleNamespace(shapes=(BlockShape(3),))),
    )
    comparison = Comparison(SamplingParams(), speed, speed, [stats], [])
    text = format_comparison(comparison, decoder, drafter="d")
    assert "drafts offered: 0 in 1 step, 1 in 6 steps, 3 in 4 steps" in text
    rows = [line.split() for line in text.partition("accepted, by position")[2].splitlines()[1:]]
    assert [(row[0], *row[-2:]) for row in rows if row[0].isdigit()] == [("1", "70.0%", "10")]
    assert "from position 2 on, fewer than 5 steps" in text


def test_compare_finds_the_first_divergence_and_its_margin(
    tiny_decoder: SpecDecoder, monkeypatch: Patch, capsys: Capture
) -> None:
    """Catches a report that hides a wrong token, or measures the margin at the wrong place."""
    real = tiny_decoder.generate

    def tampered(inputs: Any, sampling: SamplingParams | None = None, **overrides: Any) -> Any:
        results = real(inputs, sampling, **overrides)
        assert isinstance(results, list)
        results[1].token_ids[4] = (results[1].token_ids[4] + 1) % VOCAB
        return results

    monkeypatch.setattr(tiny_decoder, "generate", tampered)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    comparison = compare(tiny_decoder, ["ab", "cd"], sampling)
    assert comparison.divergences is not None
    (found,) = comparison.divergences
    reference = tiny_decoder.plain().generate("cd", sampling)
    assert isinstance(reference, GenerationResult)
    assert (found.index, found.position, found.plain_token_id) == (1, 4, reference.token_ids[4])
    assert found.speculative_token_id == (reference.token_ids[4] + 1) % VOCAB
    logits = (
        tiny_decoder.next_token_logits(reference.prompt_token_ids + reference.token_ids[:4])
        .sort(descending=True)
        .values
    )
    assert found.margin == pytest.approx(float(logits[0] - logits[1]))
    assert 0 < found.resolution < 1e-5 * max(1.0, float(logits[0].abs()))

    use(monkeypatch, tiny_decoder)
    assert main(["generate", "ab", "cd", "--compare", "--max-tokens", "8", "--ignore-eos"]) == 0
    text = capsys.readouterr().out
    assert "differs for 1 of 2 prompts" in text
    assert "prompt 2, output token 5" in text


@pytest.mark.parametrize(
    ("drafts", "same"), [("probabilistic", None), ("greedy", []), ("coupled", [])]
)
def test_compare_compares_tokens_that_cannot_differ(
    tiny_decoder: SpecDecoder, drafts: DraftSampling, same: list[Divergence] | None
) -> None:
    """Probabilistic drafts keep the distribution, not the tokens; point masses keep both. A least
    length above the warm-up's changes nothing.
    """
    verifier = tiny_decoder.verifier
    config = EngineConfig(max_num_seqs=2, max_model_len=64, draft_sampling=drafts)
    decoder = SpecDecoder(
        verifier, tiny_decoder.tokenizer, load_ngram(None, verifier=verifier), config
    )
    sampling = SamplingParams(max_tokens=WARMUP_TOKENS + 4, min_tokens=WARMUP_TOKENS + 2)
    assert compare(decoder, ["ab"], replace(sampling, temperature=1.0)).divergences == same
    assert compare(decoder, ["ab"], sampling).divergences == []


def test_compare_copies_from_no_run_before(tiny_decoder: SpecDecoder, monkeypatch: Patch) -> None:
    """Catches a ratio of drafts that have seen their own output: in a warm-up or a repeated run."""
    real, done = tiny_decoder.generate, list[str]()

    def listen(*args: Any, **options: Any) -> Any:
        done.append("decode")
        return real(*args, **options)

    monkeypatch.setattr(tiny_decoder, "generate", listen)
    drafter = tiny_decoder.engine.runner.drafter
    monkeypatch.setattr(drafter, "forget", lambda: done.append("forget"))
    compare(tiny_decoder, ["ab", "cd"], SamplingParams(max_tokens=8), repeats=2)
    assert done == ["decode", "forget", "decode", "forget", "decode"]


def test_first_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([], []) is None
