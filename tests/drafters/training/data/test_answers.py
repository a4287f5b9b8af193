"""The answers stage: what it writes, that it resumes, and what it refuses."""

import errno
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from drafters.training.config import TrainConfig
from drafters.training.data import answers, self_prompts
from drafters.training.data import shards as answers_files
from drafters.training.data.dataset import read_answers
from drafters.training.data.prompts import (
    TrainingPrompt,
)
from drafters.training.data.shards import stable_seed
from drafters.training.data.source import Source
from drafters.training.provenance import PROVENANCE
from drafters.training.stages import run_stages
from specdec.base.errors import CapacityError, CheckpointError, InvalidInputError, SpecDecError
from specdec.engine.engine import SpecEngine
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from tests.drafters.training.toy import (
    as_flags,
    toy_config,
    write_prompts,
    write_target,
)
from tests.helpers.ranks import run_command


def question(text: str, answer: str | None = "worked") -> TrainingPrompt:
    return TrainingPrompt("x", (("user", text),), answer)


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "max_tokens": 6,
        "heldout": 3,
        "shard_size": 8,
        "max_prompts": 20,
        "temperatures": (0.0, 0.7),
    }
    values |= {"heldout_temperature": 1.3}
    return toy_config(folder, **values | changes)


def shards(folder: Path) -> dict[str, list[dict[str, Any]]]:
    paths = sorted((folder / "run" / "answers").glob("*.jsonl.gz"))
    return {path.name: [json.loads(line) for line in gzip.open(path, "rt")] for path in paths}


def test_answers_are_the_targets_own_with_their_origin(tmp_path: Path) -> None:
    """Catches answers that the target does not say, a wrong split, missing provenance."""
    assert run_stages(("answers",), small_config(tmp_path))
    records = shards(tmp_path)
    assert {name: len(rows) for name, rows in records.items()} == {
        "heldout-00000.jsonl.gz": 6, "train-00000.jsonl.gz": 8, "train-00001.jsonl.gz": 8,
        "train-00002.jsonl.gz": 8, "train-00003.jsonl.gz": 8, "train-00004.jsonl.gz": 2,
    }  # fmt: skip
    rows = [row for part in records.values() for row in part]
    assert sum(row["temperature"] == 0.0 for row in rows) == 3 + 17
    assert [row["temperature"] for row in records["heldout-00000.jsonl.gz"]] == [0.0] * 3 + [
        1.3
    ] * 3
    decoder = SpecDecoder.from_pretrained(
        str(tmp_path / "target"), drafter=None, device="cpu", dtype="float32"
    )
    for row in rows[:8]:
        sampling = SamplingParams(max_tokens=6, temperature=row["temperature"], seed=row["seed"])
        result = decoder.generate(row["prompt_ids"], sampling)
        assert not isinstance(result, list) and row["answer_ids"] == result.token_ids
    about = json.loads((tmp_path / "run" / "answers" / PROVENANCE).read_text())
    assert about["settings"]["temperatures"] == [0.0, 0.7]
    assert len(about["prompt_files"]["prompts.txt"]) == 64 and about["target"] == str(
        tmp_path / "target"
    )


def test_a_killed_answers_stage_goes_on_with_the_missing_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches shards written in part, and answers that depend on what was written before."""
    write = Path.write_bytes

    def interrupted(path: Path, data: bytes) -> int:
        if "train-00002" in path.name:
            write(path, data[:20])
            raise KeyboardInterrupt
        return write(path, data)

    config = small_config(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stages(("answers",), config)
    assert 1 <= len(shards(tmp_path)) < 6
    monkeypatch.undo()
    assert not run_stages(("answers",), replace(config, stop_after=1e-9))
    assert len(shards(tmp_path)) < 6
    assert run_stages(("answers",), config)
    resumed = shards(tmp_path)
    assert run_stages(
        ("answers",), replace(config, out=str(tmp_path / "whole" / "run"), max_num_seqs=3)
    )
    assert resumed == shards(tmp_path / "whole")


def test_nothing_that_was_answered_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers that wait for their file to be whole, and one that is answered twice."""
    config = small_config(tmp_path, shard_size=1000, max_num_seqs=4)
    record, written = answers._Writer.record, list[int]()

    def interrupted(self: answers._Writer, result: GenerationResult, job: answers.Job) -> Any:
        if len(written) == 9:
            raise KeyboardInterrupt
        written.append(1)
        return record(self, result, job)

    monkeypatch.setattr(answers._Writer, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stages(("answers",), config)
    assert {name: len(rows) for name, rows in shards(tmp_path).items()} == {
        "heldout-00000.jsonl.gz": 6
    }
    journals = list((tmp_path / "run" / "answers").glob("*.journal"))
    assert sum(len(path.read_text().splitlines()) - 1 for path in journals) == 3

    def counted(self: answers._Writer, result: GenerationResult, job: answers.Job) -> Any:
        written.append(1)
        return record(self, result, job)

    monkeypatch.setattr(answers._Writer, "record", counted)
    assert run_stages(("answers",), config)
    assert len(written) == 40
    assert not list((tmp_path / "run" / "answers").glob("*.journal"))
    monkeypatch.undo()
    assert run_stages(("answers",), replace(config, out=str(tmp_path / "whole" / "run")))
    assert shards(tmp_path) == shards(tmp_path / "whole")


def test_every_turn_is_answered_behind_the_targets_own_answers(tmp_path: Path) -> None:
    """Catches another model's history, a turn without an answer, and untrained answers."""
    ends = (
        "<bos> {% for m in messages %}{{ m.content }} {% if m.role == 'user' %}<eos> {% endif"
        " %}{% endfor %}"
    )
    write_chat_target(tmp_path, ends)
    turns = [[f"w{i}", f"w{i + 1} w{i + 2}", f"w{i + 3}"][: 1 + i % 3] for i in range(4, 20)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"turns": some}) for some in turns))
    config = small_config(tmp_path, prompts=(str(tmp_path / "chats.jsonl"),), max_num_seqs=4)
    stop = SamplingParams.__init__

    def stopping(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        stop(self, *args, **kwargs | {"stop": (" w",)})  # the toy never ends an answer itself

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SamplingParams, "__init__", stopping)
        assert run_stages(("answers",), config)
    records = shards(tmp_path)
    rows = [row for name, part in records.items() for row in part if "train" in name]
    decoder = SpecDecoder.from_pretrained(
        str(tmp_path / "target"), drafter=None, device="cpu", dtype="float32"
    )
    counts = []
    for row in rows:
        ids = [*row["prompt_ids"], *row["answer_ids"]]
        spans = [*row.get("spans", []), [len(row["prompt_ids"]), len(ids)]]
        counts.append(len(spans))
        for number, (start, end) in enumerate(spans):
            assert 1 <= end - start <= 6
            if row["temperature"] == 0:
                result = decoder.generate(ids[:start], SamplingParams(max_tokens=end - start))
                assert not isinstance(result, list) and result.token_ids == ids[start:end], number
    greedy = [count for count, row in zip(counts, rows, strict=True) if row["temperature"] == 0]
    asked = [len(some) for some in turns]
    assert len(greedy) == 13 and set(greedy) == {1, 2, 3}
    assert all(greedy.count(n) in range(asked.count(n) - 3, asked.count(n) + 1) for n in (1, 2, 3))
    held = [row for name, part in records.items() for row in part if "heldout" in name]
    assert not any("spans" in row for row in held)


def test_a_file_that_was_whole_but_not_written_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that was killed between the last answer of a file and the file."""
    config = small_config(tmp_path)
    monkeypatch.setattr(answers_files, "remove", lambda path: None)
    assert run_stages(("answers",), config)
    whole = shards(tmp_path)
    monkeypatch.undo()
    for name in ("train-00001.jsonl.gz", "train-00003.jsonl.gz"):
        (tmp_path / "run" / "answers" / name).unlink()
    (tmp_path / "run" / "answers" / "train-00001.journal").unlink()
    assert run_stages(("answers",), config)
    assert shards(tmp_path) == whole


def test_progress_is_told_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a stage that says nothing until its first file is whole."""
    monkeypatch.setattr(answers_files, "_EVERY", 0.0)
    assert run_stages(("answers",), small_config(tmp_path, shard_size=1000))
    said = [line for line in capsys.readouterr().err.splitlines() if "tokens/s" in line]
    done = [int(line.split()[1]) for line in said]
    assert sorted(done) == done and set(done) == set(range(1, 41))


def test_processes_share_the_shards(tmp_path: Path) -> None:
    """Catches shards that two processes write, or none."""
    config = small_config(tmp_path)
    decoder = SpecDecoder.from_pretrained(
        str(tmp_path / "target"), drafter=None, device="cpu", dtype="float32"
    )
    written = []
    for rank in range(2):
        before = set(shards(tmp_path))
        assert answers.write_answers(
            config, lambda: Source.of_engine(decoder), lambda text: None, rank=rank, world=2
        )
        written.append(set(shards(tmp_path)) - before)
    assert sorted(map(len, written)) == [3, 3]
    assert run_stages(("answers",), replace(config, out=str(tmp_path / "whole" / "run")))
    assert shards(tmp_path) == shards(tmp_path / "whole")


def test_a_full_disk_keeps_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "train-00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        CapacityError, match=r"train-00001.*No space left on device.*make room and run again"
    ):
        run_stages(("answers",), small_config(tmp_path))
    assert "heldout-00000.jsonl.gz" in shards(tmp_path)


def test_prompts_longer_than_the_context_are_refused_first_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a long prompt that ends the stage half way, and one that is cut."""
    config = small_config(tmp_path, max_num_seqs=1)
    (tmp_path / "prompts.txt").write_text(
        "\n".join(["w5 " * 300, *(f"w{i} w{i + 1}" for i in range(4, 20))])
    )
    monkeypatch.delattr(SpecEngine, "step")  # nothing is decoded before the refusal
    with pytest.raises(
        InvalidInputError,
        match=r"prompts.txt:1 has 300 tokens and the target's context is 256 .*--skip-long",
    ):
        run_stages(("answers",), config)
    monkeypatch.undo()
    assert run_stages(("answers",), replace(config, skip_long=True))
    assert sum(map(len, shards(tmp_path).values())) == 2 * 3 + 2 * 13


def test_a_wrong_tap_does_not_wait_for_the_answers(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="are not different layers"):
        run_stages(("answers",), small_config(tmp_path, taps=(1, 99)))
    assert not shards(tmp_path)


def test_few_shot_answers_end_where_the_next_question_begins(tmp_path: Path) -> None:
    """Catches the stop string, and a record's template, which the engine check needs."""
    write_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(
            json.dumps({"question": f"w{i} w{i + 1}", "answer": f"w{i + 2}"}) for i in range(4, 24)
        )
    )
    config = small_config(
        tmp_path,
        prompts=(str(tmp_path / "prompts.jsonl"),),
        few_shot_share=1.0,
        few_shot=2,
        temperatures=(0.0,),
    )
    config = replace(config, max_prompts=None, heldout_temperature=0.0)
    original = answers.FEW_SHOT_STOP
    try:
        answers.FEW_SHOT_STOP = " w"  # the toy never says "Question:", but says a second word
        assert run_stages(("answers",), config)
    finally:
        answers.FEW_SHOT_STOP = original
    rows = [row for part in shards(tmp_path).values() for row in part]
    assert {row["template"] for row in rows} == {"few-shot"}
    assert {len(row["answer_ids"]) for row in rows} == {2}
    assert all(answer.few_shot for answer in read_answers(tmp_path / "run" / "answers", "train"))


TEMPLATE = "<bos> w4 w5 {% for m in messages %}{{ m.content }} <eos> {% endfor %}w6"


def write_chat_target(folder: Path, template: str = TEMPLATE) -> None:
    """The toy target with a chat template."""
    write_target(folder / "target")
    write_prompts(folder / "prompts.txt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "target")


@pytest.mark.slow
def test_the_target_writes_prompts_of_its_own(tmp_path: Path) -> None:
    """Catches turns begun elsewhere, cut prompts, repeats, and prompts without answers."""
    write_chat_target(tmp_path)
    config = small_config(tmp_path, prompts=(), max_prompts=None, self_prompts=20, max_num_seqs=4)
    assert run_stages(("answers",), config)
    paths = sorted((tmp_path / "run" / "prompts").glob("*.jsonl.gz"))
    records = [
        json.loads(line)
        for path in paths
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    assert 10 < len(records) <= 20 and len(paths) == 3
    decoder = SpecDecoder.from_pretrained(
        str(tmp_path / "target"), drafter=None, device="cpu", dtype="float32"
    )
    prefix, stop = self_prompts.user_turn(Source.of_engine(decoder))
    assert (decoder.tokenizer.decode(prefix), decoder.tokenizer.decode(stop)) == (
        "<bos> w4 w5",
        "<eos>",
    )
    for record in records:
        seed = stable_seed(config.seed, "prompt", record["index"])
        sampling = SamplingParams(max_tokens=256, temperature=self_prompts.TEMPERATURE, seed=seed)
        result = decoder.generate(prefix, sampling)
        assert not isinstance(result, list) and result.finish_reason == "stop"
        assert record["prompt"] == decoder.tokenizer.decode(
            result.token_ids, skip_special_tokens=True
        )
    texts = self_prompts.read_self_prompts(config)
    assert texts == list(dict.fromkeys(record["prompt"] for record in records))
    asked = {tuple(row["prompt_ids"]) for part in shards(tmp_path).values() for row in part}
    assert asked == {tuple(decoder.tokenize([{"role": "user", "content": text}])) for text in texts}
    before = [path.read_bytes() for path in paths]
    paths[0].unlink()
    with pytest.raises(
        InvalidInputError, match="lacks prompts of the target; run the answers stage again"
    ):
        self_prompts.read_self_prompts(config)
    assert run_stages(("answers",), config) and before == [path.read_bytes() for path in paths]
    with pytest.raises(
        InvalidInputError, match="holds prompts that were written with another self-prompts"
    ):
        run_stages(("answers",), replace(config, self_prompts=21))


@pytest.mark.slow
def test_the_target_goes_on_with_prompts_that_are_begun_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches openings that the target does not see, and a share that is ignored."""
    write_chat_target(tmp_path)
    monkeypatch.setattr(self_prompts, "opening", lambda random, kinds: ("two words", "w7 w8"))
    config = small_config(
        tmp_path, prompts=(), max_prompts=None, self_prompts=24, opening_share=0.5
    )
    assert run_stages(("answers",), config)
    paths = sorted((tmp_path / "run" / "prompts").glob("*.jsonl.gz"))
    records = [
        json.loads(line)
        for path in paths
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    begun = [record for record in records if record["kind"]]
    assert 3 < len(begun) < len(records) - 3
    decoder = SpecDecoder.from_pretrained(
        str(tmp_path / "target"), drafter=None, device="cpu", dtype="float32"
    )
    prefix, _ = self_prompts.user_turn(Source.of_engine(decoder))
    for record in begun[:4]:
        seed = stable_seed(config.seed, "prompt", record["index"])
        sampling = SamplingParams(max_tokens=256, temperature=self_prompts.TEMPERATURE, seed=seed)
        result = decoder.generate([*prefix, 7, 8], sampling)
        assert not isinstance(result, list)
        assert record["prompt"] == "w7 w8 " + decoder.tokenizer.decode(
            result.token_ids, skip_special_tokens=True
        )


@pytest.mark.slow
def test_processes_wait_for_each_others_prompts(tmp_path: Path) -> None:
    """Catches a process that asks before all prompts are written."""
    write_chat_target(tmp_path)
    config = small_config(tmp_path, self_prompts=20)
    run_command(2, ["train", "answers", *as_flags(config)])
    assert run_stages(("answers",), replace(config, out=str(tmp_path / "whole" / "run")))
    assert shards(tmp_path) == shards(tmp_path / "whole")


@pytest.mark.parametrize(("self_prompts", "file"), [(0, "heldout-00000"), (20, "prompts-00000")])
def test_a_target_that_fails_is_named(tmp_path: Path, self_prompts: int, file: str) -> None:
    """Catches prompts and answers that are quietly left out because every logit is NaN."""
    write_chat_target(tmp_path)
    weights = tmp_path / "target" / "model.safetensors"
    poisoned = {
        name: tensor * torch.nan if tensor.ndim > 1 else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(poisoned, weights, {"format": "pt"})
    with pytest.raises(
        SpecDecError, match=rf"the target failed on record \d+ of {file}.jsonl.gz: .*NaN"
    ):
        run_stages(("answers",), small_config(tmp_path, self_prompts=self_prompts))


def test_a_prompt_that_has_no_end_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches half a prompt among those to train on."""
    write_chat_target(tmp_path)
    monkeypatch.setattr(self_prompts, "MAX_PROMPT_TOKENS", 1)
    with pytest.raises(InvalidInputError, match=r"too few to hold out|there is no prompt"):
        run_stages(
            ("answers",), small_config(tmp_path, prompts=(), max_prompts=None, self_prompts=20)
        )


@pytest.mark.parametrize(
    ("template", "message"), [("", "has no chat template"), ("<bos> w4", "drops a user's words")]
)
def test_a_target_that_knows_no_user_writes_no_prompts(
    tmp_path: Path, template: str, message: str
) -> None:
    write_chat_target(tmp_path, template)
    with pytest.raises(InvalidInputError, match=f"{message}.*set self-prompts to 0"):
        run_stages(("answers",), small_config(tmp_path, self_prompts=4))


def test_damaged_or_missing_answers_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match="holds no train answers; run the answers stage first"
    ):
        read_answers(tmp_path, "train")
    (tmp_path / "train-00000.jsonl.gz").write_bytes(gzip.compress(b'{"prompt_ids": [1]}\n')[:-4])
    with pytest.raises(
        CheckpointError,
        match=r"train-00000.jsonl.gz is damaged .* delete it and run the answers stage again",
    ):
        read_answers(tmp_path, "train")
    folder = tmp_path / "run" / "answers"
    folder.mkdir(parents=True)
    (folder / PROVENANCE).write_text("{")
    with pytest.raises(SpecDecError, match=r"provenance\.json is damaged"):
        run_stages(("answers",), small_config(tmp_path))
