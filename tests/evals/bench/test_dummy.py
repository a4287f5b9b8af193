"""`specdec bench --dummy-weights`: what is timed on both sides, what the report says, and the
shapes that come with the package.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import verifiers.dummy
from evals.bench import dummy, dummy_engine
from evals.bench.dummy import DummyBench, DummyConfig
from evals.bench.dummy_engine import WARM_STEPS, FreeDrafter, OwnSteps, Room
from evals.bench.shapes import config_file, names
from evals.peers.vllm_steps import VllmSteps
from evals.report.table import format_report
from specdec.base.blocks import BlockShape
from specdec.base.errors import CapacityError
from specdec.engine.launch import Launch
from specdec.engine.policy.timing import StepClock
from specdec.parallel.group import WITHOUT_MULTICAST
from tests.evals.bench.fake_vllm import Clock, FakeVllm
from tests.evals.tiny import PROVENANCE
from tests.helpers.tiny_configs import CONFIGS
from verifiers.dummy import dummy_verifier, random_model, read_config, write_weights

Patch = pytest.MonkeyPatch


GPU = torch.device("cuda")


PARAMETERS = {
    "gemma3-4b": 3_880_263_168, "gpt-oss-20b": 20_914_757_184, "llama3-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-8b": 8_190_735_360, "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-9b": 8_953_803_264, "qwen3.6-27b": 26_895_998_464,
}  # fmt: skip
"""As the model cards count them; of Gemma and Qwen3.5 the text model alone."""


def tiny_target(name: str = "qwen3_moe", **changes: Any) -> Any:
    """A target with random weights of a tiny shape."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return dummy_verifier(
        random_model(config, torch.device("cpu"), torch.float32), name=name, block_size=4
    )


def prompts_of(count: int, length: int = 12) -> list[list[int]]:
    return torch.randint(
        3, 90, (count, length), generator=torch.Generator().manual_seed(0)
    ).tolist()


@pytest.mark.parametrize("name", names())
def test_shapes_are_those_of_the_models_they_are_called_after(name: str) -> None:
    """Catches a width or a count that was mistyped."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(config_file(name)))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("shape", [BlockShape(0), BlockShape(3), BlockShape(6, 6)], ids=str)
def test_timed_steps_of_ours_have_all_rows_and_nothing_else(
    shape: BlockShape, monkeypatch: Patch
) -> None:
    """Catches prefill, warm-up or a shrinking batch between two readings of the clock, and drafts
    that are not verified.
    """
    log: list[Any] = []
    monkeypatch.setattr(dummy_engine, "time", Clock(log))
    verifier = tiny_target()
    # more tokens than one step prefills
    own = OwnSteps(verifier, Room.of(verifier, 3, 300, 5), shape=shape)
    runner = own.engine.runner
    prefill, decode = runner.prefill, runner.decode

    def noted_prefill(chunks: Any, **options: Any) -> Any:
        log.append("prefill")
        return prefill(chunks, **options)

    def noted_decode(launch: Launch, clock: StepClock) -> None:
        log.append((len(launch.requests), launch.shape.rows))
        decode(launch, clock)

    monkeypatch.setattr(runner, "prefill", noted_prefill)
    monkeypatch.setattr(runner, "decode", noted_decode)
    for _ in range(2):  # the second pass finds the engine empty
        log.clear()
        own.steps(prompts_of(3, 300), 5)
        before, timed, after = parts(log)
        assert timed == [(3, shape.rows)] * 5
        assert "prefill" in before
        assert before[-WARM_STEPS:] == [(3, shape.rows)] * WARM_STEPS
        assert after == []
        assert own.distinct > 1
        assert not own.engine.has_work
    own.steps(prompts_of(1) * 3, 2)
    assert own.distinct == 1
    log.clear()
    own.prefill(prompts_of(3, 300))
    before, timed, after = parts(log)
    assert before == after == []
    assert set(timed) == {"prefill"}
    own.close()


def parts(log: list[Any]) -> Iterator[list[Any]]:
    """What was launched before, between and after two readings of the clock."""
    first, second = (index for index, entry in enumerate(log) if entry == "clock")
    return iter((log[:first], log[first + 1 : second], log[second + 1 :]))


def test_free_drafts_leave_the_output_alone() -> None:
    """Catches drafts that are taken over without being verified."""
    verifier = tiny_target()
    outputs = []
    for shape in (BlockShape(0), BlockShape(4), BlockShape(20, 5)):
        own = OwnSteps(verifier, Room.of(verifier, 2, 12, 8), shape=shape)
        requests = own._submit(prompts_of(2), 12)
        own._drain()
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]
    assert FreeDrafter(4).max_draft_tokens == 4


def test_timed_steps_of_vllm_have_all_rows_and_nothing_else(vllm: FakeVllm) -> None:
    """Catches prefill in a step's time, and requests that end before the last one has all its
    steps.
    """
    side = VllmSteps(
        {"vocab_size": 9}, GPU, torch.bfloat16, max_num_seqs=3, max_model_len=64, spare=28 * 2**30
    )
    assert vllm.started["load_format"] == "dummy"
    assert (vllm.started["dtype"], vllm.started["max_num_seqs"], vllm.started["max_model_len"]) == (
        "bfloat16",
        3,
        64,
    )
    assert vllm.started["config"] == {"vocab_size": 9}
    assert "limit_mm_per_prompt" not in vllm.started
    # 100 GiB free, 28 to spare and 2 for neither, of 140
    assert vllm.started["gpu_memory_utilization"] == pytest.approx(0.5)
    prompts = prompts_of(3)
    assert side.steps(prompts, 5, 2) == 5 * 3
    assert side.prefill(prompts) == 300
    assert vllm.prompts == prompts * 2
    assert not vllm.has_unfinished_requests()
    side.close()
    assert vllm.open == 0
    assert not Path(vllm.started["model"]).exists()


def test_a_peer_of_several_ranks_starts_its_own(vllm: FakeVllm, monkeypatch: Patch) -> None:
    """Catches a peer on one GPU beside ours on two, and one that takes its rank from our group."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    for name in (*WITHOUT_MULTICAST, "VLLM_ALLREDUCE_USE_SYMM_MEM"):
        monkeypatch.setenv(name, "")
    rooms: Any = {"max_num_seqs": 1, "max_model_len": 64, "spare": 0}
    VllmSteps({"vocab_size": 9}, GPU, torch.bfloat16, **rooms, ranks=2).close()
    assert vllm.started["tensor_parallel_size"] == 2
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(os.environ)
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


def test_what_vllm_is_told_of_a_multimodal_model(vllm: FakeVllm) -> None:
    """Catches a tower that takes memory."""
    VllmSteps(
        {"text_config": {}}, GPU, torch.bfloat16, max_num_seqs=3, max_model_len=64, spare=28 * 2**30
    )
    assert vllm.started["limit_mm_per_prompt"] == {"image": 0, "video": 0}


def test_vllm_takes_weights_that_lie_in_a_folder(vllm: FakeVllm, tmp_path: Path) -> None:
    """Catches dummy weights beside which experts would be chosen otherwise, and a folder that a
    peer takes away.
    """
    rooms: Any = {"max_num_seqs": 1, "max_model_len": 64, "spare": 0}
    VllmSteps({"vocab_size": 9}, GPU, torch.bfloat16, **rooms, weights=tmp_path).close()
    assert (vllm.started["model"], vllm.started["load_format"]) == (str(tmp_path), "auto")
    assert vllm.started["config"] == {"vocab_size": 9}
    assert tmp_path.exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_written_weights_are_those_of_the_model(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Catches names and shapes that only transformers' modules have."""
    monkeypatch.setattr(verifiers.dummy, "_SHARD_BYTES", 20_000)
    model = random_model(CONFIGS[name](), torch.device("cpu"), torch.float32)
    write_weights(model, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model.config.save_pretrained(tmp_path)
    token_ids = torch.tensor([[3, 4, 5, 6]])
    read = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model.set_attn_implementation("eager")
    assert torch.equal(read(token_ids).logits, model(token_ids).logits)
    write_weights(model, tmp_path, wrapped=True)
    names = set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"])
    assert "model.language_model.embed_tokens.weight" in names
    assert all(one.startswith("model.language_model.") for one in names - {"lm_head.weight"})


def test_both_sides_are_given_the_same_prompts_in_turn(vllm: FakeVllm, monkeypatch: Patch) -> None:
    """Catches a ratio the wrong way around, prompts of one side alone, and an engine that outlives
    the sweep.
    """
    config = DummyConfig(
        prompt_tokens=(10, 20),
        concurrencies=(1, 2),
        verify_rows=(3,),
        steps=4,
        repeats=2,
        peers=("vllm",),
    )
    start = dummy.VllmSteps
    monkeypatch.setattr(
        dummy,
        "VllmSteps",
        lambda entries, device, *rest, **options: start(entries, GPU, *rest, **options),
    )
    monkeypatch.setattr(dummy, "measured_bandwidth", lambda device: 1e9)
    asked: list[list[int]] = []
    submit = OwnSteps._submit

    def noted_submit(self: OwnSteps, prompts: Any, max_tokens: int) -> Any:
        asked.extend(prompts)
        return submit(self, prompts, max_tokens)

    monkeypatch.setattr(OwnSteps, "_submit", noted_submit)
    titles: list[str] = []
    *_, report = DummyBench(
        tiny_target(), {"model_type": "gpt_oss"}, config, progress=titles.append
    ).run(PROVENANCE)
    assert report["complete"]
    assert vllm.open == 0
    verifying = [row for row in report["rows"] if row["work"] == "verify 3"]
    assert [(row["prompt_tokens"], row["num_reqs"]) for row in verifying] == [
        (10, 1),
        (10, 2),
        (20, 1),
    ]
    assert [row["theirs"] for row in verifying] == [None] * 3
    plain = [row for row in report["rows"] if row["work"] == "plain step"]
    # ms
    assert [row["theirs"]["values"] for row in plain] == [[1000.0] * 2, [2000.0] * 2, [1000.0] * 2]
    for row in plain:
        assert row["ratio"] == pytest.approx(row["ours"]["median"] / row["theirs"]["median"])
        assert row["roofline"]["ms"] == pytest.approx(row["roofline"]["bytes"] / 1e9 * 1e3)
        assert row["roofline"]["share"] == pytest.approx(
            row["roofline"]["ms"] / row["ours"]["median"]
        )
    prefill = [row for row in report["rows"] if row["work"] == "prefill"]
    # prompt tokens per second
    assert [row["theirs"]["median"] for row in prefill] == pytest.approx([0.1, 0.1, 0.2])
    remaining = list(asked)
    for prompt in vllm.prompts:
        # what is left over are the verifying steps, which the peer does not take
        remaining.remove(prompt)
    assert {len(prompt) for prompt in vllm.prompts} == {10, 20}
    assert sum(title.endswith("warm-up") for title in titles) == 3 * 3
    experts = report["experts"]
    assert [one["rows"] for one in experts["met"]] == [1, 2, 3, 6]
    text = format_report(report)
    assert f"{experts['met'][1]['expected']:.1f} expected" in text
    assert f"2 requests last decoded {plain[1]['distinct_tokens']} different token" in text


def test_what_does_not_fit_is_said_before_measuring() -> None:
    verifier = tiny_target("llama")
    with pytest.raises(CapacityError, match="prompts of 500 tokens and 64 steps need"):
        DummyBench(verifier, {}, DummyConfig(prompt_tokens=(500,)))
