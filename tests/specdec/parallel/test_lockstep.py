"""Two processes, of which rank 0 is this one, decode as one engine: the tokens are those of a
process alone.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.accuracy.scoring import score
from specdec import CacheConfig, EngineConfig, SamplingParams, SpecDecoder
from specdec.base.blocks import BlockShape
from specdec.base.errors import SpecDecError
from specdec.cli.main import main
from specdec.parallel.executor import collective_rpc, current
from specdec.parallel.processes import launch
from specdec.session.drafter_choice import find_drafter
from specdec.session.outputs import GenerationResult
from tests.evals.tiny import save_tiny
from tests.helpers import lockstep_parts as parts
from tests.helpers.tiny_models import random_prompts
from tests.helpers.waiting import HANG

PROMPTS = [*random_prompts(3, seed=4, longest=20), [5, 6, 7, 5, 6, 7, 5, 6]]
LOAD: dict[str, Any] = {"drafter": "ngram", "device": "cpu", "dtype": "float32"}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one(folder: Path) -> SpecDecoder:
    return SpecDecoder.from_pretrained(folder, **LOAD, engine=EngineConfig(max_num_seqs=2))


@pytest.fixture(scope="module")
def started_groups() -> Iterator[list[SpecDecoder]]:
    """Those of this module; at most the last of them lives."""
    groups: list[SpecDecoder] = []
    yield groups
    for group in groups:
        group.close()


@pytest.fixture
def two(folder: Path, started_groups: list[SpecDecoder]) -> SpecDecoder:
    """The group that lives, or another one after a test that has ended it."""
    if current() is None:
        limits = EngineConfig(max_num_seqs=2)
        started_groups.append(
            SpecDecoder.from_pretrained(folder, **LOAD, tensor_parallel=2, engine=limits)
        )
    return started_groups[-1]


def again(decoder: SpecDecoder, drafters: str = "ngram", **config: Any) -> SpecDecoder:
    """The same target with another engine."""
    drafter = find_drafter(drafters)(decoder.verifier)
    return SpecDecoder(
        decoder.verifier, decoder.tokenizer, drafter, EngineConfig(max_num_seqs=2, **config)
    )


def written(results: list[GenerationResult]) -> list[tuple[list[int], str, str]]:
    return [(result.token_ids, result.text, result.finish_reason) for result in results]


@pytest.mark.parametrize(
    ("k", "sampling"), [(0, SAMPLED), (3, {}), (7, SAMPLED), ("auto", {})], ids=str
)
def test_tokens_are_those_of_one_process(
    one: SpecDecoder, two: SpecDecoder, k: Any, sampling: dict[str, Any]
) -> None:
    """More prompts than are decoded at once, in chunks."""
    config = {"num_draft_tokens": k, "max_prefill_tokens": 7, "seed": 3}
    expected, got = (
        again(decoder, **config).generate(PROMPTS, max_tokens=14, **sampling)
        for decoder in (one, two)
    )
    assert written(got) == written(expected)
    assert k == "auto" or [result.stats for result in got] == [result.stats for result in expected]


def test_ranks_read_what_rank_0_reads(
    folder: Path, one: SpecDecoder, two: SpecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model, which reads a few requests late; catches a rank that reads others."""
    results = list[Any]()
    for decoder in (one, two):
        drafter = find_drafter(str(folder))(decoder.verifier)
        config = EngineConfig(max_num_seqs=6, num_draft_tokens="auto", max_prefill_tokens=7)
        made = SpecDecoder(decoder.verifier, decoder.tokenizer, drafter, config)
        choice: Any = made.engine.planner.choice
        turns = iter([*[0] * 25, *[3] * 400])
        monkeypatch.setattr(choice, "pays", lambda *_, **__: False)
        monkeypatch.setattr(choice, "tries", True)
        monkeypatch.setattr(choice, "choose", lambda *_, turns=turns, **__: BlockShape(next(turns)))
        if decoder is two:
            collective_rpc(two.verifier, parts.note_reads, made.engine)
        prompts = [*PROMPTS, [8, 9], [7]]
        results.append(written(made.generate(prompts, max_tokens=40, ignore_eos=True)))
    assert results[0] == results[1]
    alike, num_read = collective_rpc(two.verifier, parts.all_read_alike)
    assert alike and 0 < num_read < sum(map(len, PROMPTS)) + 4 * 40


def test_what_comes_ends_and_is_cancelled_on_rank_0_alone(
    one: SpecDecoder, two: SpecDecoder
) -> None:
    """Requests come while others decode, one is cancelled while it waits and one while it decodes,
    two end at stop strings.
    """
    longest = one.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    stop = (longest.text[9:11],)
    assert 2 <= longest.text.index(stop[0]) <= 9
    outputs = []
    for decoder in (one, two):
        session = again(decoder, num_draft_tokens=3, pipeline_depth=1).session
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        handles = [
            session.submit(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, stop=stop)),
            session.submit(PROMPTS[1], sampling),
        ]
        for step in range(60):
            session.step()
            if step == 2:
                handles += [session.submit(prompt, sampling) for prompt in PROMPTS[2:]]
                handles.append(
                    session.submit(
                        PROMPTS[0],
                        SamplingParams(max_tokens=30, stop=stop, temperature=0.5, seed=8),
                    )
                )
            if step == 4:
                handles[1].cancel()
                handles[3].cancel()
            if session.idle:
                break
        assert session.idle
        outputs.append(written([handle.result() for handle in handles]))
    assert outputs[0] == outputs[1]
    assert [reason for _, _, reason in outputs[1]][:4] == [
        "stop",
        "cancelled",
        "length",
        "cancelled",
    ]


@pytest.mark.parametrize("drafters", ["ngram", "tests.helpers.tiny_ranks:divided_drafter"])
def test_prefixes_are_found_and_requests_preempted_alike(
    one: SpecDecoder, two: SpecDecoder, drafters: str
) -> None:
    """A cache that is too small for all; every step compares the schedules of the ranks."""
    prompts = [[*range(3, 36), last] for last in range(4)]
    outputs = []
    for decoder in (one, two):
        drafter = find_drafter(drafters)(decoder.verifier)
        specs = [*decoder.verifier.kv_specs, *getattr(drafter, "kv_specs", ())]
        per_block = 16 * sum(spec.bytes_per_token(torch.float32) for spec in specs)
        small = SpecDecoder(
            decoder.verifier,
            decoder.tokenizer,
            drafter,
            EngineConfig(
                max_num_seqs=4,
                num_draft_tokens=3,
                max_model_len=90,
                cache=CacheConfig(memory_bytes=11 * per_block),
            ),
        )
        first = small.generate(prompts, max_tokens=40, ignore_eos=True)
        outputs.append(
            written(first + small.generate(prompts[:2], max_tokens=30, temperature=1.0, seed=2))
        )
        assert small.engine.scheduler.num_preemptions > 0
    assert outputs[0] == outputs[1]


def test_what_is_asked_of_the_target_alone(one: SpecDecoder, two: SpecDecoder) -> None:
    """Logits and scores outside any engine, also while threads decode; they differ by the order in
    which halves are added up.
    """
    with ThreadPoolExecutor(3) as threads:
        outputs = [threads.submit(two.generate, prompt, max_tokens=20) for prompt in PROMPTS[:2]]
        asked = threads.submit(two.next_token_logits, PROMPTS[0])
        scored = next(score(two, [(PROMPTS[0], 3)])).log_probability
    assert [output.result().token_ids for output in outputs] == [
        one.generate(one_of, max_tokens=20).token_ids for one_of in PROMPTS[:2]
    ]
    expected = one.next_token_logits(PROMPTS[0])
    bound = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert torch.allclose(asked.result(), expected, rtol=0, atol=bound)
    assert abs(scored - next(score(one, [(PROMPTS[0], 3)])).log_probability) < 6 * bound


def test_the_smallest_cache_counts(one: SpecDecoder, two: SpecDecoder) -> None:
    """Each rank has room for so many blocks, and all take as many as the one with the
    least memory.
    """
    per_block = 16 * sum(spec.bytes_per_token(torch.float32) for spec in two.verifier.kv_specs)
    before = parts.specdec.engine.memory.default_cache_bytes
    collective_rpc(two.verifier, parts.have_memory, 40 * per_block, 23 * per_block)
    try:
        decoder = again(two, num_draft_tokens=3)
    finally:
        parts.specdec.engine.memory.default_cache_bytes = before
    assert collective_rpc(two.verifier, parts.num_blocks, decoder.engine) == (23, 23)
    assert written(decoder.generate(PROMPTS, max_tokens=9)) == written(
        again(one, num_draft_tokens=3).generate(PROMPTS, max_tokens=9)
    )


def test_requests_begin_again_alike(one: SpecDecoder, two: SpecDecoder) -> None:
    """What is not finite on account of a draft is computed again without any, on all ranks in the
    same step.
    """
    expected = again(one, num_draft_tokens=3).generate(PROMPTS, max_tokens=14)
    used = {
        token
        for prompt, result in zip(PROMPTS, expected, strict=True)
        for token in (*prompt, *result.token_ids)
    }
    decoder = again(two, num_draft_tokens=3, pipeline_depth=1)
    collective_rpc(
        two.verifier,
        parts.spoil_drafts,
        two.verifier,
        decoder.engine,
        min(set(range(3, 90)) - used),
    )
    try:
        results = decoder.generate(PROMPTS, max_tokens=14)
    finally:
        collective_rpc(two.verifier, parts.mend, two.verifier)
    assert written(results) == written(expected)
    assert decoder.engine.second_tries._warned, "the test needs rows that do harm"


@pytest.mark.parametrize("k", [3, "auto"])
def test_no_rank_goes_by_its_own_clock(one: SpecDecoder, two: SpecDecoder, k: Any) -> None:
    """Whether models draft: they ask the target's divided head, where a rank that left them out
    would be missing.
    """
    expected, got = (
        again(decoder, "ngram+tests.helpers.tiny_ranks:random_drafter", num_draft_tokens=k)
        for decoder in (one, two)
    )
    collective_rpc(two.verifier, parts.judge_apart, got.engine)
    assert written(got.generate(PROMPTS, max_tokens=14)) == written(
        expected.generate(PROMPTS, max_tokens=14)
    )


def test_all_capture_or_none(two: SpecDecoder) -> None:
    """A graph that one rank cannot capture is used by none."""
    assert [collective_rpc(two.verifier, parts.captured, refusing) for refusing in (7, 1, 0)] == [
        (True, True),
        (False, False),
        (False, False),
    ]


def test_all_go_on_from_rank_0s_outcome(two: SpecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However each rank's own would differ; of trees, too."""
    assert collective_rpc(two.verifier, parts.outcomes_agree, False)
    assert collective_rpc(two.verifier, parts.outcomes_agree, True)


def test_what_belongs_to_one_process(two: SpecDecoder) -> None:
    """A drafter of this process is refused; neither what cannot be sent nor a fork harms
    the group.
    """
    ready = find_drafter("ngram")(two.verifier)
    with pytest.raises(
        SpecDecError,
        match=r"drafter is a .* of this process, and every rank of the target's group makes its"
        r" own",
    ):
        find_drafter(ready)(two.verifier)
    with pytest.raises(SpecDecError, match="the other ranks cannot be told of this call"):
        collective_rpc(two.verifier, lambda: None)
    # a child that ends as programs do, and would end the group of its parent
    if (fork := os.fork()) == 0:
        try:
            current().end()  # type: ignore[union-attr]
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    assert two.generate(PROMPTS[0], max_tokens=2).token_ids


def test_ranks_listen_on_loopback_alone(two: SpecDecoder) -> None:
    """And where they have met, nobody else may look."""
    assert collective_rpc(two.verifier, parts.listens_on_loopback)
    folder = current()._ranks._folder.path  # type: ignore[union-attr]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_rank_0_shares_out_a_budget(one: SpecDecoder, two: SpecDecoder) -> None:
    """Though the other rank would verify other rows; else sums would be of different rows."""
    for sampling in ({}, SAMPLED):
        decoder = again(two, num_draft_tokens=7, verify_budget=1.3, seed=3)
        assert decoder.engine.k == "1.3 of 7"
        collective_rpc(two.verifier, parts.share_out_apart, decoder.engine)
        asked: dict[str, Any] = {"max_tokens": 14, **sampling}
        expected = again(one, num_draft_tokens=0, seed=3).generate(PROMPTS, **asked)
        got = decoder.generate(PROMPTS, **asked)
        assert written(got) == written(expected)
        assert len({count for each in got for count in each.stats.num_verified}) > 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "rank 1 of the tensor-parallel group was ended by SIGKILL"),
        (
            "astray",
            r"rank 1 of the tensor-parallel group failed: RuntimeError: this rank's schedule \[.*\]"
            r" is not rank 0's",
        ),
    ],
)
def test_a_rank_that_ends_in_a_step_ends_the_group(two: SpecDecoder, how: str, said: str) -> None:
    """With one line; another group can be started then."""
    decoder = two
    if how == "astray":
        collective_rpc(decoder.verifier, parts.lose_a_block, decoder.engine)
    else:
        collective_rpc(decoder.verifier, parts.be_killed_in_forward, decoder.verifier, 4)
    with pytest.raises(SpecDecError, match=said) as error:
        decoder.generate(PROMPTS, max_tokens=30, ignore_eos=True)
    assert "\n" not in str(error.value)
    with pytest.raises(SpecDecError, match="load the target again"):
        decoder.generate(PROMPTS, max_tokens=3)


ENDS_AT_ONCE = """
import atexit, glob, os, sys
from pathlib import Path
from specdec.cli.main import main

def look():
    names = [Path(one).read_text() for one in glob.glob("/proc/self/task/*/comm")]
    os._exit(9) if any("gloo_runloop" in name for name in names) else None

atexit.register(look)  # called last
status = main(sys.argv[1:])
sys.setswitchinterval(100)
sys.exit(status)
"""
"""The command line. At its end no other thread gets the interpreter any more, and one of gloo's
that waits for it aborts the process, so there must be none.
"""


def test_torchrun(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command line, printed once; tokens are those of one process, and its end does not depend
    on other threads.
    """
    command = shlex.split(
        f"generate abcabc 'one two' --raw --model {folder} --drafter ngram --device cpu"
        " --dtype float32 --max-tokens 12 --json"
    )
    assert main(command) == 0
    alone = capfd.readouterr().out
    (tmp_path / "command.py").write_text(ENDS_AT_ONCE, encoding="utf-8")
    torchrun = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 2")
    together = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "command.py"), *command],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert together.returncode == 0, together.stderr
    assert _texts(together.stdout) == _texts(alone) and alone.count("\n") == 2


def _texts(lines: str) -> list[Any]:
    return [json.loads(line)["text"] for line in lines.splitlines()]


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than accelerators, an accelerator by its number, and another number of ranks than
    torchrun has started.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.device_of_rank(torch.device("cuda"), 1, 2) == torch.device("cuda", 1)
    with pytest.raises(
        SpecDecError,
        match="tensor_parallel is 4 and this machine has 2 accelerators; start at most 2 ranks",
    ):
        launch.device_of_rank(torch.device("cuda"), 0, 4)
    with pytest.raises(
        SpecDecError,
        match="device is 'cuda:1' and tensor_parallel 2, whose ranks take cuda:0 to cuda:1; give"
        " cuda",
    ):
        launch.device_of_rank(torch.device("cuda:1"), 0, 2)
    monkeypatch.setattr(launch.executors, "_current", None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        SpecDecError,
        match="tensor_parallel is 2 and torchrun has started 3 ranks; give 3, or leave it out",
    ):
        SpecDecoder.from_pretrained(folder, **LOAD, tensor_parallel=2)
    with pytest.raises(SpecDecError, match="tensor_parallel is 0; it must be at least 1"):
        SpecDecoder.from_pretrained(folder, **LOAD, tensor_parallel=0)
